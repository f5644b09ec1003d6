"""What the figure of the limits shows, computed before anything is drawn."""

import math
from typing import NamedTuple

from kbatch.analysis.batch_choice import (
    TimedUpdate,
    noise_bounds,
    relative_time,
    update_time_s,
)
from kbatch.analysis.binding_limit import INPUT, MEMORY, NOISE, SATURATION
from kbatch.analysis.goodput_search import UpdatesForecast
from kbatch.analysis.input_bound import CLOSEST_RATIO
from kbatch.analysis.intervals import Interval
from kbatch.analysis.time_in_fit import TimeInFit
from kbatch.records.recommendation import Recommendation
from kbatch.reporting.number_text import readable
from kbatch.reporting.where_measured import where_measured


class LimitRow(NamedTuple):
    """One limit on the batch axis.

    Attributes:
        name: One of `kbatch.analysis.binding_limit.LIMITS`.
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
        worth: What an example is worth over that in the smallest batch; None where the noise scale
            is unresolved.
        worth_interval: The same at the ends of the noise scale's interval.
        progress: Progress a second over that of the best size; None likewise.
        progress_interval: The same at the ends, each against the best size there.
    """

    batch_size: int
    throughput: float
    worth: float | None
    worth_interval: Interval
    progress: float | None
    progress_interval: Interval


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
    """Computes what the figure of the limits shows."""
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
    """Describes the figure in sentences, for those who do not see it."""
    rows = "; ".join(f"{row.name}: {row.words}" for row in info.rows)
    return f"{info.title}. Limits on a common batch axis: {rows}."


def _title(recommendation: Recommendation) -> str:
    size, binding = recommendation.batch_size, recommendation.binding
    answer = "Batch size: cannot tell" if size is None else f"Batch size {size:,}"
    choice = recommendation.choice
    if recommendation.forecast and choice and choice.smallest < choice.largest:
        answer += f" ({choice.smallest:,} to {choice.largest:,} may be as good)"
    if size is None or not binding:
        return answer
    if len(binding) == 1:
        return f"{answer}: {binding[0]} binds"
    return f"{answer}: {' or '.join(binding)} binds"


def _points(recommendation: Recommendation) -> tuple[SizePoint, ...]:
    if not recommendation.updates:
        return ()
    ways = recommendation.fastest
    if recommendation.forecast is not None:
        return _forecast_points(recommendation, recommendation.forecast)
    noise = recommendation.noise_scale
    rates = _rates(recommendation)
    bounds = noise_bounds(noise)
    in_fit = recommendation.in_fit.line
    progress = {scale: _progress(ways, scale, in_fit) for scale in (*bounds, noise.value)}
    return tuple(
        SizePoint(
            way.batch_size,
            rates[way.batch_size],
            None if noise.value is None else _worth(way.batch_size, noise.value),
            _span(_worth(way.batch_size, scale) for scale in bounds),
            None if noise.value is None else progress[noise.value][i],
            _span(progress[scale][i] for scale in bounds),
        )
        for i, way in enumerate(ways)
    )


def _rates(recommendation: Recommendation) -> dict[int, float]:
    """Gives samples/s in `fit` over the largest, by batch size."""
    seconds = recommendation.trained.costs.update_costs
    most = max(size / update_s for size, update_s in seconds.items())
    return {size: size / update_s / most for size, update_s in seconds.items()}


def _forecast_points(
    recommendation: Recommendation, forecast: UpdatesForecast
) -> tuple[SizePoint, ...]:
    """Gives the points by the updates that sizes need; worth times throughput is progress."""
    ways, seconds = recommendation.fastest, recommendation.trained.costs.update_costs
    rates = _rates(recommendation)
    least_s = min(forecast.updates[size] * seconds[size] for size in seconds)
    first = ways[0].batch_size
    unit = _worth(first, forecast.critical) * first * forecast.updates[first]
    points = []
    for way in ways:
        size, updates = way.batch_size, forecast.updates[way.batch_size]
        factor = forecast.intervals[size].high / updates
        worth, progress = unit / (updates * size), least_s / (updates * seconds[size])
        points.append(
            SizePoint(
                size,
                rates[size],
                worth,
                Interval(worth / factor, worth * factor),
                progress,
                Interval(progress / factor, progress * factor),
            )
        )
    return tuple(points)


def _progress(
    ways: tuple[TimedUpdate, ...], noise_scale: float | None, in_fit: TimeInFit | None
) -> list[float]:
    if noise_scale is None:
        return []
    times = [relative_time(way, noise_scale=noise_scale, in_fit=in_fit) for way in ways]
    return [min(times) / time for time in times]


def _worth(batch_size: int, noise_scale: float) -> float:
    return 1.0 if noise_scale == math.inf else noise_scale / (noise_scale + batch_size)


def _span(values) -> Interval:
    low, high = sorted(values)
    return Interval(low, high)


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
    return " · ".join([*parts, "bands and bars: 95 % interval of the noise scale and the peak"])
