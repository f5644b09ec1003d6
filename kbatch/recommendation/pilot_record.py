"""Records of the pilot, of short trainings at other sizes, and of what `fit` adds."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kbatch.analysis.intervals import over_rounds
from kbatch.analysis.learning_rate import LearningRateScaling
from kbatch.analysis.next_size import FinishedRun
from kbatch.analysis.noise_scale import NoiseScale, noise_scale_of_epochs
from kbatch.input_pipeline.record import InputPipelineProfile
from kbatch.recommendation.limits import TimeInFit
from kbatch.records.record import check_choice

# What a pilot lacks for sizes to be compared.
PILOT_DIVERGED, FEW_UPDATES, NO_PROGRESS = "pilot diverged", "few updates", "no progress"
ENDS = ("progress", "budget", "epochs", "diverged")
# Of fewer stretches the late half says too little.
_FEWEST_STRETCHES = 6
# Where the target lies on the way that the loss went: nearer to its end the loss is flat, and runs
# of one size that differ in their seed alone need once or twice as many updates to it.
TARGET_SHARE = 0.9
# Fewer updates to a loss compare no sizes, and a loss that fell by less than this many standard
# deviations of its scatter may not have fallen.
_FEWEST_UPDATES, _LEAST_FALL = 20, 4.0
# The median of the absolute second difference of independent values, over their deviation.
_SECOND_DIFFERENCE = 0.6745 * math.sqrt(6)


@dataclasses.dataclass(frozen=True)
class PilotStretch:
    """Some updates in a row."""

    updates: int  #: How many.
    loss: float | None  #: Mean training loss over them, None where it is not finite.
    held_out_loss: float | None  #: Loss on the examples held out after them, None without any.
    #: Mean estimate of tr(Sigma), in squared gradient units; None if not measured.
    gradient_variance: float | None
    gradient_squared_norm: float | None  #: Mean estimate of |G|^2, None where not measured.


@dataclasses.dataclass(frozen=True)
class PilotRecord:
    """What a pilot showed."""

    batch_size: int  #: Examples of an update.
    micro_batch_size: int  #: Examples of each gradient that was measured.
    learning_rate: float | None  #: Learning rate at the first update, None where it is no scalar.
    stretches: tuple[PilotStretch, ...]  #: Its stretches, in order.
    duration_s: float  #: Seconds that it took in all, building its graph included.
    #: One of `ENDS`: little progress in the later half, what was allowed is spent, or NaN.
    ended_by: str
    seed: int | None = None  #: Seed of weights and order, None when none was set.
    trained_s: float | None = None  #: After its first update, looks included; None if unknown.
    build_s: float | None = None  #: Before its first update or look; None if not recorded.
    look_s: float | None = None  #: Of a look at the held-out loss, the median; None if unknown.
    #: Share of the way of its loss at which the target lies.
    target_share: float = 0.98  # As in the versions that did not record it.

    def __post_init__(self):
        check_choice(ENDS, ended_by=self.ended_by)

    @property
    def updates(self) -> int:
        """Number of updates made."""
        return sum(stretch.updates for stretch in self.stretches)

    @property
    def useful(self) -> tuple[PilotStretch, ...]:
        """The stretches until its loss, held-out if it has one, met the target; six at least."""
        # What follows takes long, and fits the training set alone in the end.
        return self.stretches[: max(_FEWEST_STRETCHES, self._to_target)]

    @property
    def useful_updates(self) -> int:
        """Number of updates in these stretches."""
        return sum(stretch.updates for stretch in self.useful)

    @property
    def has_held_out(self) -> bool:
        """Whether examples were held out, whose loss counts then."""
        return any(stretch.held_out_loss is not None for stretch in self.stretches)

    @property
    def target(self) -> float | None:
        """The loss after `target_share` of its way; None where it did not fall."""
        return _near_least(_losses(self.stretches), self.target_share)

    @property
    def updates_to_target(self) -> int:
        """Number of updates until the target was reached; all of them if the loss did not fall."""
        return sum(stretch.updates for stretch in self.stretches[: self._to_target])

    @functools.cached_property
    def _to_target(self) -> int:
        return useful_count(self.stretches, self.target_share)

    @property
    def missing(self) -> str | None:
        """What it lacks for sizes to be compared, as in `BatchDecision`; None if nothing."""
        if self.ended_by == "diverged":
            return PILOT_DIVERGED
        if self.updates < _FEWEST_UPDATES:
            return FEW_UPDATES
        losses = [loss for loss in _losses(self.stretches) if loss < math.inf]
        if self.target is None or len(losses) < _FEWEST_STRETCHES:
            return NO_PROGRESS
        bends = [a - 2 * b + c for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)]
        scatter = statistics.median(map(abs, bends)) / _SECOND_DIFFERENCE
        if losses[0] - min(losses) < _LEAST_FALL * scatter:
            return NO_PROGRESS
        return FEW_UPDATES if self.updates_to_target < _FEWEST_UPDATES else None

    @property
    def noise_scale(self) -> NoiseScale:
        """The gradient noise scale of the late half of the useful stretches."""
        useful = self.useful
        return noise_scale_of_epochs(
            np.array([stretch.gradient_variance for stretch in useful], float),  # None is NaN.
            np.array([stretch.gradient_squared_norm for stretch in useful], float),
            weights=[max(1, stretch.updates) for stretch in useful],
        )


def useful_count(stretches: Sequence[PilotStretch], share: float = TARGET_SHARE) -> int:
    """Count the stretches until the loss has gone a share of the way that it went."""
    losses = _losses(stretches)
    near = _near_least(losses, share)
    if near is None:
        return len(stretches)
    return next(i for i, loss in enumerate(losses, start=1) if loss <= near)


def _losses(stretches: Sequence[PilotStretch]) -> list[float]:
    losses = [s.held_out_loss for s in stretches]
    if all(loss is None for loss in losses):
        losses = [s.loss for s in stretches]
    return [math.inf if loss is None else loss for loss in losses]


def _near_least(losses: Sequence[float], share: float) -> float | None:
    first, least = (losses[0], min(losses)) if losses else (math.inf, math.inf)
    return least + (1 - share) * (first - least) if least < first < math.inf else None


CHECK_ENDS = ("target", "lost", "budget", "diverged", "failed")


@dataclasses.dataclass(frozen=True)
class SizeCheck:
    """What a batch size needed to the target."""

    batch_size: int  #: In examples.
    micro_batch_size: int  #: Examples that went through the device at once.
    learning_rate: float | None  #: Learning rate at the first update, None where it is no scalar.
    updates: int  #: Updates that were made.
    loss: float | None  #: After them, held-out or of training as in the pilot; None if NaN.
    trained_s: float  #: Seconds that it took after its first update.
    #: One of `CHECK_ENDS`: it reached the target, was beaten already by another size, spent its
    #: time, its loss became NaN, or it failed, as for want of memory.
    ended_by: str
    #: How its settings followed the batch size; None where it was not recorded.
    scaling: LearningRateScaling | None = None

    def __post_init__(self):
        check_choice(CHECK_ENDS, ended_by=self.ended_by)

    def as_run(self, update_s: float) -> FinishedRun:
        """Return it as a run of a search, whose updates take so many seconds each."""
        if self.ended_by in ("diverged", "failed"):
            return FinishedRun(self.batch_size, None, None)
        cost = self.updates * update_s if self.reached else None
        return FinishedRun(self.batch_size, cost, self.updates)

    @property
    def reached(self) -> bool:
        """Whether it reached the target."""
        return self.ended_by == "target"


# An interval of few rounds may reach below 0, and a wait be 0.
_LEAST_S = 1e-9


@dataclasses.dataclass(frozen=True)
class FitTime:
    """Epochs of `fit` at one batch size, in turns with the train step alone."""

    batch_size: int  #: In examples.
    step_times_s: tuple[float, ...]  #: Of the train step on a batch at hand, one a round.
    batch_times_s: tuple[float, ...]  #: Seconds from batch to batch in `fit`, a value a round.
    epoch_times_s: tuple[float, ...]  #: Of an epoch to start, until its first batch, and end.
    epoch_batches: int | None  #: Batches of a whole epoch; None where that is not known.

    def __post_init__(self):
        counts = [len(t) for t in (self.step_times_s, self.batch_times_s, self.epoch_times_s)]
        if not counts[0] or len(set(counts)) > 1:
            raise ValueError(
                "A `FitTime` has one value a round of each kind, one at least. "
                f"Received: numbers of values={counts}."
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
    """What an update takes in `fit`, by the batch size; None and empty where it was not timed."""

    line: TimeInFit | None  # Through what was measured.
    ends: tuple[TimeInFit, ...]  # At the ends of the 95 % intervals, the slower first.
    own: TimeInFit | None  # With the data at hand, in an epoch without end.


def fit_lines(times: Sequence[FitTime], pipeline: InputPipelineProfile | None = None) -> FitLines:
    """Draw the lines through what `fit` took at one or two batch sizes."""
    examples_s: tuple[float, ...] = ()  # Likely, most and least seconds of an example.
    rate = pipeline and pipeline.pipeline.samples_per_second
    bounds = pipeline and pipeline.rate_bounds
    if rate is not None and bounds is not None and bounds.low > 0:
        # Short rounds may miss the pauses that a long reading has seen.
        likely = min(max(rate.value, bounds.low), bounds.high)
        examples_s = 1 / likely, 1 / bounds.low, 1 / bounds.high
    if not times:
        if pipeline is None or not examples_s:
            return FitLines(None, (), None)
        size = pipeline.batch_size
        line, *ends = (TimeInFit({size: size * one_s}) for one_s in examples_s)
        return FitLines(line, tuple(ends), None)
    beside = TimeInFit({t.batch_size: max(_LEAST_S, t.beside_s) for t in times})
    own_s = max(_LEAST_S, min(time.wait_s for time in times))
    own = TimeInFit(
        {time.batch_size: time.step_s + own_s for time in times},
        beside=TimeInFit({1: own_s, 2: own_s}),
    )
    updates = {t.batch_size: estimate for t in times if (estimate := over_rounds(t.update_times_s))}
    spans = {
        size: (found.value, *((span.high, span.low) if (span := found.interval) else ()))
        for size, found in updates.items()
    }
    line, *ends = (
        TimeInFit(
            {size: max(_LEAST_S, span[end % len(span)]) for size, span in spans.items()},
            beside=beside,
            example_s=examples_s[end] if examples_s else 0.0,
        )
        for end in range(3)
    )
    return FitLines(line, tuple(ends), own)
