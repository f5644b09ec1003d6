"""Whether the input pipeline or the train step limits training, from their rates.

With p examples/s of the pipeline alone and s of the train step alone, training that overlaps
both runs at min(p, s), and training that does one after the other at 1 / (1/p + 1/s).

The time of a step on B examples is close to a + b B, and a pipeline takes c a example. Both take
as long at

    B = a / (c - b)        for c > b, a > 0

Below it the step's fixed part keeps the device busier than the pipeline; above it the pipeline
falls behind.
"""

import dataclasses
import math
from collections.abc import Sequence

from kbatch.analysis.intervals import Interval
from kbatch.analysis.round_ratios import RoundEstimate, over_rounds

VERDICTS = ("input-bound", "compute-bound", "undetermined")
# Measuring costs each side a few percent of its own: rates that are closer are taken as equal.
CLOSEST_RATIO = 1.05


def input_verdict(ratio: RoundEstimate | None) -> str:
    """Tells which side limits training.

    Args:
        ratio: Rate of the pipeline over that of the train step, paired by round.

    Returns:
        `"input-bound"` where the whole interval lies below 1, `"compute-bound"` where it lies
        above, by more than 5 % each; else, and without an interval, `"undetermined"`.
    """
    if ratio is None or ratio.interval is None:
        return "undetermined"
    if ratio.interval.high < 1 / CLOSEST_RATIO:
        return "input-bound"
    if ratio.interval.low > CLOSEST_RATIO:
        return "compute-bound"
    return "undetermined"


@dataclasses.dataclass(frozen=True)
class Crossing:
    """The batch size at which pipeline and train step take as long.

    Attributes:
        batch_size: Examples, not rounded; None where the two never cross.
        interval: Interval of 95 % confidence over the rounds, None where a round has no crossing
            or there are too few.
        slower_above: `"pipeline"` or `"step"`: which one is the slower for larger batches.
    """

    batch_size: float | None
    interval: Interval | None
    slower_above: str


def crossing_batch_size(
    *,
    batch_size: int,
    smaller_size: int,
    step_s: Sequence[float],
    smaller_step_s: Sequence[float],
    example_s: Sequence[float],
) -> Crossing | None:
    """Computes the batch size from which on the pipeline is the slower one.

    Assumes that the step's time is a line over the batch size, and that the pipeline's time an
    example is the same at every batch size.

    Args:
        batch_size: Examples in a batch.
        smaller_size: Examples in a smaller batch.
        step_s: Seconds of a step on the batch, one value a round.
        smaller_step_s: Seconds of a step on the smaller batch, of the same rounds.
        example_s: Seconds of the pipeline an example, of the same rounds.

    Returns:
        The crossing, None without rounds.

    Raises:
        ValueError: If the sizes are not 1 <= smaller_size < batch_size.
    """
    if not 1 <= smaller_size < batch_size:
        raise ValueError(
            "A line needs two batch sizes, the smaller one first. Received: "
            f"smaller_size={smaller_size}, batch_size={batch_size}."
        )
    rounds = list(zip(step_s, smaller_step_s, example_s, strict=True))
    if not rounds:
        return None
    lines = [_line(batch_size, smaller_size, t, s) for t, s, _ in rounds]
    found = [_crossing(a, b, c) for (a, b), (_, _, c) in zip(lines, rounds, strict=True)]
    slope, time = _medians([b for _, b in lines], [c for _, _, c in rounds])
    finite = [size for size in found if size is not None]
    # The median over all rounds, one without a crossing standing for one beyond any batch.
    middle = sorted(found, key=lambda size: math.inf if size is None else size)[len(found) // 2]
    whole = len(finite) == len(found) and all(size > 0 for size in finite)
    estimate = over_rounds(finite) if whole else None
    return Crossing(
        batch_size=estimate.value if estimate else middle,
        interval=estimate and estimate.interval,
        slower_above="pipeline" if time > slope else "step",
    )


def overlapped_rate(pipeline: float, step: float) -> float:
    """Computes the rate of training that overlaps pipeline and step wholly."""
    return min(pipeline, step)


def serial_rate(pipeline: float, step: float) -> float:
    """Computes the rate of training that waits for each batch and then trains on it."""
    return 1 / (1 / pipeline + 1 / step)


def _line(batch_size: int, smaller_size: int, step_s: float, smaller_s: float):
    """Puts t = a + b B through two points; neither part of a time is negative."""
    slope = max(0.0, (step_s - smaller_s) / (batch_size - smaller_size))
    fixed = step_s - slope * batch_size
    return (fixed, slope) if fixed > 0 else (0.0, step_s / batch_size)


def _crossing(fixed: float, slope: float, example_s: float) -> float | None:
    return fixed / (example_s - slope) if example_s > slope else None


def _medians(*rounds: Sequence[float]) -> list[float]:
    return [sorted(values)[len(values) // 2] for values in rounds]
