"""The sum of gradients over micro-batches: init, add, finalize."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_HALF = ("float16", "bfloat16")


def init(variables: Sequence[Any]) -> tuple[tf.Tensor, ...]:
    """Makes a zero for each variable, in float32 where the variable has half precision."""
    return tuple(tf.zeros(v.shape, _sum_dtype(v)) for v in variables)


def add(sums: Sequence[tf.Tensor], gradients: Sequence[Any]) -> tuple[tf.Tensor, ...]:
    """Adds the gradients of one micro-batch; a None gradient leaves its sum as it is."""
    return tuple(_add(s, g) for s, g in zip(sums, gradients, strict=True))


def joined(first: Sequence[Any], second: Sequence[Any]) -> tuple[Any, ...]:
    """Adds the gradients of two micro-batches, sparse ones by listing the rows of both."""
    return tuple(_joined(a, b) for a, b in zip(first, second, strict=True))


def finalize(
    sums: Sequence[tf.Tensor], variables: Sequence[Any], connected: Sequence[bool]
) -> list[tf.Tensor | None]:
    """Gives the optimizer its gradients, None for a variable that the loss does not reach."""
    return [
        tf.cast(s, v.dtype) if reached else None
        for s, v, reached in zip(sums, variables, connected, strict=True)
    ]


def _joined(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, tf.IndexedSlices) and isinstance(second, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([first.values, second.values], axis=0),
            tf.concat([first.indices, second.indices], axis=0),
            first.dense_shape,
        )
    return tf.convert_to_tensor(first) + tf.convert_to_tensor(second)


def _sum_dtype(variable: Any) -> str:
    return "float32" if variable.dtype in _HALF else variable.dtype


def _add(total: tf.Tensor, gradient: Any) -> tf.Tensor:
    if gradient is None:
        return total
    if isinstance(gradient, tf.IndexedSlices):
        # Only the rows that were looked up move; a dense copy of an embedding costs more. Slices
        # of int32 are made on the host beside a GPU, those of int64 are not.
        indices = tf.cast(gradient.indices, tf.int64)[:, None]
        return tf.tensor_scatter_nd_add(total, indices, tf.cast(gradient.values, total.dtype))
    # A gradient of unknown shape would be broadcast along an axis of length 1.
    return total + tf.ensure_shape(tf.cast(gradient, total.dtype), total.shape)
