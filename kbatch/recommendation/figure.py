"""The figure of the limits: what a batch size gains and wastes, above the limits themselves."""

import textwrap
from typing import TYPE_CHECKING, NamedTuple

from mpl_toolkits.axes_grid1 import make_axes_locatable

from kbatch.analysis.intervals import Interval
from kbatch.document.numbers import listed, readable, shortened
from kbatch.document.section import where_measured
from kbatch.input_pipeline.rates import CLOSEST_RATIO
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.canvas import (
    SMALL_PT,
    TEXT_PT,
    halo,
    new_axes,
    tidy,
    width_share,
    write_caption,
)
from kbatch.plotting.palette import ALARM, ALARM_TEXT, INK, MUTED, PAPER, SeriesStyle, series_style
from kbatch.recommendation.choice import TARGET, update_time_s
from kbatch.recommendation.limits import INPUT, MEMORY, NOISE, SATURATION
from kbatch.recommendation.record import Recommendation

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class LimitRow(NamedTuple):
    """One limit on the batch axis.

    Attributes:
        name: One of `kbatch.recommendation.limits.LIMITS`.
        size: Where it lies, in examples; None where it limits nothing that is shown, or is unknown.
        interval: Its 95 % interval, in examples, None where unknown.
        words: What it says.
        known: Whether it could be told.
        binds: Whether it is the one that binds.
    """

    name: str
    size: float | None
    interval: Interval | None
    words: str
    known: bool
    binds: bool


class SizePoint(NamedTuple):
    """One batch size.

    Attributes:
        batch_size: In examples.
        throughput: Its samples/s over the largest.
        worth: What an example is worth over that at the smallest size that was trained; None where
            the size did not come to the target.
        worth_interval: Its 95 % interval, None if unknown.
        progress: Progress a second over the recommended size's; None where the size did not come
            to the target.
        progress_interval: Its 95 % interval, None if unknown.
    """

    batch_size: int
    throughput: float
    worth: float | None = None
    worth_interval: Interval | None = None
    progress: float | None = None
    progress_interval: Interval | None = None


class LimitsInfo(NamedTuple):
    """What the figure shows.

    Attributes:
        title: The answer in a few words.
        batch_size: The recommended size, None where it cannot be told.
        points: The sizes that were timed, ascending.
        rows: The limits, from memory to the input pipeline.
        conditions: Model, device, versions and pilot in a line.
    """

    title: str
    batch_size: int | None
    points: tuple[SizePoint, ...]
    rows: tuple[LimitRow, ...]
    conditions: str


def limits_info(recommendation: Recommendation) -> LimitsInfo:
    """Compute what the figure of the limits shows."""
    return LimitsInfo(
        title=_title(recommendation),
        batch_size=recommendation.batch_size,
        points=_points(recommendation),
        rows=(
            _memory_row(recommendation),
            _saturation_row(recommendation),
            _noise_row(recommendation),
            _input_row(recommendation),
        ),
        conditions=_conditions(recommendation),
    )


def alt_text(info: LimitsInfo) -> str:
    """Describe the figure in sentences, for those who do not see it."""
    rows = "; ".join(f"{row.name}: {row.words}" for row in info.rows)
    return f"{info.title}. Limits on a common batch axis: {rows}."


def _title(recommendation: Recommendation) -> str:
    size, binding = recommendation.batch_size, recommendation.binding
    answer = "Batch size: cannot tell" if size is None else f"Batch size {size:,}"
    as_good = recommendation.decision.as_good
    if as_good:
        answer += f" ({listed(f'{other:,}' for other in as_good)} may be as good)"
    if size is None or not binding:
        return answer
    if len(binding) == 1:
        return f"{answer}: {binding[0]} binds"
    return f"{answer}: {' or '.join(binding)} binds"


def _points(recommendation: Recommendation) -> tuple[SizePoint, ...]:
    """Compute the points from the stored answer; worth times throughput is progress."""
    rows = recommendation.decision.sizes
    rates = {row.batch_size: row.samples_per_second.value or 0.0 for row in rows}
    reached = [row for row in rows if row.ended_by == TARGET]
    unit = reached[0].batch_size * (reached[0].updates.value or 0.0) if reached else 0.0
    most = max(rates.values(), default=1.0)
    points = []
    for row in rows:
        point = SizePoint(row.batch_size, rates[row.batch_size] / most)
        updates, relative = row.updates.value, row.relative_time.value
        if row.ended_by == TARGET and updates and relative:
            point = point._replace(
                worth=unit / (updates * row.batch_size),
                worth_interval=_over(unit / row.batch_size, row.updates.interval),
                progress=1 / relative,
                progress_interval=_over(1.0, row.relative_time.interval),
            )
        points.append(point)
    return tuple(points)


def _over(value: float, interval: Interval | None) -> Interval | None:
    return interval and Interval(value / interval.high, value / interval.low)


