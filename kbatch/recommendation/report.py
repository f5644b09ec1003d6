"""A recommendation as a section of a report, and the figure of its limits."""

import functools
import math
import textwrap
from typing import NamedTuple

from matplotlib.axes import Axes

from kbatch.page.content import Figure
from kbatch.page.environment import where_measured
from kbatch.page.numbers import format_number, setting
from kbatch.page.section import Cell, Column, Fact, Note, Row, Section, Table, environment_facts
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.canvas import shortened
from kbatch.plotting.palette import ALARM, ALARM_TEXT, INK, MUTED, series_style
from kbatch.recommendation.limits import noise_bounds
from kbatch.recommendation.record import Limit, Recommendation

_HEIGHT_IN = 5.2
_ROW_CHARACTERS = 90
_SHORTEST_OCTAVES = 2
# Limits further out than this many times the largest size that was timed are given in words alone.
_WIDEST = 4
# The curves: what an example is worth is that over its worth at the smallest size, and progress
# that over the best size's.
THROUGHPUT, WORTH, PROGRESS = "samples/s", "worth of an example", "progress a second"
_COLUMNS = ("Batch size", "Micro-batch size", "Samples/s", "Expected time")

CurvePoint = tuple[
    int, float, tuple[float, float] | None
]  # A batch size, its value and 95 % interval.


def recommendation_section(recommendation: Recommendation) -> Section:
    found, environment = recommendation, recommendation.environment
    times, rows = found.relative_times, []
    for way in found.fastest:
        size, rate, time = way.batch_size, way.samples_per_second, times.get(way.batch_size)
        cells = (
            Cell(f"{size:,}", size),
            Cell(f"{way.micro_batch_size:,}", way.micro_batch_size),
            Cell(format_number(rate), rate),
            Cell("n/a" if time is None else format_number(time), time),
        )
        rows.append(Row(str(size), "", size == found.batch_size, cells))
    table = Table(
        "What the limits let expect: the time to a goal, over that of the best size",
        tuple(Column(title, True) for title in _COLUMNS),
        tuple(rows),
        best_means="the size to start with",
    )
    rate = found.base_learning_rate
    rate_text = "n/a (not a single number)" if rate is None else setting(rate)
    draw_limits = functools.partial(plot_limits, found)
    return Section(
        kind="recommendation",
        name=found.model_name,
        headline=found.answer,
        lead=found.reasons,
        details=tuple(f"{one.name.capitalize()}: {one.words}." for one in found.limits),
        conditions="",
        figures=(Figure("limits", "The limits of the batch size", _HEIGHT_IN, draw_limits),),
        tables=(table,) if rows else (),
        notes=tuple(Note("", "", note) for note in found.notes),
        command=environment.command,
        settings=(
            Fact("optimizer", found.optimizer),
            Fact("learning rate of the model", "a schedule" if found.scheduled else rate_text),
            Fact("batch size that it suits", f"{found.base_batch_size:,}"),
            Fact("learning-rate rule", found.learning_rate_rule),
            Fact("dtype policy", found.dtype_policy),
            Fact("budget", f"{setting(found.budget_s)} s"),
        ),
        environment=environment_facts(environment),
    )


class LimitsInfo(NamedTuple):
    title: str  # The answer in a few words.
    curves: dict[str, tuple[CurvePoint, ...]]  # By name, ascending.
    conditions: str


def limits_info(found: Recommendation) -> LimitsInfo:
    size, pilot, noise = found.batch_size, found.pilot, found.noise_scale.value
    title = "Batch size: cannot tell"
    if size is not None:
        title = f"Start with batch size {size:,}: {' or '.join(found.binding)} binds"
    parts = [found.model_name, found.optimizer, found.dtype_policy]
    parts += where_measured(found.environment)
    if pilot is not None:
        parts.append(f"pilot of {sum(pilot.updates):,} updates at batch size {pilot.batch_size:,}")
    rates = {way.batch_size: way.samples_per_second for way in found.fastest}
    most, smallest = max(rates.values(), default=1.0), min(rates, default=1)

    def worth(size: int) -> CurvePoint:
        value, low, high = (
            (scale + smallest) / (scale + size) if scale < math.inf else 1.0
            for scale in (noise or 0.0, *noise_bounds(found.noise_scale))
        )
        return size, value, (low, high)

    curves = {
        THROUGHPUT: tuple((size, rate / most, None) for size, rate in rates.items()),
        WORTH: tuple(worth(size) for size in found.relative_times),
        PROGRESS: tuple((size, 1 / time, None) for size, time in found.relative_times.items()),
    }
    conditions = " · ".join([*parts, "band and bars: 95 % intervals; grey: sizes to search"])
    return LimitsInfo(title, curves, conditions)


