"""The figure of the limits: what a batch size gains and wastes, above the limits themselves."""

import math
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from matplotlib.axes import Axes

from kbatch.analysis.intervals import Interval
from kbatch.document.numbers import format_number, join_words, shortened
from kbatch.document.section import where_measured
from kbatch.input_pipeline.rates import CLOSEST_RATIO
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.palette import ALARM, ALARM_TEXT, INK, MUTED, series_style
from kbatch.recommendation.choice import TARGET, Estimate
from kbatch.recommendation.limits import INPUT, MEMORY, NOISE, SATURATION, update_time_s
from kbatch.recommendation.record import Recommendation

HEIGHT_IN = 5.2
_ROW_CHARACTERS = 90
_SHORTEST_OCTAVES = 2
# Limits further out than this many times the largest size that was timed are given in words alone.
_WIDEST = 4
# The curves: what an example is worth is that over its worth at the smallest size that was trained,
# and progress that over the recommended size's.
THROUGHPUT, WORTH, PROGRESS = "samples/s", "worth of an example", "progress a second"

CurvePoint = tuple[int, float, Interval | None]  # A batch size, its value and 95 % interval.


class LimitRow(NamedTuple):
    name: str  # One of `kbatch.recommendation.limits.LIMITS`.
    size: float | None  # In examples; None where it limits nothing shown, or is unknown.
    interval: Interval | None  # Its 95 % interval, in examples, None where unknown.
    words: str  # What it says.
    known: bool
    binds: bool  # Whether it is the one that binds.


class LimitsInfo(NamedTuple):
    title: str  # The answer in a few words.
    batch_size: int | None  # The recommended size, None where it cannot be told.
    curves: dict[str, tuple[CurvePoint, ...]]  # By name, ascending.
    rows: tuple[LimitRow, ...]  # From memory to the input pipeline.
    conditions: str


def limits_info(recommendation: Recommendation) -> LimitsInfo:
    size, pilot = recommendation.batch_size, recommendation.pilot
    title = "Batch size: cannot tell" if size is None else f"Batch size {size:,}"
    if as_good := recommendation.decision.as_good:
        title += f" ({join_words(f'{other:,}' for other in as_good)} may be as good)"
    if size is not None and recommendation.binding:
        title += f": {' or '.join(recommendation.binding)} binds"
    parts = [recommendation.model_name, recommendation.optimizer, recommendation.dtype_policy]
    if recommendation.environment is not None:
        parts += where_measured(recommendation.environment)
    if pilot is not None:
        parts.append(f"pilot of {pilot.updates:,} updates at batch size {pilot.batch_size:,}")
    rows = recommendation.decision.sizes
    rates = {row.batch_size: row.samples_per_second.value or 0.0 for row in rows}
    most = max(rates.values(), default=1.0)
    # What needs the target is known of the sizes that reached it.
    reached = [row for row in rows if row.ended_by == TARGET and row.updates.value]
    unit = reached[0].batch_size * (reached[0].updates.value or 0.0) if reached else 0.0
    curves = {
        THROUGHPUT: tuple((size, rate / most, None) for size, rate in rates.items()),
        WORTH: tuple((r.batch_size, *_over(unit / r.batch_size, r.updates)) for r in reached),
        PROGRESS: tuple((r.batch_size, *_over(1.0, r.relative_time)) for r in reached),
    }
    conditions = " · ".join([*parts, "bands and bars: 95 % intervals"])
    return LimitsInfo(title, size, curves, tuple(_rows(recommendation)), conditions)


def alt_text(info: LimitsInfo) -> str:
    rows = "; ".join(f"{row.name}: {row.words}" for row in info.rows)
    return f"{info.title}. Limits on a common batch axis: {rows}."


def _over(value: float, estimate: Estimate) -> tuple[float, Interval | None]:
    span = estimate.interval
    return value / (estimate.value or 1.0), span and Interval(value / span.high, value / span.low)


