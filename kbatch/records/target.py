"""How long training may last, and what it took to come to a target."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a training run may spend; it ends when one of the limits is reached.

    Attributes:
        train_s: Seconds of training, None for no limit.
        updates: Optimizer updates, likewise.
        examples: Training examples, likewise.
    """

    train_s: float | None = None
    updates: int | None = None
    examples: int | None = None


@dataclasses.dataclass(frozen=True)
class Target:
    """The value of a metric at which training ends.

    Attributes:
        metric: Name of the metric, as Keras gives it.
        value: The value.
        direction: `"max"` where it is to be reached from below, `"min"` from above.
    """

    metric: str
    value: float
    direction: str

    def __post_init__(self):
        check_direction(self.direction)

    def is_met(self, value: float | None) -> bool:
        """Tells whether a value of the metric meets it; None does not."""
        if value is None:
            return False
        # Keras's metrics are float32: 0.95 there is 0.94999999.
        if math.isclose(value, self.value, rel_tol=2e-7):
            return True
        return value >= self.value if self.direction == "max" else value <= self.value


def check_direction(direction: str) -> None:
    """Checks in which direction a metric gets better.

    Raises:
        ValueError: If it is neither `"max"` nor `"min"`.
    """
    if direction not in ("max", "min"):
        raise ValueError(f'`direction` must be "max" or "min". Received: direction={direction!r}.')


class Cost(NamedTuple):
    """What training took.

    Attributes:
        train_s: Seconds of training, validation and callbacks left out.
        updates: Optimizer updates.
        examples: Training examples.
    """

    train_s: float
    updates: int
    examples: int


# The name of each cost as an objective of keras-tuner.
COST_NAMES = {
    "seconds_to_target": "train_s",
    "updates_to_target": "updates",
    "examples_to_target": "examples",
}


class _Epoch(Protocol):
    @property
    def metrics(self) -> Mapping[str, float | None]: ...
    @property
    def train_s(self) -> float: ...
    @property
    def updates(self) -> int: ...
    @property
    def examples(self) -> int: ...


def cost_to_target(target: Target, epochs: Sequence[_Epoch]) -> Cost | None:
    """Sums what the epochs took up to the first that meets a target, that one included.

    Args:
        target: The target, which is looked at when an epoch ends.
        epochs: The epochs, in order.

    Returns:
        The cost, None if no epoch meets it.
    """
    met = (i for i, e in enumerate(epochs) if target.is_met(e.metrics.get(target.metric)))
    last = next(met, None)
    if last is None:
        return None
    spent = epochs[: last + 1]
    return Cost(
        train_s=sum(epoch.train_s for epoch in spent),
        updates=sum(epoch.updates for epoch in spent),
        examples=sum(epoch.examples for epoch in spent),
    )
