"""Where figures are drawn: new or given Axes, and their plain look."""

import sys
import textwrap
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patheffects import AbstractPathEffect, withStroke
from matplotlib.text import Text
from mpl_toolkits.axes_grid1 import make_axes_locatable

from kbatch.document.numbers import shortened
from kbatch.plotting.palette import ALARM_TEXT, GRID, INK, MUTED, PAPER

WIDTH_IN = 6.4
# A narrower figure has no room for its labels, and no page is wider.
LEAST_WIDTH_IN = 3.25
MOST_WIDTH_IN = 40.0
SMALL_PT = 7.5
TEXT_PT = 8
# Mean width of a character, in font sizes.
_CHARACTER_EM = 0.5
# The same of digits, which tick labels consist of.
_DIGIT_EM = 0.62
# What the labels of the y axis take of the width.
_LABELS_IN = 0.7
# The same, with its title in two lines.
_BESIDE_CAPTION_IN = 1.2
_LINE_SPACING = 1.35
_CAPTION = "_caption"
# In characters: a study of thousands of hyperparameters lists them.
_LONGEST_LINE = 600


def new_axes(height_in: float) -> Axes:
    """Make Axes in a figure of their own.

    In a notebook pyplot owns the figure, which is how it gets shown; elsewhere nobody but
    the caller holds it, so none stays open.
    """
    if "ipykernel" not in sys.modules:
        return detached_axes(height_in)
    from matplotlib import pyplot

    return pyplot.figure(figsize=(WIDTH_IN, height_in), layout="constrained").add_subplot()


def detached_axes(height_in: float, *, width_in: float = WIDTH_IN) -> Axes:
    """Make Axes in a figure that no notebook shows, for a file."""
    figure = Figure(figsize=(width_in, height_in), dpi=150, layout="constrained")
    return figure.add_subplot()


def draw_so_wide(draw: Callable[[Axes | None], Axes], width_in: float) -> Axes:
    """Draw a figure at another width than the usual one, its panels as high as there."""
    if not LEAST_WIDTH_IN <= width_in <= MOST_WIDTH_IN:
        raise ValueError(
            f"A figure's width must lie between {LEAST_WIDTH_IN:g} and {MOST_WIDTH_IN:g} inches. "
            f"Received: {width_in:g}."
        )
    usual = draw(None).get_figure(root=True)
    if usual is None:
        raise ValueError("The figure has no Axes to be drawn on.")
    height_in = usual.get_figheight()
    drawn = draw(detached_axes(height_in, width_in=width_in)).get_figure(root=True)
    # What is narrower has its captions in more lines.
    more_lines = _caption_lines(drawn) - _caption_lines(usual)
    height_in += max(0.0, more_lines * 1.2 * _LINE_SPACING * SMALL_PT / 72)
    return draw(detached_axes(height_in, width_in=width_in))


def _caption_lines(figure: Figure | SubFigure | None) -> int:
    texts = [] if figure is None else figure.findobj(Text)
    captions = (text for text in texts if text.get_label() == _CAPTION)
    return sum(1 + text.get_text().count("\n") for text in captions)


def width_share(ax: Axes) -> float:
    """Compare the width for texts with that of a figure of the usual width, 1 at most."""
    return min(1.0, (_width_in(ax) - _LABELS_IN) / (WIDTH_IN - _LABELS_IN))


def label_room(ax: Axes) -> float:
    """Return how many characters of tick labels fit beside each other, about: before the layout."""
    # It asks for a renderer, which sizes that are shares of each other do without.
    locate: Any = ax.get_axes_locator()
    place = ax.get_position() if locate is None else locate(ax, None)
    width_in = _width_in(ax)
    # What stands beside narrow Axes takes a larger part of the figure.
    shrunk = min(1.0, (width_in - _LABELS_IN) / width_in)
    return 72 * width_in * place.width * shrunk / (TEXT_PT * _DIGIT_EM)


def _width_in(ax: Axes) -> float:
    figure = ax.get_figure(root=True)
    return WIDTH_IN if figure is None else figure.get_figwidth()


def plain_axes(ax: Axes | None, height_in: float) -> Axes:
    """Return tidy Axes: those of a caller, or new ones."""
    panel = new_axes(height_in) if ax is None else ax
    tidy(panel)
    return panel


def stacked(ax: Axes) -> tuple[Axes, Axes]:
    """Split Axes in two of equal height, one above the other, that share the x axis."""
    upper, lower = piled(ax, 2)
    return upper, lower


