"""The report as one HTML page that needs no network."""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from kbatch.document.content import Figure
from kbatch.plotting.canvas import WIDTH_IN, detached_axes
from kbatch.plotting.inline_svg import SvgPage
from kbatch.plotting.saving import figure_bytes
from kbatch.report.content import Reported, report_content
from kbatch.report.templating import templates

# On a telephone this width keeps the texts of a figure as large as those of a small print.
_NARROW_IN = 3.6
# Captions take more lines there.
_NARROW_TALLER = 1.15


class Drawing(NamedTuple):
    """A figure as elements of a page.

    Attributes:
        wide: For a desk and for print, None for a small figure.
        narrow: For a telephone, None where it cannot be read so narrow.
        alt_text: Its description.
    """

    wide: Markup | None
    narrow: Markup | None
    alt_text: str


def render_html(study_or_profiles: Reported | Sequence[Reported]) -> str:
    """Renders a report as one HTML page.

    Args:
        study_or_profiles: A study, a profile, a result, or a sequence of them.

    Raises:
        ValueError: If a study is empty, with what to run, or there is nothing to report.
    """
    content = report_content(study_or_profiles)
    page = SvgPage()
    drawings = {
        (place, figure.name): _drawing(figure, page)
        for place, section in enumerate(content.sections, start=1)
        for figure in section.figures
    }
    template = templates().get_template("report.html")
    return template.render(
        content=content,
        drawings=drawings,
        glyphs=Markup(page.glyphs()),
        rules=Markup(page.rules()),
    )


def _drawing(figure: Figure, page: SvgPage) -> Drawing:
    """Draws a figure in the widths that its shape needs."""
    alt_text = figure.alt_text

    def drawn(width_in: float, taller: float = 1.0) -> Markup:
        nonlocal alt_text
        axes = figure.draw(detached_axes(taller * figure.height_in, width_in=width_in))
        alt_text = alt_text or str(axes.get_label())
        return Markup(page.element(figure_bytes(axes, ".svg", transparent=True).decode()))

    wide = drawn(WIDTH_IN) if figure.shape != "small" else None
    narrow = drawn(_NARROW_IN, _NARROW_TALLER) if figure.shape != "wide" else None
    return Drawing(wide, narrow, alt_text)
