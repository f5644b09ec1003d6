"""Moving statistics of BatchNormalization over an accumulated batch.

Statistics of rows seen so far (weight W, mean, sum of squares Q) and of a micro-batch (weight w,
mean_k, var_k) join, with d = mean_k - mean, to

    mean + d w / (W + w)        Q + w var_k + d^2 W w / (W + w)

Chan, Golub and LeVeque (1983), "Algorithms for computing the sample variance", equation 2.1. At
the end W is 1, Q the variance of the whole batch, and the moving statistics advance once.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf


class BatchStatistics(NamedTuple):
    """Statistics of the rows so far for one layer.

    Attributes:
        weight: W, their share of the batch.
        mean: Of shape (channels,).
        squares: Q, of shape (channels,).
    """

    weight: tf.Tensor
    mean: tf.Tensor
    squares: tf.Tensor


class BatchNormUpdate:
    """Advances the moving statistics of all BatchNormalization layers once an update."""

    def __init__(self, model: keras.Model):
        self._layers: list[Any] = [
            layer
            for layer in model._flatten_layers(include_self=False)
            if isinstance(layer, keras.layers.BatchNormalization) and _advances_once(layer)
        ]
        self._before = [_moving(layer) for layer in self._layers]

    def init(self) -> tuple[BatchStatistics, ...]:
        """Starts with no rows for each layer."""
        return tuple(
            BatchStatistics(tf.zeros([]), tf.zeros_like(mean), tf.zeros_like(variance))
            for mean, variance in self._before
        )

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
            _joined(total, rows_share, *new) for total, new in zip(sums, found, strict=True)
        )

    def finalize(self, sums: tuple[BatchStatistics, ...]) -> None:
        """Writes the moving statistics."""
        for layer, before, total in zip(self._layers, self._before, sums, strict=True):
            batch = (total.mean, total.squares)
            variables = (layer.moving_mean, layer.moving_variance)
            for variable, old, new in zip(variables, before, batch, strict=True):
                moved = layer.momentum * old + (1.0 - layer.momentum) * new
                variable.assign(tf.cast(moved, variable.dtype))


def _joined(
    total: BatchStatistics, weight: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
) -> BatchStatistics:
    together = total.weight + weight
    difference = mean - total.mean
    between = difference**2 * (total.weight * weight / together)
    return BatchStatistics(
        together,
        total.mean + difference * (weight / together),
        total.squares + weight * variance + between,
    )


def _advances_once(layer: Any) -> bool:
    """Tells whether one call of the layer leaves the statistics of its batch behind.

    One that is called several times in a forward pass, or renormalises, keeps to Keras's way.
    """
    once = len(layer._inbound_nodes) <= 1
    return layer.trainable and once and not getattr(layer, "renorm", False)


def _moving(layer: Any) -> tuple[tf.Tensor, tf.Tensor]:
    # A copy: the variable changes while the loop runs.
    mean, variance = (
        tf.cast(tf.identity(tf.convert_to_tensor(variable)), tf.float32)
        for variable in (layer.moving_mean, layer.moving_variance)
    )
    return mean, variance
