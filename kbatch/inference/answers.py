"""Batch sizes as an inference profile answers them, by fits and by verified calls."""

import dataclasses
import math
import numbers
from collections.abc import Sequence

import numpy as np

from kbatch.analysis.intervals import Interval, calls_for_quantile
from kbatch.analysis.line_fit import fit_line
from kbatch.analysis.scaling_curve import BatchAnswer, Latency, batch_size_within, fit_latency
from kbatch.analysis.slow_rounds import calm_values
from kbatch.inference.record import TargetCheck, TimingRecord

# Groups of calls that each give a quantile of their own, which shows its noise.
_MOST_GROUPS = 8


@dataclasses.dataclass(frozen=True)
class InferenceAnswer:
    """A batch size, and how sure it is.

    Attributes:
        batch_size: The size, in examples.
        interval: 95 % interval of the size before it was made whole, in examples; None if
            unknown.
        verified: Whether fresh calls of this size kept to the target, with 95 % confidence over all
            sizes and looks of the search together.
        reason: Where the answer comes from.
        call_path: How the model was called.
        dtype_policy: Under which policy.
        extrapolated: Whether the size lies outside the measured ones; `reason` says so too.
    """

    batch_size: int
    interval: Interval | None
    verified: bool
    reason: str
    call_path: str
    dtype_policy: str
    extrapolated: bool = False


class TargetTooLow(ValueError):
    """A latency target that not even the smallest batch reaches; it says what can be reached.

    Attributes:
        reachable_ms: Latency of the smallest batch, in milliseconds.
    """

    def __init__(self, latency_ms: float, quantile: float, batch_size: int, reachable_ms: float):
        smaller = "" if batch_size == 1 else "measure smaller batch sizes, "
        super().__init__(
            f"`latency_ms` must be at least what batch size {batch_size} takes, "
            f"{reachable_ms:.3g} ms at the {quantile:g} quantile: {smaller}give a higher target, "
            f"or a faster call path or model. Received: latency_ms={latency_ms:g}."
        )
        self.reachable_ms = reachable_ms


def answer_of(found: BatchAnswer, reason: str, timings: Sequence[TimingRecord]) -> InferenceAnswer:
    """Make an answer of what a fit found."""
    if found.batch_size is None:
        raise ValueError(
            "The measurements do not tell this batch size: their noise hides how the time "
            f"grows. Measure larger batch sizes, or longer. Received: interval={found.interval}."
        )
    if found.extrapolated:
        sizes = [t.batch_size for t in timings]
        beyond = found.batch_size > max(sizes)
        end = f"beyond the largest measured size, {max(sizes)}"
        reason += f"; {end if beyond else f'below the smallest measured size, {min(sizes)}'}"
    return InferenceAnswer(
        batch_size=found.batch_size,
        interval=found.interval,
        verified=False,
        reason=reason,
        call_path=timings[0].call_path,
        dtype_policy=timings[0].dtype_policy,
        extrapolated=found.extrapolated,
    )


def check_target(latency_ms: float, quantile: float) -> None:
    """Check a latency target and its quantile."""
    known = isinstance(latency_ms, numbers.Real) and not isinstance(latency_ms, bool)
    if not known or not 0 < latency_ms < math.inf:
        raise ValueError(
            "A latency target must be a positive number, in milliseconds. "
            f"Received: latency_ms={latency_ms!r}."
        )
    calls_for_quantile(quantile)


def fit_timings(timings: Sequence[TimingRecord]) -> Latency:
    """Fit the time of a batch to the blocks of one call path and policy.

    Blocks that a neighbour on the machine slowed are left out where they can be told apart, so
    that the fit, and the batch sizes that follow from it, are those of the model.
    """
    kept = calm_values([t.batch_times_s for t in timings])
    calm = [(t.batch_size, time_s) for t, one in zip(timings, kept, strict=True) for time_s in one]
    if len(calm) < 3 or len(timings) < 2:
        raise ValueError(
            "A fit needs two measured batch sizes with three blocks in all: measure longer, or "
            f"fewer call paths and policies at once. Received: {len(timings)} sizes with "
            f"{len(calm)} blocks."
        )
    return fit_latency([size for size, _ in calm], [time_s for _, time_s in calm])


def disturbed_share(timings: Sequence[TimingRecord]) -> float:
    """Return the share of the blocks that `fit_timings` leaves out."""
    blocks = sum(len(t.batch_times_s) for t in timings)
    calm = sum(map(len, calm_values([t.batch_times_s for t in timings])))
    return 1 - calm / blocks if blocks else 0.0


def round_noise(timings: Sequence[TimingRecord]) -> float | None:
    """Return how far blocks of one size scatter, disturbed ones included."""
    pairs = [(t.batch_size, value) for t in timings for value in t.batch_times_s]
    if len(pairs) < 3 or len(timings) < 2:
        return None
    return fit_line([size for size, _ in pairs], [value for _, value in pairs]).departure.noise


