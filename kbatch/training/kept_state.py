"""The state of a model, kept while it is trained for a measurement."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np


@contextlib.contextmanager
def kept_state(model: keras.Model) -> Iterator[None]:
    """Puts weights, optimizer, metrics and train step back as they were.

    The optimizer is built first: what is put back is its state before the first update.

    Args:
        model: A compiled and built model.
    """
    target: Any = model
    target.optimizer.build(model.trainable_variables)
    variables = _variables(target)
    values = [np.array(variable.value) for variable in variables]
    step = vars(target).get("train_step")
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        if step is None:
            vars(target).pop("train_step", None)
        else:
            target.train_step = step
        target.train_function = None
        target.reset_metrics()


def _variables(model: Any) -> list[Any]:
    found = [*model.variables, *model.optimizer.variables]
    return list({id(variable): variable for variable in found}.values())
