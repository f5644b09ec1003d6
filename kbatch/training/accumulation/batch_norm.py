"""Update the moving statistics of BatchNormalization for an accumulated batch.

Each call of a layer has its own statistics. With the statistics of the entries so far (weight W,
mean, var) and of a micro-batch (weight w, mean_k, var_k), d = mean_k - mean and s = w / (W + w),
the statistics of both together are

    mean + d s        var + (var_k - var) s + d^2 s (1 - s)

Chan, Golub and LeVeque (1983), "Algorithms for computing the sample variance", equation 2.1. After
all micro-batches, these are the statistics of the whole batch. The moving statistics are then
updated as in Keras: once for each call, in the order of the calls.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kbatch.library_internals import batch_norm_axes, batch_norm_moments
from kbatch.training.data.forms import each_part, open_spec
from kbatch.training.model import batch_norms


class CallStatistics(NamedTuple):
    """Statistics of the entries so far in one call of a layer, each of shape (channels,)."""

    weight: tf.Tensor  # W, the number of entries that are not masked.
    mean: tf.Tensor
    variance: tf.Tensor


BatchStatistics = tuple[tuple[CallStatistics, ...], ...]


class BatchNormUpdate:
    """Updates the moving statistics of a model's BatchNormalization layers once per update."""

    def __init__(self, model: keras.Model):
        # The statistics of a layer with `renorm` cannot be combined, so Keras updates them.
        trained = (layer for layer in batch_norms(model) if layer.trainable)
        self._layers = [layer for layer in trained if not getattr(layer, "renorm", False)]
        self._before = [_moving(layer) for layer in self._layers]
        # For each layer, the statistics of its calls in the last pass. A list is empty if the calls
        # cannot be observed: within a loop or function in the model, or in a custom `call`.
        self._calls: list[list[Any]] = [[] for _ in self._layers]

    def init(self, forward: Callable[[Any], Any], inputs: Any) -> BatchStatistics:
        """Return statistics without entries for each call of each layer."""
        if not self._layers or tf.executing_eagerly():
            return ()

        def trace(inputs: Any) -> None:
            with self.observed():
                forward(inputs)

        # A loop must know its variables before it begins, so trace one pass to count the calls.
        specs = each_part(open_spec, inputs)
        tf.function(trace, autograph=False).get_concrete_function(specs)
        return tuple(
            tuple(_no_entries(layer) for _ in calls or [None])
            for layer, calls in zip(self._layers, self._calls, strict=True)
        )

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Collect the statistics of all calls in a pass, after resetting the moving statistics."""
        graph = tf.compat.v1.get_default_graph()
        self._calls = [[] for _ in self._layers]
        with contextlib.ExitStack() as stack:
            for layer, before, calls in zip(self._layers, self._before, self._calls, strict=True):
                _assign(layer, *before)
                collect = functools.partial(_collect, layer, calls, graph)
                stack.enter_context(batch_norm_moments(layer, collect))
            yield
        for calls in self._calls:
            if None in calls:
                calls.clear()

    def add(self, sums: BatchStatistics, rows: tf.Tensor) -> BatchStatistics:
        added = []
        for index, (layer, calls) in enumerate(zip(self._layers, self._calls, strict=True)):
            # If calls cannot be observed, average the moving statistics that Keras has updated.
            # This ignores the variance between micro-batches.
            moved = CallStatistics(tf.fill(layer.moving_mean.shape, rows), *_moving(layer))
            new = calls or [moved]
            totals = sums[index] if sums else [_no_entries(layer) for _ in new]
            pairs = zip(totals, new, strict=True)
            added.append(tuple(_joined(*pair, between=bool(calls)) for pair in pairs))
        return tuple(added)

    def finalize(self, sums: BatchStatistics) -> None:
        layers = zip(self._layers, self._before, self._calls, sums, strict=True)
        for layer, (mean, variance), calls, totals in layers:
            if not calls:
                mean, variance = totals[0].mean, totals[0].variance
            for call in totals if calls else ():
                mean = layer.momentum * mean + (1.0 - layer.momentum) * call.mean
                variance = layer.momentum * variance + (1.0 - layer.momentum) * call.variance
            _assign(layer, mean, variance)


def _collect(
    layer: Any, calls: list[Any], graph: Any, moments: Callable[..., Any], inputs: Any, mask: Any
) -> Any:
    """Compute the moments of a call, and append them to `calls`, or None in another graph."""
    mean, variance = moments(inputs, mask)
    if tf.compat.v1.get_default_graph() is not graph:
        calls.append(None)
        return mean, variance
    shape = layer.moving_mean.shape
    if mask is None:
        entries = tf.fill(shape, tf.cast(tf.size(inputs) // shape[0], tf.float32))
    else:
        valid = tf.broadcast_to(tf.expand_dims(tf.cast(mask, tf.float32), -1), tf.shape(inputs))
        entries = tf.reduce_sum(valid, batch_norm_axes(layer))
    flat = [tf.reshape(tf.cast(value, tf.float32), shape) for value in (mean, variance)]
    calls.append(CallStatistics(entries, *flat))
    return mean, variance


def _joined(total: CallStatistics, new: CallStatistics, *, between: bool) -> CallStatistics:
    together = total.weight + new.weight
    share = tf.math.divide_no_nan(new.weight, together)
    difference = new.mean - total.mean
    variance = total.variance + (new.variance - total.variance) * share
    if between:
        variance += difference**2 * share * (1.0 - share)
    return CallStatistics(together, total.mean + difference * share, variance)


def _no_entries(layer: Any) -> CallStatistics:
    return CallStatistics(*[tf.zeros(layer.moving_mean.shape)] * 3)


def _moving(layer: Any) -> tuple[tf.Tensor, tf.Tensor]:
    # Copies, because the variables change while the loop runs.
    mean, variance = (
        tf.cast(tf.identity(tf.convert_to_tensor(variable)), tf.float32)
        for variable in (layer.moving_mean, layer.moving_variance)
    )
    return mean, variance


def _assign(layer: Any, mean: tf.Tensor, variance: tf.Tensor) -> None:
    for variable, value in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        variable.assign(tf.cast(value, variable.dtype))
