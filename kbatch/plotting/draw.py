"""The marks of all figures, series, bars, lines and texts, and their batch and logarithmic axes."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Transform

from kbatch.plotting.canvas import (
    ALARM,
    ALARM_TEXT,
    INK,
    MUTED,
    PAPER,
    SMALL_PT,
    TEXT_PT,
    label_room,
    series_style,
    width_share,
)

if TYPE_CHECKING:
    from kbatch.analysis.scaling_curve import Timed

Color = str | tuple[float, float, float]
# Both ends of an interval, None where there is none.
Bounds = Sequence[tuple[float, float] | None]
# Height of a panel in heights of its highest point, and what a row of names adds and takes of it.
_ABOVE, _NAME_ROW = 1.12, 0.085
# More marks of a series are pixels in a vector file: as shapes thousands are heavy and slow.
_MOST_MARKS = 500


def series(
    panel: Axes,
    index: int,
    places: Sequence[float],
    values: Sequence[float],
    *,
    label: str,
    bounds: Bounds = (),
    joined: bool = True,
) -> None:
    color, marker = series_style(index)
    bars(panel, places, bounds, color)
    points(panel, places, values, color, marker, label=label, line="-" if joined else "none")


def rates_and_times(
    upper: Axes,
    lower: Axes,
    index: int,
    rows: "Sequence[Timed]",
    *,
    label: str,
    line_s: Sequence[tuple[float, float]],
) -> None:
    """Draw one series of throughput above and of the time below, joined or with a fitted line."""
    for panel, found in (
        (upper, [row.rate for row in rows]),
        (lower, [row.time_s and row.time_s.times(1e3) for row in rows]),
    ):
        known = [(row.batch_size, one) for row, one in zip(rows, found, strict=True) if one]
        places, values = [size for size, _ in known], [one.value for _, one in known]
        bounds = [one.ends for _, one in known]
        series(panel, index, places, values, label=label, bounds=bounds, joined=not line_s)
    if line_s:
        sizes, look = [b for b, _ in line_s], {"color": series_style(index).color, "linewidth": 1.2}
        upper.plot(sizes, [size / time_s for size, time_s in line_s], **look)
        lower.plot(sizes, [1e3 * time_s for _, time_s in line_s], **look)


def points(
    panel: Axes,
    places: Sequence[float],
    values: Sequence[float],
    color: Color,
    marker: str,
    *,
    size: float = 6,
    hollow: bool = False,
    line: str = "none",
    label: str | None = None,
    zorder: float = 2,
) -> None:
    """Draw marks with an edge that keeps them apart."""
    panel.plot(
        places,
        values,
        color=color,
        linestyle=line,
        linewidth=1.4,
        marker=marker,
        markersize=size,
        markerfacecolor=PAPER if hollow else color,
        markeredgecolor=color if hollow else PAPER,
        markeredgewidth=1.1 if hollow else 0.8,
        label=label,
        zorder=zorder,
        rasterized=len(places) > _MOST_MARKS,
    )


def bars(
    panel: Axes, places: Sequence[float], bounds: Bounds, color: Color, *, across: bool = False
) -> None:
    """Draw the intervals that there are as upright bars, or across."""
    spans = [(x, *b) for x, b in zip(places, bounds, strict=False) if b is not None]
    if spans:
        look = {"color": color, "linewidth": 1.6, "alpha": 0.55}
        lines = panel.hlines if across else panel.vlines
        lines(*zip(*spans, strict=True), **look, rasterized=len(spans) > _MOST_MARKS)


def band(panel: Axes, places: Sequence[float], bounds: Bounds, color: Color) -> None:
    """Shade the intervals along a line where it has them."""
    spans = [(x, *b) for x, b in zip(places, bounds, strict=True) if b is not None]
    if spans:
        across, lows, highs = zip(*spans, strict=True)
        panel.fill_between(across, lows, highs, color=color, alpha=0.18, linewidth=0)


def ring(panel: Axes, place: float, value: float) -> None:
    panel.plot([place], [value], "o", ms=13, mfc="none", mec=INK, mew=1.2, clip_on=False)


def text(
    panel: Axes,
    words: str,
    place: tuple[float, float],
    offset_pt: tuple[float, float] = (0, 0),
    *,
    ha: str = "center",
    va: str = "center",
    color: Color = INK,
    bold: bool = False,
    size: float | None = None,
    xycoords: str | Transform = "data",
) -> None:
    """Write a small text beside a place, readable across lines."""
    panel.annotate(
        words,
        place,
        xycoords=xycoords,
        xytext=offset_pt,
        textcoords="offset points",
        ha=ha,
        va=va,
        fontsize=size or (TEXT_PT if bold else SMALL_PT),
        fontweight="bold" if bold else "normal",
        color=color,
        path_effects=[withStroke(linewidth=2.5, foreground=PAPER)],
        parse_math=False,
    )


def arrow(panel: Axes, place: tuple[float, float], up_pt: float, color: Color) -> None:
    """Draw an arrow upwards from a value of which only the lower bound is known."""
    panel.annotate(
        "",
        place,
        xytext=(0, up_pt),
        textcoords="offset points",
        arrowprops={"arrowstyle": "<|-", "color": color, "linewidth": 1.2, "shrinkB": 0},
    )


def guide(panel: Axes, place: float) -> None:
    """Draw a dotted line upwards at a place that is named."""
    panel.axvline(place, color=MUTED, linewidth=0.8, linestyle=":", zorder=0.5)


def limit(panel: Axes, value: float, words: str, *, below: bool = False) -> None:
    """Draw a dashed line across at a limit, with its name above or below the left end."""
    panel.axhline(value, color=ALARM, linewidth=1.0, linestyle="--", zorder=0.6)
    va, offset_pt = ("top", -3) if below else ("bottom", 3)
    look = {"color": ALARM_TEXT, "xycoords": panel.get_yaxis_transform()}
    text(panel, words, (0.01, value), (0, offset_pt), ha="left", va=va, **look)


def names_above(
    panel: Axes, named: Sequence[tuple[float, str]], edges: tuple[float, float], *, color: str = INK
) -> None:
    """Name places of a logarithmic x axis above all points, which make room, one a row."""
    panel.set_ylim(bottom=0, top=(_ABOVE + _NAME_ROW * len(named)) * panel.get_ylim()[1])
    top = panel.get_xaxis_transform()
    for row, (x, words) in enumerate(sorted(named)):
        # A place beyond the edges is named at the edge, on the side that has room.
        place = (min(max(x, edges[0]), edges[1]), 0.99 - _NAME_ROW * row)
        side, offset_pt = ("right", -4) if x**2 > edges[0] * edges[1] else ("left", 4)
        text(panel, words, place, (offset_pt, 0), ha=side, va="top", color=color, xycoords=top)


def answers(
    panel: Axes, named: Iterable[tuple[str, int, bool]], smallest: int, largest: int
) -> None:
    """Name the sizes that answer something, with what was not measured."""
    words: dict[int, str] = {}
    for name, size, measured in named:
        name = name if measured else f"{name}, not measured"
        words[size] = f"{words[size]}, {name}" if size in words else name
        if smallest <= size <= largest:
            guide(panel, size)
    lines = [(size, f"{names}: {size:,}") for size, names in words.items()]
    names_above(panel, lines, (smallest, largest))


def missing(panel: Axes, *places: float, words: str = "") -> None:
    """Mark runs without a result at the bottom edge, and write above the last why there is none."""
    marked, edge = list(dict.fromkeys(places)), panel.get_xaxis_transform()
    look = {"color": ALARM, "markersize": 8, "markeredgecolor": PAPER, "zorder": 4}
    panel.plot(marked, [0] * len(marked), "X", transform=edge, clip_on=False, **look)
    if words:
        reason(panel, places[-1], words)


def reason(panel: Axes, place: float, words: str) -> None:
    """Write above such marks why there is no result."""
    words = words.replace("out of memory", "out of\nmemory")
    edge = panel.get_xaxis_transform()
    text(panel, words, (place, 0), (0, 8), va="bottom", color=ALARM_TEXT, xycoords=edge)


_MOST_TICKS = 12
# What may be labelled in each decade of an axis that spans less than so many times its low end:
# over many decades a label for each third of one could not be read.
_LABELS = (
    (4, (1, 1.5, 2, 3, 4, 5, 6, 8)),
    (10, (1, 2, 3, 4, 6, 8)),
    (1e3, (1, 2, 5)),
    (math.inf, (1,)),
)
_FEWER = ((1, 2, 5), (1, 3), (1,))
# Less than a factor of two may hold no such number: there plain steps are labelled.
_MOST_STEPS = 4


def batch_axis(ax: Axes, batch_sizes: Iterable[int], label: str) -> None:
    sizes = sorted(set(batch_sizes))
    most = round(_MOST_TICKS * width_share(ax))
    margin = 2 ** max(0.35, 0.05 * math.log2(sizes[-1] / sizes[0]))
    ax.set_xscale("log", base=2)
    ax.set_xlim(sizes[0] / margin, sizes[-1] * margin)
    ax.xaxis.set_major_locator(FixedLocator(batch_ticks(sizes, most)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{round(size):d}"))
    ax.set_xlabel(label)


def batch_ticks(batch_sizes: Iterable[int], most: int = _MOST_TICKS) -> list[int]:
    """Pick the batch sizes that get a tick: all, or as many as can be read."""
    sizes = sorted(set(batch_sizes))
    distance = math.log2(sizes[-1] / sizes[0]) / most
    ticks: list[int] = []
    for size in sizes:
        if not ticks or math.log2(size / ticks[-1]) >= distance:
            ticks.append(size)
    return ticks


def rate_and_time_axes(upper: Axes, lower: Axes, timed: str) -> None:
    """Label the y axes of throughput and, on a logarithmic scale below, of what is timed."""
    upper.yaxis.set_major_formatter("{x:,.0f}")
    upper.set_ylabel("Throughput\n(samples/s)")
    lower.set_yscale("log")
    plain_log_labels(lower.yaxis)
    lower.set_ylabel(f"Time of a {timed}\n(ms)")


def plain_log_labels(axis: Axis) -> None:
    """Label an axis that is logarithmic already."""
    low, high = sorted(axis.get_view_interval())
    most = next(subs for span, subs in _LABELS if high < span * low)
    fewer = (subs for subs in (most, *_FEWER) if len(subs) <= len(most))
    single: list[float] = []
    for locator in (
        # Beyond nine decades every second one is labelled.
        *(LogLocator(subs=subs, numticks=9) for subs in fewer),
        *(LogLocator(numticks=count) for count in range(_MOST_STEPS, 1, -1)),
        *(MaxNLocator(nbins=count) for count in range(_MOST_STEPS, 0, -1)),
    ):
        places = [float(place) for place in locator.tick_values(low, high) if low <= place <= high]
        # Two at least, to compare; where they have no room, one.
        if len(places) > 1 and _fit(axis, places):
            axis.set_major_locator(locator)
            break
        single = max(single, places, key=len)
    else:
        axis.set_major_locator(FixedLocator(single[-1:]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))


def _fit(axis: Axis, places: Sequence[float]) -> bool:
    """Return whether labels have room side by side; one above the other they always have."""
    if not isinstance(axis, XAxis):
        return True
    low, high = sorted(axis.get_view_interval())
    room = label_room(axis.axes) / math.log(high / low)
    # Between two labels one and a half characters stay free.
    return all(
        room * math.log(right / left) >= 1.5 + (len(_plain(left)) + len(_plain(right))) / 2
        for left, right in itertools.pairwise(places)
    )


def _plain(value: float) -> str:
    # With an exponent otherwise.
    return f"{value:,.0f}" if value >= 1e5 else f"{value:,g}"
