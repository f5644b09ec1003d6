"""Figures as files, and as images inside a page."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from kbatch.plotting.canvas import figure_of
from kbatch.records.json_codec import write_whole_file

_PNG_DPI = 200
# A date in the file would differ every time.
_METADATA: dict[str, dict[str, str | None]] = {
    ".png": {},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
_REPEATABLE: dict[Any, Any] = {"svg.hashsalt": "kbatch", "svg.fonttype": "path", "pdf.fonttype": 42}
_DESCRIPTION = {".png": "Description", ".svg": "Description", ".pdf": "Subject"}
# Hundredths of a point nobody sees; the scale of a glyph, 0.015625, stays whole.
_MORE_DIGITS = re.compile(r"(?<=[1-9]\.\d\d)\d+|(?<=\d0\.\d\d)\d+")


def save_figure(ax_or_figure: Axes | Figure, path: str | Path) -> None:
    """Write a figure as `.png`, `.svg` or `.pdf`, with the label of its Axes as description.

    The same figure gives the same bytes, and a PDF holds its fonts as TrueType.
    """
    path = Path(path)
    write_whole_file(path, figure_bytes(ax_or_figure, path.suffix.lower()))


def figure_bytes(ax_or_figure: Axes | Figure, suffix: str) -> bytes:
    if suffix not in _METADATA:
        raise ValueError(
            f"A figure's `path` must end in `.png`, `.svg` or `.pdf`. Received: suffix={suffix!r}."
        )
    figure = figure_of(ax_or_figure)
    labels = [str(axes.get_label()) for axes in figure.axes]
    # A label that matplotlib made, such as `<colorbar>`, describes nothing.
    description = " ".join(label for label in labels if label and not label.startswith("<"))
    content = io.BytesIO()
    metadata = _METADATA[suffix] | {_DESCRIPTION[suffix]: description or None}
    with matplotlib.rc_context(_REPEATABLE):
        figure.savefig(content, format=suffix[1:], dpi=_PNG_DPI, metadata=metadata)
    return content.getvalue()


def svg_address(ax: Axes) -> str:
    """Render a figure as the address of an image within a page; it loses its backgrounds."""
    figure = figure_of(ax)
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set(facecolor="none", edgecolor="none")
    figure.dpi, content = _PNG_DPI, io.StringIO()  # For marks that are pixels.
    with matplotlib.rc_context(_REPEATABLE):
        FigureCanvasSVG(figure).print_svg(content, metadata=_METADATA[".svg"])
    svg = _MORE_DIGITS.sub("", content.getvalue())
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
