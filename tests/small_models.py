"""Small models and data that the tests train on."""

import threading

import keras
import numpy as np

layers = keras.layers


def rows(count, *, seed=0, features=8, classes=3):
    """Random inputs of shape (count, features) and class labels of shape (count,)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, features)).astype("float32")
    return x, rng.integers(0, classes, count)


def compiled(model, *arguments, **named):
    """Compile a model, or one of these layers, and return it."""
    model = keras.Sequential(model) if isinstance(model, list) else model
    model.compile(*arguments, **named)
    return model


def mlp(*, inner=(), optimizer="adam", **compile_arguments):
    """A compiled classifier of (rows, 8) into 3 classes, with layers between its own two."""
    model = keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(16, activation="relu"),
            *inner,
            layers.Dense(3, activation="softmax", dtype="float32"),
        ]
    )
    arguments = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    model.compile(optimizer, **(arguments | compile_arguments))
    return model


def own_loss(y, probabilities):
    """A loss of the user's own."""
    return keras.losses.sparse_categorical_crossentropy(y, probabilities)


def stock(*, optimizer="sgd"):
    """A classifier of one layer with weights and that loss, which is built and traced faster."""
    parts = [layers.Input((8,)), layers.Dense(3), layers.Softmax(dtype="float32")]
    return compiled(parts, optimizer, own_loss, metrics=["accuracy"])


def normalised(**compile_arguments):
    """One whose statistics move and which draws."""
    inner = layers.BatchNormalization(), layers.Dropout(0.3)
    return mlp(inner=inner, **compile_arguments)


def state_of(model):
    """The values of all that changes when a model trains; those of metrics are built late."""
    variables = *model.variables, *model.optimizer.variables, *model.metrics_variables
    return [np.array(variable.value) for variable in variables]


def linear(**compile_arguments):
    """A classifier of one layer, whose step is traced in a third of the time of the others."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled([layers.Input((8,)), layers.Dense(3)], "sgd", loss, **compile_arguments)


class Locked:
    """A build function that cannot be sent: its memory is measured in this process."""

    def __init__(self, build=mlp):
        self._lock = threading.Lock()
        self._build = build

    def __call__(self):
        with self._lock:
            return self._build()


class TokenLoss(keras.losses.Loss):
    """A scalar that is divided by a mask of its own, as in named-entity recognition."""

    def call(self, y_true, y_pred):
        mask = keras.ops.cast(y_true > 0, "float32")
        values = keras.losses.sparse_categorical_crossentropy(y_true, y_pred)
        return keras.ops.sum(values * mask) / keras.ops.sum(mask)
