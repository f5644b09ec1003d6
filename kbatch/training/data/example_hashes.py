"""Fingerprints of examples, computed in the graph that reads them."""

from typing import Any

import tensorflow as tf

from kbatch.training.data.forms import each_part, is_composite, parts_of

# Odd numbers of 64 bits without pattern, and a shift: each bit of a number then changes about half
# of those of its product (Steele, Lea, Flood 2014, the finalizer of SplitMix64).
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_SHIFT = 31


class FirstBatch:
    """Takes a fingerprint of the first batch that is read, which tells one order from another."""

    def __init__(self):
        with tf.device("CPU:0"):
            self._found = tf.Variable(tf.zeros([2], tf.int64))  # Whether there is one, and it.

    def attach(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Make a dataset of the same batches whose first one is looked at as it is taken."""

        @tf.autograph.experimental.do_not_convert
        def see(*batch: Any) -> Any:
            def first() -> Any:
                hashes = example_hashes(parts_of(batch))
                places = tf.range(1, tf.shape(hashes, out_type=tf.int64)[0] + 1)
                return self._found.assign([1, tf.reduce_sum(mixed(hashes + mixed(places)))])

            seen = tf.cond(self._found[0] == 0, first, lambda: self._found.value())
            with tf.control_dependencies([seen]):
                taken = each_part(tf.identity, batch)
            return taken if len(taken) > 1 else taken[0]

        return dataset.map(see)

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint, None before the first batch."""
        seen, found = self._found.numpy().tolist()
        return f"{found % 2**64:x}" if seen else None


def example_hashes(parts: list[Any]) -> tf.Tensor:
    """Return a number of 64 bits for each example of a batch, whose parts have a row for each."""
    found: Any = tf.constant(0, tf.int64)
    for part in parts:
        numbers = _numbers(part)
        places = tf.range(1, tf.shape(numbers, out_type=tf.int64)[1] + 1)
        found = mixed(found + tf.reduce_sum(numbers * mixed(places), axis=1))
    return found


def mixed(numbers: Any) -> Any:
    """Return numbers of 64 bits that have no pattern in common with those given."""
    numbers *= _FACTORS[0]
    return tf.bitwise.bitwise_xor(numbers, tf.bitwise.right_shift(numbers, _SHIFT)) * _FACTORS[1]


def _numbers(part: Any) -> tf.Tensor:
    """Return a part of a batch as whole numbers, a row for each example."""
    if isinstance(part, tf.RaggedTensor):
        part = part.to_tensor()
    elif is_composite(part):
        part = tf.sparse.to_dense(part)
    if part.dtype == tf.string:
        part = tf.strings.to_hash_bucket_fast(part, 2**62)
    elif part.dtype.is_floating:
        part = tf.bitcast(tf.cast(part, tf.float32), tf.int32)
    return tf.reshape(tf.cast(part, tf.int64), [tf.shape(part)[0], -1])
