"""The clock of a training run, and meters of the examples and the waiting time in it."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.analysis.throughput import Throughput, steady_windows, throughput_of_windows
from kbatch.records.training_run import EpochRecord
from kbatch.training.data.forms import each_part, parts_of
from kbatch.training.learning_rate import current_learning_rate
from kbatch.training.state import inner_optimizers, updates_made


def numbers_of(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics that are one number, as a scalar or, as in `F1Score`, an array of one."""
    arrays = {name: np.asarray(value) for name, value in (logs or {}).items()}
    return {n: float(a.item()) for n, a in arrays.items() if a.size == 1 and a.dtype != object}


class InputReading(NamedTuple):
    batches: int
    examples: int
    largest_batch: int  # Examples in it.
    wait_s: float | None  # From requests for batches to their arrivals; None where unknown.
    shape_number: float  # Tells the shapes of the last batch from others.


class InputMeter:
    """Counts in the graph what really reaches the train step."""

    # A `batch_size` argument says nothing about a dataset, which brings its own.
    def __init__(self):
        with tf.device("CPU:0"):
            self._totals = tf.Variable(tf.zeros([5], tf.float64), trainable=False)

    def attach(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Make a dataset of the same batches that counts them as they are taken."""
        # The time is stamped when a batch is asked for, and when it is there. The largest batch is
        # counted from zero.
        self._totals.assign(self._totals * tf.constant([1, 1, 0, 1, 1], tf.float64))
        requests = tf.data.Dataset.range(1).repeat().map(lambda _: tf.timestamp())
        counted = tf.data.Dataset.zip(requests, dataset).map(self._count)
        options = tf.data.Options()
        # A prefetch after the meter would hide the waiting.
        options.experimental_optimization.inject_prefetch = False
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        counted = counted.with_options(options)
        cardinality = dataset.cardinality()
        if cardinality == tf.data.UNKNOWN_CARDINALITY:
            return counted
        return counted.apply(tf.data.experimental.assert_cardinality(cardinality))

    def counting(self, dataset: tf.data.Dataset) -> contextlib.AbstractContextManager[Any]:
        """Count what training takes of a dataset; train on what this yields."""
        return contextlib.nullcontext(self.attach(dataset))

    def begin_step(self) -> None:
        """Do nothing: the dataset stamps the time."""

    def read(self) -> InputReading:
        batches, examples, largest, wait_s, shape = self._totals.numpy()
        return InputReading(int(batches), int(examples), int(largest), float(wait_s), float(shape))

    def _count(self, asked_s: tf.Tensor, batch: Any) -> Any:
        leaves = parts_of(batch)
        shapes = [
            leaf.bounding_shape(out_type=tf.int64)
            if isinstance(leaf, tf.RaggedTensor)
            else tf.shape(leaf, out_type=tf.int64)
            for leaf in leaves
        ]
        # The lengths of all axes, each times a root of its own: equal for equal shapes.
        lengths = tf.cast(tf.concat(shapes, axis=0), tf.float64)
        roots = tf.sqrt(tf.range(2.0, 2.0 + tf.cast(tf.size(lengths), tf.float64)))
        rows = tf.cast(shapes[0][0], tf.float64)
        with tf.control_dependencies(tf.nest.flatten(leaves, expand_composites=True)):
            waited_s = tf.timestamp() - asked_s
        batches, examples, largest, wait_s, _ = tf.unstack(self._totals)
        totals = [batches + 1, examples + rows, tf.maximum(largest, rows), wait_s + waited_s]
        update = self._totals.assign(tf.stack([*totals, tf.reduce_sum(lengths * roots)]))
        with tf.control_dependencies([update]):
            return each_part(tf.identity, batch)


class TrainingClock(keras.callbacks.Callback):
    """Times each train step; one that may have compiled is not steady."""

    # A step begins after all other callbacks' `on_train_batch_begin` and ends before their
    # `on_train_batch_end`: data loading is in it, other callbacks and validation are not. So the
    # clock stands first among the callbacks and `clock.last` stands last.
    def __init__(
        self,
        meter: "InputMeter | ReplicaMeter",
        *,
        every_shape_compiles: bool = False,  # XLA: for a new length of any axis, not only of rows.
        now: Callable[[], float] = time.perf_counter,
    ):
        super().__init__()
        self.first_step_s: float | None = None  # Tracing and compiling included.
        self.first_learning_rate: float | None = None
        self.train_s = 0.0  # In train steps.
        self.epochs: list[EpochRecord] = []
        self.in_step = False  # An error then came from the step.
        # Starts the steps and ends the epochs after all other callbacks.
        self.last: keras.callbacks.Callback = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs=None: self.begin_step(),
            on_epoch_end=lambda epoch, logs=None: self.keep_epoch(epoch, logs or {}),
        )
        self._meter = meter
        self._every_shape_compiles = every_shape_compiles
        self._now = now
        self._examples: list[int] = []
        self._durations_s: list[float] = []
        self._steady: list[bool] = []
        self._shapes: set[float] = set()
        self._begun_s = 0.0
        self._first_of_fit = True
        self._reading = self._epoch_reading = meter.read()
        self._epoch_train_s = 0.0
        self._epoch_iterations = 0
        self._epoch_begun = False

    @property
    def windows(self) -> tuple[list[int], list[float]]:
        """Examples and seconds of the windows of steady training."""
        return steady_windows(self._examples, self._durations_s, self._steady)

    @property
    def throughput(self) -> Throughput | None:
        """Examples per second of the steady steps, None before there is one."""
        return throughput_of_windows(*self.windows)

    @property
    def reading(self) -> InputReading:
        return self._meter.read()

    @property
    def examples(self) -> int:
        return self._reading.examples

    @property
    def updates(self) -> int:
        """Optimizer updates so far, those that overflowed not counted."""
        now = updates_made(self.model, self._reading.batches) - self._epoch_iterations
        return sum(epoch.updates for epoch in self.epochs) + (now if self._epoch_begun else 0)

    def on_train_begin(self, logs: Any = None):
        """Begin with a step that is not steady: a new `fit` may build a new train function."""
        self._first_of_fit = True
        self.in_step = False

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        self._epoch_reading = self._reading = self._meter.read()
        self._epoch_train_s = self.train_s
        self._epoch_iterations = updates_made(self.model, self._reading.batches)
        self._epoch_begun = True

    def begin_step(self) -> None:
        self.in_step = True
        self._meter.begin_step()
        if self.first_learning_rate is None:
            found = inner_optimizers(self.model)
            self.first_learning_rate = current_learning_rate(next(iter(found), None))
        self._begun_s = self._now()

    def on_train_batch_end(self, batch: int, logs: Any = None):
        self.in_step = False
        duration_s = self._now() - self._begun_s
        reading = self._meter.read()
        examples = reading.examples - self._reading.examples
        self._reading = reading
        if self.first_step_s is None:
            self.first_step_s = duration_s
        shape = reading.shape_number if self._every_shape_compiles else float(examples)
        self._steady.append(not self._first_of_fit and shape in self._shapes)
        self._first_of_fit = False
        self._shapes.add(shape)
        self._examples.append(examples)
        self._durations_s.append(duration_s)
        self.train_s += duration_s

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        """Add `samples_per_second` to the logs, for the callbacks that follow."""
        throughput = self.throughput
        if logs is not None and throughput is not None:
            logs["samples_per_second"] = throughput.mean

    def keep_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Keep the epoch with the metrics that all callbacks have left."""
        before, now = self._epoch_reading, self._reading
        self._epoch_begun = False
        waited_s = None
        if now.wait_s is not None and before.wait_s is not None:
            waited_s = now.wait_s - before.wait_s
        self.epochs.append(
            EpochRecord(
                epoch=epoch,
                metrics={
                    name: value if math.isfinite(value) else None
                    for name, value in numbers_of(logs).items()
                },
                examples=now.examples - before.examples,
                batches=now.batches - before.batches,
                # A callback that compiles the model again starts the count over.
                updates=max(0, updates_made(self.model, now.batches) - self._epoch_iterations),
                train_s=self.train_s - self._epoch_train_s,
                data_wait_s=waited_s,
            )
        )


class ReplicaMeter:
    """Counts what the replicas of a `tf.distribute.Strategy` really train on, in the train step."""

    # A strategy takes batches ahead of the steps, and one more to build the model from, so that its
    # input pipeline tells neither how many were trained on nor who waited.
    def __init__(self, model: keras.Model):
        self._model: Any = model
        self._strategy = self._model.distribute_strategy
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
    def how(self) -> Any:
        """How the train step that it counts for accumulates, None where it does not."""
        return getattr(getattr(self._step, "__self__", None), "how", None)

    @contextlib.contextmanager
    def counting(self, dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
        """Count the train steps of the model. The largest batch is counted from zero."""
        before = vars(self._model).get("train_step")
        self._step = self._model.train_step
        for local in self._strategy.experimental_local_results(self._totals):
            local.assign(local * tf.constant([1, 1, 0, 1, 1], tf.float64))
        self._model.train_step = self.run
        self._model.train_function = None
        try:
            yield dataset
        finally:
            self._model.train_function = None
            if before is None:
                del self._model.train_step
            else:
                self._model.train_step = before

    def run(self, data: Any) -> Any:
        """Count a batch, then make the train step that was there; in each replica."""
        if not tf.executing_eagerly():
            self._traces += 1
        mine = tf.cast(tf.shape(parts_of(data)[0])[0], tf.float64)
        context: Any = tf.distribute.get_replica_context()
        rows = context.all_reduce(tf.distribute.ReduceOp.SUM, mine)
        # When the sum of all is known, the batch has arrived everywhere.
        with tf.control_dependencies([rows]):
            arrived_s = tf.timestamp()
        batches, examples, largest, _, _ = tf.unstack(tf.convert_to_tensor(self._totals))
        self._totals.assign(
            tf.stack([batches + 1, examples + rows, tf.maximum(largest, rows), rows, arrived_s])
        )
        return self._step(data)

    def begin_step(self) -> None:
        self._traces_before = self._traces
        # Of several steps in one execution only the last arrival is known.
        self._begun_s = time.time() if self._model.steps_per_execution == 1 else None

    def read(self) -> InputReading:
        """Read the totals since the meter was made; the waiting of one step an execution only."""
        local = self._strategy.experimental_local_results(self._totals)[0]
        batches, examples, largest, rows, arrived_s = local.numpy()
        if self._begun_s is not None and arrived_s > self._begun_s:
            if self._traces == self._traces_before:  # Else tracing hides the waiting.
                self._wait_s += float(arrived_s) - self._begun_s
            self._begun_s = None
        known = self._model.steps_per_execution == 1
        return InputReading(
            int(batches), int(examples), int(largest), self._wait_s if known else None, float(rows)
        )
