"""Batch sizes as an inference profile answers them, and what keeps it from an answer."""

import dataclasses
import math
import numbers
from collections.abc import Sequence

from kbatch.analysis.intervals import Interval
from kbatch.analysis.latency_batches import BatchAnswer
from kbatch.analysis.quantile_bounds import calls_for_quantile
from kbatch.inference.record import TimingRecord


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
    """Makes an answer of what a fit found.

    Args:
        found: The size.
        reason: Where it comes from.
        timings: What was measured of the call path and policy, which the fit saw.

    Raises:
        ValueError: If no size was found.
    """
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
    """Checks a latency target and its quantile.

    Raises:
        ValueError: If the target is no positive number or the quantile not in (0, 1).
    """
    known = isinstance(latency_ms, numbers.Real) and not isinstance(latency_ms, bool)
    if not known or not 0 < latency_ms < math.inf:
        raise ValueError(
            "A latency target must be a positive number, in milliseconds. "
            f"Received: latency_ms={latency_ms!r}."
        )
    calls_for_quantile(quantile)
