"""The largest batch size within a latency target: by the calls that verified one, or by the fit."""

from collections.abc import Sequence

from kbatch.analysis.intervals import Interval
from kbatch.analysis.latency_batches import BatchAnswer, batch_size_within
from kbatch.inference.inference_answers_record import InferenceAnswer, TargetTooLow, answer_of
from kbatch.inference.inference_fits import fit_quantile
from kbatch.inference.inference_limits import least_by_checks, most_by_checks
from kbatch.inference.record import TargetCheck, TimingRecord


def answer_within(
    timings: Sequence[TimingRecord],
    checks: Sequence[TargetCheck],
    *,
    latency_ms: float,
    quantile: float,
) -> InferenceAnswer:
    """Finds the largest batch size of which a share of the calls keeps to a latency.

    Args:
        timings: What was measured of one call path and policy.
        checks: Checks of it by fresh calls.
        latency_ms: The target, in milliseconds.
        quantile: Share of the calls that keep to it, in (0, 1).

    Raises:
        ValueError: If no size can be told, as in `InferenceProfile.batch_for`.
    """
    for check in checks:
        if check.best and (check.latency_ms, check.quantile) == (latency_ms, quantile):
            return _checked(timings, checks, check)
    return _fitted(timings, checks, latency_ms, quantile)


def _fitted(
    timings: Sequence[TimingRecord],
    checks: Sequence[TargetCheck],
    latency_ms: float,
    quantile: float,
) -> InferenceAnswer:
    latency = fit_quantile(timings, quantile, checks=checks)
    answer = batch_size_within(latency, latency_s=latency_ms / 1000)
    sizes = latency.curve.batch_sizes
    smallest, largest = int(sizes[0]), int(sizes[-1])
    size, reason = answer.batch_size, f"fit of the {quantile:g} quantile"
    if size is None or size < smallest:
        if not least_by_checks(checks, latency_ms, quantile):
            reachable_ms = 1000 * latency.latency_s(smallest)
            raise _too_low(timings, smallest, reachable_ms, latency_ms, quantile)
        size = 0  # The checks know more.
    if size >= largest:
        size = largest
        reason = _at_the_end(timings, largest, quantile)
    kept = _within_checks(checks, answer, size, reason, latency_ms, quantile)
    return answer_of(*kept, timings)


def _at_the_end(timings: Sequence[TimingRecord], largest: int, quantile: float) -> str:
    """Says why the answer goes no further than the fit."""
    if max(t.batch_size for t in timings) <= largest:
        return "the largest measured size; larger ones may keep to the target too"
    return (
        f"the largest size with the calls that the {quantile:g} quantile needs; larger ones were "
        "measured with fewer, and may keep to the target too"
    )


def _too_low(
    timings: Sequence[TimingRecord],
    smallest: int,
    reachable_ms: float,
    latency_ms: float,
    quantile: float,
) -> ValueError:
    if min(t.batch_size for t in timings) < smallest:
        return ValueError(
            f"Sizes below {smallest} have too few calls for the {quantile:g} quantile to "
            f"tell whether they keep to the target: measure with `quantile={quantile:g}` "
            f"and more time. Received: latency_ms={latency_ms:g}."
        )
    return TargetTooLow(latency_ms, quantile, smallest, reachable_ms)


def _within_checks(
    checks: Sequence[TargetCheck],
    answer: BatchAnswer,
    size: int,
    reason: str,
    latency_ms: float,
    quantile: float,
) -> tuple[BatchAnswer, str]:
    """Keeps the size of a fit to what fresh calls showed, and the interval around it."""
    least = least_by_checks(checks, latency_ms, quantile)
    most = most_by_checks(checks, latency_ms, quantile)
    if size < least:
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
    return BatchAnswer(size, interval, False), reason


def _checked(
    timings: Sequence[TimingRecord], checks: Sequence[TargetCheck], check: TargetCheck
) -> InferenceAnswer:
    try:
        interval = _fitted(timings, checks, check.latency_ms, check.quantile).interval
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
