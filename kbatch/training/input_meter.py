"""Meters of the examples that reach the train step, and of the time that it waits for them."""

import math
from typing import Any, NamedTuple

import tensorflow as tf

from kbatch.training.data.batches import map_traced
from kbatch.training.data.forms import each_part, parts_of


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
            self._totals = tf.Variable(tf.zeros([6], tf.float64), trainable=False)
        self.see_order = False  # Whether it takes a fingerprint of the first batch.
        self._functions: dict[str, Any] = {}  # Traced, by what they take.

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_functions": {}}  # Graphs cannot be copied.

    def reset(self) -> None:
        self._totals.assign(tf.zeros_like(self._totals))

    def attach(self, dataset: tf.data.Dataset, examples: int | None = None) -> tf.data.Dataset:
        """Make a dataset of the same batches that counts them as they are taken."""
        # The time is stamped when a batch is asked for, and when it is there. The largest batch is
        # counted from zero.
        self._totals.assign(self._totals * tf.constant([1, 1, 0, 1, 1, 1], tf.float64))
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
        key = repr((function.__name__, self.see_order, specs))
        if key not in self._functions:
            made = tf.function(function, autograph=False)
            self._functions[key] = made.get_concrete_function(*specs)
        return self._functions[key]

    def begin_epoch(self) -> None:
        """Do nothing: the dataset counts."""

    def end_step(self, batch: int) -> None:
        """Do nothing: the dataset counts."""

    def read(self) -> InputReading:
        batches, examples, largest, wait_s, shape, _ = self._totals.numpy()
        return InputReading(int(batches), int(examples), int(largest), float(wait_s), float(shape))

    @property
    def order(self) -> str | None:
        """The fingerprint of the first batch, which tells orders apart; None where unknown."""
        found = int(self._totals.numpy()[5])
        return f"{found:x}" if found else None

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
        tensors = tf.nest.flatten(leaves, expand_composites=True)
        with tf.control_dependencies(tensors):
            waited_s = tf.timestamp() - asked_s
        batches, examples, largest, wait_s, _, order = tf.unstack(self._totals)
        totals = [batches + 1, examples + rows, tf.maximum(largest, rows), wait_s + waited_s]
        if self.see_order:
            first = tf.equal(batches, 0)
            most = tf.where(first, tf.int64.max, 0)  # A condition would take longer.
            texts = tf.strings.join([tf.io.serialize_tensor(one[:most]) for one in tensors])
            seen = tf.strings.to_hash_bucket_fast(texts, 2**52)  # Exact as a float.
            order = tf.where(first, tf.cast(seen, tf.float64), order)
        update = self._totals.assign(tf.stack([*totals, shape_number, order]))
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
