"""The report as one HTML page that needs no network."""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from kbatch.reporting.figures.canvas import WIDTH_IN, detached_axes
from kbatch.reporting.figures.saving import figure_bytes
from kbatch.reporting.inline_svg import glyph_sheet, inline_svg
from kbatch.reporting.report_content import Reported, report_content
from kbatch.reporting.sections.content import Figure
from kbatch.reporting.templating import templates

# On a telephone this width keeps the texts of a figure as large as those of a small print.
_NARROW_IN = 3.6


class Drawing(NamedTuple):
    """A figure drawn twice.

    Attributes:
        wide: For a desk and for print.
        narrow: For a telephone.
    """

    wide: Markup
    narrow: Markup


def render_html(study_or_profiles: Reported | Sequence[Reported]) -> str:
    """Renders a report as one HTML page.

    Args:
        study_or_profiles: A study, a profile, a result, or a sequence of them.

    Raises:
        ValueError: If a study is empty, with what to run, or there is nothing to report.
    """
    content = report_content(study_or_profiles)
    glyphs: dict[str, str] = {}
    drawings = {
        (place, figure.name): Drawing(
            _drawn(figure, WIDTH_IN, f"s{place}-{figure.name}-w-", glyphs),
            _drawn(figure, _NARROW_IN, f"s{place}-{figure.name}-n-", glyphs),
        )
        for place, section in enumerate(content.sections, start=1)
        for figure in section.figures
    }
    template = templates().get_template("report.html")
    return template.render(content=content, drawings=drawings, glyphs=Markup(glyph_sheet(glyphs)))


def _drawn(figure: Figure, width_in: float, prefix: str, glyphs: dict[str, str]) -> Markup:
    """Draws a figure as an element and adds the glyphs that it uses."""
    axes = figure.draw(detached_axes(figure.height_in, width_in=width_in))
    svg = figure_bytes(axes, ".svg", transparent=True).decode()
    return Markup(inline_svg(svg, prefix, glyphs))