def _memory_row(recommendation: Recommendation) -> LimitRow:
    found = recommendation.memory
    if found is None:
        return _unknown(recommendation, MEMORY)
    words = f"{found.max_batch_size:,} examples fit at once"
    if not recommendation.memory_ends:
        words += ", or more: the search ended there"
    return _row(recommendation, MEMORY, float(found.max_batch_size), None, words)


def _saturation_row(recommendation: Recommendation) -> LimitRow:
    found = recommendation.saturation
    if found is None:
        return _unknown(recommendation, SATURATION)
    if found.batch_size is None:
        return LimitRow(SATURATION, None, None, "cannot tell: steps take as long", False, False)
    words = f"90 % of the peak at {readable(found.batch_size, 2)}"
    if found.extrapolated:
        words += ", by the line beyond what was timed"
    return _row(recommendation, SATURATION, float(found.batch_size), found.interval, words)


def _noise_row(recommendation: Recommendation) -> LimitRow:
    noise = recommendation.critical
    if noise.value is None:
        if not noise.at_least:
            return _unknown(recommendation, NOISE, "the noise scale is unresolved")
        words = f"noise scale at least {readable(noise.at_least, 2)}"
        return _row(recommendation, NOISE, noise.at_least, None, words)
    words = f"half of the examples wasted at {readable(noise.value, 2)}"
    return _row(recommendation, NOISE, noise.value, noise.interval, words)


def _input_row(recommendation: Recommendation) -> LimitRow:
    line, own = recommendation.in_fit.line, recommendation.in_fit.own
    if line is None or not recommendation.updates:
        return _unknown(recommendation, INPUT)
    ways = recommendation.fastest
    waits = [
        way.batch_size
        for way in ways
        if update_time_s(way, line) > CLOSEST_RATIO * update_time_s(way, own)
    ]
    if not waits:
        return _row(recommendation, INPUT, None, None, "data keep up at every size")
    if len(waits) == len(ways):
        words, size = "the device waits at every size", waits[0]
    elif waits[-1] == ways[-1].batch_size:
        words, size = f"the device waits from {waits[0]:,} on", waits[0]
    else:
        words, size = f"the device waits up to {waits[-1]:,}", None
    return _row(recommendation, INPUT, size, None, words)


def _row(
    recommendation: Recommendation,
    name: str,
    size: float | None,
    interval: Interval | None,
    words: str,
) -> LimitRow:
    return LimitRow(name, size, interval, words, True, recommendation.binding == (name,))


def _unknown(
    recommendation: Recommendation, name: str, otherwise: str = "not measured"
) -> LimitRow:
    reason = recommendation.unknown.get(name, otherwise)
    return LimitRow(name, None, None, f"cannot tell: {reason}", False, False)


def _conditions(recommendation: Recommendation) -> str:
    environment = recommendation.environment
    parts = [recommendation.model_name, recommendation.optimizer, recommendation.dtype_policy]
    if environment is not None:
        parts += where_measured(environment)
    pilot = recommendation.pilot
    if pilot is not None:
        parts.append(f"pilot of {pilot.updates:,} updates at batch size {pilot.batch_size:,}")
    return " · ".join([*parts, "bands and bars: 95 % intervals"])


HEIGHT_IN = 5.2
_TITLE_CHARACTERS = 64
_ROW_CHARACTERS = 90
_SERIES_IN_ROW = 3
_BATCH_LABEL = "Batch size (examples)"
_SHORTEST_OCTAVES = 2
# Limits further out than this many times the largest size that was timed are told in words alone.
_WIDEST = 4


def plot_limits(recommendation: "Recommendation", ax: "Axes | None" = None) -> "Axes":
    """Plot throughput, worth of an example and progress by batch size, above the four limits.

    Example:

    >>> recommendation = kbatch.recommend(build, x, y)
    >>> kbatch.plot_limits(recommendation).figure.savefig("limits.png")

    Args:
        recommendation: What `kbatch.recommend` returned.
        ax: Axes whose place the two panels take; a new figure if None.

    Returns:
        The Axes of the upper panel.
    """
    info = limits_info(recommendation)
    upper, lower = _panels(new_axes(HEIGHT_IN) if ax is None else ax)
    for panel in (upper, lower):
        tidy(panel)
    batch_axis(lower, _axis_sizes(info), _BATCH_LABEL)
    _draw_shares(upper, info)
    _draw_rows(lower, info)
    if info.batch_size is not None:
        for panel in (upper, lower):
            panel.axvline(info.batch_size, color=INK, linewidth=1.2, linestyle="--", zorder=1.5)
    write_caption(lower, info.conditions)
    return upper


def _panels(ax: "Axes") -> "tuple[Axes, Axes]":
    """Split Axes in two, one above the other, that share the batch axis."""
    place = ax.get_subplotspec()
    if place is None:
        lower = make_axes_locatable(ax).append_axes("bottom", "75%", pad=0.15, sharex=ax)
    else:
        # In a narrow figure what a limit says takes two lines.
        lower_share = 3 if width_share(ax) == 1 else 7
        rows = place.subgridspec(2, 1, height_ratios=(4, lower_share), hspace=0.08)
        ax.set_subplotspec(rows[0])
        lower = ax.figure.add_subplot(rows[1], sharex=ax)
    ax.tick_params(labelbottom=False)
    return ax, lower


