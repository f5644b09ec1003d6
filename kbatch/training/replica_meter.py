"""Examples and waiting time, counted inside the train step of several replicas."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kbatch.training.input_meter import InputReading


def replica_count(model: Any) -> int:
    """Tells on how many devices a model trains at once."""
    return model.distribute_strategy.num_replicas_in_sync


class ReplicaMeter:
    """Counts what the replicas of a `tf.distribute.Strategy` really train on.

    A strategy takes batches ahead of the steps, and one more to build the model from, so that its
    input pipeline tells neither how many were trained on nor who waited. Here the train step
    counts: all replicas add their rows up, and the time when that sum is known is when the batch
    has arrived everywhere.

    Args:
        model: The model to train, built under the strategy.

    Attributes:
        stamp: The callback that stands last and notes when a step begins.
    """

    def __init__(self, model: keras.Model):
        self._model: Any = model
        self._strategy = self._model.distribute_strategy
        self.stamp: keras.callbacks.Callback = _Stamp(self)
        with self._strategy.scope():
            # Batches, examples, the largest batch, the last one, and when it arrived.
            self._totals = tf.Variable(
                tf.zeros([5], tf.float64),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
        self._step: Any = None
        self._traces = 0
        self._traces_before = 0
        self._begun_s: float | None = None
        self._wait_s = 0.0

    @property
    def micro_batch_size(self) -> int | None:
        """The micro-batch size of the train step that it counts for, None without one."""
        return getattr(getattr(self._step, "__self__", None), "micro_batch_size", None)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the train steps of the model. The largest batch is counted from zero."""
        before = vars(self._model).get("train_step")
        self._step = self._model.train_step
        for local in self._strategy.experimental_local_results(self._totals):
            local.assign(local * tf.constant([1, 1, 0, 1, 1], tf.float64))
        self._model.train_step = self.run
        self._model.train_function = None
        try:
            yield
        finally:
            self._model.train_function = None
            if before is None:
                del self._model.train_step
            else:
                self._model.train_step = before

    def run(self, data: Any) -> Any:
        """Counts a batch, then makes the train step that was there; in each replica."""
        if not tf.executing_eagerly():
            self._traces += 1
        leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        mine = tf.cast(tf.shape(leaves[0])[0], tf.float64)
        context: Any = tf.distribute.get_replica_context()
        rows = context.all_reduce(tf.distribute.ReduceOp.SUM, mine)
        with tf.control_dependencies([rows]):
            arrived_s = tf.timestamp()
        batches, examples, largest, _, _ = tf.unstack(tf.convert_to_tensor(self._totals))
        self._totals.assign(
            tf.stack([batches + 1, examples + rows, tf.maximum(largest, rows), rows, arrived_s])
        )
        return self._step(data)

    def begin_step(self) -> None:
        """Notes that a step begins."""
        self._traces_before = self._traces
        # Of several steps in one execution only the last arrival is known.
        self._begun_s = time.time() if self._model.steps_per_execution == 1 else None

    def read(self) -> InputReading:
        """Reads the totals since the meter was made.

        A step that was traced counts as one that waited for nothing: tracing hides the waiting.
        Nothing is known of it where an execution has several steps.
        """
        local = self._strategy.experimental_local_results(self._totals)[0]
        batches, examples, largest, rows, arrived_s = local.numpy()
        if self._begun_s is not None and arrived_s > self._begun_s:
            if self._traces == self._traces_before:
                self._wait_s += float(arrived_s) - self._begun_s
            self._begun_s = None
        known = self._model.steps_per_execution == 1
        return InputReading(
            int(batches), int(examples), int(largest), self._wait_s if known else None, float(rows)
        )


class _Stamp(keras.callbacks.Callback):
    def __init__(self, meter: ReplicaMeter):
        super().__init__()
        self._meter = meter

    def on_train_batch_begin(self, batch: int, logs: Any = None):
        self._meter.begin_step()