def piled(ax: Axes, count: int) -> list[Axes]:
    """Split Axes in several of equal height, the first on top, that share the x axis."""
    place = ax.get_subplotspec()
    if place is None:
        divider = make_axes_locatable(ax)
        below = [
            divider.append_axes("bottom", "100%", pad=0.15, sharex=ax) for _ in range(count - 1)
        ]
    else:
        rows = place.subgridspec(count, 1, hspace=0.08)
        ax.set_subplotspec(rows[0])
        below = [ax.figure.add_subplot(rows[i], sharex=ax) for i in range(1, count)]
    panels = [ax, *below]
    for panel in panels[:-1]:
        panel.tick_params(labelbottom=False)
    return panels


def beside(ax: Axes, count: int) -> tuple[list[Axes], Axes]:
    """Split Axes in several of equal width, side by side, that share the y axis."""
    place = ax.get_subplotspec()
    if place is None:
        divider = make_axes_locatable(ax)
        more = [divider.append_axes("right", "100%", pad=0.15, sharey=ax) for _ in range(count - 1)]
        panels, below = [ax, *more], ax
    else:
        rows = place.subgridspec(2, 1, height_ratios=(1, 1e-3), hspace=0)
        cells = rows[0].subgridspec(1, count, wspace=0.04)
        ax.set_subplotspec(cells[0])
        more = [ax.figure.add_subplot(cells[i], sharey=ax) for i in range(1, count)]
        panels, below = [ax, *more], ax.figure.add_subplot(rows[1])
        below.set_axis_off()
    for panel in more:
        panel.tick_params(labelleft=False)
    return panels, below


def beside_table(ax: Axes, share: float) -> tuple[Axes, Axes]:
    """Return a part of the place of Axes, on their left, to a table."""
    place = ax.get_subplotspec()
    if place is None:
        size = f"{100 * share / (1 - share):.0f}%"
        table = make_axes_locatable(ax).append_axes("left", size, pad=0.1, sharey=ax)
        below = ax
    else:
        rows = place.subgridspec(2, 1, height_ratios=(1, 1e-3), hspace=0)
        cells = rows[0].subgridspec(1, 2, width_ratios=(share, 1 - share), wspace=0.02)
        ax.set_subplotspec(cells[1])
        table = ax.figure.add_subplot(cells[0], sharey=ax)
        below = ax.figure.add_subplot(rows[1])
        below.set_axis_off()
    table.set_axis_off()
    return table, below


def tidy(ax: Axes) -> None:
    """Return Axes a light horizontal grid and take away what carries no data."""
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
    """Keep text readable that crosses a line."""
    return [withStroke(linewidth=2.5, foreground=PAPER)]


def say(ax: Axes, text: str) -> None:
    """Write in the middle of Axes that hold no data why they hold none."""
    ax.set_yticks([])
    ax.text(
        0.5,
        0.5,
        textwrap.fill(text, 70),
        transform=ax.transAxes,
        ha="center",
        va="center",
        fontsize=TEXT_PT,
        color=MUTED,
        parse_math=False,
    )


def write_caption(ax: Axes, *lines: str, alarm: str = "", below_pt: float = 36) -> None:
    """Write small lines below the x axis label of Axes."""
    width_in = _width_in(ax)
    # Before the layout a place is about right, and too wide in a narrow figure.
    width_pt = 72 * min(width_in * ax.get_position().width, width_in - _BESIDE_CAPTION_IN)
    characters = max(30, int(width_pt / (SMALL_PT * _CHARACTER_EM)))
    top_pt = below_pt
    for color, texts in ((ALARM_TEXT, [alarm] if alarm else []), (MUTED, lines)):
        short = (shortened(line, _LONGEST_LINE) for line in texts)
        wrapped = [part for line in short for part in _wrapped(line, characters)]
        ax.annotate(
            "\n".join(wrapped),
            xy=(0, 0),
            xycoords="axes fraction",
            xytext=(0, -top_pt),
            textcoords="offset points",
            annotation_clip=False,
            va="top",
            fontsize=SMALL_PT,
            color=color,
            linespacing=_LINE_SPACING,
            parse_math=False,
            label=_CAPTION,
        )
        top_pt += len(wrapped) * 1.2 * _LINE_SPACING * SMALL_PT


def _wrapped(line: str, characters: int) -> list[str]:
    """Break a line between its parts where it has parts, else between words."""
    space = "\N{NO-BREAK SPACE}"
    parts = (
        part.replace(" ", space) if len(part) < characters - 1 else part
        for part in line.split(" · ")
    )
    wrapped = textwrap.wrap(f"{space}· ".join(parts).replace(" %", f"{space}%"), characters)
    return [one.removesuffix(f"{space}·") for one in wrapped]