def _rows(found: Recommendation) -> Iterator[LimitRow]:

    def row(name: str, words: str, size: float | None = None, interval: Interval | None = None):
        return LimitRow(name, size, interval, words, True, found.binding == (name,))

    def unknown(name: str, otherwise: str = "not measured"):
        words = f"cannot tell: {found.unknown.get(name, otherwise)}"
        return LimitRow(name, None, None, words, False, False)

    memory, saturation, noise = found.memory, found.saturation, found.critical
    if memory is None:
        yield unknown(MEMORY)
    else:
        more = "" if found.memory_ends else ", or more: the search ended there"
        words = f"{memory.max_batch_size:,} examples fit at once{more}"
        yield row(MEMORY, words, memory.max_batch_size)
    if saturation is None:
        yield unknown(SATURATION)
    elif saturation.batch_size is None:
        yield unknown(SATURATION, "steps take as long")
    else:
        beyond = ", by the line beyond what was timed" if saturation.extrapolated else ""
        words = f"90 % of the peak at {format_number(saturation.batch_size, 2)}{beyond}"
        yield row(SATURATION, words, saturation.batch_size, saturation.interval)
    if noise.value is not None:
        words = f"half of the examples wasted at {format_number(noise.value, 2)}"
        yield row(NOISE, words, noise.value, noise.interval)
    elif noise.at_least:
        yield row(NOISE, f"noise scale at least {format_number(noise.at_least, 2)}", noise.at_least)
    else:
        yield unknown(NOISE, "the noise scale is unresolved")
    line, own, ways = found.in_fit.line, found.in_fit.own, found.fastest
    if line is None or not found.updates:
        yield unknown(INPUT)
        return
    waits = [
        way.batch_size
        for way in ways
        if update_time_s(way, line) > CLOSEST_RATIO * update_time_s(way, own)
    ]
    if not waits:
        yield row(INPUT, "data keep up at every size")
    elif len(waits) == len(ways):
        yield row(INPUT, "the device waits at every size", waits[0])
    elif waits[-1] == ways[-1].batch_size:
        yield row(INPUT, f"the device waits from {waits[0]:,} on", waits[0])
    else:
        yield row(INPUT, f"the device waits up to {waits[-1]:,}")


def plot_limits(recommendation: Recommendation, ax: Axes | None = None) -> Axes:
    """Plot throughput, worth of an example and progress by batch size, above the four limits.

    >>> recommendation = kbatch.recommend(build, x, y)
    >>> kbatch.plot_limits(recommendation).figure.savefig("limits.png")

    Args:
        recommendation: What `kbatch.recommend` returned.
        ax: Axes whose place the two panels take; a new figure if None. The upper one is returned,
            whose label describes the figure in sentences.
    """
    info = limits_info(recommendation)
    # In a narrow figure what a limit says takes two lines.
    wide = ax is None or canvas.width_share(ax) == 1
    upper, lower = canvas.panels(ax, HEIGHT_IN, (4, 3 if wide else 7))
    upper.set_label(alt_text(info))
    # The axis holds the sizes that were timed, and powers of two around the limits.
    sizes = {size for size, _, _ in info.curves[THROUGHPUT]} or {1}
    places = [end for row in info.rows for end in (row.size, *(draw.ends(row.interval) or ()))]
    within = [end for end in places if end is not None and 1 <= end <= _WIDEST * max(sizes)]
    sizes |= {2 ** (math.ceil(end) - 1).bit_length() for end in within}
    if len(sizes) == 1:
        sizes.add(min(sizes) * 2**_SHORTEST_OCTAVES)
    batch_axis(lower, sorted(sizes), "Batch size (examples)")
    for index, (label, curve) in enumerate(info.curves.items()):
        if curve:
            timed, values, intervals = zip(*curve, strict=True)
            color, marker = series_style(index)
            draw.band(upper, timed, [draw.ends(one) for one in intervals], color)
            draw.points(upper, timed, values, color, marker, size=5, line="-", label=label)
    upper.set_ylim(0, 1.06)
    upper.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    upper.set_ylabel("Share of the largest")
    canvas.write_title(upper, info.title, columns=3, fewest=1, characters=len(info.title))
    _draw_rows(lower, info)
    if info.batch_size is not None:
        for panel in (upper, lower):
            panel.axvline(info.batch_size, color=INK, linewidth=1.2, linestyle="--", zorder=1.5)
    canvas.write_caption(lower, info.conditions)
    return upper


def _draw_rows(panel: Axes, info: LimitsInfo) -> None:
    low, high = panel.get_xlim()
    for place, row in enumerate(info.rows):
        color = ALARM if row.binds else MUTED
        if row.known:
            end = high if row.size is None else min(max(row.size, low), high)
            bar = {"height": 0.34, "color": color, "alpha": 0.35, "linewidth": 0}
            panel.barh(place, end - low, left=low, **bar)
            if row.size is not None and low <= row.size <= high:
                panel.vlines(row.size, place - 0.22, place + 0.22, color=color, linewidth=2)
        if row.interval is not None:
            ends = max(row.interval.low, low), min(row.interval.high, high)
            if ends[0] < ends[1]:
                panel.hlines(place, *ends, color=color, linewidth=1.6)
        width = round(canvas.width_share(panel) * _ROW_CHARACTERS)
        words, edge = shortened(row.words, _ROW_CHARACTERS), panel.get_yaxis_transform()
        wrapped = textwrap.fill(words, width)
        draw.text(panel, wrapped, (0.01, place), (0, -7), ha="left", va="top", xycoords=edge)
    panel.set_ylim(len(info.rows) - 0.25, -0.6)
    names = [row.name.capitalize().replace(" ", "\n") for row in info.rows]
    panel.set_yticks(range(len(info.rows)), names)
    panel.grid(visible=False, axis="y")
    for tick, row in zip(panel.get_yticklabels(), info.rows, strict=True):
        if row.binds:
            tick.set(color=ALARM_TEXT, fontweight="bold")
