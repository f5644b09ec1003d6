"""The nets that the benchmarks train, with data of their own."""

from typing import NamedTuple

import keras
import numpy as np
from sklearn.datasets import load_digits

layers = keras.layers


class Net(NamedTuple):
    """A net to train.

    Attributes:
        build: Builds it, uncompiled, under the global dtype policy.
        x: Inputs of one batch.
        y: Class labels of one batch.
        micro_batch_size: Examples in a micro-batch.
    """

    build: object
    x: np.ndarray
    y: np.ndarray
    micro_batch_size: int


def mlp():
    return keras.Sequential(
        [
            layers.Input((256,)),
            layers.Dense(512, activation="relu"),
            layers.Dense(512, activation="relu"),
            layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )


def resnet():
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for _ in range(3):
        y = layers.Activation("relu")(layers.GroupNormalization(4)(x))
        y = layers.Conv2D(16, 3, padding="same")(y)
        x = layers.Add()([x, y])
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax", dtype="float32")(x))


def transformer():
    inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(1000, 64)(inputs)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 16)(y, y)])
        y = layers.Dense(128, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(64)(y)])
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax", dtype="float32")(x))


def embedding_bag():
    inputs = keras.Input((32,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(20_000, 64)(inputs))
    x = layers.Dense(64, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax", dtype="float32")(x))


def nets() -> dict[str, Net]:
    """Makes each net with a batch of data."""
    rng = np.random.default_rng(0)

    def net(build, micro_batch_size, steps, *shape, tokens=0):
        count = micro_batch_size * steps
        x = rng.integers(0, tokens, (count, *shape)) if tokens else rng.normal(size=(count, *shape))
        x = x.astype("int32" if tokens else "float32")
        return Net(build, x, rng.integers(0, 10, count), micro_batch_size)

    return {
        "mlp": net(mlp, 64, 8, 256),
        "resnet": net(resnet, 16, 8, 16, 16, 3),
        "transformer": net(transformer, 16, 8, 32, tokens=1000),
        "embedding bag": net(embedding_bag, 64, 8, 32, tokens=20_000),
    }


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Loads 1,797 images of handwritten digits, shape (1797, 8, 8, 1) in [0, 1]."""
    found = load_digits()
    return found.images[..., None] / 16.0, found.target


def digits_cnn() -> keras.Model:
    """Makes a small convolutional net for the digits, compiled."""
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )
    optimizer = keras.optimizers.Adam(1e-3)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
