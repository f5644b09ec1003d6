"""An update whose loss looks at the whole batch, in the memory of its micro-batches.

With f_k the outputs of micro-batch k and L(f_1, ..., f_K, w) the loss of the batch,

    dL/dw = sum_k (df_k/dw)^T dL/df_k + (dL/dw at fixed f)

The outputs of all micro-batches come first, without a tape; then L and dL/df on the whole batch;
then each micro-batch goes through again, with the same random draws, and its part of dL/df is
pulled back. Gao et al. (2021), arXiv:2101.06983, section 3.2. A loss that a layer adds is an output
too: that of the batch is the mean over micro-batches, weighed by rows.
"""

from typing import Any

import keras
import tensorflow as tf

from kbatch.device.memory import DeviceMemory, available_bytes
from kbatch.library_internals import (
    compute_loss,
    forward,
    mask_of,
    overridden_losses,
    set_mask,
    state_variables,
)
from kbatch.training.accumulation import gradient_sum
from kbatch.training.accumulation.gradient_sum import MicroBatches
from kbatch.training.accumulation.output_losses import LossDenominators
from kbatch.training.accumulation.train_step import AccumulatingTrainStep, Sums, Update
from kbatch.training.data.forms import each_part
from kbatch.training.model import user_step

# Of the largest value of an output: far above rounding in half precision, and far below what other
# draws change.
_SAME_UP_TO = 0.02
_UNREPEATABLE = (
    "`exact=True` sends each micro-batch through the model twice, and random draws must be the "
    "same both times: draw by `keras.random` with a `keras.random.SeedGenerator` that the layer "
    "holds, or leave `exact` out."
)
_TOO_LARGE = (
    "`exact=True` needs three times the memory of the outputs of the whole batch: use a smaller "
    "batch, or let the model return fewer values per row. Received:"
)


