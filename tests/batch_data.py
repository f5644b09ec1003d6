"""Data in batches, and steps that take them."""

import keras
import numpy as np
import small_models as models
import tensorflow as tf

from kbatch.training.data.forms import rows_of


class Rows(keras.utils.PyDataset):
    """Rows in batches. Counts how often `on_epoch_end` was called."""

    def __init__(self, rows=20, size=8, **settings):
        super().__init__(**settings)
        self.rows = models.rows(rows) if isinstance(rows, int) else rows
        self.size, self.epoch_ends = size, 0

    @property
    def num_batches(self):
        return -(-len(self.rows[0]) // self.size)

    def __getitem__(self, index):
        rows = slice(index * self.size, (index + 1) * self.size)
        return tuple(part[rows] for part in self.rows)

    def on_epoch_end(self):
        self.epoch_ends += 1


class Step:
    """A train step that does nothing but record the rows of its batches."""

    def __init__(self):
        self.rows, self.restored, self.waited = [], 0, 0

    def launch(self, batch):
        self.rows.append(rows_of(batch))

    __call__ = launch

    def wait(self):
        self.waited += 1

    def has_seen(self, batch):
        return rows_of(batch) in self.rows

    def restore(self):
        self.restored += 1


def examples(count=20):
    """A dataset of single examples (x, y)."""
    return tf.data.Dataset.from_tensor_slices(models.rows(count))


def raising(at=2):
    """A dataset of batches of 8 whose n-th raises an error."""

    def check(x, y):
        def look(index):
            if index == at:
                raise RuntimeError("a broken image")
            return np.int64(0)

        looked = tf.numpy_function(look, [tf.cast(x[0], tf.int64)], tf.int64)
        return tf.ensure_shape(tf.ones((8, 8)) + tf.cast(looked, tf.float32), (8, 8)), y

    numbers = tf.repeat(tf.range(6), 8)
    return (
        tf.data.Dataset.from_tensor_slices((numbers, tf.zeros(48, tf.int64)))
        .batch(8, drop_remainder=True)
        .map(check)
    )
