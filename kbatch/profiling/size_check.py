"""A short training at another batch size, to the loss that a pilot came to."""

import math
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from kbatch.analysis.timescales import FOLLOWERS
from kbatch.profiling.stretches import fit_in_stretches, held_out_batches
from kbatch.records.size_check import SizeCheck
from kbatch.training.accumulation import accumulate_gradients, sum_sparse_gradients
from kbatch.training.data import FitData
from kbatch.training.learning_rate import current_learning_rate
from kbatch.training.scaled_model import scaled_model, scaling_of
from kbatch.training.seeds import seeded
from kbatch.training.update_count import updates_made


class CheckPlan(NamedTuple):
    """How a size is trained.

    Attributes:
        batch_size: In examples.
        micro_batch_size: Examples that go through the device at once.
        base_batch_size: Batch size that the model's settings suit, in examples.
        rule: How the learning rate follows the batch size, or None.
        target: Loss to come to.
        held_out: Whether it is that of the examples held out, or that of training.
        stretch: Updates between two looks at it.
        most_updates: Updates after which another size has won.
        budget_s: Seconds that it may take, building included.
        seed: Seed of weights, order and held-out examples, as of the pilot.
    """

    batch_size: int
    micro_batch_size: int
    base_batch_size: int
    rule: str | None
    target: float
    held_out: bool
    stretch: int
    most_updates: int
    budget_s: float
    seed: int | None


def run_size_check(
    build: Callable[[], keras.Model], data: FitData, *, plan: CheckPlan
) -> SizeCheck:
    """Trains from the start until the loss is at the target, or what the plan allows is spent.

    Args:
        build: Builds the model, which is trained; keep the state of one that shall stay as it is.
        data: Arguments of `fit`, those of the pilot.
        plan: How to train.
    """
    ends_s = time.perf_counter() + plan.budget_s
    with seeded(plan.seed):
        model = build()
        batches = held_out_batches(data, model, batch_size=plan.batch_size, seed=plan.seed)
        watch = _Watch(plan, ends_s)
        sizes = {"batch_size": plan.batch_size, "base_batch_size": plan.base_batch_size}
        with scaled_model(model, **sizes, rule=plan.rule, follow_batch_size=FOLLOWERS):
            sum_sparse_gradients(model)  # As in the pilot, whose batches are cut.
            if plan.micro_batch_size < plan.batch_size:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # As in the pilot.
                    accumulate_gradients(model, plan.micro_batch_size)
            learning_rate = current_learning_rate(model.optimizer)
            fit_in_stretches(model, batches, stretch=plan.stretch, watch=watch)
            scaling = scaling_of(model)
    return SizeCheck(
        plan.batch_size,
        plan.micro_batch_size,
        learning_rate,
        watch.made,
        watch.loss if math.isfinite(watch.loss) else None,
        watch.trained_s,
        watch.ended_by,
        scaling,
    )


class _Watch(keras.callbacks.Callback):
    """Counts updates and ends training."""

    def __init__(self, plan: CheckPlan, ends_s: float):
        super().__init__()
        self.made = 0
        self.loss = math.nan
        self.ended_by = "budget"
        self._plan = plan
        self._ends_s = ends_s
        self._began_s = math.nan
        self._before = 0

    def on_train_begin(self, logs: Any = None):
        self._before = updates_made(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None):
        if math.isnan(self._began_s):
            self._began_s = time.perf_counter()  # What came before traced and compiled.
        if time.perf_counter() > self._ends_s:
            model: Any = self.model
            model.stop_training = True  # The loss is looked at once more.

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        found = logs or {}
        # One call of the train step may make several updates.
        self.made = updates_made(self.model) - self._before
        self.loss = float(found.get("val_loss" if self._plan.held_out else "loss", math.nan))
        if not math.isfinite(self.loss):
            self._end("diverged")
        elif self.loss <= self._plan.target:
            self._end("target")
        elif self.made >= self._plan.most_updates:
            self._end("lost")
        elif time.perf_counter() > self._ends_s:
            self._end("budget")

    @property
    def trained_s(self) -> float:
        """Seconds since the first update."""
        return time.perf_counter() - self._began_s

    def _end(self, reason: str) -> None:
        self.ended_by = reason
        model: Any = self.model
        model.stop_training = True
