"""The record of what `fit` takes for an update and an epoch, beside the train step alone."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kbatch.analysis.intervals import Interval
from kbatch.analysis.round_ratios import RoundEstimate, over_rounds
from kbatch.input_pipeline.input_pipeline_record import InputPipelineProfile
from kbatch.recommendation.time_in_fit import TimeInFit

# An interval of few rounds may reach below 0, and a wait be 0.
_LEAST_S = 1e-9


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
    def beside_s(self) -> float:
        """Seconds of an update beside its train step: the wait, and its share of the epoch's."""
        return self.wait_s + self.epoch_share_s

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
        own: What it would take with the data at hand, in an epoch without end; None where `fit`
            was not timed.
    """

    line: TimeInFit | None
    ends: tuple[TimeInFit, ...]
    own: TimeInFit | None


def fit_lines(times: Sequence[FitTime], pipeline: InputPipelineProfile | None = None) -> FitLines:
    """Draws the lines through what `fit` took at one or two batch sizes.

    Args:
        times: What it took; where there is none, the pipeline alone gives the lines.
        pipeline: What the data take, which short epochs of `fit` may not see: a pipeline that
            makes several batches at once delivers them in bursts.
    """
    seconds = None if pipeline is None else _example_times_s(pipeline)
    if not times:
        return _pipeline_lines(pipeline, seconds)
    found = {time.batch_size: over_rounds(time.update_times_s) for time in times}
    known = {size: estimate for size, estimate in found.items() if estimate is not None}
    spans = {size: _ends(estimate) for size, estimate in known.items()}
    own_s = max(_LEAST_S, min(time.wait_s for time in times))
    beside = TimeInFit.through({t.batch_size: max(_LEAST_S, t.beside_s) for t in times})
    most_s, likely_s, least_s = seconds or (0.0, 0.0, 0.0)

    def through(times_s: Mapping[int, float], example_s: float) -> TimeInFit:
        at_least = {size: max(_LEAST_S, seconds) for size, seconds in times_s.items()}
        return TimeInFit.through(at_least, beside=beside, example_s=example_s)

    return FitLines(
        through({size: estimate.value for size, estimate in known.items()}, likely_s),
        (
            through({size: span.high for size, span in spans.items()}, most_s),
            through({size: span.low for size, span in spans.items()}, least_s),
        ),
        TimeInFit.through(
            {time.batch_size: time.step_s + own_s for time in times},
            beside=TimeInFit.through({1: own_s, 2: own_s}),
        ),
    )


def _example_times_s(pipeline: InputPipelineProfile) -> tuple[float, float, float] | None:
    """Gives the most, the likely and the least seconds of an example; None where unknown."""
    rate, bounds = pipeline.pipeline.samples_per_second, pipeline.rate_bounds
    if rate is None or bounds is None or bounds.low <= 0:
        return None
    # Short rounds may miss the pauses that a long reading has seen.
    likely = min(max(rate.value, bounds.low), bounds.high)
    return 1 / bounds.low, 1 / likely, 1 / bounds.high


def _pipeline_lines(
    pipeline: InputPipelineProfile | None, seconds: tuple[float, float, float] | None
) -> FitLines:
    if pipeline is None or seconds is None:
        return FitLines(None, (), None)
    size = pipeline.batch_size
    slow, likely, fast = (TimeInFit.through({size: size * one_s}) for one_s in seconds)
    return FitLines(likely, (slow, fast), None)


def _ends(estimate: RoundEstimate) -> Interval:
    return estimate.interval or Interval(estimate.value, estimate.value)
