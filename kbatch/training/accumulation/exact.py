"""An update of the whole batch, in the memory of its micro-batches.

The step runs on the whole batch, as Keras wrote it or the user did, but each call of a layer or
model from that step goes through in micro-batches. With f_k the outputs of micro-batch k and
L(f_1, ..., f_K, w) what the step makes of them,

    dL/dw = sum_k (df_k/dw)^T dL/df_k + (dL/dw at fixed f)

The outputs of all micro-batches come first, without a tape. Where the step takes a gradient through
a call, each micro-batch goes through again, with the same random draws, and its part of dL/df is
pulled back to weights and inputs. Gao et al. (2021), arXiv:2101.06983, section 3.2. A loss that a
layer adds is an output too: that of the batch is the mean over micro-batches, weighed by rows.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.library_internals import (
    added_by,
    is_recorded,
    layers_of,
    mask_of,
    replaced,
    replaced_layer_calls,
    set_added,
    set_mask,
    state_variables,
    stopped_tapes,
    watched_variables,
)
from kbatch.training.accumulation import gradient_sum
from kbatch.training.accumulation.batch_norm import BatchNormUpdate
from kbatch.training.accumulation.gradient_sum import MicroBatches, cut
from kbatch.training.accumulation.output_losses import LossDenominators
from kbatch.training.data.forms import each_part, is_composite, open_spec, row_count
from kbatch.training.model import TrainStep, check_model, replica_count

# Of the largest value of an output: far above rounding in half precision, and far below what other
# draws change.
_SAME_UP_TO = 0.02
_UNREPEATABLE = (
    "`exact=True` sends each micro-batch through the model twice, and random draws must be the "
    "same both times: draw by `keras.random` with a `keras.random.SeedGenerator` that the layer "
    "holds, or leave `exact` out. Received:"
)
_MOVED = (
    "`exact=True` computes a call again where its gradient is taken, so weights must not change in "
    "between: take the gradient before an optimizer applies another one. Received: a call of"
)
# A gradient of these gradients would lack the second passes.
_ONCE = (
    "`exact=True` takes first derivatives only: leave out `exact` where a loss is made of "
    "gradients, such as a gradient penalty, or put `tf.stop_gradient` around those that are used "
    "as values. Received: the gradient of a gradient."
)
_NO_ROWS = (
    "`exact=True` needs outputs with an axis of rows: let the layer return values a row, and "
    "reduce or reshape them in the loss. Received: an output of"
)


def check_exact(model: keras.Model, loss_denominator: LossDenominators, moments_every: int) -> None:
    if loss_denominator is not None or moments_every:
        raise ValueError(
            "`exact=True` takes the loss of the whole batch as it is, and no micro-batch has one "
            "by itself: leave out `loss_denominator` and `moments_every`, or `exact`. Received: "
            f"moments_every={moments_every}, loss_denominator={loss_denominator!r}."
        )
    if (replicas := replica_count(model)) > 1:
        raise ValueError(
            "`exact=True` needs one device, because replicas do not exchange the outputs that a "
            "loss relates: train without a strategy, or leave out `exact`. "
            f"Received: replicas={replicas}, model of class {type(model).__name__}."
        )


class ExactTrainStep(TrainStep):
    """The train step behind `accumulate_gradients(..., exact=True)`.

    It sends the calls of layers through in micro-batches, and again for their gradients.
    """

    def __init__(self, model: keras.Model, how: Any):
        super().__init__(model)
        self.how = how  # An `Accumulation`.
        self._within = False  # A call that is cut: those of layers in it are not.
        self._thread: int | None = None  # That of the step: others may read data meanwhile.

    def _update(self, data: Any) -> dict[str, Any]:
        check_model(self.model)
        self._thread = threading.get_ident()
        with replaced_layer_calls(self._call):
            return super()._update(data)

    def _leaving(self) -> contextlib.AbstractContextManager[None]:
        """Leave calls as they are."""
        return replaced([(self, "_within", True)])

    def _call(self, layer: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a layer, in micro-batches if it gets more rows than one has."""
        leaves = keras.tree.flatten((args, kwargs))
        places = [i for i, one in enumerate(leaves) if _has_rows(one)]
        rows = {leaves[i].shape[0] for i in places}
        few = all(n is not None and n <= self.how.micro_batch_size for n in rows)
        # Where first axes differ, any of them may be that of the rows.
        elsewhere = threading.get_ident() != self._thread
        if elsewhere or self._within or few or len(rows) != 1:
            return plain(*args, **kwargs)
        with self._leaving():
            return self._in_parts(_LayerCall(layer, plain, (args, kwargs), places))

    def _in_parts(self, call: "_LayerCall") -> Any:
        """Return what a layer returns for the whole batch."""
        layer, batch = call.layer, cut(call.inputs, self.how.micro_batch_size)
        specs = call.traced(batch)
        state = state_variables(layer)  # What there is once the layer is built.
        before = _values_of(state)
        # In a graph a tape keeps nothing of a loop whose gradient is not taken.
        stopped = stopped_tapes() if tf.executing_eagerly() else contextlib.nullcontext()
        with stopped, watched_variables() as watcher:
            if not specs or not all(one.shape[1:].is_fully_defined() for one in specs):
                specs = call(batch.part(0, tf.minimum(batch.size, batch.rows)))
                _assign(state, before)
            outputs = self._first_passes(call, batch, specs)
        # Also those of other layers that it reads. What is frozen now may not be so later.
        weights = gradient_sum.sources(layer.trainable_weights)
        if not tf.distribute.has_strategy():
            own = {id(one.value) for one in layer.variables}
            weights += [one for one in watcher.watched_variables() if id(one) not in own]
        at_first = [tf.convert_to_tensor(one) for one in weights]

        def pulled_back(upstream: dict[int, tf.Tensor]) -> list[Any]:
            after = _values_of(state)
            _assign(state, before)
            # One that is NaN differs from itself.
            pairs = zip(at_first, weights, strict=True)
            same = [tf.reduce_all((a == b) | (a != a)) for a, b in pairs]
            tf.debugging.Assert(tf.reduce_all(same), [f"{_MOVED} {call.name}."])
            # Nothing else orders the two: the second may not need what the first found.
            with self._leaving(), tf.control_dependencies(outputs):
                found = self._second_passes(call, batch, outputs, upstream, weights)
            _assign(state, after)
            return found

        sources = [*at_first, *call.shared, *(batch.leaves[i] for i in call.watched)]
        return call.returned(_with_gradient(outputs, sources, pulled_back))

    def _first_passes(
        self, call: "_LayerCall", batch: MicroBatches, specs: list[Any]
    ) -> list[tf.Tensor]:
        """Compute the outputs of the whole batch."""

        def nothing(one: Any) -> tf.Tensor:
            known = one.shape[1:].is_fully_defined()
            inner = one.shape[1:] if known else tf.shape(one)[1:]
            return tf.zeros(tf.concat([[batch.rows], inner], axis=0), one.dtype)

        norms = BatchNormUpdate(call.layer)

        def add(sums: tuple[tf.Tensor, list[Any], Any], parts: Any) -> Any:
            start, totals, statistics = sums
            rows = row_count(parts)
            with norms.observed():
                outputs = call(parts)
            found = [_placed(*pair, start) for pair in zip(totals, outputs, strict=True)]
            share = tf.cast(rows, tf.float32) / tf.cast(batch.rows, tf.float32)
            return start + rows, found, norms.add(statistics, share)

        statistics = norms.init(call, batch.leaves)
        sums = (tf.constant(0), [nothing(one) for one in specs], statistics)
        _, found, statistics = batch.fold(add, sums, fixed=self.model.jit_compile)
        norms.finalize(statistics)
        for one, spec in zip(found, specs, strict=True):
            one.set_shape([batch.known_rows, *spec.shape[1:]])
        return found

    def _second_passes(
        self,
        call: "_LayerCall",
        batch: MicroBatches,
        outputs: list[tf.Tensor],
        upstream: dict[int, tf.Tensor],
        weights: list[Any],
    ) -> list[Any]:
        """Pull the gradients of outputs back to weights and inputs, and see that outputs repeat."""
        kinds = [*weights, *call.shared]
        connected = [False] * (len(kinds) + len(call.watched))

        def add(sums: Any, part: Any) -> Any:
            start, totals, of_inputs, off = sums
            parts, expected, slices = part
            shared = [tf.identity(one) for one in call.shared]
            with tf.GradientTape() as tape:
                tape.watch([*shared, *(parts[i] for i in call.watched)])
                found = call(parts, shared)
            found = [found[i] for i in upstream]
            sources = [*weights, *shared, *(parts[i] for i in call.watched)]
            gradients: Any = tape.gradient(found, sources, output_gradients=slices)
            connected[:] = [
                known or one is not None for known, one in zip(connected, gradients, strict=True)
            ]
            for pair in zip(expected, found, strict=True):
                first, second = (tf.cast(one, tf.float32) for one in pair)
                largest = tf.reduce_max(tf.abs(first)) + 1e-6
                off = tf.maximum(off, tf.reduce_max(tf.abs(first - second)) / largest)
            pulled = zip(of_inputs, gradients[len(kinds) :], strict=True)
            return (
                start + row_count(parts),
                gradient_sum.add(totals, gradients[: len(kinds)]),
                [total if one is None else _placed(total, one, start) for total, one in pulled],
                off,
            )

        zeros = [tf.zeros_like(batch.leaves[i]) for i in call.watched]
        sums = (tf.constant(0), gradient_sum.init(kinds), zeros, tf.zeros([]))
        leaves = (batch.leaves, [outputs[i] for i in upstream], list(upstream.values()))
        parts = batch._replace(leaves=leaves)
        _, totals, of_inputs, off = parts.fold(add, sums, fixed=self.model.jit_compile)
        # Not the contrary: what is not finite differs from itself.
        same = tf.logical_not(off > _SAME_UP_TO)
        text = f"outputs of {call.name} that differ, as a share of the largest, by"
        tf.debugging.Assert(same, [f"{_UNREPEATABLE} {text}", off])
        found = [*gradient_sum.finalize(totals, kinds, connected[: len(kinds)]), *of_inputs]
        return [one if known else None for one, known in zip(found, connected, strict=True)]


