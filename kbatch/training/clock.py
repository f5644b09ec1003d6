"""The clock of a training run, and meters of the examples and the waiting time in it."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.analysis.throughput import Throughput, steady_windows, throughput_of_windows
from kbatch.records.training_run import EpochRecord
from kbatch.training.data.array_rows import map_traced
from kbatch.training.data.forms import each_part, parts_of
from kbatch.training.learning_rate import peak_learning_rate, set_learning_rate
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
        self._functions: dict[str, Any] = {}  # Traced, by what they take.

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_functions": {}}  # Graphs cannot be copied.

    def reset(self) -> None:
        self._totals.assign(tf.zeros_like(self._totals))

    def attach(self, dataset: tf.data.Dataset, examples: int | None = None) -> tf.data.Dataset:
        """Make a dataset of the same batches that counts them as they are taken."""
        # The time is stamped when a batch is asked for, and when it is there. The largest batch is
        # counted from zero.
        self._totals.assign(self._totals * tf.constant([1, 1, 0, 1, 1], tf.float64))
        moment, spec = tf.TensorSpec([], tf.float64), dataset.element_spec
        parts = [one for one in tf.nest.flatten(spec) if one.value_type is not type(None)]
        requests = tf.data.Dataset.range(1).repeat()
        requests = map_traced(self._traced(_asked, tf.TensorSpec([], tf.int64)), requests, moment)
        counted = tf.data.Dataset.zip(requests, dataset)
        if all(isinstance(part, tf.TensorSpec) for part in parts):
            counted = map_traced(self._traced(self._count_parts, moment, *parts), counted, spec)
        else:
            counted = counted.map(tf.autograph.experimental.do_not_convert(self._count))
        options = tf.data.Options()
        # A prefetch after the meter would hide the waiting.
        options.experimental_optimization.inject_prefetch = False
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        counted = counted.with_options(options)
        cardinality = dataset.cardinality()
        if cardinality == tf.data.UNKNOWN_CARDINALITY:
            return counted
        return counted.apply(tf.data.experimental.assert_cardinality(cardinality))

    def _traced(self, function: Any, *specs: tf.TensorSpec) -> Any:
        key = repr((function.__name__, specs))
        if key not in self._functions:
            made = tf.function(function, autograph=False)
            self._functions[key] = made.get_concrete_function(*specs)
        return self._functions[key]

    def begin_epoch(self) -> None:
        """Do nothing: the dataset counts."""

    def end_step(self, batch: int) -> None:
        """Do nothing: the dataset counts."""

    def read(self) -> InputReading:
        batches, examples, largest, wait_s, shape = self._totals.numpy()
        return InputReading(int(batches), int(examples), int(largest), float(wait_s), float(shape))

    def _count_parts(self, asked_s: tf.Tensor, *parts: tf.Tensor) -> list[tf.Tensor]:
        return self._count(asked_s, list(parts))

    def _count(self, asked_s: tf.Tensor, batch: Any) -> Any:
        leaves = parts_of(batch)
        ranks = [leaf.shape.rank for leaf in leaves]
        # Else all parts have the same rows, and nothing else varies.
        vary = None in ranks or any(None in leaf.shape[1:].as_list() for leaf in leaves)
        shapes = [
            leaf.bounding_shape(out_type=tf.int64)
            if isinstance(leaf, tf.RaggedTensor)
            else tf.shape(leaf, out_type=tf.int64)
            for leaf in (leaves if vary else leaves[:1])
        ]
        rows = shape_number = tf.cast(shapes[0][0], tf.float64)
        if vary:
            # The lengths of all axes, each times a root of its own: equal for equal shapes.
            lengths = tf.cast(tf.concat(shapes, axis=0), tf.float64)
            roots = tf.sqrt(tf.range(2.0, 2.0 + tf.cast(tf.size(lengths), tf.float64)))
            shape_number = tf.reduce_sum(lengths * roots)
        with tf.control_dependencies(tf.nest.flatten(leaves, expand_composites=True)):
            waited_s = tf.timestamp() - asked_s
        batches, examples, largest, wait_s, _ = tf.unstack(self._totals)
        totals = [batches + 1, examples + rows, tf.maximum(largest, rows), wait_s + waited_s]
        update = self._totals.assign(tf.stack([*totals, shape_number]))
        with tf.control_dependencies([update]):
            return each_part(tf.identity, batch)


def _asked(number: tf.Tensor) -> tf.Tensor:
    return tf.timestamp()


class StepMeter(InputMeter):
    """Counts what several replicas train on by the steps that the host sees end."""

    # A strategy takes batches ahead of the steps, and one more to build the model from, so that its
    # input tells neither how many were trained on nor who waited. Batches are full but for the last
    # one of an epoch, where the examples of an epoch are known.
    def __init__(self, batch_size: int):
        super().__init__()
        self._batch_size = batch_size
        self._batches = self._examples = self._last = 0
        self._before = 0, 0  # Batches and examples before the epoch.
        self._most: tuple[float, float] = math.inf, math.inf  # Of them, in an epoch.

    def attach(self, dataset: tf.data.Dataset, examples: int | None = None) -> tf.data.Dataset:
        batches = int(dataset.cardinality())
        self._most = (
            math.inf if batches < 0 else batches,
            math.inf if examples is None else examples,
        )
        return super().attach(dataset)

    def begin_epoch(self) -> None:
        self._before = self._batches, self._examples

    def end_step(self, batch: int) -> None:
        """Count the steps up to `batch`, which Keras counts from 0 in an epoch."""
        most_batches, most_examples = self._most
        batches = min(batch + 1, most_batches)  # An execution of several steps may end early.
        examples = self._before[1] + int(min(batches * self._batch_size, most_examples))
        self._batches = self._before[0] + int(batches)
        self._last, self._examples = examples - self._examples, examples

    def read(self) -> InputReading:
        largest = super().read().largest_batch
        return InputReading(self._batches, self._examples, largest, None, float(self._last))


class TrainingClock(keras.callbacks.Callback):
    """Times each train step; one that may have compiled is not steady."""

    # A step begins after all other callbacks' `on_train_batch_begin` and ends before their
    # `on_train_batch_end`: data loading is in it, other callbacks and validation are not. So the
    # clock stands first among the callbacks and `clock.last` stands last.
    def __init__(
        self,
        meter: InputMeter,
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
        self._meter.begin_epoch()
        self._epoch_reading = self._reading = self._meter.read()
        self._epoch_train_s = self.train_s
        self._epoch_iterations = updates_made(self.model, self._reading.batches)
        self._epoch_begun = True

    def begin_step(self) -> None:
        self.in_step = True
        if self.first_learning_rate is None:
            found = inner_optimizers(self.model)
            self.first_learning_rate = peak_learning_rate(next(iter(found), None))
        self._begun_s = self._now()

    def on_train_batch_end(self, batch: int, logs: Any = None):
        self.in_step = False
        duration_s = self._now() - self._begun_s
        self._meter.end_step(batch)
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
                learning_rate=set_learning_rate(next(iter(inner_optimizers(self.model)), None)),
            )
        )
