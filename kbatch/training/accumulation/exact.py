"""Update a model on a whole batch, in the memory of its micro-batches.

The train step, Keras's or the user's, runs on the whole batch, but each call of a layer or model
in it is computed in micro-batches. With f_k the outputs of micro-batch k and the loss
L(f_1, ..., f_K, w) that the step computes from them,

    dL/dw = sum_k (df_k/dw)^T dL/df_k + (dL/dw at fixed f)

First, the outputs of all micro-batches are computed without a tape. When the step takes a gradient
through a call, each micro-batch goes through the layer again, with the same random draws, and its
part of dL/df is propagated back to weights and inputs. Gao et al. (2021), arXiv:2101.06983, section
3.2. A loss that a layer adds is treated as an output: the loss of the batch is the mean over
micro-batches, weighted by rows.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch import library_internals as internals
from kbatch.training.accumulation import gradient_sum
from kbatch.training.accumulation.batch_norm import BatchNormUpdate
from kbatch.training.accumulation.gradient_sum import MicroBatches, cut
from kbatch.training.accumulation.output_losses import LossDenominators
from kbatch.training.data.forms import each_part, is_composite, open_spec, row_count
from kbatch.training.model import TrainStep, check_model, replica_count

# If two passes differ by more than this share of an output's largest value, their random draws
# differ. Rounding in half precision causes much smaller differences.
_SAME_UP_TO = 0.02
_UNREPEATABLE = (
    "`exact=True` sends each micro-batch through the model twice, and both passes must draw the "
    "same random numbers: use `keras.random` with a `keras.random.SeedGenerator` that the layer "
    "holds, or leave out `exact`. Received:"
)
_CHANGED_WEIGHTS = (
    "`exact=True` repeats a call when you compute its gradient, so the weights must not change in "
    "between: compute this gradient before an optimizer updates them. Received: a call of"
)
# The gradient of these gradients would be wrong: it would not include the second passes.
_SECOND_DERIVATIVE = (
    "`exact=True` supports first derivatives only: leave out `exact` if the loss contains "
    "gradients, such as a gradient penalty, or put `tf.stop_gradient` around gradients that are "
    "used as values. Received: the gradient of a gradient."
)
_NO_ROWS = (
    "With `exact=True`, the first axis of each layer's output must be the rows of the batch: "
    "move code that reduces or reshapes this axis to the loss. Received: an output of"
)


def check_exact(model: keras.Model, loss_denominator: LossDenominators, moments_every: int) -> None:
    if loss_denominator is not None or moments_every:
        raise ValueError(
            "`exact=True` computes the loss of the whole batch, not of micro-batches: leave out "
            "either `exact`, or both `loss_denominator` and `moments_every`. Received: "
            f"moments_every={moments_every}, loss_denominator={loss_denominator!r}."
        )
    if (replicas := replica_count(model)) > 1:
        raise ValueError(
            "`exact=True` requires one device, because the loss needs the outputs of all replicas: "
            "train without a strategy, or leave out `exact`. "
            f"Received: replicas={replicas}, model of class {type(model).__name__}."
        )


class ExactTrainStep(TrainStep):
    """The train step of `accumulate_gradients(..., exact=True)`.

    It computes each call of a layer in micro-batches, and once more for its gradient.
    """

    def __init__(self, model: keras.Model, accumulation: Any):
        super().__init__(model)
        self.accumulation = accumulation
        self._inside_call = False  # Whether a call of an outer layer is already cut.
        self._thread: int | None = None  # Only calls in the thread of the step are cut.

    def _update(self, data: Any) -> dict[str, Any]:
        check_model(self.model)
        self._thread = threading.get_ident()
        with internals.replaced_layer_calls(self._call):
            return super()._update(data)

    def _calling(self) -> contextlib.AbstractContextManager[None]:
        """Leave the calls of inner layers whole within a context."""
        return internals.replaced([(self, "_inside_call", True)])

    def _call(self, layer: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a layer, in micro-batches if its input has more rows than a micro-batch."""
        leaves = keras.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if _has_rows(leaf)]
        rows = {leaves[i].shape[0] for i in places}
        few = all(n is not None and n <= self.accumulation.micro_batch_size for n in rows)
        other_thread = threading.get_ident() != self._thread
        # If the first axes differ in length, it is unknown which of them are the rows.
        if other_thread or self._inside_call or few or len(rows) != 1:
            return plain(*args, **kwargs)
        with self._calling():
            return self._in_parts(_LayerCall(layer, plain, (args, kwargs), places))

    def _in_parts(self, call: "_LayerCall") -> Any:
        """Return the result of a layer for the whole batch."""
        layer, batch = call.layer, cut(call.inputs, self.accumulation.micro_batch_size)
        specs = call.traced(batch)  # This builds the layer.
        state = internals.state_variables(layer)
        before = _values_of(state)
        # Tapes must not store the first passes. In a graph they do not, because the gradient of the
        # loop is never taken.
        stopped = internals.stopped_tapes() if tf.executing_eagerly() else contextlib.nullcontext()
        with stopped, internals.watched_variables() as watcher:
            if not specs or not all(spec.shape[1:].is_fully_defined() for spec in specs):
                specs = call(batch.part(0, tf.minimum(batch.size, batch.rows)))
                _assign(state, before)
            outputs = self._first_passes(call, batch, specs)
        # Also include variables of other layers that this layer reads, even if they are frozen now.
        weights = gradient_sum.sources(layer.trainable_weights)
        if not tf.distribute.has_strategy():
            layer_values = {id(variable.value) for variable in layer.variables}
            weights += [v for v in watcher.watched_variables() if id(v) not in layer_values]
        first_weights = [tf.convert_to_tensor(weight) for weight in weights]

        def pulled_back(upstream: dict[int, tf.Tensor]) -> list[Any]:
            after = _values_of(state)
            _assign(state, before)
            pairs = zip(first_weights, weights, strict=True)
            same = [tf.reduce_all((a == b) | (a != a)) for a, b in pairs]  # NaN is not changed.
            tf.debugging.Assert(tf.reduce_all(same), [f"{_CHANGED_WEIGHTS} {call.name}."])
            # The second passes need no results of the first passes, so order them explicitly.
            with self._calling(), tf.control_dependencies(outputs):
                gradients = self._second_passes(call, batch, outputs, upstream, weights)
            _assign(state, after)
            return gradients

        sources = [*first_weights, *call.shared, *(batch.leaves[i] for i in call.watched)]
        return call.returned(_with_gradient(outputs, sources, pulled_back))

    def _first_passes(
        self, call: "_LayerCall", batch: MicroBatches, specs: list[Any]
    ) -> list[tf.Tensor]:
        """Compute the outputs of the whole batch, one micro-batch after the other."""
        norms = BatchNormUpdate(call.layer)

        def zeros(spec: Any) -> tf.Tensor:
            known = spec.shape[1:].is_fully_defined()
            inner = spec.shape[1:] if known else tf.shape(spec)[1:]
            return tf.zeros(tf.concat([[batch.rows], inner], axis=0), spec.dtype)

        def add(sums: tuple[tf.Tensor, list[Any], Any], parts: Any) -> Any:
            start, totals, statistics = sums
            rows = row_count(parts)
            with norms.observed():
                outputs = call(parts)
            totals = [_placed(*pair, start) for pair in zip(totals, outputs, strict=True)]
            share = tf.cast(rows, tf.float32) / tf.cast(batch.rows, tf.float32)
            return start + rows, totals, norms.add(statistics, share)

        sums = (tf.constant(0), [zeros(spec) for spec in specs], norms.init(call, batch.leaves))
        _, outputs, statistics = batch.fold(add, sums, fixed=self.model.jit_compile)
        norms.finalize(statistics)
        for output, spec in zip(outputs, specs, strict=True):
            output.set_shape([batch.known_rows, *spec.shape[1:]])
        return outputs

    def _second_passes(
        self,
        call: "_LayerCall",
        batch: MicroBatches,
        outputs: list[tf.Tensor],
        upstream: dict[int, tf.Tensor],
        weights: list[Any],
    ) -> list[Any]:
        """Propagate gradients back to weights and inputs, and check that outputs are the same."""
        summed = [*weights, *call.shared]
        connected = [False] * (len(summed) + len(call.watched))

        def add(sums: Any, part: Any) -> Any:
            start, totals, of_inputs, off = sums
            parts, expected, slices = part
            shared = [tf.identity(tensor) for tensor in call.shared]
            with tf.GradientTape() as tape:
                tape.watch([*shared, *(parts[i] for i in call.watched)])
                results = call(parts, shared)
            results = [results[i] for i in upstream]
            sources = [*weights, *shared, *(parts[i] for i in call.watched)]
            gradients: Any = tape.gradient(results, sources, output_gradients=slices)
            for place, gradient in enumerate(gradients):
                connected[place] |= gradient is not None
            for pair in zip(expected, results, strict=True):
                first, second = (tf.cast(result, tf.float32) for result in pair)
                largest = tf.reduce_max(tf.abs(first)) + 1e-6
                off = tf.maximum(off, tf.reduce_max(tf.abs(first - second)) / largest)
            pairs = zip(of_inputs, gradients[len(summed) :], strict=True)
            return (
                start + row_count(parts),
                gradient_sum.add(totals, gradients[: len(summed)]),
                [total if g is None else _placed(total, g, start) for total, g in pairs],
                off,
            )

        zeros = [tf.zeros_like(batch.leaves[i]) for i in call.watched]
        sums = (tf.constant(0), gradient_sum.init(summed), zeros, tf.zeros([]))
        leaves = (batch.leaves, [outputs[i] for i in upstream], list(upstream.values()))
        parts = batch._replace(leaves=leaves)
        _, totals, of_inputs, off = parts.fold(add, sums, fixed=self.model.jit_compile)
        same = tf.logical_not(off > _SAME_UP_TO)  # Also True for NaN, unlike `off <= ...`.
        text = f"outputs of {call.name} that differ, as a share of the largest, by"
        tf.debugging.Assert(same, [f"{_UNREPEATABLE} {text}", off])
        gradients = [*gradient_sum.finalize(totals, summed, connected[: len(summed)]), *of_inputs]
        return [g if known else None for g, known in zip(gradients, connected, strict=True)]


