"""The rate of a pipeline in the long run, from one long reading of it.

Where data come in chunks, such as files, the batches of a chunk follow each other quickly and then
there is a pause. A short stretch shows the one or the other. With n examples until the time T, the
first batch at t of m examples,

    n / T  and  (n - m) / (T - t)

are bounds: the lower counts the start as a pause like others, the upper as one that does not come
again. Over whole chunks, or whole epochs, there is one value.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

BASES = ("whole epochs", "whole chunks", "part of the data")
# A pause is at least this share of the longest one.
_PAUSE_SHARE = 0.5
_FEWEST_PAUSES = 3
# Whole chunks must make up this share of the reading.
_CHUNKS_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class LongRun:
    """What a long reading counted.

    Attributes:
        basis: What was counted, one of `BASES`.
        examples: Examples, of the first batch too.
        duration_s: Seconds they took, with the start of the pipeline.
        later_examples: Examples without those of the first batch; 0 where whole epochs or chunks
            were counted.
        later_s: Seconds they took after the first batch.
    """

    basis: str
    examples: int
    duration_s: float
    later_examples: int
    later_s: float

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
    """Counts whole epochs or whole chunks, else the part that was read.

    Args:
        examples: Examples in each batch, two batches or more.
        arrivals_s: Seconds from the start of the pipeline until each batch came.
        epochs: Number of the epoch of each batch, from 0 on.

    Returns:
        What was counted.
    """
    rows, times_s = np.asarray(examples), np.asarray(arrivals_s, float)
    starts = np.flatnonzero(np.diff([-1, *epochs]))
    if len(starts) > 1:
        return _between(rows, times_s, starts, "whole epochs")
    gaps_s = np.diff([0.0, *times_s])
    pauses = np.flatnonzero(gaps_s >= _PAUSE_SHARE * gaps_s.max())
    # Where every batch is a pause of its own there are no chunks, and this is the plain rate.
    if len(pauses) >= _FEWEST_PAUSES:
        span_s = times_s[pauses[-1]] - times_s[pauses[0]]
        if span_s >= _CHUNKS_SHARE * times_s[-1]:
            return _between(rows, times_s, pauses, "whole chunks")
    return LongRun(
        "part of the data",
        int(rows.sum()),
        float(times_s[-1]),
        int(rows[1:].sum()),
        float(times_s[-1] - times_s[0]),
    )


def _between(rows: np.ndarray, times_s: np.ndarray, starts: np.ndarray, basis: str) -> LongRun:
    """Counts from the first batch of the first part to that of the last part."""
    first, last = starts[0], starts[-1]
    return LongRun(
        basis, int(rows[first:last].sum()), float(times_s[last] - times_s[first]), 0, 0.0
    )
