"""A train step that accumulates the gradient over micro-batches.

One `tf.while_loop` over the micro-batches, then one `apply_gradients`: the optimizer, its
schedule, its moving averages and its loss scale see one large batch.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kbatch.training.accumulation import gradient_sum, output_losses
from kbatch.training.accumulation.batch_norm import BatchNormUpdate, BatchStatistics
from kbatch.training.accumulation.micro_batches import MicroBatches, cut
from kbatch.training.accumulation.moments import MomentMeans, squared_norm
from kbatch.training.symbolic_build import build_symbolically
from kbatch.training.trainable_model import check_model


class Part(NamedTuple):
    """What one micro-batch adds to an update.

    Attributes:
        gradients: Of its part of the scaled loss, None where the loss does not reach a variable.
        loss: Its part of the loss of the batch.
        output_losses: The same of each output.
        rows_share: Its rows over those of the batch.
    """

    gradients: Any
    loss: tf.Tensor
    output_losses: tuple[tf.Tensor, ...]
    rows_share: tf.Tensor


class Sums(NamedTuple):
    """What an update is made of: sums over its micro-batches so far."""

    gradients: tuple[Any, ...]
    loss: tf.Tensor
    output_losses: tuple[tf.Tensor, ...]
    micro_sq_norm: tf.Tensor
    batch_statistics: tuple[BatchStatistics, ...]


class AccumulatingTrainStep:
    """The custom `tf.GradientTape` train step behind `accumulate_gradients`.

    Attributes:
        micro_batch_size: Examples that go through the device at once.
        varying_size: A variable that has them instead, where they change from step to step.
        moments_every: Every how many updates the moments are measured, 0 for never.
        batch_norm_once: Whether moving statistics advance once an update.
    """

    def __init__(
        self,
        model: keras.Model,
        micro_batch_size: int,
        *,
        moments_every: int,
        batch_norm_once: bool,
    ):
        self.micro_batch_size = micro_batch_size
        self.varying_size: tf.Variable | None = None
        self._model = model
        self.moments_every = moments_every
        self._moments = MomentMeans(moments_every) if moments_every else None
        self.batch_norm_once = batch_norm_once

    def run(self, data: Any) -> dict[str, Any]:
        """Makes one optimizer update from one batch, as `keras.Model.train_step` does.

        Args:
            data: Inputs, targets and sample weights, each nested tensors of shape (rows, ...).

        Returns:
            The metrics, by name.
        """
        model = self._model
        # It may have been compiled again, or frozen, since accumulation was turned on.
        check_model(model)
        size = self.micro_batch_size if self.varying_size is None else self.varying_size
        batch = cut(keras.utils.unpack_x_y_sample_weight(data), size)
        build_variables(model, batch)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if self._moments is None or replicas > 1:
            update = Update(model, batch, self.batch_norm_once, measured=None)
            update.apply(update.accumulate())
            return model.get_metrics_result()
        anew, scale = before_update(model)
        measured = self._moments.is_due(anew)
        update = Update(model, batch, self.batch_norm_once, measured)
        sums = update.accumulate()
        update.apply(sums)
        micro = tf.where(measured, sums.micro_sq_norm, float("nan"))
        whole = tf.cond(measured, lambda: squared_norm(sums.gradients), lambda: tf.zeros([]))
        norms = (micro / scale**2, whole / scale**2)
        moments = self._moments.update(*norms, batch.rows, batch.count, anew)
        return model.get_metrics_result() | moments


class Update:
    """One optimizer update: init, one `add` a micro-batch, apply.

    Args:
        model: The model.
        batch: Its batch.
        batch_norm_once: Whether batch statistics advance once.
        measured: Whether to measure the micro-gradients, a boolean tensor; None for never.
    """

    def __init__(
        self,
        model: keras.Model,
        batch: MicroBatches,
        batch_norm_once: bool,
        measured: tf.Tensor | None,
    ):
        self._model = model
        self._batch = batch
        self._measured = measured
        self._batch_norm = BatchNormUpdate(model) if batch_norm_once else None
        self._totals = self._denominators()
        # Which variables the loss reaches; known once a micro-batch has been traced.
        self._connected = [False] * len(model.trainable_weights)

    def accumulate(self) -> Sums:
        """Runs all micro-batches, one after the other: that is what saves the memory."""
        batch = self._batch
        # XLA wants one size in the loop, and compiles it also where it never runs: a size that is
        # in the batch. The rest, if there is one, follows the loop.
        fixed = self._model.jit_compile

        end = batch.full * batch.size if fixed else batch.rows

        def add(start: tf.Tensor, sums: Sums) -> tuple[tf.Tensor, Sums]:
            rest = batch.rows if fixed else batch.rows - start
            size = tf.minimum(batch.size, rest)
            return start + batch.size, self._add(sums, batch.part(start, size))

        _, sums = tf.while_loop(
            lambda start, _: start < end, add, (tf.constant(0), self._init()), parallel_iterations=1
        )
        return self._add_rest(sums, batch.rows - end) if fixed else sums

    def _add_rest(self, sums: Sums, rest: tf.Tensor) -> Sums:
        # XLA compiles the branch also where there is no rest, but not for zero rows.
        size = tf.maximum(rest, 1)
        part = functools.partial(self._batch.part, self._batch.rows - size, size)
        return tf.cond(rest > 0, lambda: self._add(sums, part()), lambda: sums)

    def apply(self, sums: Sums) -> None:
        """Applies the gradients once and writes the statistics and losses of the batch."""
        model = self._model
        variables = model.trainable_weights
        gradients = gradient_sum.finalize(sums.gradients, variables, self._connected)
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        if self._batch_norm is not None:
            self._batch_norm.finalize(sums.batch_statistics)
        # A loss is divided by the replicas for the sum over them; a tracker reports it whole.
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        model._loss_tracker.update_state(sums.loss * replicas, sample_weight=self._batch.rows)
        trackers = getattr(model._compile_loss, "metrics", ())
        for tracker, loss in zip(trackers, sums.output_losses, strict=False):
            # As in Keras, by rows only where their number is known before the step runs.
            tracker.update_state(loss * replicas, sample_weight=self._batch.known_rows)

    def _init(self) -> Sums:
        outputs = output_losses.output_count(self._model)
        return Sums(
            gradient_sum.init(self._model.trainable_weights),
            tf.zeros([]),
            tuple(tf.zeros([]) for _ in range(outputs)),
            tf.zeros([]),
            () if self._batch_norm is None else self._batch_norm.init(),
        )

    def part(self, micro_batch: tuple[Any, Any, Any]) -> Part:
        """Computes loss and gradients of a micro-batch, and counts it in the metrics."""
        model = self._model
        x, y, sample_weight = micro_batch
        rows_share = _rows(x) / tf.cast(self._batch.rows, tf.float32)
        with tf.GradientTape() as tape:
            with self._observed():
                y_pred = _forward(model, x, training=True)
            loss, parts = output_losses.part_of_batch_loss(
                model,
                (x, y, y_pred, sample_weight),
                rows_share=rows_share,
                totals=self._totals,
            )
            scaled_loss = model.optimizer.scale_loss(loss)
        gradients: Any = tape.gradient(scaled_loss, model.trainable_weights)
        reached = [gradient is not None for gradient in gradients]
        self._connected = [a or b for a, b in zip(self._connected, reached, strict=True)]
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return Part(gradients, loss, parts, rows_share)

    def _add(self, sums: Sums, micro_batch: tuple[Any, Any, Any]) -> Sums:
        part = self.part(micro_batch)
        losses = zip(sums.output_losses, part.output_losses, strict=True)
        return Sums(
            gradient_sum.add(sums.gradients, part.gradients),
            sums.loss + tf.cast(part.loss, tf.float32),
            tuple(total + tf.cast(loss, tf.float32) for total, loss in losses),
            sums.micro_sq_norm + self._micro_sq_norm(part),
            ()
            if self._batch_norm is None
            else self._batch_norm.add(sums.batch_statistics, part.rows_share),
        )

    def _micro_sq_norm(self, part: Part) -> tf.Tensor:
        if self._measured is None:
            return tf.zeros([])
        return tf.cond(self._measured, lambda: weighted_squared_norm(part), lambda: tf.zeros([]))

    def _observed(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._batch_norm is None else self._batch_norm.observed()

    def _denominators(self) -> tuple[tf.Tensor, ...]:
        model, batch = self._model, self._batch
        if not output_losses.need_counting(model):
            return ()

        def counted(x, y, sample_weight):
            y_pred = _forward(model, x, training=False)
            return output_losses.denominators(model, (y, y_pred, sample_weight))

        zeros = tuple(tf.zeros([]) for _ in range(output_losses.output_count(model)))

        def add(start: tf.Tensor, sums: tuple[tf.Tensor, ...]):
            part = batch.part(start, tf.minimum(batch.size, batch.rows - start))
            return start + batch.size, tuple(
                s + c for s, c in zip(sums, counted(*part), strict=True)
            )

        if self._model.jit_compile:
            return counted(*batch.leaves)  # XLA drops what the masks do not need.
        # In a graph what the masks do not need is dropped too, except for recurrent layers: then
        # the memory is that of a micro-batch.
        return tf.while_loop(
            lambda start, _: start < batch.rows, add, (tf.constant(0), zeros), parallel_iterations=1
        )[1]


def weighted_squared_norm(part: Part) -> tf.Tensor:
    """Gives w_k |g_k|^2; the gradient of a micro-batch's part of the loss is w_k g_k."""
    return squared_norm(part.gradients) / part.rows_share


