"""Pages as documents: HTML in one file, Markdown with its figures beside it, a notebook's cell."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape

from kbatch.plotting.canvas import WIDTH_IN, detached_axes, figure_bytes, svg_address

if TYPE_CHECKING:
    from kbatch.page.result import Page


def html_text(pages: "Sequence[Page]") -> str:
    """Write results as one HTML page."""
    drawings = {}
    # For a desk and print; and for a telephone, where texts stay as large and captions take more
    # lines.
    widths = {"wide": (WIDTH_IN, 1.0), "narrow": (3.6, 1.15)}
    for place, page in enumerate(pages, start=1):
        for figure in page.figures:
            drawing: dict[str, str] = {}
            for name, (width_in, taller) in widths.items():
                if name == "narrow" or figure is page.figures[0]:
                    axes = figure.draw(detached_axes(taller * figure.height_in, width_in=width_in))
                    drawing |= {name: svg_address(axes), "alt_text": str(axes.get_label())}
            drawings[place, figure.name] = drawing
    return templates().get_template("report.html").render(pages=pages, drawings=drawings)


def notebook_html(page: "Page") -> str:
    """Write a result as a piece of HTML for the output of a cell."""
    # It has no style sheet, which notebooks take away, and no colours, for light and dark pages.
    return templates().get_template("notebook.html").render(page=page, most=40)


def markdown_files(pages: "Sequence[Page]", path: Path) -> dict[Path, bytes]:
    """Return the files of a document, the text last."""
    files, pictures = {}, {}
    for place, page in enumerate(pages, start=1):
        for figure in page.figures:
            name = f"{path.stem}-{f'{place}-' if len(pages) > 1 else ''}{figure.name}.png"
            axes = figure.draw(detached_axes(figure.height_in))
            files[path.with_name(name)] = figure_bytes(axes, ".png")
            pictures[place, figure.name] = {"address": quote(name), "alt_text": axes.get_label()}
    text = templates().get_template("report.md").render(pages=pages, pictures=pictures)
    return {**files, path: text.encode()}


_RANGE = re.compile(r"\(?-?[\d.,]+ (?:±|to) -?[\d.,]+\)?")
_NUMBER_WITH_UNIT = re.compile(r"(?<=\d) (?=%|[KMGT]iB|ms\b|s\b|samples/s)")
# Characters that Markdown or the HTML inside it would take for markup.
_MARKUP = re.compile(r"([\\`*\[\]<>|])")


def templates() -> jinja2.Environment:
    """Return the templates, in which an unknown name is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kbatch.page"),
        autoescape=jinja2.select_autoescape(("html",)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for function in (prose, in_cell, plain, plain_prose, fenced):
        environment.filters[function.__name__] = function
    return environment


def in_cell(text: str) -> Markup:
    """Let a long name break at underscores, and keep a range or a number with its ± together."""
    broken = str(escape(text)).replace("_", "_<wbr>")
    return Markup(_RANGE.sub(r'<span class="range">\g<0></span>', broken))


def prose(text: str) -> Markup:
    """Write a sentence as HTML: code between back-ticks, and a number on the line of its unit."""
    text = _NUMBER_WITH_UNIT.sub("\N{NO-BREAK SPACE}", text)
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


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
