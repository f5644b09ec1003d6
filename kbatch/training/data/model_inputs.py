"""The inputs that a model declares, and how rows of data differ from them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.device.failures import failure_text
from kbatch.errors import InputError
from kbatch.training.data.forms import by_input, named_inputs
from kbatch.training.data.training_data import TrainingData


def declared_inputs(model: Any) -> Sequence[Any]:
    """Return the symbolic inputs of a model, none of one that does not declare them."""
    return getattr(model, "inputs", None) or ()


def ordered_rows(model: Any, rows: Any) -> list[Any]:
    """Return the arrays of rows in the order of the inputs that the model declares."""
    tensors, named = declared_inputs(model), named_inputs(model)
    if isinstance(rows, dict) and not named.keys() <= rows.keys():
        raise _other_inputs(sorted(named), f"x with {sorted(rows)}")
    leaves = by_input(rows, model)
    if len(leaves) != len(tensors):
        names = [tensor.name for tensor in tensors]
        raise _other_inputs(names, f"x with {len(leaves)} arrays")
    return leaves


def of_rank(leaf: np.ndarray, rank: int) -> np.ndarray:
    """Add a last axis of 1 to an array, or take it away, where its rank is off by one."""
    if leaf.ndim == rank - 1:
        return leaf[..., None]
    return leaf[..., 0] if leaf.ndim == rank + 1 else leaf


def _other_inputs(names: Sequence[str], received: str) -> InputError:
    return InputError(
        "`x` must hold an array for each of the model's inputs, nested as the model takes them: "
        f"{', '.join(names)}. Received: {received}."
    )


def alike(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    """Return whether Keras takes a shape for an expected one: a last axis of 1 comes and goes."""
    missing = len(expected) - len(shape)
    if missing == 1 and expected[-1] == 1:
        shape = (*shape, 1)
    elif missing == -1 and shape[-1] == 1:
        shape = shape[:-1]
    return len(shape) == len(expected) and all(
        size is None or size == there for size, there in zip(expected[1:], shape[1:], strict=True)
    )


_ONE_HOT = (
    "The loss {loss!r} takes the index of each label, and `y` has a value for each class: give "
    '`y.argmax(axis=-1)`, or compile with "categorical_crossentropy".'
)
_INDICES = (
    "The loss {loss!r} takes a value for each class, and `y` has one for each example: give "
    '`keras.utils.to_categorical(y)`, or compile with "sparse_categorical_crossentropy".'
)


def row_mismatch(model: Any, rows: Any) -> str | None:
    """Describe what to give in the place of rows that a model's train step refused."""
    x, y = (*rows, None)[:2] if isinstance(rows, tuple) else (rows, None)
    inputs = declared_inputs(model)
    try:
        leaves = ordered_rows(model, x) if inputs else []
    except InputError:
        leaves = []  # Keras names the input that is missing.
    for tensor, leaf in zip(inputs, leaves, strict=False):
        wanted, given = tuple(tensor.shape), tuple(leaf.shape)
        if not alike(given, wanted):
            return (
                f"`x` must have the shape that the model takes, {_shape(wanted[1:])}: reshape it, "
                f"or change the model's `keras.Input`. Received: x of shape {_shape(given[1:])}."
            )
    if not isinstance(y, np.ndarray):
        return None
    loss = keras.losses.get(model.loss) if isinstance(model.loss, str) else model.loss
    name = getattr(loss, "name", None) or getattr(loss, "__name__", None)
    received = f"Received: y of shape {_shape(y.shape[1:])} and dtype {y.dtype}."
    several = y.ndim > 1 and y.shape[-1] > 1
    # One-hot labels, or a share of every class.
    shares = several and bool(np.all(y >= 0) and np.allclose(y.sum(axis=-1), 1))
    if name == "sparse_categorical_crossentropy" and shares:
        return f"{_ONE_HOT.format(loss=name)} {received}"
    outputs = list(getattr(model, "outputs", None) or [])
    one_each = not several or (len(outputs) == 1 and y.ndim < len(outputs[0].shape))
    if name == "categorical_crossentropy" and one_each:
        return f"{_INDICES.format(loss=name)} {received}"
    return None


def _shape(features: tuple[int | None, ...]) -> str:
    return f"({', '.join(['examples', *map(str, features)])})"


# What TensorFlow raises of data; Keras raises a ValueError or TypeError, as a model's own code may.
_REFUSALS = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)


@contextlib.contextmanager
def refusals_told(model: Callable[[], keras.Model], data: TrainingData) -> Iterator[None]:
    """Turn what a train step says of data that it refuses into what to give instead."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, TypeError, *_REFUSALS) as error:
        told = _refusal_text(error, model, data)
        if told is None:
            raise
        raise InputError(told) from error


def _refusal_text(
    error: Exception, model: Callable[[], keras.Model], data: TrainingData
) -> str | None:
    if not data.is_function:
        built = model()
        known = data.some_rows(built)
        mismatch = known and row_mismatch(built, known.rows)
        if mismatch is not None:
            return mismatch
    if not isinstance(error, _REFUSALS):
        return None
    return (
        "A train step must run on the data: give inputs that the model takes, and targets that its "
        f"loss takes. Received: {failure_text(error)}"
    )
