"""Reports of a study: one HTML file, or Markdown with its figure beside it."""

import re
from pathlib import Path
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from kbatch.records.study import Study
from kbatch.records.whole_files import write_whole_file
from kbatch.reporting.figures.canvas import detached_axes
from kbatch.reporting.figures.palette import ALARM_TEXT, GRID, INK, MUTED, PAPER, series_style
from kbatch.reporting.figures.saving import figure_bytes
from kbatch.reporting.figures.trials import HEIGHT_IN, plot_trials
from kbatch.reporting.report_content import report_content

# Colours of the figure that the page sets for light and dark, by name in the style sheet.
_PAGE_COLORS = {
    "ink": INK,
    "muted": MUTED,
    "grid": GRID,
    "paper": PAPER,
    "alarm": ALARM_TEXT,
    "first": series_style(0).color,
}
# Characters that Markdown or the HTML inside it would take for markup.
_MARKDOWN_MARKUP = re.compile(r"([\\`*\[\]<>|])")


def write_report(study: Study, path: str | Path) -> None:
    """Writes what a study found: decision, figure, trials, caveats, environment.

    HTML is one file that needs no network. Markdown has its figure in a file beside it,
    `<name>-trials.png`.

    Example:

    >>> study = kbatch.load_study("results/digits")
    >>> kbatch.write_report(study, "digits.html")

    Args:
        study: A study, as `load_study` gives it.
        path: File to write, with suffix `.html` or `.md`.

    Raises:
        ValueError: If the suffix is another one or the study is empty.
        OSError: If the folder cannot be written, with what to do.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".html":
            files = {path: render_html(study).encode()}
        case ".md":
            picture = path.with_name(f"{path.stem}-trials.png")
            text = render_markdown(study, picture_name=picture.name)
            files = {picture: figure_bytes(_figure(study), ".png"), path: text.encode()}
        case _:
            raise ValueError(
                "A report's `path` must end in `.html` (one file) or `.md` (with a figure beside "
                f"it). Received: path={str(path)!r}."
            )
    for file, data in files.items():
        write_whole_file(file, data)


def render_html(study: Study) -> str:
    """Renders the report as one HTML page.

    Args:
        study: A study with at least one trial.
    """
    content = report_content(study)
    return _templates().get_template("report.html").render(content=content, figure=_inline(study))


def render_markdown(study: Study, *, picture_name: str) -> str:
    """Renders the report as Markdown.

    Args:
        study: A study with at least one trial.
        picture_name: Name of the figure's file beside the report.
    """
    content = report_content(study)
    template = _templates().get_template("report.md")
    return template.render(content=content, picture=quote(picture_name))


def _figure(study: Study):
    return plot_trials(study, detached_axes(HEIGHT_IN))


def _inline(study: Study) -> Markup:
    """Renders the figure as SVG whose ink, grid and paper follow the page's colours."""
    svg = figure_bytes(_figure(study), ".svg", transparent=True).decode()
    svg = svg[svg.index("<svg") :]
    # The page's own names and texts stand beside it, so the metadata is only weight.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for name, color in _PAGE_COLORS.items():
        svg = svg.replace(color, f"var(--figure-{name})")
    return Markup(svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1))


def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kbatch.reporting"),
        autoescape=jinja2.select_autoescape(("html",)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["plain"] = _plain
    return environment


def _plain(text: str) -> str:
    """Keeps Markdown from reading markup into a text."""
    return _MARKDOWN_MARKUP.sub(r"\\\1", " ".join(text.split()))
