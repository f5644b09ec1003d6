"""Where figures are drawn: new or given Axes, and their plain look."""

import sys
import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import AbstractPathEffect, withStroke
from mpl_toolkits.axes_grid1 import make_axes_locatable

from kbatch.reporting.figures.palette import GRID, INK, MUTED, PAPER

WIDTH_IN = 6.4
SMALL_PT = 7.5
TEXT_PT = 9
# Mean width of a character, in font sizes.
_CHARACTER_EM = 0.5


def new_axes(height_in: float) -> Axes:
    """Makes Axes in a figure of their own.

    In a notebook pyplot owns the figure, which is how it gets shown; elsewhere nobody but
    the caller holds it, so none stays open.

    Args:
        height_in: Height of the figure, in inches.
    """
    if "ipykernel" not in sys.modules:
        return detached_axes(height_in)
    from matplotlib import pyplot

    return pyplot.figure(figsize=(WIDTH_IN, height_in), layout="constrained").add_subplot()


def detached_axes(height_in: float) -> Axes:
    """Makes Axes in a figure that no notebook shows, for a file.

    Args:
        height_in: Height of the figure, in inches.
    """
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=150, layout="constrained")
    return figure.add_subplot()


def plain_axes(ax: Axes | None, height_in: float) -> Axes:
    """Gives tidy Axes: those of a caller, or new ones.

    Args:
        ax: The caller's, None for new ones.
        height_in: Height of a new figure, in inches.
    """
    panel = new_axes(height_in) if ax is None else ax
    tidy(panel)
    return panel


def stacked(ax: Axes) -> tuple[Axes, Axes]:
    """Splits Axes in two of equal height, one above the other, that share the x axis."""
    place = ax.get_subplotspec()
    if place is None:
        lower = make_axes_locatable(ax).append_axes("bottom", "100%", pad=0.15, sharex=ax)
    else:
        rows = place.subgridspec(2, 1, hspace=0.08)
        ax.set_subplotspec(rows[0])
        lower = ax.figure.add_subplot(rows[1], sharex=ax)
    ax.tick_params(labelbottom=False)
    return ax, lower


def tidy(ax: Axes) -> None:
    """Gives Axes a light horizontal grid and takes away what carries no data."""
    ax.set_axisbelow(True)
    ax.grid(visible=True, axis="y", color=GRID, linewidth=0.6, linestyle="-")
    ax.grid(visible=False, axis="x", which="both")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set(color=MUTED, linewidth=0.8)
    ax.tick_params(axis="y", length=0, labelsize=TEXT_PT, labelcolor=INK)
    ax.tick_params(axis="x", color=MUTED, labelsize=TEXT_PT, labelcolor=INK)
    for text in (ax.xaxis.label, ax.yaxis.label):
        text.set(color=INK, fontsize=TEXT_PT)


def halo() -> list[AbstractPathEffect]:
    """Keeps text readable that crosses a line."""
    return [withStroke(linewidth=2.5, foreground=PAPER)]


def write_caption(ax: Axes, *lines: str) -> None:
    """Writes small lines below the x axis label of Axes."""
    root = ax.get_figure(root=True)
    width_pt = 72 * (root.get_figwidth() * ax.get_position().width if root else WIDTH_IN)
    characters = max(30, int(width_pt / (SMALL_PT * _CHARACTER_EM)))
    wrapped = [part for line in lines for part in _wrapped(line, characters)]
    ax.annotate(
        "\n".join(wrapped),
        xy=(0, 0),
        xycoords="axes fraction",
        xytext=(0, -36),
        textcoords="offset points",
        annotation_clip=False,
        va="top",
        fontsize=SMALL_PT,
        color=MUTED,
        linespacing=1.35,
    )


def _wrapped(line: str, characters: int) -> list[str]:
    """Breaks a line between its parts where it has parts, else between words."""
    space = "\N{NO-BREAK SPACE}"
    parts = line.replace(" ", space).replace(f"{space}·{space}", f"{space}· ")
    return textwrap.wrap(parts if "·" in line else line, characters)
