"""Draw the parts of figures: series, bars, lines, texts, and logarithmic axes."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from kbatch.analysis.intervals import Estimate
from kbatch.plotting import canvas

Color = str | tuple[float, float, float]
Place = tuple[float, float]
# Both ends of each interval, or None if there is no interval.
Bounds = Sequence[tuple[float, float] | None]
# Upper end of the y axis below the names, relative to the highest point. Height of a row of names.
_ABOVE, _NAME_ROW, _NAME_ROW_IN = 1.1, 0.085, 0.115
# A series with more marks is rasterized, because thousands of shapes make a vector file slow.
_MOST_MARKS = 500
# Width of "memory" above a mark, in characters of tick labels.
_REASON_CHARACTERS = 6


def series(
    panel: Axes,
    index: int,
    rows: Sequence[tuple[float, Estimate[float]]],
    *,
    label: str,
    line: Sequence[tuple[float, float]] = (),
    style: str = "-",
    shaded: bool = False,
    hollow: Sequence[tuple[float, float]] = (),  # Points with a hollow mark.
) -> None:
    """Draw estimates with their intervals, joined by a line, or with a fitted line."""
    color, marker = canvas.series_style(index)
    places, values = [place for place, _ in rows], [estimate.value for _, estimate in rows]
    (band if shaded else bars)(panel, places, [estimate.ends for _, estimate in rows], color)
    if line:
        panel.plot(*zip(*line, strict=True), color=color, linewidth=1.2, linestyle=style)
    points(panel, places, values, color, marker, label=label, line="none" if line else "-")
    for place, value in hollow:
        points(panel, [place], [value], color, marker, hollow=True)


def sampled(curve: Callable[[float], float], low: float, high: float) -> list[tuple[float, float]]:
    """Return points of a fitted curve for logarithmic axes, which cannot show 0."""
    places = np.geomspace(low, high, 100).tolist()
    return [(place, value) for place in places if (value := curve(place)) > 0]


def follows(curve: Callable[[float], float], measured: Mapping[int, float]) -> bool:
    """Return whether a fitted curve is within a fifth of every measured value."""
    shares = [curve(place) / value for place, value in measured.items()]
    return min(shares) > 1 / 1.2 and max(shares) < 1.2


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
    **look: Any,
) -> None:
    """Draw marks with an edge, so that overlapping marks can be seen."""
    face, edge = (canvas.PAPER, color) if hollow else (color, canvas.PAPER)
    look = {"markerfacecolor": face, "markeredgecolor": edge, "zorder": 2} | look
    look |= {"marker": marker, "markersize": size, "markeredgewidth": 1.1 if hollow else 0.8}
    look |= {"color": color, "linestyle": line, "linewidth": 0.7 if hollow else 1.4}
    panel.plot(places, values, **look, rasterized=len(places) > _MOST_MARKS)


def bars(
    panel: Axes, places: Sequence[float], bounds: Bounds, color: Color, *, across: bool = False
) -> None:
    """Draw intervals as vertical bars, or as horizontal ones if `across`."""
    spans = [(x, *b) for x, b in zip(places, bounds, strict=False) if b is not None]
    if spans:
        look = {"color": color, "linewidth": 1.6, "alpha": 0.55}
        lines = panel.hlines if across else panel.vlines
        lines(*zip(*spans, strict=True), **look, rasterized=len(spans) > _MOST_MARKS)


def band(panel: Axes, places: Sequence[float], bounds: Bounds, color: Color) -> None:
    """Draw intervals as a shaded band along a line."""
    spans = [(x, *b) for x, b in zip(places, bounds, strict=True) if b is not None]
    if spans:
        across, lows, highs = zip(*spans, strict=True)
        panel.fill_between(across, lows, highs, color=color, alpha=0.18, linewidth=0)


def ring(panel: Axes, place: float, value: float) -> None:
    panel.plot([place], [value], "o", ms=13, mfc="none", mec=canvas.INK, mew=1.2, clip_on=False)


def text(panel: Axes, words: str, place: Place, offset_pt: Place = (0, 0), **look: Any) -> None:
    """Write a small text near a point, with a white edge so that it is readable over lines."""
    usual: dict[str, Any] = {"ha": "center", "va": "center", "color": canvas.INK}
    usual["path_effects"] = [withStroke(linewidth=2.5, foreground=canvas.PAPER)]
    look = usual | {"fontsize": canvas.SMALL_PT, "parse_math": False} | look
    look["fontsize"] = canvas.text_pt(panel, look["fontsize"])
    panel.annotate(words, place, offset_pt, textcoords="offset points", **look)


def label_points(
    panel: Axes,
    points: Sequence[tuple[tuple[float, float], str, Color]],
    *,
    lines: Sequence[int] = (),
) -> None:
    """Write a text beside each point that has room for it; the first points come first.

    A text covers neither another text nor a point. The limits of both axes must be final. `lines`
    may give the line of each point. Then each line gets only one text, at its first point that has
    room and that no point of another line covers.
    """
    in_axes = (panel.transData - panel.transAxes).transform([place for place, *_ in points])
    width_pt = canvas.label_room(panel) * canvas.TEXT_PT * canvas.DIGIT_EM
    spots = in_axes * (width_pt, 72 * canvas.height_in(panel))
    taken = [Bbox.from_bounds(x - 3.5, y - 3.5, 7, 7) for x, y in spots.tolist()]
    labelled, seen = set[int](), set[int]()
    each = lines or range(len(points))
    covers = [*zip(each, spots.tolist(), strict=True)]
    for (place, words, color), (line, (x, y)) in zip(points, covers, strict=True):
        if line in seen and any(o != line and math.dist(spot, (x, y)) < 5 for o, spot in covers):
            continue
        seen.add(line)
        wide, high = canvas.DIGIT_EM * canvas.SMALL_PT * len(words) + 3, 1.2 * canvas.SMALL_PT
        for ha, left_pt, up_pt in (
            ("center", -wide / 2, 4 + high / 2),
            ("left", 5, 0),
            ("right", -5 - wide, 0),
            ("center", -wide / 2, -4 - high / 2),
        ):
            box = Bbox.from_bounds(x + left_pt, y + up_pt - high / 2, wide, high)
            free = line not in labelled and not any(map(box.overlaps, taken))
            if words and box.y0 > 0 and free:
                taken.append(box)
                labelled.add(line)
                right_pt = {"center": 0.0, "left": 6.0, "right": -6.0}[ha]
                text(panel, words, place, (right_pt, up_pt), ha=ha, color=color)
                break


def arrow(panel: Axes, place: tuple[float, float], up_pt: float, color: Color) -> None:
    """Draw an upward arrow at a value that is only a lower bound."""
    look: dict[str, Any] = {"arrowstyle": "<|-", "color": color, "linewidth": 1.2, "shrinkB": 0}
    panel.annotate("", place, xytext=(0, up_pt), textcoords="offset points", arrowprops=look)


def guide(panel: Axes, place: float) -> None:
    """Draw a dotted vertical line at a place."""
    panel.axvline(place, color=canvas.MUTED, linewidth=0.8, linestyle=":", zorder=0.5)


def limit(panel: Axes, value: float, words: str = "", *, below: bool = False) -> None:
    """Draw a dashed horizontal line, with its name above or below the left end."""
    panel.axhline(value, color=canvas.ALARM, linewidth=1.0, linestyle="--", zorder=0.6)
    va, offset_pt = ("top", -3) if below else ("bottom", 3)
    look = {"color": canvas.ALARM_TEXT, "xycoords": panel.get_yaxis_transform()}
    if words:
        text(panel, words, (0.01, value), (0, offset_pt), ha="left", va=va, **look)


def names_above(
    panel: Axes,
    named: Sequence[tuple[float, str]],
    edges: tuple[float, float],
    *,
    color: str = canvas.INK,
) -> None:
    """Write names of places on a logarithmic x axis above all points, one in each row."""
    row_share = max(_NAME_ROW, _NAME_ROW_IN / canvas.height_in(panel))
    panel.set_ylim(0, panel.get_ylim()[1] * _ABOVE / max(0.2, 1 - row_share * len(named)))
    top = panel.get_xaxis_transform()
    for row, (x, words) in enumerate(sorted(named)):
        # A place outside of the axis is named at its edge.
        place = (min(max(x, edges[0]), edges[1]), 0.99 - row_share * row)
        words += " \N{RIGHTWARDS ARROW}" if x > edges[1] else ""
        side, offset_pt = ("right", -4) if x**2 > edges[0] * edges[1] else ("left", 4)
        text(panel, words, place, (offset_pt, 0), ha=side, va="top", color=color, xycoords=top)


def name_answers(
    panel: Axes, named: Iterable[tuple[str, int, bool]], smallest: int, largest: int
) -> None:
    """Write the names of sizes that are an answer, and whether a size was not measured."""
    names: dict[int, str] = {}
    for name, size, measured in named:
        name = name if measured else f"{name}, not measured"
        names[size] = f"{names[size]}, {name}" if size in names else name
        if smallest <= size <= largest:
            guide(panel, size)
    lines = [(size, f"{name}: {size:,}") for size, name in names.items()]
    names_above(panel, lines, (smallest, largest))


def mark_failed(panels: Sequence[Axes], failed: Iterable[tuple[int, str]]) -> bool:
    """Mark sizes without a result at the bottom, and return whether the reasons had room."""
    reasons: dict[int, dict[str, None]] = {}
    for size, outcome in failed:
        reasons.setdefault(size, {})[outcome.replace("out of memory", "out of\nmemory")] = None
    crosses = {"color": canvas.ALARM, "marker": "X", "markeredgecolor": canvas.PAPER}
    rings = {"color": canvas.MUTED, "marker": "o", "markerfacecolor": canvas.PAPER}
    running = {size for size, outcomes in reasons.items() if [*outcomes] == ["running"]}
    for panel, sizes in itertools.product(panels, (running, reasons.keys() - running)):
        look = {"transform": panel.get_xaxis_transform(), "clip_on": False, "zorder": 4}
        look |= (rings if sizes is running else crosses) | {"markersize": 8, "linestyle": "none"}
        if sizes:
            panel.plot(sorted(sizes), [0] * len(sizes), **look)
    low, high = panels[-1].get_xlim()
    octave = canvas.label_room(panels[-1]) / math.log2(high / low)
    gaps = (octave * math.log2(b / a) for a, b in itertools.pairwise(sorted(reasons)))
    room = all(gap >= _REASON_CHARACTERS for gap in gaps)
    edge = panels[-1].get_xaxis_transform()
    for size, outcomes in reasons.items() if room else ():
        color, words = canvas.MUTED if size in running else canvas.ALARM_TEXT, ",\n".join(outcomes)
        text(panels[-1], words, (size, 0), (0, 8), va="bottom", color=color, xycoords=edge)
    return room


_MOST_TICKS = 12
# The multiples of each power of ten that may be labelled, by the upper limit of high / low of the
# axis. Longer axes get fewer labels.
_LABELS = ((4, (1, 1.5, 2, 3, 4, 5, 6, 8)), (10, (1, 2, 3, 4, 6, 8)), (1e3, (1, 2, 5)))
_LABELS = (*_LABELS, (math.inf, (1,)))
_FEWER = ((1, 2, 5), (1, 3), (1,))
# If an axis has no such multiples, at most this many even steps are labelled.
_MOST_STEPS = 4


def batch_axis(ax: Axes, batch_sizes: Iterable[int], label: str) -> None:
    sizes = sorted(set(batch_sizes))
    most = round(_MOST_TICKS * canvas.width_share(ax))
    margin = 2 ** max(0.35, 0.05 * math.log2(sizes[-1] / sizes[0]))
    ax.set_xscale("log", base=2)
    ax.set_xlim(sizes[0] / margin, sizes[-1] * margin)
    ax.xaxis.set_major_locator(FixedLocator(batch_ticks(sizes, most)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{round(size):,}"))
    ax.set_xlabel(label)


def batch_ticks(batch_sizes: Iterable[int], most: int = _MOST_TICKS) -> list[int]:
    """Choose the batch sizes that get a tick: all, or as many as have room."""
    sizes = sorted(set(batch_sizes))
    distance = math.log2(sizes[-1] / sizes[0]) / most
    ticks: list[int] = []
    for size in sizes:
        if not ticks or math.log2(size / ticks[-1]) >= distance:
            ticks.append(size)
    return ticks


def plain_log_labels(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers, as many as have room."""
    low, high = sorted(axis.get_view_interval())
    most = next(subs for span, subs in _LABELS if high < span * low)
    fewer = (subs for subs in (most, *_FEWER) if len(subs) <= len(most))
    single: list[float] = []
    for locator in (
        # On more than nine decades every second one is labelled.
        *(LogLocator(subs=subs, numticks=9) for subs in fewer),
        *(LogLocator(numticks=count) for count in range(_MOST_STEPS, 1, -1)),
        *(MaxNLocator(nbins=count) for count in range(_MOST_STEPS, 0, -1)),
    ):
        places = [float(place) for place in locator.tick_values(low, high) if low <= place <= high]
        # At least two labels, if they have room.
        if len(places) > 1 and _fit(axis, places):
            axis.set_major_locator(locator)
            break
        single = max(single, places, key=len)
    else:
        axis.set_major_locator(FixedLocator(single[-1:]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))


def _fit(axis: Axis, places: Sequence[float]) -> bool:
    """Return whether the labels have room."""
    low, high = sorted(axis.get_view_interval())
    if not isinstance(axis, XAxis):
        rows = canvas.label_rows(axis.axes) / math.log(high / low)
        return all(rows * math.log(b / a) >= 1 for a, b in itertools.pairwise(places))
    room = canvas.label_room(axis.axes) / math.log(high / low)
    # At least one and a half characters between two labels.
    return all(
        room * math.log(right / left) >= 1.5 + (len(_plain(left)) + len(_plain(right))) / 2
        for left, right in itertools.pairwise(places)
    )


def _plain(value: float) -> str:
    # "g" would use an exponent for large numbers.
    return f"{value:,.0f}" if value >= 1e5 else f"{value:,g}"