class ExactUpdate(Update):
    """One optimizer update by the loss of the whole batch."""

    # The predictions in their structure and which of them have a mask, from the latest pass.
    _like: tuple[Any, list[bool]] = (None, [])

    def accumulate(self) -> Sums:
        """Run all micro-batches twice, with the loss of the batch in between."""
        model, batch = self.model, self.batch
        x, y, sample_weight = batch.leaves
        specs = self._output_specs()
        state = state_variables(model)
        before = _values_of(state)
        outputs = self._first_passes(specs, state, before)
        loss, upstream, direct = self._gradients_of_loss(outputs)
        # What the loss itself draws or writes, the next update goes on from.
        after = _values_of(state)
        _assign(state, before)
        # Nothing else orders the two: the second may not need what the first found.
        with tf.control_dependencies(outputs):
            gradients, statistics = self._second_passes(outputs, upstream, direct)
        _assign(state, after)
        y_pred, _ = self._unpacked(outputs)
        self._measured_batch = (x, y, y_pred, sample_weight)
        return Sums(gradients, loss, (), tf.zeros([]), statistics)

    def apply(self, sums: Sums) -> None:
        """Apply the gradients, and measure the whole batch: metrics that look at it are exact."""
        super().apply(sums)
        x, y, y_pred, sample_weight = self._measured_batch
        self.model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def _outputs(self, x: Any) -> list[tf.Tensor]:
        """List what the model computes from rows: predictions, their masks, added losses."""
        y_pred = forward(self.model, x, training=True)
        leaves = keras.tree.flatten(y_pred)
        masks = [mask_of(leaf) for leaf in leaves]
        self._like = y_pred, [mask is not None for mask in masks]
        found = [*leaves, *(mask for mask in masks if mask is not None), *self.model.losses]
        return [tf.convert_to_tensor(one) for one in found]

    def _unpacked(self, outputs: list[tf.Tensor]) -> tuple[Any, list[tf.Tensor]]:
        """Return predictions with their masks, and the added losses."""
        like, masked = self._like
        leaves, rest = outputs[: len(masked)], iter(outputs[len(masked) :])
        for leaf, has_mask in zip(leaves, masked, strict=True):
            if has_mask:
                set_mask(leaf, next(rest))
        return keras.tree.pack_sequence_as(like, leaves), list(rest)

    def _output_specs(self) -> list[Any]:
        """Trace what the model computes from rows, and look for draws that nothing repeats."""
        x = self.batch.leaves[0]
        if tf.executing_eagerly():
            return []
        specs = each_part(lambda one: tf.TensorSpec([None, *one.shape[1:]], one.dtype), x)
        traced = tf.function(self._outputs, autograph=False).get_concrete_function(specs)
        graph: Any = traced.graph.as_graph_def()
        for node in (*graph.node, *(n for f in graph.library.function for n in f.node_def)):
            # TensorFlow's generators: one an operation, with two seeds, or `tf.random.Generator`.
            # Those of recurrent layers on a GPU draw nothing, for Keras gives them no dropout.
            own = "seed2" in node.attr and not node.op.startswith("Cudnn")
            if own or node.op.startswith("RngRead"):
                raise ValueError(f"{_UNREPEATABLE} Received: {node.name} ({node.op}).")
        return traced.structured_outputs

    def _first_passes(
        self, specs: list[Any], state: list[Any], before: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Compute the outputs of the whole batch."""
        batch = self.batch
        if not specs or not all(one.shape[1:].is_fully_defined() for one in specs):
            specs = self._outputs(batch.part(0, tf.minimum(batch.size, batch.rows))[0])
            _assign(state, before)

        def nothing(one: Any) -> tf.Tensor:
            if one.shape.rank == 0:
                return tf.zeros([], tf.float64)
            known = one.shape[1:].is_fully_defined()
            inner = one.shape[1:] if known else tf.shape(one)[1:]
            return tf.zeros(tf.concat([[batch.rows], inner], axis=0), one.dtype)

        def add(sums: tuple[tf.Tensor, list[Any]], micro_batch: Any) -> Any:
            start, totals = sums
            rows = gradient_sum.row_count(micro_batch)
            places = tf.cast(start + tf.range(rows), tf.int64)[:, None]
            share = tf.cast(rows, tf.float64) / tf.cast(batch.rows, tf.float64)
            found = [
                total + share * tf.cast(one, tf.float64)
                if one.shape.rank == 0
                else tf.tensor_scatter_nd_update(total, places, one)
                for total, one in zip(totals, self._outputs(micro_batch[0]), strict=True)
            ]
            return start + rows, found

        def values(one: Any) -> Any:
            return one.shape[1:].num_elements() or tf.reduce_prod(tf.shape(one, tf.int64)[1:])

        # Three: the outputs, their gradient, and what the loss makes of them.
        row_bytes = 3 * sum(one.dtype.size * values(one) for one in specs if one.shape.rank)
        rows = batch.known_rows or tf.cast(batch.rows, tf.int64)
        needed, limit = rows * row_bytes, DeviceMemory().limit_bytes or available_bytes()
        if isinstance(needed, int) and needed > limit:
            raise ValueError(f"{_TOO_LARGE} needed_bytes={needed}, limit_bytes={limit}.")
        received = [_TOO_LARGE, "needed_bytes", needed, "limit_bytes", limit]
        fits = tf.debugging.Assert(needed <= limit, received)
        with tf.control_dependencies([] if fits is None else [fits]):
            zeros = [nothing(one) for one in specs]
            _, found = batch.fold(add, (tf.constant(0), zeros), fixed=self.model.jit_compile)
        for one, spec in zip(found, specs, strict=True):
            if spec.shape.rank:
                one.set_shape([batch.known_rows, *spec.shape[1:]])
        return [tf.cast(one, spec.dtype) for one, spec in zip(found, specs, strict=True)]

    def _gradients_of_loss(self, outputs: list[tf.Tensor]) -> tuple[tf.Tensor, list[Any], Any]:
        """Return the loss of the batch, and its scaled gradients by outputs and by weights."""
        model = self.model
        x, y, sample_weight = self.batch.leaves
        with tf.GradientTape() as tape:
            tape.watch([one for one in outputs if one.dtype.is_floating])
            y_pred, added = self._unpacked(outputs)
            with overridden_losses(model, added):
                loss = compute_loss(model, x, y, y_pred, sample_weight)
            scaled_loss = model.optimizer.scale_loss(loss)
        found: Any = tape.gradient(scaled_loss, (outputs, model.trainable_weights))
        upstream, direct = found
        return loss, [None if g is None else tf.convert_to_tensor(g) for g in upstream], direct

    def _second_passes(
        self, outputs: list[tf.Tensor], upstream: list[Any], direct: list[Any]
    ) -> tuple[Any, Any]:
        """Pull the gradients of the outputs back to the weights, and see that outputs repeat."""
        model, batch = self.model, self.batch
        reached = [i for i, gradient in enumerate(upstream) if gradient is not None]
        of_rows = [i for i in reached if outputs[i].shape.rank != 0]
        self._connected = [gradient is not None for gradient in direct]
        x = batch.leaves[0]

        def add(sums: tuple[Any, Any, tf.Tensor], part: Any) -> Any:
            totals, statistics, off = sums
            x, expected, slices = part
            rows = gradient_sum.row_count(x)
            share = tf.cast(rows, tf.float32) / tf.cast(batch.rows, tf.float32)
            with tf.GradientTape() as tape, self.batch_norm.observed():
                found = self._outputs(x)
            given = {i: tf.cast(share, upstream[i].dtype) * upstream[i] for i in reached}
            given |= dict(zip(of_rows, slices, strict=True))
            gradients: Any = tape.gradient(
                [found[i] for i in reached],
                model.trainable_weights,
                output_gradients=[given[i] for i in reached],
            )
            self._connected = [
                known or gradient is not None
                for known, gradient in zip(self._connected, gradients, strict=True)
            ]
            for i, first in zip(of_rows, expected, strict=True):
                off = tf.maximum(off, _difference(first, found[i]))
            return (
                gradient_sum.add(totals, gradients),
                self.batch_norm.add(statistics, share),
                off,
            )

        zeros = gradient_sum.init(model.trainable_weights)
        statistics = self.batch_norm.init(lambda x: forward(model, x, training=True), x)
        sums = (gradient_sum.add(zeros, direct), statistics, tf.zeros([]))
        leaves = (x, [outputs[i] for i in of_rows], [upstream[i] for i in of_rows])
        parts = batch._replace(leaves=leaves)
        gradients, statistics, off = parts.fold(add, sums, fixed=model.jit_compile)
        # Not the contrary: what is not finite differs from itself.
        same = tf.logical_not(off > _SAME_UP_TO)
        text = "Received: outputs of one micro-batch that differ, as a share of the largest, by"
        tf.debugging.Assert(same, [f"{_UNREPEATABLE} {text}", off])
        return gradients, statistics


class ExactTrainStep(AccumulatingTrainStep):
    """The train step behind `accumulate_gradients(..., exact=True)`."""

    exact = True

    def __init__(
        self,
        model: keras.Model,
        size: int,
        *,
        loss_denominator: LossDenominators,
        moments_every: int,
        batch_norm_once: bool,
    ):
        if loss_denominator is not None:
            raise ValueError(
                "The exact mode takes the loss of the whole batch as it is: leave out "
                "`loss_denominator` or `exact`. Received: exact=True with a `loss_denominator`."
            )
        if moments_every:
            raise ValueError(
                "The noise scale takes a gradient of each micro-batch by itself, which a loss over "
                "the whole batch does not have: leave out `moments_every` or `exact`. "
                f"Received: exact=True, moments_every={moments_every}."
            )
        replicas = model.distribute_strategy.num_replicas_in_sync
        if replicas > 1:
            raise ValueError(
                "`exact=True` needs one device, because replicas do not exchange the outputs that "
                "the loss relates: train without a strategy, or leave out `exact`. "
                f"Received: exact=True, replicas={replicas}."
            )
        if user_step(model) is not None:
            raise ValueError(
                "`exact=True` needs Keras's own `train_step`, to compute all outputs before the "
                "loss: move the loss of your `train_step` into `compute_loss`, or leave out "
                f"`exact`. Received: exact=True, model of class {type(model).__name__}."
            )
        super().__init__(
            model, size, loss_denominator=None, moments_every=0, batch_norm_once=batch_norm_once
        )

    def _new_update(self, batch: MicroBatches, measured: tf.Tensor | bool) -> ExactUpdate:
        return ExactUpdate(self.model, batch, self.batch_norm_once, measured)


def _difference(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    first, second = tf.cast(first, tf.float32), tf.cast(second, tf.float32)
    largest = tf.reduce_max(tf.abs(first)) + 1e-6
    return tf.reduce_max(tf.abs(first - second)) / largest


def _values_of(variables: list[Any]) -> list[tf.Tensor]:
    # Copies: the variables change while the loops run.
    return [tf.identity(tf.convert_to_tensor(one.value)) for one in variables]


def _assign(variables: list[Any], values: list[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