def fit_quantile(
    timings: Sequence[TimingRecord], quantile: float, *, checks: Sequence[TargetCheck] = ()
) -> Latency:
    """Fit a quantile of the latency to the single calls of one call path and policy.

    Only sizes with enough calls take part. Their calls are cut into groups in order of time,
    each long enough to show the quantile, and each gives one value.
    """
    if timings and timings[0].bulk:
        raise ValueError(
            "Bulk prediction times all batches together: the latency of one is not known. "
            'Measure another call path, such as "predict_on_batch". '
            f"Received: call path {timings[0].call_path!r}."
        )
    bounds = {t.batch_size: t.latency_bound(quantile) for t in timings}
    known = {t.batch_size: t.latencies_s for t in timings if not bounds[t.batch_size].missing_calls}
    needed, largest = calls_for_quantile(quantile), max(known, default=0)
    known |= {
        check.batch_size: check.latencies_s
        for check in checks
        if check.batch_size > largest and len(check.latencies_s) >= needed
    }
    if len(known) < 2:
        missing = {size: bound.missing_calls for size, bound in bounds.items()}
        raise ValueError(
            f"The {quantile:g} quantile needs {needed} calls at two "
            f"batch sizes or more: measure with `quantile={quantile:g}` and more time. "
            f"Received: missing calls by batch size {missing}."
        )
    pairs = [
        (size, value)
        for size, latencies_s in known.items()
        for value in _group_quantiles(latencies_s, quantile)
    ]
    # With the calls that the quantile needs there are two groups of each size or more.
    return fit_latency([size for size, _ in pairs], [value for _, value in pairs])


def _group_quantiles(latencies_s: Sequence[float], quantile: float) -> list[float]:
    shortest = math.ceil(1 / min(quantile, 1 - quantile))
    groups = max(1, min(_MOST_GROUPS, len(latencies_s) // shortest))
    parts = np.array_split(np.asarray(latencies_s), groups)
    return [float(np.quantile(part, quantile)) for part in parts]


def answer_within(
    timings: Sequence[TimingRecord],
    checks: Sequence[TargetCheck],
    *,
    latency_ms: float,
    quantile: float,
) -> InferenceAnswer:
    """Find the largest batch size of which a share of the calls keeps to a latency.

    A target that was checked gets the size that its fresh calls verified, any other one that of
    the fit, kept to what fresh calls for other targets showed.
    """
    asked = (latency_ms, quantile)
    check = next((c for c in checks if c.best and (c.latency_ms, c.quantile) == asked), None)
    if check is None:
        return _fitted(timings, checks, latency_ms, quantile)
    try:
        interval = _fitted(timings, checks, latency_ms, quantile).interval
    except ValueError:  # The fit may say less than the calls that were made.
        interval = None
    reason = f"{len(check.latencies_s)} fresh calls, {check.exceeded} above the target"
    if check.drift:
        reason += f", with room for calls {100 * check.drift:.0f} % slower"
    smallest = min((t.batch_size for t in timings), default=1)
    if check.batch_size < smallest:
        reason += f"; below the smallest size of the sweep, {smallest}"
    return InferenceAnswer(
        check.batch_size, interval, check.verified, reason, check.call_path, check.dtype_policy
    )


def _fitted(
    timings: Sequence[TimingRecord],
    checks: Sequence[TargetCheck],
    latency_ms: float,
    quantile: float,
) -> InferenceAnswer:
    latency = fit_quantile(timings, quantile, checks=checks)
    answer = batch_size_within(latency, latency_s=latency_ms / 1000)
    smallest, largest = (int(size) for size in latency.curve.batch_sizes[[0, -1]])
    least, most = _bounds_by_checks(checks, latency_ms, quantile)
    size, reason = answer.batch_size or 0, f"fit of the {quantile:g} quantile"
    if size < smallest and not least:
        if min(t.batch_size for t in timings) < smallest:
            raise ValueError(
                f"Sizes below {smallest} have too few calls for the {quantile:g} quantile to "
                f"tell whether they keep to the target: measure with `quantile={quantile:g}` "
                f"and more time. Received: latency_ms={latency_ms:g}."
            )
        raise TargetTooLow(latency_ms, quantile, smallest, 1000 * latency.latency_s(smallest))
    if size >= largest:
        size, reason = largest, "the largest measured size; larger ones may keep to the target too"
        if max(t.batch_size for t in timings) > largest:
            reason = (
                f"the largest size with the calls that the {quantile:g} quantile needs; larger "
                "ones were measured with fewer, and may keep to the target too"
            )
    if size < max(least, smallest):
        size, reason = least, "fresh calls of it kept to a target as strict"
    if most is not None and size > most:
        if most < 1:
            raise ValueError(
                "Fresh calls of batch size 1 did not keep to this target or to a looser one: "
                "give a higher target, or a faster call path or model. "
                f"Received: latency_ms={latency_ms:g}."
            )
        size, reason = most, "fresh calls for this target or a looser one leave no larger size"
    interval = answer.interval
    if interval is not None and size != answer.batch_size:
        interval = Interval(min(interval.low, size), max(interval.high, size))
    return answer_of(BatchAnswer(size, interval, False), reason, timings)


def _bounds_by_checks(
    checks: Sequence[TargetCheck], latency_ms: float, quantile: float
) -> tuple[int, int | None]:
    """Return the sizes between which fresh calls leave the answer: 0 and None where they do not.

    The largest size that kept to a target as strict or stricter is the least. A stricter target has
    no larger size than the one that was found for a looser one, and none from the smallest size on
    that missed it. A check that lacks calls for a verification says nothing.
    """
    stricter = [c for c in checks if c.latency_ms <= latency_ms and c.quantile >= quantile]
    looser = [c for c in checks if c.latency_ms >= latency_ms and c.quantile <= quantile]
    missed = [c for c in looser if not (c.best or c.verified or c.missing_calls is not None)]
    most = [*(c.batch_size for c in looser if c.best), *(c.batch_size - 1 for c in missed)]
    return max((c.batch_size for c in stricter if c.verified), default=0), min(most, default=None)
