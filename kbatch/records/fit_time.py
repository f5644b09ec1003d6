"""The record of what `fit` takes for an update and an epoch, beside the train step alone."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kbatch.analysis.batch_time import BatchTime
from kbatch.analysis.intervals import Interval
from kbatch.analysis.round_ratios import RoundEstimate, over_rounds


@dataclasses.dataclass(frozen=True)
class FitTime:
    """Epochs of `fit` at one batch size, in turns with the train step alone.

    Attributes:
        batch_size: In examples.
        step_times_s: Seconds of the train step on a batch at hand, a value a round.
        batch_times_s: Seconds from batch to batch in `fit`, likewise.
        epoch_times_s: Seconds that an epoch took beside its batches: to start, until the first
            batch, and to end where it was not cut short.
        epoch_batches: Batches of a whole epoch; None where that is not known.
    """

    batch_size: int
    step_times_s: tuple[float, ...]
    batch_times_s: tuple[float, ...]
    epoch_times_s: tuple[float, ...]
    epoch_batches: int | None

    def __post_init__(self):
        if not self.step_times_s or not (
            len(self.step_times_s) == len(self.batch_times_s) == len(self.epoch_times_s)
        ):
            raise ValueError(
                "A `FitTime` has one value a round of each kind, one at least. Received: "
                f"{len(self.step_times_s)}, {len(self.batch_times_s)} and "
                f"{len(self.epoch_times_s)} values."
            )

    @property
    def wait_s(self) -> float:
        """Seconds of a batch beside its train step: the wait for data, and Keras's own work."""
        pairs = zip(self.batch_times_s, self.step_times_s, strict=True)
        return max(0.0, statistics.median(fit_s - step_s for fit_s, step_s in pairs))

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch beside its batches."""
        return statistics.median(self.epoch_times_s)

    @property
    def epoch_share_s(self) -> float:
        """What of that falls on a batch, in seconds; 0 for epochs of unknown length."""
        return self.epoch_s / self.epoch_batches if self.epoch_batches else 0.0

    @property
    def update_times_s(self) -> tuple[float, ...]:
        """Seconds of an update in `fit`, its share of the epoch's included, a value a round."""
        batches = self.epoch_batches or math.inf
        pairs = zip(self.batch_times_s, self.epoch_times_s, strict=True)
        return tuple(batch_s + epoch_s / batches for batch_s, epoch_s in pairs)

    @property
    def step_s(self) -> float:
        """Seconds of the train step alone."""
        return statistics.median(self.step_times_s)


class FitLines(NamedTuple):
    """What an update takes in `fit`, by the batch size.

    Attributes:
        line: Through what was measured; None if nothing was.
        ends: The same at the ends of the 95 % intervals, the slower first; empty likewise.
        own: What it would take with the data at hand, in an epoch without end; None likewise.
    """

    line: BatchTime | None
    ends: tuple[BatchTime, ...]
    own: BatchTime | None


def fit_lines(times: Sequence[FitTime]) -> FitLines:
    """Draws the lines through what `fit` took at one or two batch sizes."""
    if not times:
        return FitLines(None, (), None)
    found = {time.batch_size: over_rounds(time.update_times_s) for time in times}
    known = {size: estimate for size, estimate in found.items() if estimate is not None}
    spans = {size: _ends(estimate) for size, estimate in known.items()}
    own_s = min(time.wait_s for time in times)
    return FitLines(
        BatchTime.through({size: estimate.value for size, estimate in known.items()}),
        (_through(spans, "high"), _through(spans, "low")),
        BatchTime.through({time.batch_size: time.step_s + own_s for time in times}),
    )


def _through(spans: Mapping[int, Interval], end: str) -> BatchTime:
    # An interval of few rounds may reach below 0.
    return BatchTime.through({size: max(1e-9, getattr(s, end)) for size, s in spans.items()})


def _ends(estimate: RoundEstimate) -> Interval:
    return estimate.interval or Interval(estimate.value, estimate.value)
