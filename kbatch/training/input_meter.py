"""Examples and waiting time, counted inside the input pipeline."""

from typing import NamedTuple

import keras
import tensorflow as tf


class InputReading(NamedTuple):
    """What a model has received so far.

    Attributes:
        batches: Batches delivered, one for each optimizer update.
        examples: Examples in them.
        largest_batch: Examples in the largest of them.
        wait_s: Seconds between the request for a batch and its arrival, in all.
    """

    batches: int
    examples: int
    largest_batch: int
    wait_s: float


class InputMeter:
    """Counts in the graph what really reaches the train step.

    A `batch_size` argument says nothing about a dataset, which brings its own.
    """

    def __init__(self):
        with tf.device("CPU:0"):
            self._totals = tf.Variable(tf.zeros([4], tf.float64), trainable=False)

    def attach(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Makes a dataset of the same batches that counts them as they are taken.

        The outermost step runs when a batch is asked for: it stamps the time, asks for the
        batch, and stamps the time again.
        """
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
        batches, examples, largest, wait_s = self._totals.numpy()
        return InputReading(int(batches), int(examples), int(largest), float(wait_s))

    def _count(self, asked_s: tf.Tensor, batch):
        leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
        rows = tf.cast(tf.shape(leaves[0])[0], tf.float64)
        with tf.control_dependencies(leaves):
            waited_s = tf.timestamp() - asked_s
        largest = tf.maximum(self._totals[2], rows)
        update = self._totals.assign(
            [self._totals[0] + 1, self._totals[1] + rows, largest, self._totals[3] + waited_s]
        )
        with tf.control_dependencies([update]):
            return keras.tree.map_structure(
                lambda leaf: None if leaf is None else tf.identity(leaf), batch
            )
