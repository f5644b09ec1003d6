"""Fingerprints of examples, computed in the graph that reads them."""

from typing import Any

import tensorflow as tf

from kbatch.training.data.forms import is_composite

# Odd numbers of 64 bits without pattern, and a shift: each bit of a number then changes about half
# of those of its product (Steele, Lea, Flood 2014, the finalizer of SplitMix64).
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_SHIFT = 31


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
