"""Whether the input pipeline or the train step limits training, from their rates.

With p examples/s of the pipeline alone and s of the train step alone, training that overlaps
both runs at min(p, s), and training that does one after the other at 1 / (1/p + 1/s). Training
that ran faster than min(p, s) shows that p or s was disturbed while it was measured.

The time of a step on B examples is close to a + b B, and a pipeline takes c a example. Both take
as long at

    B = a / (c - b)        for c > b, a > 0

Below it the step's fixed part keeps the device busier than the pipeline; above it the pipeline
falls behind.

The rate of a pipeline in the long run, from one long reading of it.

Where data come in chunks, such as files, the batches of a chunk follow each other quickly and then
there is a pause. A short stretch shows the one or the other. With n examples until the time T, the
first batch at t of m examples,

    n / T  and  (n - m) / (T - t)

are bounds: the lower counts the start as a pause like others, the upper as one that does not come
again. Over whole chunks, or whole epochs, there is one value.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from kbatch.analysis.intervals import (
    Estimate,
    over_rounds,
    ratio_of_estimates,
    t_quantile,
)
from kbatch.analysis.line_fit import Line, fit_line

# Measuring costs each side a few percent of its own: rates that are closer are taken as equal.
CLOSEST_RATIO = 1.05
# The same for a long reading, which is one and has no rounds.
_CLOSEST_ONCE = 1.1
# Short blocks and a long reading that differ by more than this saw different things.
AGREEING_RATIO = 1.3
# Training surely this much faster than one side alone cannot be.
_IMPOSSIBLE_RATIO = 1.1


def input_verdict(
    ratio: Estimate[float] | None,
    *,
    long_run: tuple[float, float] | None = None,
    together: Sequence[Estimate[float]] = (),
) -> str:
    if ratio is None or ratio.ends is None or any(map(is_impossible, together)):
        return "undetermined"
    if long_run is not None and not agrees(ratio, long_run):
        return _side(long_run, closest=_CLOSEST_ONCE)
    found = _side(ratio.ends, closest=CLOSEST_RATIO)
    # Rounds read the first batches of the data again and again, and these may be unlike the others.
    if long_run is not None and (
        (found == "input-bound" and long_run[0] > 1)
        or (found == "compute-bound" and long_run[1] < 1)
    ):
        return "undetermined"
    return found


def is_impossible(together: Estimate[float]) -> bool:
    """Return whether both together ran faster than one of them alone, beyond the noise."""
    # What was timed alone was disturbed then.
    return (together.low or 0.0) > _IMPOSSIBLE_RATIO or together.value > AGREEING_RATIO


def agrees(ratio: Estimate[float], long_run: tuple[float, float]) -> bool:
    """Return whether short rounds and a long reading gave about the same ratio."""
    low, high = long_run
    return high <= AGREEING_RATIO * ratio.value <= AGREEING_RATIO**2 * low


def _side(ends: tuple[float, float], *, closest: float) -> str:
    low, high = ends
    if high < 1 / closest:
        return "input-bound"
    if low > closest:
        return "compute-bound"
    return "undetermined"


@dataclasses.dataclass(frozen=True)
class Crossing:
    """The batch size from which on the pipeline is slower than the train step."""

    batch_size: Estimate[
        float | None
    ]  # Not rounded; without a value where c cannot be told from b.
    never: bool  # Whether the pipeline surely takes less time an example than the step.
    step: Line  # Examples of a step against its seconds.


def crossing_batch_size(
    batch_sizes: Sequence[int], step_times_s: Sequence[float], *, example_s: Sequence[float]
) -> Crossing | None:
    """Compute the batch size from which on the pipeline is slower, by errors as if independent."""
    pipeline = over_rounds(example_s)
    if pipeline is None or pipeline.ends is None:
        return None
    step = fit_line(batch_sizes, step_times_s)
    degrees_of_freedom = min(step.degrees_of_freedom, len(example_s) - 1)
    quantile = t_quantile(degrees_of_freedom)
    margin_s = pipeline.value - step.slope
    covariance = step.covariance * [[1, -1], [-1, 1]]
    # The variance that an interval of 95 % stands for, taken as symmetric in logarithms.
    half_width = math.log(pipeline.ends[1] / pipeline.ends[0]) / 2
    covariance[1, 1] += (pipeline.value * half_width / t_quantile(len(example_s) - 1)) ** 2
    estimates = {"covariance": covariance, "degrees_of_freedom": degrees_of_freedom}
    size = ratio_of_estimates(step.intercept, margin_s, **estimates)
    return Crossing(size, margin_s + quantile * math.sqrt(covariance[1, 1]) < 0, step)


# A pause is at least this share of the longest one.
_PAUSE_SHARE = 0.5
_FEWEST_PAUSES = 3
# Whole chunks must make up this share of the reading.
_CHUNKS_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class LongRun:
    """What a long reading counted."""

    basis: str  # "whole epochs", "whole chunks" or "part of the data".
    examples: int  # Of the first batch too.
    duration_s: float  # With the start of the pipeline.
    later_examples: int  # Without the first batch; 0 where whole epochs or chunks were counted.
    later_s: float  # After the first batch.

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest rate in the long run, examples/s."""
        lowest = self.examples / self.duration_s
        if self.later_examples == 0:
            return lowest, lowest
        return lowest, max(lowest, self.later_examples / self.later_s)


def long_run(
    examples: Sequence[int], arrivals_s: Sequence[float], *, epochs: Sequence[int]
) -> LongRun:
    """Count whole epochs or whole chunks, else the part that was read."""
    rows, times_s = np.asarray(examples), np.asarray(arrivals_s, float)

    def between(basis: str, first: int, last: int) -> LongRun:
        """Count from the first batch of the first part to that of the last part."""
        counted = int(rows[first:last].sum())
        return LongRun(basis, counted, float(times_s[last] - times_s[first]), 0, 0.0)

    starts = np.flatnonzero(np.diff([-1, *epochs]))
    if len(starts) > 1:
        return between("whole epochs", starts[0], starts[-1])
    gaps_s = np.diff([0.0, *times_s])
    pauses = np.flatnonzero(gaps_s >= _PAUSE_SHARE * gaps_s.max())
    first, last = pauses[0], pauses[-1]
    # Where every batch is a pause of its own there are no chunks, and this is the plain rate.
    whole = times_s[last] - times_s[first] >= _CHUNKS_SHARE * times_s[-1]
    if len(pauses) >= _FEWEST_PAUSES and whole:
        return between("whole chunks", first, last)
    all_s, later_s = float(times_s[-1]), float(times_s[-1] - times_s[0])
    return LongRun("part of the data", int(rows.sum()), all_s, int(rows[1:].sum()), later_s)
