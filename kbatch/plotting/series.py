"""The marks of a series, those of runs without a result and the heading, alike in all figures."""

import textwrap
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.transforms import Transform

from kbatch.document.numbers import shortened
from kbatch.plotting.canvas import SMALL_PT, TEXT_PT, halo, width_share
from kbatch.plotting.palette import ALARM, ALARM_TEXT, INK, PAPER, series_style

# What a row of the legend holds, and what the mark before a name takes of it.
_ROW_CHARACTERS = 78
_HANDLE_CHARACTERS = 6
_TITLE_CHARACTERS = 58


def draw_series(
    panel: Axes,
    index: int,
    *,
    label: str,
    places: Sequence[float],
    values: Sequence[float],
    bounds: Sequence[tuple[float, float] | None] = (),
    joined: bool = True,
) -> None:
    """Draw one series with its bars."""
    style = series_style(index)
    spans = [(x, *b) for x, b in zip(places, bounds, strict=False) if b is not None]
    if spans:
        panel.vlines(*zip(*spans, strict=True), color=style.color, linewidth=1.6, alpha=0.55)
    panel.plot(
        places,
        values,
        color=style.color,
        linestyle="-" if joined else "none",
        linewidth=1.4,
        marker=style.marker,
        markersize=6,
        markeredgecolor=PAPER,
        markeredgewidth=0.8,
        label=label,
    )


def draw_band(
    panel: Axes,
    places: Sequence[float],
    bounds: Sequence[tuple[float, float] | None],
    color: str | tuple[float, float, float],
) -> None:
    """Shade the intervals along a line where it has them."""
    spans = [(x, *b) for x, b in zip(places, bounds, strict=True) if b is not None]
    if spans:
        across, lows, highs = zip(*spans, strict=True)
        panel.fill_between(across, lows, highs, color=color, alpha=0.18, linewidth=0)


def ring(panel: Axes, place: float, value: float) -> None:
    """Draw a ring around the point that is named."""
    panel.plot(
        [place],
        [value],
        marker="o",
        markersize=13,
        markerfacecolor="none",
        markeredgecolor=INK,
        markeredgewidth=1.2,
        linestyle="none",
    )


def annotate(
    panel: Axes,
    text: str,
    place: tuple[float, float],
    offset_pt: tuple[float, float],
    *,
    ha: str = "center",
    va: str = "center",
    color: str = INK,
    bold: bool = False,
    xycoords: str | Transform = "data",
) -> None:
    """Write a small text beside a place, readable across lines."""
    panel.annotate(
        text,
        place,
        xycoords=xycoords,
        xytext=offset_pt,
        textcoords="offset points",
        ha=ha,
        va=va,
        fontsize=TEXT_PT if bold else SMALL_PT,
        fontweight="bold" if bold else "normal",
        color=color,
        path_effects=halo(),
        parse_math=False,
    )


def mark_missing(panel: Axes, place: float, words: str = "") -> None:
    """Mark a run without a result at the bottom edge, and write above why there is none."""
    panel.plot(
        [place],
        [0],
        transform=panel.get_xaxis_transform(),
        color=ALARM,
        marker="X",
        markersize=8,
        markeredgecolor=PAPER,
        linestyle="none",
        clip_on=False,
        zorder=4,
    )
    if words:
        name_missing(panel, place, words)


def name_missing(panel: Axes, place: float, words: str) -> None:
    """Write above such marks why there is no result."""
    words = words.replace("out of memory", "out of\nmemory")
    edge = panel.get_xaxis_transform()
    annotate(panel, words, (place, 0), (0, 8), va="bottom", color=ALARM_TEXT, xycoords=edge)


def name_panel(
    panel: Axes,
    title: str,
    *,
    columns: int = 0,
    lines_below: int = 0,
    series_of: Axes | None = None,
) -> None:
    """Title the upper panel; the names of its series stand below the title."""
    rows = _name_series(panel, panel if series_of is None else series_of, columns) if columns else 0
    share = width_share(panel)
    title = shortened(title, _TITLE_CHARACTERS)
    panel.set_title(
        title if share == 1 else textwrap.fill(title, int(share * _TITLE_CHARACTERS)),
        loc="left",
        pad=6 + 1.6 * TEXT_PT * (rows + lines_below),
        fontsize=TEXT_PT + 1.5,
        color=INK,
        fontweight="bold",
        parse_math=False,
    )


def legend_columns(labels: Iterable[str], *, most: int = 4) -> int:
    """Return how many names of series stand in a row of the legend."""
    widths = [len(label) + _HANDLE_CHARACTERS for label in labels]
    if len(widths) < 2:
        return 0
    return max(1, min(most, _ROW_CHARACTERS // max(widths)))


def _name_series(panel: Axes, series_of: Axes, columns: int) -> int:
    """Name the series above the panel, where they cover no point, in so many rows."""
    handles, labels = series_of.get_legend_handles_labels()
    if not labels:
        return 0
    labels = [shortened(label, _ROW_CHARACTERS - _HANDLE_CHARACTERS) for label in labels]
    longest = max(len(label) for label in labels) + _HANDLE_CHARACTERS
    share = width_share(panel)
    if share < 1:
        columns = max(1, min(columns, int(share * _ROW_CHARACTERS) // longest))
    legend = panel.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        borderaxespad=0,
        frameon=False,
        fontsize=TEXT_PT,
        labelcolor=INK,
        columnspacing=1.2,
        handletextpad=0.5,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    # It may be wider than the first of several panels, whose width it must not decide.
    legend.set_in_layout(False)
    return -(-len(legend.get_texts()) // columns)
