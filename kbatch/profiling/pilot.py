"""The pilot: a short training whose micro-batches tell the gradient noise scale."""

import math
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kbatch.profiling.stretches import fit_in_stretches, held_out_batches, steps_at_once
from kbatch.records.noise import MOMENT_METRICS
from kbatch.records.pilot import PilotRecord, PilotStretch, useful_count
from kbatch.training.accumulation import accumulate_gradients
from kbatch.training.data import FitData
from kbatch.training.errors import InputError
from kbatch.training.learning_rate import current_learning_rate
from kbatch.training.seeds import seeded
from kbatch.training.update_count import updates_made

ACCUMULATION_STEPS = 4
_MOST_UPDATES = 10
_STRETCHES_IN_BUDGET = 50
# Of fewer stretches it is not told whether the later half brought little.
_FEWEST_STRETCHES = 24


class PilotPlan(NamedTuple):
    """How a pilot trains.

    Attributes:
        batch_size: Examples of an update, which its micro-batches share; the learning rate suits
            them.
        budget_s: Seconds that it may take, building included; half of them follow the first update
            in any case.
        epochs: Most passes over the data.
        update_s: Seconds that an update takes about, None if not known.
        seed: Seed of weights and order.
    """

    batch_size: int
    budget_s: float
    epochs: int | None = None
    update_s: float | None = None
    seed: int | None = None


def run_pilot(build: Callable[[], keras.Model], data: FitData, *, plan: PilotPlan) -> PilotRecord:
    """Trains until the later half of its updates brought little, or what the plan allows is spent.

    Little is 2 % of the way that the held-out loss went, or the training loss without one.

    Args:
        build: Builds the model, which is trained; keep the state of one that shall stay as it is.
        data: Arguments of `fit`; a part of arrays without validation data is held out.
        plan: How to train.

    Raises:
        InputError: If there are too few examples for two updates.
        ValueError: If the model cannot be trained in micro-batches.
    """
    began_s = time.perf_counter()
    with seeded(plan.seed):
        model = build()
        batches = held_out_batches(data, model, batch_size=plan.batch_size, seed=plan.seed)
        in_epoch = _updates_in_epoch(batches.dataset, plan)
        micro_batch_size = pilot_micro_batch_size(plan.batch_size)
        with warnings.catch_warnings():
            # What looks at a batch as a whole is measured in parts, and said to be.
            warnings.simplefilter("ignore")
            accumulate_gradients(model, micro_batch_size, moments_every=1)
        learning_rate = current_learning_rate(model.optimizer)
        watch = _Watch(plan, in_epoch, began_s)
        fit_in_stretches(model, batches, stretch=_stretch_length(plan, in_epoch), watch=watch)
    return PilotRecord(
        plan.batch_size,
        micro_batch_size,
        learning_rate,
        tuple(watch.stretches),
        time.perf_counter() - began_s,
        watch.ended_by,
        plan.seed,
        watch.trained_s,
        watch.build_s,
        watch.look_s,
    )


def pilot_micro_batch_size(batch_size: int) -> int:
    """Gives the examples that go through the device at once in a pilot."""
    return max(1, batch_size // ACCUMULATION_STEPS)


class _Watch(keras.callbacks.Callback):
    """Keeps the stretches, each of which is an epoch to Keras, and ends training."""

    def __init__(self, plan: PilotPlan, in_epoch: int | None, began_s: float):
        super().__init__()
        self.stretches: list[PilotStretch] = []
        self.ended_by = "budget"
        self._plan = plan
        self._most = plan.epochs * in_epoch if plan.epochs and in_epoch else math.inf
        self._ends_s = began_s + plan.budget_s
        self._begun_s = began_s
        self._began_s = math.nan
        self._look_began_s = math.nan
        self._looks_s: list[float] = []
        self._before = 0
        self._made = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        self._before = updates_made(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None):
        # One call of the train step may make several updates, and skip some that overflowed.
        self._made += steps_at_once(self.model)
        if math.isnan(self._began_s):
            self._began_s = time.perf_counter()  # What came before traced and compiled.
            self._ends_s = max(self._ends_s, self._began_s + self._plan.budget_s / 2)
        if self._made >= self._most:
            self._end("epochs")
        elif time.perf_counter() > self._ends_s:
            self._end("budget")

    def on_test_begin(self, logs: Any = None):
        self._look_began_s = time.perf_counter()

    def on_test_end(self, logs: Any = None):
        self._looks_s.append(time.perf_counter() - self._look_began_s)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        found = logs or {}
        updates = updates_made(self.model) - self._before
        variance, squared_norm = (_finite(found.get(name)) for name in MOMENT_METRICS)
        loss = _finite(found.get("loss"))
        self.stretches.append(
            PilotStretch(updates, loss, _finite(found.get("val_loss")), variance, squared_norm)
        )
        if loss is None:
            self._end("diverged")
        elif len(self.stretches) >= max(_FEWEST_STRETCHES, 2 * useful_count(self.stretches)):
            self._end("progress")

    @property
    def trained_s(self) -> float:
        """Seconds since the first update."""
        return time.perf_counter() - self._began_s

    @property
    def look_s(self) -> float:
        """Seconds of a look at the held-out loss."""
        return statistics.median(self._looks_s) if self._looks_s else 0.0

    @property
    def build_s(self) -> float:
        """Seconds that building took, of the first look too."""
        return self._began_s - self._begun_s + sum(self._looks_s[:1]) - self.look_s

    def _end(self, reason: str) -> None:
        model: Any = self.model
        # That training diverged shows at the end of a stretch, where another reason may have come.
        if not model.stop_training or reason == "diverged":
            self.ended_by = reason
        model.stop_training = True


def _stretch_length(plan: PilotPlan, in_epoch: int | None) -> int:
    """Gives the updates of a stretch: few enough that the budget holds some fifty of them."""
    most = min(_MOST_UPDATES, in_epoch or _MOST_UPDATES)
    if plan.update_s is None:
        return most
    return max(1, min(most, int(plan.budget_s / plan.update_s / _STRETCHES_IN_BUDGET)))


def _updates_in_epoch(dataset: tf.data.Dataset, plan: PilotPlan) -> int | None:
    """Counts the updates in a pass over the data, None where they do not tell and need not.

    Raises:
        InputError: If there are too few.
    """
    updates = int(dataset.cardinality())
    if updates == tf.data.UNKNOWN_CARDINALITY:
        # A pass is made where epochs are counted; else two batches are enough to know.
        updates = sum(1 for _ in (dataset if plan.epochs else dataset.take(2)))
        if updates >= 2 and not plan.epochs:
            return None
    if 0 <= updates < 2:
        raise InputError(
            "A pilot needs data for two updates at least: give more examples, or a smaller "
            f"`base_batch_size`. Received: {updates} batches of {plan.batch_size} examples."
        )
    return updates if updates > 0 else None


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