def _with_gradient(
    outputs: list[tf.Tensor],
    sources: list[Any],
    pulled_back: Callable[[dict[int, tf.Tensor]], list[Any]],
) -> list[tf.Tensor]:
    """Return outputs whose gradients, by place, are pulled back to those of the sources."""
    floats = [i for i, one in enumerate(outputs) if _is_float(one)]
    reached: set[int] = set()

    def marked(i: int, output: tf.Tensor) -> Any:
        """Note whether what the step takes a gradient of depends on an output."""

        def gradient(upstream: Any) -> Any:
            reached.add(i)
            return upstream

        return tf.custom_gradient(lambda one: (tf.identity(one), gradient))(output)

    @tf.custom_gradient
    def recomputed(*tensors: tf.Tensor) -> Any:
        def gradient(*upstream: Any) -> Any:
            pairs = zip(floats, upstream, strict=True)
            given = {i: tf.convert_to_tensor(one) for i, one in pairs if i in reached}
            reached.clear()
            found = [
                one if one is None else tf.raw_ops.PreventGradient(input=one, message=_ONCE)
                for one in pulled_back(given)
            ]
            return [None] * len(floats) + found

        return [tf.identity(one) for one in tensors[: len(floats)]], gradient

    if not floats or not sources:
        return outputs
    found = iter(recomputed(*(outputs[i] for i in floats), *sources))
    return [marked(i, next(found)) if i in floats else one for i, one in enumerate(outputs)]


