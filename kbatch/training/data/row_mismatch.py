"""In what rows of data do not suit a model, found where a train step refused them."""

from typing import Any

import keras
import numpy as np

from kbatch.errors import InputError
from kbatch.training.data.model_inputs import alike, declared_inputs, ordered_rows

_ONE_HOT = (
    "The loss {loss!r} takes the index of each label, and `y` has a value for each class: give "
    '`y.argmax(axis=-1)`, or compile with "categorical_crossentropy".'
)
_INDICES = (
    "The loss {loss!r} takes a value for each class, and `y` has one for each example: give "
    '`keras.utils.to_categorical(y)`, or compile with "sparse_categorical_crossentropy".'
)


def row_mismatch(model: keras.Model, rows: Any) -> str | None:
    """Says what to give in the place of rows that a model's train step refused.

    Args:
        model: A compiled model.
        rows: Inputs, targets and perhaps sample weights, nested arrays of shape (rows, ...).

    Returns:
        What does not fit, in sentences that end with what was received; None where that is not
        told by the shapes.
    """
    x, y = (*rows, None)[:2] if isinstance(rows, tuple) else (rows, None)
    return _of_inputs(model, x) or _of_targets(model, y)


def _of_inputs(model: Any, x: Any) -> str | None:
    try:
        leaves = ordered_rows(model, x) if declared_inputs(model) else []
    except InputError:
        return None  # Keras names the input that is missing.
    for tensor, leaf in zip(declared_inputs(model), leaves, strict=False):
        wanted, given = tuple(tensor.shape), tuple(leaf.shape)
        if not alike(given, wanted):
            return (
                f"`x` must have the shape that the model takes, {_shape(wanted[1:])}: reshape it, "
                f"or change the model's `keras.Input`. Received: x of shape {_shape(given[1:])}."
            )
    return None


def _of_targets(model: Any, y: Any) -> str | None:
    if not isinstance(y, np.ndarray):
        return None
    given = f"Received: y of shape {_shape(y.shape[1:])} and dtype {y.dtype}."
    name, outputs = _loss_name(model.loss), list(getattr(model, "outputs", None) or [])
    rank = len(outputs[0].shape) if len(outputs) == 1 else None
    if name == "sparse_categorical_crossentropy" and _has_classes(y):
        return f"{_ONE_HOT.format(loss=name)} {given}"
    one_each = y.ndim == 1 or y.shape[-1] == 1 or (rank is not None and y.ndim < rank)
    if name == "categorical_crossentropy" and one_each:
        return f"{_INDICES.format(loss=name)} {given}"
    return None


def _has_classes(y: np.ndarray) -> bool:
    """Tells whether each example has a share of every class, as one-hot labels do."""
    several = y.ndim > 1 and y.shape[-1] > 1
    return several and bool(np.all(y >= 0) and np.allclose(y.sum(axis=-1), 1))


def _loss_name(loss: Any) -> str | None:
    """Gives the name of a model's only loss, None where it has several."""
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    return getattr(loss, "name", None) or getattr(loss, "__name__", None)


def _shape(features: tuple[int | None, ...]) -> str:
    return f"({', '.join(['examples', *map(str, features)])})"