def plot_limits(recommendation: Recommendation, ax: Axes | None = None) -> Axes:
    """Plot throughput, worth of an example and progress by batch size, above the four limits.

    >>> recommendation = kbatch.recommend(build, x, y)
    >>> kbatch.plot_limits(recommendation).figure.savefig("limits.png")

    Args:
        recommendation: What `kbatch.recommend` returned.
        ax: Axes whose place the two panels take; a new figure if None. The upper one is returned,
            whose label describes the figure in sentences.
    """
    found, info = recommendation, limits_info(recommendation)
    # In a narrow figure what a limit says takes two lines.
    wide = ax is None or canvas.width_share(ax) == 1
    upper, lower = canvas.panels(ax, _HEIGHT_IN, (4, 3 if wide else 7))
    rows = "; ".join(f"{one.name}: {one.words}" for one in found.limits)
    upper.set_label(f"{info.title}. Limits on a common batch axis: {rows}.")
    # The axis holds the sizes that were timed, and powers of two around the limits.
    sizes = {size for size, _, _ in info.curves[THROUGHPUT]} or {1}
    places = [end for one in found.limits for end in (one.batch_size, *_ends(one))]
    within = [end for end in places if end is not None and 1 <= end <= _WIDEST * max(sizes)]
    sizes |= {2 ** (math.ceil(end) - 1).bit_length() for end in within}
    if len(sizes) == 1:
        sizes.add(min(sizes) * 2**_SHORTEST_OCTAVES)
    batch_axis(lower, sorted(sizes), "Batch size (examples)")
    for index, (label, curve) in enumerate(info.curves.items()):
        if curve:
            timed, values, intervals = zip(*curve, strict=True)
            color, marker = series_style(index)
            draw.band(upper, timed, intervals, color)
            draw.points(upper, timed, values, color, marker, size=5, line="-", label=label)
    upper.set_ylim(0, 1.06)
    upper.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    upper.set_ylabel("Share of the largest")
    canvas.write_title(upper, info.title, columns=3, fewest=1, characters=len(info.title))
    _draw_limits(lower, found)
    if found.batch_size is not None:
        for panel in (upper, lower):
            ends = found.batch_sizes[0], found.batch_sizes[-1]
            panel.axvspan(*ends, color=MUTED, alpha=0.12, linewidth=0, zorder=0.5)
            panel.axvline(found.batch_size, color=INK, linewidth=1.2, linestyle="--", zorder=1.5)
    canvas.write_caption(lower, info.conditions)
    return upper


def _ends(limit: Limit) -> tuple[float, ...]:
    return limit.ends or ()


def _draw_limits(panel: Axes, found: Recommendation) -> None:
    low, high = panel.get_xlim()
    for place, limit in enumerate(found.limits):
        color = ALARM if found.binding == (limit.name,) else MUTED
        if limit.known:
            end = high if limit.batch_size is None else min(max(limit.batch_size, low), high)
            bar = {"height": 0.34, "color": color, "alpha": 0.35, "linewidth": 0}
            panel.barh(place, end - low, left=low, **bar)
            if limit.batch_size is not None and low <= limit.batch_size <= high:
                panel.vlines(limit.batch_size, place - 0.22, place + 0.22, color=color, linewidth=2)
        if ends := _ends(limit):
            inside = max(ends[0], low), min(ends[1], high)
            if inside[0] < inside[1]:
                panel.hlines(place, *inside, color=color, linewidth=1.6)
        width = round(canvas.width_share(panel) * _ROW_CHARACTERS)
        words, edge = shortened(limit.words, _ROW_CHARACTERS), panel.get_yaxis_transform()
        wrapped = textwrap.fill(words, width)
        draw.text(panel, wrapped, (0.01, place), (0, -7), ha="left", va="top", xycoords=edge)
    panel.set_ylim(len(found.limits) - 0.25, -0.6)
    names = [limit.name.capitalize().replace(" ", "\n") for limit in found.limits]
    panel.set_yticks(range(len(found.limits)), names)
    panel.grid(visible=False, axis="y")
    for tick, limit in zip(panel.get_yticklabels(), found.limits, strict=True):
        if found.binding == (limit.name,):
            tick.set(color=ALARM_TEXT, fontweight="bold")
