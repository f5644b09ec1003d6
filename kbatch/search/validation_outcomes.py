"""The best epoch of an execution: its weights, and its metric by blocks of validation examples."""

import hashlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.device.failures import failure_text
from kbatch.records.training_run import Outcomes
from kbatch.search.trial_files import write_checkpoint
from kbatch.study.trial import Objective
from kbatch.training.clock import numbers_of
from kbatch.training.data.forms import FitData, arrays_of, each_part, gives_batches
from kbatch.training.model import replica_count
from kbatch.training.one_graph import GraphCount
from kbatch.training.state import kept_seeds, kept_variables

# Fewer than a record may hold: each costs a call, and variances are known to 9 % by them.
_BLOCKS = 256
# Relative. Half precision, and a GPU's TF32, round otherwise in batches of another size.
_CLOSE, _CLOSE_ROUNDED = 1e-4, 2e-3


class BestEpoch(keras.callbacks.Callback):
    """Keeps the weights of the best epoch in memory, once, and what it was validated on."""

    # It stands after all callbacks that change the logs.

    def __init__(self, objective: Objective, parts: Sequence[Objective] = ()):
        super().__init__()
        # Data, in batches or as arrays, the size of a batch, and how many are taken, None for all.
        self.validation: tuple[Any, int, int | None] = (None, 1, None)
        self._objective, self._parts = objective, parts  # It may be the sum of several.
        # The objective, or where that is no metric of an epoch, an accuracy or loss of validation.
        self._metric: Objective | None = None
        self._best: dict[str, Any] = {}
        self._validated: list[tuple[Any, np.ndarray]] | None = None
        self._batches = 0
        self.copy_s = 0.0  # Seconds that copying weights took.

    def on_test_batch_end(self, batch: int, logs: Any = None):
        self._batches = batch + 1

    def keep_validated(self, logs: Any = None) -> None:
        """Keep weights before callbacks change them, which may have swapped them in to validate."""
        started_s = time.perf_counter()
        self._validated = self._copied()
        self.copy_s += time.perf_counter() - started_s

    def _copied(self) -> list[tuple[Any, np.ndarray]]:
        model: Any = self.model
        return [(one, np.array(one)) for one in model.weights]

    def on_epoch_end(self, epoch: int, logs: Any = None):
        validated, self._validated = self._validated, None
        logs = numbers_of(logs)
        if self._parts and all(part.name in logs for part in self._parts):
            signs = [-1 if part.direction == "max" else 1 for part in self._parts]
            values = [logs[part.name] for part in self._parts]
            logs[self._objective.name] = float(np.dot(signs, values))
        # It is chosen at the first epoch that was validated, unless the objective comes later.
        names = [n for n in logs if n.startswith("val_") or n == self._objective.name]
        found = self._objective.or_quality(names)
        if self._metric is None or (self._metric != found == self._objective):
            self._metric, self._best = found, {}
        if self._metric is None:
            return
        value = logs.get(self._metric.name, np.nan)
        if self._metric.is_better(value, self._best.get("value")):
            started_s = time.perf_counter()
            self._best = {
                "value": value,
                "epoch": epoch,
                "weights": validated or self._copied(),
                "data": (*self.validation, self._batches),
            }
            self.copy_s += time.perf_counter() - started_s

    def write_weights(self, model: Any, folder: Path, best_before: float | None) -> None:
        """Write the best epoch if no earlier execution is better; the last without an objective."""
        if self.model is None:  # No `fit` was timed.
            return
        if self._metric != self._objective:
            write_checkpoint(model, folder)
        elif self._best and self._objective.is_better(self._best["value"], best_before):
            with kept_variables(model):
                for variable, weight in self._best["weights"]:
                    variable.assign(weight)
                write_checkpoint(model, folder)

    def outcomes(self, model: Any) -> Outcomes:
        """Evaluate the weights of the best epoch by blocks, or say why that cannot be done."""
        name, best, self._best = self._metric.name if self._metric else "", self._best, {}
        if not name:
            return Outcomes(reason="no epoch was validated")
        reason = None
        if self._parts and self._metric == self._objective:
            reason = "several objectives are no single metric"
        elif not name.startswith("val_"):
            reason = f"{name} is a metric of training, not of validation"
        elif replica_count(model) > 1:
            reason = "the model was trained on several devices"
        elif not best:
            reason = f"{name} was not finite in any epoch"
        if reason is not None:
            return Outcomes(metric=name, reason=reason)
        try:
            with kept_seeds(), kept_variables(model):
                rows, found = _measured(model, name, best)
            mean, value = np.average(found["values"], weights=rows), best["value"]
            gpu = bool(tf.config.list_logical_devices("GPU"))
            close = _CLOSE_ROUNDED if gpu or model.compute_dtype != "float32" else _CLOSE
            if np.isclose(mean, value, rtol=close, atol=1e-7):
                return Outcomes.of(metric=name, epoch=best["epoch"], **found)
            reason = (
                f"{name} is no mean over validation examples, or the data differ each time "
                f"they are read: {mean:.5g} by blocks of them, {value:.5g} in training"
            )
        except Exception as error:  # Out of memory, or what a user's data and steps raise.
            text = failure_text(error)
            reason = f"its values by validation example could not be measured: {text}"
        return Outcomes(metric=name, epoch=best["epoch"], reason=reason)