def before_update(model: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Reads what an update moves: whether it is the first of an epoch, and the loss scale."""
    anew = tf.equal(tf.convert_to_tensor(model._loss_tracker.count), 0.0)
    return anew, model.optimizer.scale_loss(tf.ones([]))


def build_variables(model: Any, batch: MicroBatches) -> None:
    """Builds weights, metrics, losses and slots before a loop or branch, which cannot."""
    if tf.distribute.has_strategy():
        return  # Keras has done so, outside the replicas.
    if tf.executing_eagerly():
        _build_eagerly(model, batch)
        return
    build_symbolically(model, batch.leaves)


def _build_eagerly(model: Any, batch: MicroBatches) -> None:
    """Builds by a call on one row: layers that run eagerly only cannot be called on symbols."""
    compile_loss = model._compile_loss
    if model.built and (compile_loss is None or compile_loss.built):
        return
    x, y, sample_weight = batch.part(tf.constant(0), 1)
    y_pred = _forward(model, x, training=False)
    if compile_loss is not None:
        compile_loss(y, y_pred, sample_weight)
        for tracker in compile_loss.metrics:
            tracker.reset_state()


def _forward(model: Any, x: Any, *, training: bool) -> Any:
    return model(x, training=training) if model._call_has_training_arg else model(x)


def _rows(x: Any) -> tf.Tensor:
    first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
    return tf.cast(tf.shape(first)[0], tf.float32)
