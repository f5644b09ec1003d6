"""Figures as files: the same figure gives the same bytes."""

import io
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kbatch.records.whole_files import write_whole_file

_PNG_DPI = 200
# A date in the file would differ every time.
_METADATA: dict[str, dict[str, str | None]] = {
    ".png": {},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
_DESCRIPTION = {".png": "Description", ".svg": "Description", ".pdf": "Subject"}


def save_figure(ax_or_figure: Axes | Figure, path: str | Path) -> None:
    """Writes a figure as `.png`, `.svg` or `.pdf`.

    The same figure gives the same bytes, and a PDF holds its fonts as TrueType. The file carries
    the description of the figure that the label of its Axes holds.

    Example:

    >>> save_figure(kbatch.plot_trials(study), "trials.pdf")

    Args:
        ax_or_figure: A figure, or any Axes in it.
        path: File to write; its folder is made if it is missing.

    Raises:
        ValueError: If the suffix is another one.
        OSError: If it cannot be written, with what to do.
    """
    path = Path(path)
    write_whole_file(path, figure_bytes(ax_or_figure, path.suffix.lower()))


def figure_bytes(ax_or_figure: Axes | Figure, suffix: str, *, transparent: bool = False) -> bytes:
    """Renders a figure.

    Args:
        ax_or_figure: A figure, or any Axes in it.
        suffix: `".png"`, `".svg"` or `".pdf"`.
        transparent: Whether to leave the background out.

    Returns:
        Content of the file.

    Raises:
        ValueError: If the suffix is another one.
    """
    if suffix not in _METADATA:
        raise ValueError(
            f"A figure's `path` must end in `.png`, `.svg` or `.pdf`. Received: suffix={suffix!r}."
        )
    figure = _figure_of(ax_or_figure)
    content = io.BytesIO()
    with matplotlib.rc_context(
        {"svg.hashsalt": "kbatch", "svg.fonttype": "path", "pdf.fonttype": 42}
    ):
        figure.savefig(
            content,
            format=suffix[1:],
            dpi=_PNG_DPI,
            metadata=_METADATA[suffix] | {_DESCRIPTION[suffix]: _description(figure)},
            transparent=transparent,
        )
    return content.getvalue()


def _figure_of(ax_or_figure: Axes | Figure) -> Figure:
    figure = ax_or_figure.get_figure(root=True)
    if figure is None:
        raise ValueError(
            "The Axes have been removed from their figure: plot again. "
            f"Received: ax_or_figure={ax_or_figure!r}."
        )
    return figure


def _description(figure: Figure) -> str | None:
    """Joins the labels of all Axes, None where there is none."""
    labels = (str(axes.get_label()) for axes in figure.axes)
    return " ".join(label for label in labels if label and not label.startswith("<")) or None
