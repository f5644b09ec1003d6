"""Pages in Markdown, with their figures in files beside them."""

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from kbatch.page.content import Page
from kbatch.page.html import templates
from kbatch.plotting.canvas import detached_axes
from kbatch.plotting.saving import figure_bytes


def markdown_files(pages: Sequence[Page], path: Path) -> dict[Path, bytes]:
    """Return the files of a document, the text last."""
    files, pictures = {}, {}
    for place, page in enumerate(pages, start=1):
        for figure in page.figures:
            name = f"{path.stem}-{f'{place}-' if len(pages) > 1 else ''}{figure.name}.png"
            axes = figure.draw(detached_axes(figure.height_in))
            files[path.with_name(name)] = figure_bytes(axes, ".png")
            pictures[place, figure.name] = {"address": quote(name), "alt_text": axes.get_label()}
    environment = templates()
    for function in (plain, plain_prose, fenced):
        environment.filters[function.__name__] = function
    text = environment.get_template("report.md").render(pages=pages, pictures=pictures)
    return {**files, path: text.encode()}


# Characters that Markdown or the HTML inside it would take for markup.
_MARKUP = re.compile(r"([\\`*\[\]<>|])")


def plain_prose(text: str) -> str:
    """Write a sentence as Markdown, in which back-ticks mark code too."""
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(one if i % 2 else _MARKUP.sub(r"\\\1", one) for i, one in enumerate(parts))


def plain(text: str) -> str:
    """Keep Markdown from reading markup into a text."""
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))


def fenced(command: str) -> str:
    """Write a command as a block of Markdown, between fences that are longer than any in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
    return f"{fence}sh\n{command}\n{fence}"
