"""Examples and waiting time, counted inside the input pipeline."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf


class InputReading(NamedTuple):
    """What a model has received so far.

    Attributes:
        batches: Batches delivered.
        examples: Examples in them.
        largest_batch: Examples in the largest of them.
        wait_s: Seconds between the request for a batch and its arrival, in all; None where they
            cannot be told.
        shape_number: A number that tells the shapes of the last batch from others. It is a float
            like the other totals, which share a variable.
    """

    batches: int
    examples: int
    largest_batch: int
    wait_s: float | None
    shape_number: float


class InputMeter:
    """Counts in the graph what really reaches the train step.

    A `batch_size` argument says nothing about a dataset, which brings its own.
    """

    def __init__(self):
        with tf.device("CPU:0"):
            self._totals = tf.Variable(tf.zeros([5], tf.float64), trainable=False)

    def attach(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Makes a dataset of the same batches that counts them as they are taken.

        The outermost step runs when a batch is asked for: it stamps the time, asks for the
        batch, and stamps the time again. The largest batch is counted from zero.
        """
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

    def read(self) -> InputReading:
        """Reads the totals since the meter was made."""
        batches, examples, largest, wait_s, shape = self._totals.numpy()
        return InputReading(int(batches), int(examples), int(largest), float(wait_s), float(shape))

    def _count(self, asked_s: tf.Tensor, batch: Any) -> Any:
        leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
        shapes = [_shape(leaf) for leaf in leaves]
        rows = tf.cast(shapes[0][0], tf.float64)
        with tf.control_dependencies(tf.nest.flatten(leaves, expand_composites=True)):
            waited_s = tf.timestamp() - asked_s
        batches, examples, largest, wait_s, _ = tf.unstack(self._totals)
        update = self._totals.assign(
            tf.stack(
                [
                    batches + 1,
                    examples + rows,
                    tf.maximum(largest, rows),
                    wait_s + waited_s,
                    _shape_number(shapes),
                ]
            )
        )
        with tf.control_dependencies([update]):
            return keras.tree.map_structure(
                lambda leaf: None if leaf is None else tf.identity(leaf), batch
            )


def _shape(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.bounding_shape(out_type=tf.int64)
    return tf.shape(leaf, out_type=tf.int64)


def _shape_number(shapes: list[tf.Tensor]) -> tf.Tensor:
    """Sums the lengths of all axes, each times a root of its own: equal for equal shapes."""
    lengths = tf.cast(tf.concat(shapes, axis=0), tf.float64)
    return tf.reduce_sum(
        lengths * tf.sqrt(tf.range(2.0, 2.0 + tf.cast(tf.size(lengths), tf.float64)))
    )
