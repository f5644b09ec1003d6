"""Pages: HTML that needs no network, Markdown with its figures, and what a notebook shows."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape

from kbatch.plotting.canvas import WIDTH_IN, detached_axes
from kbatch.plotting.saving import SvgPage, figure_bytes, transparent_svg
from kbatch.records.json_codec import write_whole_file
from kbatch.report.content import Reported, report_content, section_of
from kbatch.study.study import Study


def render_html(study_or_profiles: Reported | Sequence[Reported]) -> str:
    content = report_content(study_or_profiles)
    page, drawings = SvgPage(), {}
    # For a desk and print; and for a telephone, where texts stay as large and captions take more
    # lines.
    widths = {"wide": (WIDTH_IN, 1.0), "narrow": (3.6, 1.15)}
    for place, section in enumerate(content.sections, start=1):
        for figure in section.figures:
            drawing: dict[str, Any] = {}
            for name, (width_in, taller) in widths.items():
                if name == "narrow" or figure.shape == "alone":
                    axes = figure.draw(detached_axes(taller * figure.height_in, width_in=width_in))
                    drawing[name] = Markup(page.element(transparent_svg(axes)))
                    drawing["alt_text"] = str(axes.get_label())
            drawings[place, figure.name] = drawing
    shared = {"glyphs": Markup(page.glyphs()), "rules": Markup(page.rules())}
    template = templates().get_template("report.html")
    return template.render(content=content, drawings=drawings, **shared)


def markdown_files(
    study_or_profiles: Reported | Sequence[Reported], path: Path
) -> dict[Path, bytes]:
    content = report_content(study_or_profiles)
    several = len(content.sections) > 1
    files, pictures = {}, {}
    for place, section in enumerate(content.sections, start=1):
        for figure in section.figures:
            name = f"{path.stem}-{f'{place}-' if several else ''}{figure.name}.png"
            axes = figure.draw(detached_axes(figure.height_in))
            files[path.with_name(name)] = figure_bytes(axes, ".png")
            pictures[place, figure.name] = {"address": quote(name), "alt_text": axes.get_label()}
    text = templates().get_template("report.md").render(content=content, pictures=pictures)
    return {**files, path: text.encode()}


# Characters that Markdown or the HTML inside it would take for markup.
_MARKUP = re.compile(r"([\\`*\[\]<>|])")
_RANGE = re.compile(r"\(?[\d.,]+ (?:±|to) [\d.,]+\)?")
_NUMBER_WITH_UNIT = re.compile(r"(?<=\d) (?=%|[KMGT]iB|ms\b|s\b|samples/s)")


def templates() -> jinja2.Environment:
    """Return the templates, in which an unknown name is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kbatch.report"),
        autoescape=jinja2.select_autoescape(("html",)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for name in (plain, glued, prose, in_cell, plain_prose, fenced):
        environment.filters[name.__name__] = name
    return environment


def glued(text: str) -> str:
    """Keep a number on the line of its unit."""
    return _NUMBER_WITH_UNIT.sub("\N{NO-BREAK SPACE}", text)


def in_cell(text: str) -> Markup:
    """Let a long name break at underscores, and keep a range or a number with its ± together."""
    broken = str(escape(text)).replace("_", "_<wbr>")
    return Markup(_RANGE.sub(r'<span class="range">\g<0></span>', broken))


def prose(text: str) -> Markup:
    """Write a sentence as HTML: what stands between back-ticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(glued(text)))))


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


def write_report(
    study_or_profiles: Reported | Sequence[Reported], path: str | Path
) -> tuple[Path, ...]:
    """Write what was found: the decision first, then table, figures, caveats, environment.

    HTML is one file that needs no network. Markdown has its figures in files beside it,
    `<name>-<figure>.png`.

    Example:

    >>> study = kbatch.load_study("results/digits")
    >>> kbatch.write_report(study, "digits.html")
    >>> profile = kbatch.InferenceProfile.load("profile.json")
    >>> kbatch.write_report([study, profile], "digits.md")

    Args:
        study_or_profiles: A `Study`, a `TrainingProfile`, an `InferenceProfile`, an
            `InputPipelineProfile`, a `MaxBatchSizeResult` or a `Recommendation`, or a list of them,
            which makes one document with a section each.
        path: File to write, with suffix `.html` or `.md`.

    Returns:
        The files written, the report last.

    Raises:
        ValueError: If the suffix is another one, a study is empty or the list is.
        OSError: If the folder cannot be written, with what to do.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".html":
            files = {path: render_html(study_or_profiles).encode()}
        case ".md":
            files = markdown_files(study_or_profiles, path)
        case _:
            raise ValueError(
                "A report's `path` must end in `.html` (one file) or `.md` (with figures beside "
                f"it). Received: path={str(path)!r}."
            )
    for file, data in files.items():
        write_whole_file(file, data)
    return tuple(files)


def notebook_html(record: Any) -> str | None:
    """Write a record as a piece of HTML for the output of a cell."""
    # It has no style sheet, which notebooks take away, and no colours, for light and dark pages.
    try:
        section = section_of(record)
    except ValueError as error:
        # An object that is looked at must not raise: what is missing is said in its place.
        return Markup("<p>{}</p>").format(prose(str(error))) if isinstance(record, Study) else None
    template = templates().get_template("notebook.html")
    return template.render(section=section, most=40)
