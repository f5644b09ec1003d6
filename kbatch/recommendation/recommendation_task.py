"""What a recommendation is asked for: a model, its data, and what may be spent on measuring."""

from collections.abc import Callable
from typing import NamedTuple

import keras

from kbatch.recommendation.budget_clock import BudgetClock
from kbatch.training.accumulation.parts_checks import PartsChecks
from kbatch.training.data.data import FitData
from kbatch.training.data.data_source import Source


class Task(NamedTuple):
    """What is to be trained, and what may be spent on it.

    Attributes:
        build: Builds the model.
        is_given: Whether it gives a model of the user's, which stays as it is.
        data: Arguments of `fit`.
        source: The same data for probes.
        base_batch_size: Batch size that the learning rate suits, in examples.
        epochs: Most passes over the data in the pilot, None for no limit.
        memory_limit_bytes: Memory that may be taken, None for what the device has.
        memory_window: Lower and upper share of it that a batch may fill.
        clock: The seconds that are left.
        checks: Compare parts of a batch with the whole, once.
        seed: Seed of the pilot and of other sizes.
    """

    build: Callable[[], keras.Model]
    is_given: bool
    data: FitData
    source: Source
    base_batch_size: int
    epochs: int | None
    memory_limit_bytes: int | None
    memory_window: tuple[float, float]
    clock: BudgetClock
    checks: PartsChecks
    seed: int
