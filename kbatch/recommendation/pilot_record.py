"""The record of a pilot: a short training that measures the gradient noise scale."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from kbatch.analysis.noise_scale import NoiseScale, noise_scale_of_epochs
from kbatch.recommendation.batch_decision import FEW_UPDATES, NO_PROGRESS, PILOT_DIVERGED

ENDS = ("progress", "budget", "epochs", "diverged")
# Of fewer stretches the late half says too little.
_FEWEST_STRETCHES = 6
_REST = 0.02
# Fewer updates to a loss compare no sizes, and a loss that fell by less than this many standard
# deviations of its scatter may not have fallen.
_FEWEST_UPDATES, _LEAST_FALL = 20, 4.0
# The median of the absolute second difference of independent values, over their deviation.
_SECOND_DIFFERENCE = 0.6745 * math.sqrt(6)


@dataclasses.dataclass(frozen=True)
class PilotStretch:
    """Some updates in a row.

    Attributes:
        updates: How many.
        loss: Mean training loss over them, None where it is not finite.
        held_out_loss: Loss on the examples held out after them, None without any.
        gradient_variance: Mean estimate of tr(Sigma), in squared gradient units, None where no
            update could be measured.
        gradient_squared_norm: Mean estimate of |G|^2, likewise.
    """

    updates: int
    loss: float | None
    held_out_loss: float | None
    gradient_variance: float | None
    gradient_squared_norm: float | None


@dataclasses.dataclass(frozen=True)
class PilotRecord:
    """What a pilot showed.

    Attributes:
        batch_size: Examples of an update.
        micro_batch_size: Examples of each gradient that was measured.
        learning_rate: Learning rate at the first update, None where it is no scalar.
        stretches: Its stretches, in order.
        duration_s: Seconds that it took in all, building its graph included.
        ended_by: One of `ENDS`: the later half of its updates brought little progress, or what it
            was allowed was spent, or its loss became NaN.
        seed: Seed of weights and order, None when none was set.
        trained_s: Seconds after its first update, looks at the held-out loss included; None if not
            recorded.
        build_s: Seconds before its first update and, beyond a look, at the first look; None if not
            recorded.
        look_s: Seconds of a look at the held-out loss, the median; None if not recorded.
    """

    batch_size: int
    micro_batch_size: int
    learning_rate: float | None
    stretches: tuple[PilotStretch, ...]
    duration_s: float
    ended_by: str
    seed: int | None = None
    trained_s: float | None = None
    build_s: float | None = None
    look_s: float | None = None

    def __post_init__(self):
        if self.ended_by not in ENDS:
            raise ValueError(f"`ended_by` must be one of {ENDS}. Received: {self.ended_by!r}.")

    @property
    def updates(self) -> int:
        """Updates that it made."""
        return sum(stretch.updates for stretch in self.stretches)

    @property
    def useful(self) -> tuple[PilotStretch, ...]:
        """The stretches in which its loss went 98 % of its way, six at least.

        The held-out loss, or the training loss without one. What follows takes long, and fits the
        training set alone in the end, where gradients vanish.
        """
        return self.stretches[: max(_FEWEST_STRETCHES, useful_count(self.stretches))]

    @property
    def useful_updates(self) -> int:
        """Updates of these stretches."""
        return sum(stretch.updates for stretch in self.useful)

    @property
    def has_held_out(self) -> bool:
        """Whether examples were held out, whose loss counts then."""
        return any(stretch.held_out_loss is not None for stretch in self.stretches)

    @property
    def target(self) -> float | None:
        """The loss after 98 % of its way; None where it did not fall."""
        return _near_least(_losses(self.stretches))

    @property
    def updates_to_target(self) -> int:
        """Updates until the loss was there, all where it did not fall."""
        return sum(stretch.updates for stretch in self.stretches[: useful_count(self.stretches)])

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
            [_or_nan(stretch.gradient_variance) for stretch in useful],
            [_or_nan(stretch.gradient_squared_norm) for stretch in useful],
            weights=[max(1, stretch.updates) for stretch in useful],
        )


def useful_count(stretches: Sequence[PilotStretch]) -> int:
    """Counts the stretches until the loss has gone 98 % of the way that it went.

    Args:
        stretches: The stretches of a pilot, in order.

    Returns:
        The number; that of all stretches where no loss fell.
    """
    losses = _losses(stretches)
    near = _near_least(losses)
    if near is None:
        return len(stretches)
    return next(i for i, loss in enumerate(losses, start=1) if loss <= near)


def _losses(stretches: Sequence[PilotStretch]) -> list[float]:
    losses = [s.held_out_loss for s in stretches]
    if all(loss is None for loss in losses):
        losses = [s.loss for s in stretches]
    return [math.inf if loss is None else loss for loss in losses]


def _near_least(losses: Sequence[float]) -> float | None:
    first, least = (losses[0], min(losses)) if losses else (math.inf, math.inf)
    return least + _REST * (first - least) if least < first < math.inf else None


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
