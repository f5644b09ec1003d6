"""The choice among micro-batch sizes that were timed in the same rounds: the fastest, or larger.

Two sizes that took turns met the same machine, so what counts is the ratio of their times round by
round. A larger size that the noise, or less than 2 %, parts from the fastest is preferred: it makes
fewer micro-batches of a batch, and the whole batch at once needs no accumulation at all.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from kbatch.analysis.intervals import Estimate, ratio_over_rounds

# A gain below this share is not worth a smaller micro-batch.
_NEGLIGIBLE = 0.02


@dataclasses.dataclass(frozen=True)
class MicroBatchChoice:
    """A micro-batch size and what it is preferred to."""

    micro_batch_size: int
    fastest: int  # By median time an example: the same, or smaller and no faster beyond the noise.
    gain: Estimate[float] | None  # Time of the largest size over its own; None if it is that.


def choose_micro_batch(times_s: Mapping[int, Mapping[int, float]]) -> MicroBatchChoice:
    """Choose the fastest micro-batch size, of several that tie the largest."""
    numbers = sorted(set.intersection(*map(set, times_s.values()))) if times_s else []
    if not numbers:
        raise ValueError(
            "A choice needs sizes with at least one round that all have: leave out what was not "
            f"timed. Received: rounds={ {size: list(each) for size, each in times_s.items()} }."
        )
    common_s = {size: [each[n] for n in numbers] for size, each in times_s.items()}
    medians_s = {size: statistics.median(each) for size, each in common_s.items()}
    fastest = min(medians_s, key=lambda size: (medians_s[size], -size))
    larger = sorted((size for size in common_s if size > fastest), reverse=True)
    tied = (size for size in larger if not _slower(common_s[size], common_s[fastest]))
    chosen, largest = next(tied, fastest), max(common_s)
    gain = None if chosen == largest else ratio_over_rounds(common_s[largest], common_s[chosen])
    return MicroBatchChoice(chosen, fastest, gain)


def _slower(times_s: Sequence[float], reference_s: Sequence[float]) -> bool:
    """Return whether it is slower for certain; with too few rounds nothing is."""
    ratio = ratio_over_rounds(times_s, reference_s)
    return ratio is not None and (ratio.low or 0.0) > 1 and ratio.value > 1 + _NEGLIGIBLE