def _measured(model: Any, name: str, best: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Return the rows of each block, and the fields of the record."""
    for variable, value in best["weights"]:
        variable.assign(value)
    model.make_test_function()
    name, given = name.removeprefix("val_"), model.steps_per_execution
    arrays = not gives_batches(best["data"][0])
    # An iterator over arrays takes the graph by which `fit` validated, and where that counts its
    # steps, a block in one call. One batch in a Python iterator is one step, in another graph.
    counted = isinstance(given, GraphCount)
    shared = arrays and (counted or given == 1)
    dataset, per_block = (_of_arrays if arrays else _of_dataset)(*best["data"])
    steps = per_block if counted and shared else 1
    model.reset_metrics()
    empty = [(one.value, np.array(one)) for one in model.metrics_variables]
    results, rows, prints = [], [], []
    iterator = iter(dataset) if shared else None
    try:
        if counted:
            model.steps_per_execution = given.changed(steps)
        for number, batch in enumerate(dataset):
            if number % per_block == 0:
                for variable, value in empty:  # As `reset_metrics` does, in a tenth of its time.
                    variable.assign(value)
                results, rows = [*results, None], [*rows, 0]
            if number % steps == 0:
                found = model.test_function(iterator if shared else iter((batch,)))
                results[-1] = found[name]
            prints += _fingerprints(batch)
            rows[-1] += len(prints) - sum(rows)
    finally:
        if counted:
            model.steps_per_execution = given.changed(int(given))
    return rows, {
        "values": np.array([np.asarray(one).item() for one in results]),
        "examples": len(prints),
        "block_examples": rows[0],
        "key": _digest(prints).hex(),
        "set_key": _digest(sorted(prints)).hex(),
    }


def _of_arrays(data: Any, batch_size: int, _: int | None, batches: int) -> tuple[Any, int]:
    """Return arrays in batches that are small enough, and how many of them are a block."""
    arrays, rows = arrays_of(FitData(*keras.utils.unpack_x_y_sample_weight(data)))
    most = min(batches * batch_size, rows)
    size, per_block = _cut(most, batch_size)
    taken: Any = keras.tree.lists_to_tuples(each_part(lambda leaf: leaf[:most], arrays))
    with tf.device("CPU:0"):
        return tf.data.Dataset.from_tensor_slices(taken).batch(size), per_block


def _of_dataset(data: Any, batch_size: int, steps: int | None, batches: int) -> tuple[Any, int]:
    """Return a dataset in batches that are small enough, and how many of them are a block."""
    first = next(iter(data))
    if keras.utils.unpack_x_y_sample_weight(first)[1] is None:
        raise ValueError("a dataset without targets may have other rows in each trial")
    data = data if steps is None else data.take(steps)
    shapes = [one.shape[1:] for one in tf.nest.flatten(data.element_spec)]
    if not all(shape.is_fully_defined() for shape in shapes):
        return data, -(-batches // _BLOCKS)  # Each is padded to a length of its own.
    # Its batches are not always of the size that was asked for.
    batch_size = len(keras.tree.flatten(first)[0])
    size, per_block = _cut(batches * batch_size, batch_size)
    return data.rebatch(size), per_block


def _cut(examples: int, batch_size: int) -> tuple[int, int]:
    """Return a size of batches that are small enough, and how many of them are a block."""
    block = -(-examples // _BLOCKS)
    per_block = -(-block // batch_size)
    return -(-block // per_block), per_block


def _fingerprints(batch: Any) -> list[bytes]:
    """Return a fingerprint of the targets of each example, of its inputs where it has none."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    parts = [np.asarray(one) for one in keras.tree.flatten(x if y is None else y)]
    rows = zip(*(part.reshape(len(part), -1) for part in parts), strict=True)
    return [
        _digest([repr(p.tolist()).encode() if p.dtype.hasobject else p.tobytes() for p in row])
        for row in rows
    ]


def _digest(parts: Iterable[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=8).digest()
