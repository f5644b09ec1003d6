"""Sizes of a search train a model of words by one rule, whole or in parts."""

import keras
import keras_tuner
import numpy as np
import searches

RNG = np.random.default_rng(0)
TOKENS = np.minimum(RNG.zipf(1.3, (64, 12)), 40) - 1
LABELS = RNG.integers(0, 3, 64)


def build():
    layers = [
        keras.layers.Input((12,), dtype="int32"),
        keras.layers.Embedding(40, 4),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(3, activation="softmax", dtype="float32"),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.RMSprop(0.05), "sparse_categorical_crossentropy")
    return model


def trained(micro_batch_size):
    """How three updates move the embedding."""
    hypermodel = searches.hypermodel(
        build, (64,), micro_batch_size=micro_batch_size, dtype_policy="float32"
    )
    hp = keras_tuner.HyperParameters()
    model = hypermodel.build(hp)
    before = np.asarray(model.trainable_variables[0])
    for _ in range(3):
        model.train_on_batch(TOKENS, LABELS)
    return np.asarray(model.trainable_variables[0]) - before


def test_an_embedding_trains_equally_whole_and_in_parts():
    whole, parts = trained(None), trained(16)
    assert np.linalg.norm(whole - parts) <= 1e-5 * np.linalg.norm(whole)
