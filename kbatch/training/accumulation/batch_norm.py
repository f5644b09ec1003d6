"""Moving statistics of BatchNormalization over an accumulated batch.

With w_k the share of the rows, mean_k and var_k the statistics of micro-batch k:

    mean = sum_k w_k mean_k        var = sum_k w_k (var_k + mean_k^2) - mean^2

are those of the whole batch, and the moving statistics advance by them once an update.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf


class BatchStatistics(NamedTuple):
    """Sums over micro-batches for one layer, each of shape (channels,).

    Attributes:
        mean: Sum of w_k mean_k.
        square: Sum of w_k (var_k + mean_k^2).
    """

    mean: tf.Tensor
    square: tf.Tensor


class BatchNormUpdate:
    """Advances the moving statistics of all BatchNormalization layers once an update."""

    def __init__(self, model: keras.Model):
        self._layers: list[Any] = [
            layer
            for layer in model._flatten_layers(include_self=False)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        ]
        self._before = [_moving(layer) for layer in self._layers]

    def init(self) -> tuple[BatchStatistics, ...]:
        """Makes a zero for each layer."""
        zeros = [[tf.zeros_like(value) for value in values] for values in self._before]
        return tuple(BatchStatistics(*values) for values in zeros)

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Lets a forward pass leave its batch's own statistics in the moving ones."""
        momenta = [layer.momentum for layer in self._layers]
        for layer in self._layers:
            layer.momentum = 0.0
        try:
            yield
        finally:
            for layer, momentum in zip(self._layers, momenta, strict=True):
                layer.momentum = momentum

    def add(
        self, sums: tuple[BatchStatistics, ...], rows_share: tf.Tensor
    ) -> tuple[BatchStatistics, ...]:
        """Adds the statistics that an observed forward pass left."""
        found = [_moving(layer) for layer in self._layers]
        return tuple(
            BatchStatistics(
                total.mean + rows_share * mean, total.square + rows_share * (var + mean**2)
            )
            for total, (mean, var) in zip(sums, found, strict=True)
        )

    def finalize(self, sums: tuple[BatchStatistics, ...]) -> None:
        """Writes the moving statistics."""
        for layer, before, total in zip(self._layers, self._before, sums, strict=True):
            batch = (total.mean, total.square - total.mean**2)
            variables = (layer.moving_mean, layer.moving_variance)
            for variable, old, new in zip(variables, before, batch, strict=True):
                variable.assign(layer.momentum * old + (1.0 - layer.momentum) * new)


def _moving(layer: Any) -> tuple[tf.Tensor, tf.Tensor]:
    # A copy: the variable changes while the loop runs.
    return tuple(
        tf.identity(tf.convert_to_tensor(variable))
        for variable in (layer.moving_mean, layer.moving_variance)
    )
