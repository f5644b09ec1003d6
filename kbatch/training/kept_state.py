"""The state of a model, kept while it is trained for a measurement."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np


class KeptState:
    """Weights, optimizer, seeds and train step of a model, as they are now.

    The optimizer is built first: what is kept is its state before the first update.

    Args:
        model: A built model; one that is not compiled has no optimizer to keep.
    """

    def __init__(self, model: keras.Model):
        self._model: Any = model
        found = list(self._model.variables)
        if getattr(model, "optimizer", None) is not None:
            self._model.optimizer.build(model.trainable_variables)
            found += self._model.optimizer.variables
        self._variables = list({id(variable): variable for variable in found}.values())
        self._values = [np.array(variable.value) for variable in self._variables]
        self._step = vars(model).get("train_step")

    def restore(self) -> None:
        """Puts it back."""
        for variable, value in zip(self._variables, self._values, strict=True):
            variable.assign(value)
        if self._step is None:
            vars(self._model).pop("train_step", None)
        else:
            self._model.train_step = self._step
        self._model.train_function = None
        self._model.reset_metrics()


@contextlib.contextmanager
def kept_state(model: keras.Model) -> Iterator[None]:
    """Puts a built model back as it was."""
    state = KeptState(model)
    try:
        yield
    finally:
        state.restore()
