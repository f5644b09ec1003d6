"""Models and data whose batches of some hundred or thousand examples fill 100 MB."""

import keras
import numpy as np

layers = keras.layers

MB = 10**6


def conv_net(width=16, optimizer="adam", *, normalized=False, jit_compile="auto"):
    model = keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.Conv2D(width, 3, padding="same", activation="relu"),
            layers.Conv2D(width, 3, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            *([layers.BatchNormalization()] if normalized else []),
            layers.Dense(3, activation="softmax", dtype="float32"),
        ]
    )
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile)
    return model


def images(count, *, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 32, 32, 3)).astype("float32"), rng.integers(0, 3, count)


WIDTH = 4096


def wide_net():
    """Build a classifier with inputs (rows, 8) and 16 kB of activations for each example."""
    model = keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(WIDTH, activation="relu"),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
    return model
