"""Batches of arrays, shuffled anew in each epoch."""

from typing import Any

import keras
import tensorflow as tf


def array_batches(arrays: Any, *, batch_size: int, shuffle: bool, seed: int | None):
    """Makes a dataset of batches of nested arrays.

    Keras's own shuffling repeats one order in every epoch once a global seed is set; this one
    draws another each time the dataset is iterated.

    Args:
        arrays: Nested tensors of shape (examples, ...), None where a part is absent.
        batch_size: Examples in a batch; the last one may have fewer.
        shuffle: Whether to draw an order.
        seed: Seed of the orders, None for others in each run.

    Returns:
        A `tf.data.Dataset` of known length.
    """
    # tf.data would pack a list into one tensor.
    arrays = keras.tree.lists_to_tuples(arrays)
    examples = keras.tree.flatten(arrays)[0].shape[0]
    order = _orders(examples, seed) if shuffle else tf.data.Dataset.from_tensors(tf.range(examples))
    rows = order.flat_map(lambda o: tf.data.Dataset.from_tensor_slices(o).batch(batch_size))
    batches = rows.map(
        lambda indices: keras.tree.map_structure(
            lambda leaf: None if leaf is None else tf.gather(leaf, indices), arrays
        ),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    return batches.apply(tf.data.experimental.assert_cardinality(-(-examples // batch_size)))


def _orders(examples: int, seed: int | None) -> tf.data.Dataset:
    """Makes a dataset of one permutation, another one each time it is iterated."""
    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).take(1)
    return seeds.map(lambda s: tf.argsort(tf.random.stateless_uniform([examples], seed=(s, 0))))
