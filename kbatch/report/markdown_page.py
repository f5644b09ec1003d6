"""The report as Markdown, with its figures beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from kbatch.plotting.canvas import detached_axes
from kbatch.plotting.saving import figure_bytes
from kbatch.report.content import ReportContent, Reported, report_content
from kbatch.report.templating import templates


class Picture(NamedTuple):
    """A figure's file beside the text.

    Attributes:
        address: Its name as in a link.
        alt_text: Its description.
    """

    address: str
    alt_text: str


def markdown_files(
    study_or_profiles: Reported | Sequence[Reported], path: Path
) -> dict[Path, bytes]:
    """Renders a report as Markdown.

    Args:
        study_or_profiles: A study, a profile, a result, or a sequence of them.
        path: Where it is going to be.

    Returns:
        Content of each file: the figures, then the text that shows them.

    Raises:
        ValueError: If a study is empty, with what to run, or there is nothing to report.
    """
    content = report_content(study_or_profiles)
    names = _picture_names(content, path.stem)
    files, pictures = {}, {}
    for place, section in enumerate(content.sections, start=1):
        for figure in section.figures:
            name = names[place, figure.name]
            axes = figure.draw(detached_axes(figure.height_in))
            files[path.with_name(name)] = figure_bytes(axes, ".png")
            alt_text = figure.alt_text or str(axes.get_label())
            pictures[place, figure.name] = Picture(quote(name), alt_text)
    text = templates().get_template("report.md").render(content=content, pictures=pictures)
    return {**files, path: text.encode()}


def _picture_names(content: ReportContent, stem: str) -> dict[tuple[int, str], str]:
    several = len(content.sections) > 1
    return {
        (place, figure.name): f"{stem}-{f'{place}-' if several else ''}{figure.name}.png"
        for place, section in enumerate(content.sections, start=1)
        for figure in section.figures
    }