def _axis_sizes(info: LimitsInfo) -> list[int]:
    """Return the sizes that the axis holds: those timed, and powers of two around the limits."""
    sizes = {point.batch_size for point in info.points} or {1}
    most = _WIDEST * max(sizes)
    for row in info.rows:
        ends = [row.size, *([row.interval.low, row.interval.high] if row.interval else [])]
        for end in ends:
            if end is not None and 1 <= end <= most:
                sizes.add(2 ** round_up_octave(end))
    if len(sizes) == 1:
        sizes.add(min(sizes) * 2**_SHORTEST_OCTAVES)
    return sorted(sizes)


def round_up_octave(size: float) -> int:
    """Return the exponent of the least power of two that is no smaller than a size."""
    return max(0, (int(-(-size // 1)) - 1).bit_length())


def _draw_shares(panel: "Axes", info: LimitsInfo) -> None:
    series = (
        ("samples/s", "throughput", None, series_style(0)),
        ("worth of an example", "worth", "worth_interval", series_style(1)),
        ("progress a second", "progress", "progress_interval", series_style(2)),
    )
    for label, name, band, style in series:
        _draw_share(panel, info.points, label, name, band, style)
    panel.set_ylim(0, 1.06)
    panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    panel.set_ylabel("Share of the largest")
    handles, _ = panel.get_legend_handles_labels()
    share = width_share(panel)
    columns = max(1, int(share * _SERIES_IN_ROW))
    if handles:
        panel.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=columns,
            borderaxespad=0,
            frameon=False,
            fontsize=SMALL_PT + 0.5,
            labelcolor=INK,
            columnspacing=1.2,
            handletextpad=0.5,
        )
    panel.set_title(
        textwrap.fill(info.title, int(share * _TITLE_CHARACTERS)),
        loc="left",
        pad=6 + 1.8 * TEXT_PT * -(-len(handles) // columns),
        fontsize=TEXT_PT + 1.5,
        color=INK,
        fontweight="bold",
        parse_math=False,
    )


def _draw_share(
    panel: "Axes",
    points: tuple[SizePoint, ...],
    label: str,
    name: str,
    band: str | None,
    style: SeriesStyle,
) -> None:
    known = [point for point in points if getattr(point, name) is not None]
    if not known:
        return
    sizes, values = ([getattr(p, what) for p in known] for what in ("batch_size", name))
    banded = [point for point in known if band is not None and getattr(point, band) is not None]
    if band is not None and banded:
        bounds = [getattr(point, band) for point in banded]
        panel.fill_between(
            [point.batch_size for point in banded],
            [bound.low for bound in bounds],
            [bound.high for bound in bounds],
            color=style.color,
            alpha=0.18,
            linewidth=0,
        )
    panel.plot(
        sizes,
        values,
        color=style.color,
        linewidth=1.5,
        marker=style.marker,
        markersize=5,
        markeredgecolor=PAPER,
        markeredgewidth=0.8,
        label=label,
    )


def _draw_rows(panel: "Axes", info: LimitsInfo) -> None:
    low, high = panel.get_xlim()
    for place, row in enumerate(info.rows):
        _draw_row(panel, place, row, low, high)
    panel.set_ylim(len(info.rows) - 0.25, -0.6)
    panel.set_yticks(
        range(len(info.rows)), [row.name.capitalize().replace(" ", "\n") for row in info.rows]
    )
    panel.grid(visible=False, axis="y")
    for tick, row in zip(panel.get_yticklabels(), info.rows, strict=True):
        if row.binds:
            tick.set(color=ALARM_TEXT, fontweight="bold")


def _draw_row(panel: "Axes", place: int, row: LimitRow, low: float, high: float) -> None:
    """Draw the sizes within a limit as a bar, its interval as a line, and what it says."""
    color = ALARM if row.binds else MUTED
    if row.known:
        end = high if row.size is None else min(max(row.size, low), high)
        panel.barh(place, end - low, left=low, height=0.34, color=color, alpha=0.35, linewidth=0)
        if row.size is not None and low <= row.size <= high:
            panel.vlines(row.size, place - 0.22, place + 0.22, color=color, linewidth=2)
    if row.interval is not None:
        ends = max(row.interval.low, low), min(row.interval.high, high)
        if ends[0] < ends[1]:
            panel.hlines(place, *ends, color=color, linewidth=1.6)
    width = round(width_share(panel) * _ROW_CHARACTERS)
    panel.annotate(
        textwrap.fill(shortened(row.words, _ROW_CHARACTERS), width),
        (0.01, place),
        xycoords=panel.get_yaxis_transform(),
        xytext=(0, -7),
        textcoords="offset points",
        va="top",
        fontsize=SMALL_PT,
        color=INK,
        path_effects=halo(),
        parse_math=False,
    )
