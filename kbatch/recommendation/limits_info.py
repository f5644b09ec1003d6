"""What the figure of the limits shows, computed before anything is drawn."""

from typing import NamedTuple

from kbatch.analysis.intervals import Interval
from kbatch.document.number_text import listed, readable
from kbatch.document.where_measured import where_measured
from kbatch.input_pipeline.input_bound import CLOSEST_RATIO
from kbatch.recommendation.batch_choice import update_time_s
from kbatch.recommendation.batch_decision import TARGET
from kbatch.recommendation.limits import INPUT, MEMORY, NOISE, SATURATION
from kbatch.recommendation.recommendation_record import Recommendation


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
