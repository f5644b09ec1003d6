"""Searches with optimizers of the user's own."""

import keras
import keras_tuner
import numpy as np
import pytest
import tensorflow as tf

import kbatch

TOKENS, TARGETS = np.arange(32).reshape(16, 2) % 8, np.arange(16) % 2 * 1.0


class Halved(keras.optimizers.SGD):
    """Halves gradients in `apply`, as rates by layer and clipping of one's own change them."""

    def apply(self, grads, trainable_variables=None):
        super().apply([tf.math.scalar_mul(0.5, g) for g in grads], trainable_variables)


def words():
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(8, 2, embeddings_initializer="ones"),
            keras.layers.Flatten(),
            keras.layers.Dense(1, kernel_initializer="ones", dtype="float32"),
        ]
    )
    model.compile(Halved(0.1), "mse")
    return model


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("micro_batch_size", [None, 4])
def test_an_apply_of_the_users_own_is_called_once_an_update(micro_batch_size, policy):
    plain = words()
    hypermodel = kbatch.BatchSizeHyperModel(
        words, (16,), micro_batch_size=micro_batch_size, dtype_policy=policy
    )
    model = hypermodel.build(keras_tuner.HyperParameters())
    for one in (plain, model):
        one.train_on_batch(TOKENS, TARGETS)
    moved = plain.get_weights()[-1]
    assert abs(moved).max() > 0.1
    np.testing.assert_allclose(model.get_weights()[-1], moved, rtol=1e-3)
