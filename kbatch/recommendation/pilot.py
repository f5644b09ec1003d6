"""The pilot: a short training at the base batch size that measures the gradient noise scale."""

import math
import time
from typing import Any

import keras
import numpy as np

from kbatch.analysis.noise_scale import MOMENT_METRICS
from kbatch.errors import InputError
from kbatch.page.numbers import pluralize
from kbatch.recommendation.result import PilotRecord, useful_stretches
from kbatch.training.accumulation import Accumulation
from kbatch.training.data.training_data import TrainingData
from kbatch.training.model import user_step
from kbatch.training.state import kept_state, updates_made

# Updates of a stretch, at the most.
_MOST_UPDATES = 10
_STRETCHES_IN_BUDGET = 50
# Fewer stretches do not show whether the later half brought little.
_FEWEST_STRETCHES = 24


def run_pilot(
    model: Any, data: TrainingData, *, batch_size: int, budget_s: float, seed: int
) -> PilotRecord:
    """Train until the later half of the updates brought little, or the time is spent.

    The model is put back as it was.
    """
    if batch_size < 2:
        raise InputError(
            "A pilot measures the noise between the two halves of a batch: give a "
            "`base_batch_size` of two examples at least, and the learning rate that suits it. "
            f"Received: base_batch_size={batch_size}."
        )
    if user_step(model) is not None:
        raise InputError("The model has a `train_step` of its own, which trains a batch whole.")
    ends_s = time.perf_counter() + budget_s
    dataset = data.batches(batch_size, model, seed=seed).dataset
    if 0 <= (count := int(dataset.cardinality())) < 2:
        raise InputError(
            "A pilot needs data for two updates at least: give more examples, or a smaller "
            f"`base_batch_size`. Received: {count} batches of {batch_size} examples."
        )
    watch = _Stretches(ends_s=ends_s, budget_s=budget_s)
    with kept_state(model):
        # What looks at a batch as a whole is measured in parts, and said to be.
        Accumulation((batch_size + 1) // 2, moments_every=1).apply(model)
        # All of it is one epoch to Keras: starting one takes as long as tens of updates.
        model.fit(
            dataset.repeat(), steps_per_epoch=2**31, callbacks=[watch], verbose=0, shuffle=False
        )
    updates, losses, variances, squared_norms = zip(*watch.stretches, strict=True)
    if any(map(math.isnan, losses)):
        raise InputError(
            f"The pilot's loss became NaN within {pluralize(sum(updates), 'update')}: look for "
            "values in the data that are not finite, or give the model a smaller learning rate"
        )
    return PilotRecord(batch_size, updates, losses, variances, squared_norms, seed)


class _Stretches(keras.callbacks.Callback):
    """Reads loss and moments of the gradient after some updates each, and ends the pilot."""

    def __init__(self, *, ends_s: float, budget_s: float):
        super().__init__()
        self.stretches: list[tuple[int, float, float | None, float | None]] = []
        self._ends_s, self._budget_s = ends_s, budget_s
        self._made = self._counted = 0
        self._read_s: float | None = None

    def on_train_begin(self, logs: Any = None):
        self._counted = updates_made(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None):
        now_s, model = time.perf_counter(), self.model
        assert model is not None
        if self._read_s is None:
            # What came before traced and compiled: half of the time is left in any case.
            self._read_s = now_s
            self._ends_s = max(self._ends_s, now_s + self._budget_s / 2)
        # One call of the train step may make several updates, and skip some that overflowed.
        self._made += model.steps_per_execution
        spent = now_s > self._ends_s
        long = now_s - self._read_s >= self._budget_s / _STRETCHES_IN_BUDGET
        if not (spent or long or self._made >= _MOST_UPDATES):
            return
        names = ("loss", *MOMENT_METRICS)
        loss, variance, squared_norm = (_finite((logs or {}).get(name)) for name in names)
        made = updates_made(model)
        number = math.nan if loss is None else loss
        self.stretches.append((made - self._counted, number, variance, squared_norm))
        model.reset_metrics()
        self._made, self._counted, self._read_s = 0, made, time.perf_counter()
        losses = [stretch[1] for stretch in self.stretches]
        enough = loss is None or len(losses) >= max(_FEWEST_STRETCHES, 2 * useful_stretches(losses))
        model.stop_training = enough or spent


def _finite(value: Any) -> float | None:
    number = math.nan if value is None else float(np.asarray(value))
    return number if math.isfinite(number) else None