class _LayerCall:
    """A call of a layer as a function of rows: from arguments and masks to what it returns."""

    def __init__(self, layer: Any, plain: Any, arguments: Any, places: list[int]):
        self.layer, self._plain, self._arguments = layer, plain, arguments
        self.name = f"{layer.name} ({type(layer).__name__})"
        self._leaves, self._places = keras.tree.flatten(arguments), places
        for one in self._leaves:
            values = getattr(one, "flat_values", getattr(one, "values", None))
            if not isinstance(one, tf.Tensor) and _is_differentiable(values):
                raise ValueError(
                    "`exact=True` takes ragged and sparse inputs, but no gradient by such values: "
                    "make them dense before the layer, or call both from one layer. "
                    f"Received: a {type(one).__name__} for {self.name}."
                )
        self._masked = [i for i in places if mask_of(self._leaves[i]) is not None]
        masks = (mask_of(self._leaves[i]) for i in self._masked)
        self.inputs = [*(self._leaves[i] for i in places), *masks]
        self.watched = [i for i, one in enumerate(self.inputs) if _is_differentiable(one)]
        # What is the same for all rows, such as a temperature.
        others = (pair for pair in enumerate(self._leaves) if pair[0] not in places)
        self._shared = [i for i, one in others if _is_differentiable(one)]
        self.shared = [self._leaves[i] for i in self._shared]
        # What the layer returned in the latest pass, which of its leaves are tensors and which
        # have masks, and which added losses are scalars.
        self._like: tuple[Any, list[int], list[int], list[bool]] = (None, [], [], [])

    def __call__(self, parts: list[Any], shared: Sequence[Any] = ()) -> list[tf.Tensor]:
        """List what the layer computes from rows: tensors, their masks, added losses."""
        leaves = list(self._leaves)
        for i, one in zip(self._shared, shared, strict=False):
            leaves[i] = one
        for i, part in zip(self._places, parts, strict=False):
            leaves[i] = part
        for i, mask in zip(self._masked, parts[len(self._places) :], strict=True):
            set_mask(leaves[i], mask)
        args, kwargs = keras.tree.pack_sequence_as(self._arguments, leaves)
        structure = self._plain(*args, **kwargs)
        leaves = keras.tree.flatten(structure)
        tensors = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf)]
        masks = {i: mask for i in tensors if (mask := mask_of(leaves[i])) is not None}
        added = [loss for one in layers_of(self.layer) for loss in added_by(one)]
        self._like = structure, tensors, list(masks), [loss.shape.rank == 0 for loss in added]
        rows, known = row_count(parts), parts[0].shape[0]
        found = [self._with_rows(leaves[i], rows, known) for i in tensors]
        # A scalar counts by rows: each of them has it.
        spread = (tf.fill([rows], one) if one.shape.rank == 0 else one for one in added)
        return [*found, *masks.values(), *spread]

    def _with_rows(self, output: Any, rows: tf.Tensor, known: int | None) -> tf.Tensor:
        """Check that an output has as many rows as there are."""
        if is_composite(output):
            raise ValueError(f"{_NO_ROWS} {self.name} that is a {type(output).__name__}.")
        if output.shape.rank == 0 or output.shape[0] not in (None, known):
            raise ValueError(f"{_NO_ROWS} {self.name} with shape {output.shape}.")
        shape = tf.shape(output := tf.convert_to_tensor(output))
        received = [f"{_NO_ROWS} {self.name} with shape", shape, "for rows", rows]
        checked = tf.debugging.Assert(tf.equal(shape[0], rows), received)
        # XLA has no assertions, but reshapes nothing to another number of values.
        with tf.control_dependencies([] if checked is None else [checked]):
            found = tf.reshape(output, tf.concat([[rows], shape[1:]], 0))
        found.set_shape([None, *output.shape[1:]])
        return found

    def traced(self, batch: MicroBatches) -> list[Any]:
        """Trace what the layer computes from rows, and look for draws that nothing repeats."""
        specs = each_part(open_spec, batch.leaves)
        trace = tf.function(self, autograph=False)
        if tf.executing_eagerly():
            if not self.layer.built:
                try:  # A call would move statistics.
                    trace.get_concrete_function(specs)
                except Exception:  # Of whatever kind: some layers run eagerly only.
                    self(batch.part(0, 1))
            return []
        traced = trace.get_concrete_function(specs)
        graph: Any = traced.graph.as_graph_def()
        for node in (*graph.node, *(n for f in graph.library.function for n in f.node_def)):
            # TensorFlow's generators: one an operation, with two seeds, or `tf.random.Generator`.
            # Those of recurrent layers on a GPU draw nothing, for Keras gives them no dropout.
            own = "seed2" in node.attr and not node.op.startswith("Cudnn")
            if own or node.op.startswith("RngRead"):
                raise ValueError(f"{_UNREPEATABLE} {node.name} ({node.op}).")
        return traced.structured_outputs

    def returned(self, outputs: list[tf.Tensor]) -> Any:
        """Make what the layer returns for the whole batch, with its masks and added losses."""
        structure, tensors, masked, scalars = self._like
        leaves, rest = keras.tree.flatten(structure), iter(outputs)
        for i in tensors:
            leaves[i] = next(rest)
        for i in masked:
            set_mask(leaves[i], next(rest))
        added = zip(rest, scalars, strict=True)
        set_added(self.layer, [tf.reduce_mean(one) if mean else one for one, mean in added])
        return keras.tree.pack_sequence_as(structure, leaves)


def _has_rows(one: Any) -> bool:
    tensor = tf.is_tensor(one) and not isinstance(one, tf.Variable)
    return isinstance(one, np.ndarray) or (tensor and bool(one.shape.rank))


def _is_float(one: tf.Tensor) -> bool:
    return one.dtype.is_floating or one.dtype.is_complex


def _is_differentiable(one: Any) -> bool:
    """Return whether a tape follows a tensor: variables are seen where they are read."""
    return isinstance(one, tf.Tensor) and _is_float(one) and is_recorded([one])


def _placed(total: tf.Tensor, rows: tf.Tensor, start: tf.Tensor) -> tf.Tensor:
    places = tf.cast(start + tf.range(tf.shape(rows)[0]), tf.int64)[:, None]
    return tf.tensor_scatter_nd_update(total, places, tf.cast(rows, total.dtype))


def _values_of(variables: list[Any]) -> list[tf.Tensor]:
    # Copies: the variables change while the loops run.
    return [tf.identity(tf.convert_to_tensor(one.value)) for one in variables]


def _assign(variables: list[Any], values: list[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
