"""Whether the input pipeline or the train step limits training, from their rates.

With p examples/s of the pipeline alone and s of the train step alone, training that overlaps
both runs at min(p, s), and training that does one after the other at 1 / (1/p + 1/s). Training
that ran faster than min(p, s) shows that p or s was disturbed while it was measured.

The time of a step on B examples is close to a + b B, and a pipeline takes c a example. Both take
as long at

    B = a / (c - b)        for c > b, a > 0

Below it the step's fixed part keeps the device busier than the pipeline; above it the pipeline
falls behind.

The rate of a pipeline in the long run comes from one long reading of it. Where data come in chunks,
such as files, the batches of a chunk follow each other quickly and then there is a pause. A short
stretch shows the one or the other. With n examples until the time T, the first batch at t of m
examples,

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
from kbatch.analysis.line_fit import fit_line

# Measuring costs each side a few percent of its own: rates that are closer are taken as equal.
CLOSEST_RATIO = 1.05
# The same for a long reading, which is one and has no rounds.
_CLOSEST_ONCE = 1.1
# Short blocks and a long reading that differ by more than this saw different things.
AGREEING_RATIO = 1.3
# Training surely this much faster than one side alone cannot be.
_IMPOSSIBLE_RATIO = 1.1

Ends = tuple[float, float]


def input_verdict(
    ratio: Estimate[float] | None,
    *,
    long_run: Ends | None = None,
    together: Sequence[Estimate[float]] = (),
) -> str:
    """Say what limits training, from the pipeline's rate over that of the step."""
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
    sure = together.low is not None and together.low > _IMPOSSIBLE_RATIO
    return sure or together.value > AGREEING_RATIO


def agrees(ratio: Estimate[float], long_run: Ends) -> bool:
    """Return whether short rounds and a long reading gave about the same ratio."""
    low, high = long_run
    return high <= AGREEING_RATIO * ratio.value <= AGREEING_RATIO**2 * low


def _side(ends: Ends, *, closest: float) -> str:
    low, high = ends
    if high < 1 / closest:
        return "input-bound"
    return "compute-bound" if low > closest else "undetermined"


def crossing_batch_size(
    batch_sizes: Sequence[int], step_times_s: Sequence[float], *, example_s: Sequence[float]
) -> Estimate[float | None] | None:
    """Compute the batch size from which on the pipeline is slower, by errors as if independent.

    The estimate is not rounded, and without a value where c cannot be told from b.
    """
    pipeline = over_rounds(example_s)
    if pipeline is None or pipeline.ends is None or pipeline.n is None:
        return None
    low, high = pipeline.ends
    step = fit_line(batch_sizes, step_times_s)
    covariance = step.covariance * [[1, -1], [-1, 1]]
    # The variance that an interval of 95 % stands for, taken as symmetric in logarithms.
    half_width = math.log(high / low) / 2
    covariance[1, 1] += (pipeline.value * half_width / t_quantile(pipeline.n - 1)) ** 2
    return ratio_of_estimates(
        step.intercept,
        pipeline.value - step.slope,
        covariance=covariance,
        degrees_of_freedom=min(step.degrees_of_freedom, pipeline.n - 1),
    )


# A pause is at least this share of the longest one.
_PAUSE_SHARE = 0.5
_FEWEST_PAUSES = 3
# Whole chunks must make up this share of the reading.
_CHUNKS_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class LongRun:
    """One long reading of the pipeline alone, before the rounds."""

    basis: str  # "whole epochs", "whole chunks" or "part of the data".
    examples: int  # Of the first batch too.
    duration_s: float  # With the start of the pipeline.
    later_examples: int  # Without the first batch; 0 where whole epochs or chunks were counted.
    later_s: float  # After the first batch.
    first_batch_s: float  # From the start of the pipeline to its first batch.
    training_s: float | None = None  # Of training as long, where rounds saw another rate.
    training_wait_s: float | None = None  # Of these, waiting for a batch.

    @property
    def bounds(self) -> Ends:
        """The lowest and the highest rate in the long run, examples/s."""
        lowest = self.examples / self.duration_s
        if self.later_examples == 0:
            return lowest, lowest
        return lowest, max(lowest, self.later_examples / self.later_s)

    def agrees_with(self, rate: Estimate[float] | None) -> bool:
        """Return whether rounds of the pipeline gave about its rate, true without rounds."""
        return rate is None or agrees(rate, self.bounds)


def long_run(
    examples: Sequence[int], arrivals_s: Sequence[float], *, epochs: Sequence[int]
) -> LongRun:
    """Count whole epochs or whole chunks, else the part that was read."""
    rows, times_s = np.asarray(examples), np.asarray(arrivals_s, float)
    first_s, last_s = float(times_s[0]), float(times_s[-1])

    def between(basis: str, first: int, last: int) -> LongRun:
        """Count from the first batch of the first part to that of the last part."""
        counted, counted_s = int(rows[first:last].sum()), float(times_s[last] - times_s[first])
        return LongRun(basis, counted, counted_s, 0, 0.0, first_s)

    starts = np.flatnonzero(np.diff([-1, *epochs]))
    if len(starts) > 1:
        return between("whole epochs", starts[0], starts[-1])
    gaps_s = np.diff([0.0, *times_s])
    pauses = np.flatnonzero(gaps_s >= _PAUSE_SHARE * gaps_s.max())
    first, last = pauses[0], pauses[-1]
    # Where every batch is a pause of its own there are no chunks, and this is the plain rate.
    whole = times_s[last] - times_s[first] >= _CHUNKS_SHARE * last_s
    if len(pauses) >= _FEWEST_PAUSES and whole:
        return between("whole chunks", first, last)
    later = int(rows[1:].sum())
    return LongRun("part of the data", int(rows.sum()), last_s, later, last_s - first_s, first_s)
