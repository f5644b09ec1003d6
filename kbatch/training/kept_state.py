"""The state of a model, kept while it is trained for a measurement."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# What `fit` and kbatch set on a model itself.
_ATTRIBUTES = ("train_step", "history", "stop_training")


class KeptState:
    """Weights, metrics, optimizer, seeds and train step of a model, as they are now.

    The optimizer is built first: what is kept is its state before the first update.

    Args:
        model: A built model, compiled if it is to be trained.
    """

    def __init__(self, model: keras.Model):
        self._model: Any = model
        found = [*model.variables, *self._model.metrics_variables]
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            if not optimizer.built:  # Built again, a loss scale would start anew.
                optimizer.build(model.trainable_variables)
            found += optimizer.variables
        self._variables = list({id(variable): variable for variable in found}.values())
        self._values = [
            np.array(tf.convert_to_tensor(variable.value)) for variable in self._variables
        ]
        self._attributes = {n: vars(model)[n] for n in _ATTRIBUTES if n in vars(model)}

    def restore(self) -> None:
        """Puts it back."""
        self._model.reset_metrics()  # Those that came since then were not kept.
        for variable, value in zip(self._variables, self._values, strict=True):
            variable.assign(value)
        for name in _ATTRIBUTES:
            vars(self._model).pop(name, None)
        for name, value in self._attributes.items():
            setattr(self._model, name, value)
        self._model.train_function = None


@contextlib.contextmanager
def kept_state(model: keras.Model) -> Iterator[None]:
    """Puts a built model back as it was."""
    state = KeptState(model)
    try:
        yield
    finally:
        state.restore()


@contextlib.contextmanager
def kept_variables(model: keras.Model) -> Iterator[None]:
    """Puts the variables of a model back as they were, for calls that do not train."""
    kept = [(one, np.array(tf.convert_to_tensor(one.value))) for one in model.variables]
    try:
        yield
    finally:
        for variable, value in kept:
            variable.assign(value)