def _with_gradient(
    outputs: list[tf.Tensor],
    sources: list[Any],
    pulled_back: Callable[[dict[int, tf.Tensor]], list[Any]],
) -> list[tf.Tensor]:
    """Return outputs for which `pulled_back` computes the gradients of the sources."""
    floats = [i for i, output in enumerate(outputs) if _is_float(output)]
    reached: set[int] = set()

    def marked(i: int, output: tf.Tensor) -> Any:
        """Add an output to `reached` when a gradient passes through it."""

        def gradient(upstream: Any) -> Any:
            reached.add(i)
            return upstream

        return tf.custom_gradient(lambda tensor: (tf.identity(tensor), gradient))(output)

    @tf.custom_gradient
    def recomputed(*tensors: tf.Tensor) -> Any:
        def gradient(*upstream: Any) -> Any:
            pairs = zip(floats, upstream, strict=True)
            by_output = {i: tf.convert_to_tensor(g) for i, g in pairs if i in reached}
            reached.clear()
            message = _SECOND_DERIVATIVE
            of_sources = [
                g if g is None else tf.raw_ops.PreventGradient(input=g, message=message)
                for g in pulled_back(by_output)
            ]
            return [None] * len(floats) + of_sources

        return [tf.identity(tensor) for tensor in tensors[: len(floats)]], gradient

    if not floats or not sources:
        return outputs
    tensors = iter(recomputed(*(outputs[i] for i in floats), *sources))
    return [marked(i, next(tensors)) if i in floats else output for i, output in enumerate(outputs)]


