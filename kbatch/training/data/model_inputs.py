"""The inputs that a model declares, and rows in their order."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from kbatch.errors import InputError


def declared_inputs(model: Any) -> Sequence[Any]:
    """Gives the symbolic inputs of a model, none of one that does not declare them."""
    return getattr(model, "inputs", None) or ()


def ordered_rows(model: Any, rows: Any) -> list[Any]:
    """Gives the arrays of rows in the order of the inputs that the model declares.

    Args:
        model: A model that declares its inputs.
        rows: Nested arrays; in a dict they go by the names of the inputs.

    Raises:
        InputError: If there are more or fewer than inputs, or other names.
    """
    tensors = declared_inputs(model)
    structure: Any = getattr(model, "_inputs_struct", None)
    leaves = keras.tree.flatten(rows)
    if isinstance(rows, dict):
        named = structure if isinstance(structure, dict) else {t.name: t for t in tensors}
        if set(rows) >= set(named):
            leaves = keras.tree.flatten({name: rows[name] for name in named})
            if named is not structure:  # A dict is flattened by its keys in order.
                leaves = [rows[tensor.name] for tensor in tensors]
        else:
            raise _other_inputs(sorted(named), f"x with {sorted(rows)}")
    if len(leaves) != len(tensors):
        names = [tensor.name for tensor in tensors]
        raise _other_inputs(names, f"x with {len(leaves)} arrays")
    return leaves


def of_rank(leaf: np.ndarray, rank: int) -> np.ndarray:
    """Adds a last axis of 1 to an array, or takes it away, where its rank is off by one."""
    if leaf.ndim == rank - 1:
        return leaf[..., None]
    return leaf[..., 0] if leaf.ndim == rank + 1 else leaf


def _other_inputs(names: Sequence[str], received: str) -> InputError:
    return InputError(
        "`x` must hold an array for each of the model's inputs, nested as the model takes them: "
        f"{', '.join(names)}. Received: {received}."
    )


def alike(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    """Tells whether Keras takes a shape for an expected one: a last axis of 1 comes and goes.

    Args:
        shape: A shape with the examples on the first axis.
        expected: The same, None where an axis may have any length.
    """
    missing = len(expected) - len(shape)
    if missing == 1 and expected[-1] == 1:
        shape = (*shape, 1)
    elif missing == -1 and shape[-1] == 1:
        shape = shape[:-1]
    return len(shape) == len(expected) and all(
        size is None or size == there for size, there in zip(expected[1:], shape[1:], strict=True)
    )