class _LayerCall:
    """A call of a layer, as a function of some rows of its arguments and masks."""

    def __init__(self, layer: Any, plain: Any, arguments: Any, places: list[int]):
        self.layer, self._plain, self._arguments = layer, plain, arguments
        self.name = f"{layer.name} ({type(layer).__name__})"
        self._leaves, self._places = keras.tree.flatten(arguments), places
        for leaf in self._leaves:
            values = getattr(leaf, "flat_values", getattr(leaf, "values", None))
            if not isinstance(leaf, tf.Tensor) and _is_differentiable(values):
                raise ValueError(
                    "With `exact=True`, no layer may pass a ragged or sparse tensor to another: "
                    "make it dense, or write one custom layer that contains both layers. "
                    f"Received: a {type(leaf).__name__} that is passed to {self.name}."
                )
        self._masked = [i for i in places if internals.mask_of(self._leaves[i]) is not None]
        masks = (internals.mask_of(self._leaves[i]) for i in self._masked)
        self.inputs = [*(self._leaves[i] for i in places), *masks]
        self.watched = [i for i, tensor in enumerate(self.inputs) if _is_differentiable(tensor)]
        # Arguments that are the same for all rows, such as a temperature.
        others = (pair for pair in enumerate(self._leaves) if pair[0] not in places)
        self._shared = [i for i, leaf in others if _is_differentiable(leaf)]
        self.shared = [self._leaves[i] for i in self._shared]
        # The result of the last pass, the indices of its tensors and of tensors with a mask, and
        # whether each added loss is a scalar.
        self._last_result: tuple[Any, list[int], list[int], list[bool]] = (None, [], [], [])

    def __call__(self, parts: list[Any], shared: Sequence[Any] = ()) -> list[tf.Tensor]:
        """Call the layer on some rows. List the resulting tensors, their masks and added losses."""
        leaves = list(self._leaves)
        for i, tensor in zip(self._shared, shared, strict=False):
            leaves[i] = tensor
        for i, part in zip(self._places, parts, strict=False):
            leaves[i] = part
        for i, mask in zip(self._masked, parts[len(self._places) :], strict=True):
            internals.set_mask(leaves[i], mask)
        args, kwargs = keras.tree.pack_sequence_as(self._arguments, leaves)
        structure = self._plain(*args, **kwargs)
        leaves = keras.tree.flatten(structure)
        tensors = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf)]
        masks = {i: mask for i in tensors if (mask := internals.mask_of(leaves[i])) is not None}
        layers = internals.layers_of(self.layer)
        added = [loss for layer in layers for loss in internals.own_losses(layer)]
        scalar = [loss.shape.rank == 0 for loss in added]
        self._last_result = structure, tensors, list(masks), scalar
        rows, known = row_count(parts), parts[0].shape[0]
        outputs = [self._with_rows(leaves[i], rows, known) for i in tensors]
        # Repeat a scalar loss for each row, so that its mean is weighted by rows.
        losses = (tf.fill([rows], loss) if loss.shape.rank == 0 else loss for loss in added)
        return [*outputs, *masks.values(), *losses]

    def _with_rows(self, output: Any, rows: tf.Tensor, known: int | None) -> tf.Tensor:
        """Return an output after a check that it has the same number of rows as the input."""
        if is_composite(output):
            raise ValueError(f"{_NO_ROWS} {self.name} that is a {type(output).__name__}.")
        if output.shape.rank == 0 or output.shape[0] not in (None, known):
            raise ValueError(f"{_NO_ROWS} {self.name} with shape {output.shape}.")
        shape = tf.shape(output := tf.convert_to_tensor(output))
        received = [f"{_NO_ROWS} {self.name} with shape", shape, "for rows", rows]
        checked = tf.debugging.Assert(tf.equal(shape[0], rows), received)
        # XLA ignores assertions, but its reshape fails if the number of values changes.
        with tf.control_dependencies([] if checked is None else [checked]):
            result = tf.reshape(output, tf.concat([[rows], shape[1:]], 0))
        result.set_shape([None, *output.shape[1:]])
        return result

    def traced(self, batch: MicroBatches) -> list[Any]:
        """Trace the layer, and raise an error if it draws random numbers that do not repeat."""
        specs = each_part(open_spec, batch.leaves)
        trace = tf.function(self, autograph=False)
        if tf.executing_eagerly():
            if not self.layer.built:
                try:  # Trace it, because a call would change moving statistics.
                    trace.get_concrete_function(specs)
                except Exception:  # Some layers run only eagerly, and raise any error in a graph.
                    self(batch.part(0, 1))
            return []
        traced = trace.get_concrete_function(specs)
        graph: Any = traced.graph.as_graph_def()
        for node in (*graph.node, *(n for f in graph.library.function for n in f.node_def)):
            # TensorFlow's stateful draws are operations with two seeds, or of a
            # `tf.random.Generator`. Cudnn's recurrent layers have seeds only for their dropout,
            # which Keras does not use.
            stateful = "seed2" in node.attr and not node.op.startswith("Cudnn")
            if stateful or node.op.startswith("RngRead"):
                raise ValueError(f"{_UNREPEATABLE} {node.name} ({node.op}).")
        return traced.structured_outputs

    def returned(self, outputs: list[tf.Tensor]) -> Any:
        """Return the result of the layer for the whole batch, with its masks and added losses."""
        structure, tensors, masked, scalars = self._last_result
        leaves, remaining = keras.tree.flatten(structure), iter(outputs)
        for i in tensors:
            leaves[i] = next(remaining)
        for i in masked:
            internals.set_mask(leaves[i], next(remaining))
        added = zip(remaining, scalars, strict=True)
        losses = [tf.reduce_mean(loss) if mean else loss for loss, mean in added]
        internals.set_added(self.layer, losses)
        return keras.tree.pack_sequence_as(structure, leaves)


def _has_rows(value: Any) -> bool:
    tensor = tf.is_tensor(value) and not isinstance(value, tf.Variable)
    return isinstance(value, np.ndarray) or (tensor and bool(value.shape.rank))


def _is_float(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _is_differentiable(value: Any) -> bool:
    """Return whether a tape records this tensor."""
    return isinstance(value, tf.Tensor) and _is_float(value) and internals.is_recorded([value])


def _placed(total: tf.Tensor, rows: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
    places = tf.cast(start + tf.range(tf.shape(rows)[0]), tf.int64)[:, None]
    return tf.tensor_scatter_nd_update(total, places, tf.cast(rows, total.dtype))


def _values_of(variables: list[Any]) -> list[tf.Tensor]:
    # Copies, because the variables change while the loops run.
    return [tf.identity(tf.convert_to_tensor(variable.value)) for variable in variables]


def _assign(variables: list[Any], values: list[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
