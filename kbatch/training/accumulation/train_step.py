"""A train step that accumulates the gradient over micro-batches.

One `tf.while_loop` over the micro-batches, then one `apply_gradients`: the optimizer, its
schedule, its moving averages and its loss scale see one large batch.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kbatch.training.accumulation import gradient_sum, output_losses
from kbatch.training.accumulation.batch_norm import BatchNormUpdate, BatchStatistics
from kbatch.training.accumulation.gradient_sum import MicroBatches, cut
from kbatch.training.accumulation.moments import MomentMeans, squared_norm
from kbatch.training.model import build_symbolically, check_model, with_data


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


class Forward(NamedTuple):
    """A micro-batch that has gone through the model: its gradient is still to be taken.

    Attributes:
        tape: Has recorded the pass.
        micro_batch: Inputs, targets and sample weights.
        y_pred: Predictions.
        added_losses: What `add_loss` and regularizers added in the pass.
    """

    tape: tf.GradientTape
    micro_batch: tuple[Any, Any, Any]
    y_pred: Any
    added_losses: list[Any]


class Sums(NamedTuple):
    """What an update is made of: sums over its micro-batches so far."""

    gradients: tuple[Any, ...]
    loss: tf.Tensor
    output_losses: tuple[tf.Tensor, ...]
    micro_sq_norm: tf.Tensor
    batch_statistics: BatchStatistics


class AccumulatingTrainStep:
    """The custom `tf.GradientTape` train step behind `accumulate_gradients`.

    Attributes:
        micro_batch_size: Examples that go through the device at once.
        varying_size: A variable that has them instead, where they change from step to step.
        moments_every: Every how many updates the moments are measured, 0 for never.
        batch_metrics: Names of metrics whose function returns one value for all rows: here they
            are means over micro-batches.
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
        self.batch_metrics: set[str] = set()

    def run(self, data: Any) -> dict[str, Any]:
        """Make one optimizer update from one batch, as `keras.Model.train_step` does."""
        with with_data(data):
            return self._update(data)

    def _update(self, data: Any) -> dict[str, Any]:
        model = self._model
        # It may have been compiled again, or frozen, since accumulation was turned on.
        check_model(model)
        size = self.micro_batch_size if self.varying_size is None else self.varying_size
        batch = cut(keras.utils.unpack_x_y_sample_weight(data), size)
        build_variables(model, batch)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if self._moments is None or replicas > 1:
            self._accumulated(Update(model, batch, self.batch_norm_once, measured=None))
            return model.get_metrics_result()
        epoch_begins, scale = before_update(model)
        measured = self._moments.is_due(epoch_begins)
        sums = self._accumulated(Update(model, batch, self.batch_norm_once, measured))
        micro = tf.where(measured, sums.micro_sq_norm, float("nan"))
        whole = tf.cond(measured, lambda: squared_norm(sums.gradients), lambda: tf.zeros([]))
        norms = (micro / scale**2, whole / scale**2)
        moments = self._moments.update(*norms, batch.rows, batch.count, epoch_begins)
        return model.get_metrics_result() | moments

    def _accumulated(self, update: "Update") -> Sums:
        sums = update.accumulate()
        self.batch_metrics = update.batch_metrics
        update.apply(sums)
        return sums


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
        self._totals: tuple[tf.Tensor, ...] = ()
        # Which variables the loss reaches; known once a micro-batch has been traced.
        self._connected = [False] * len(model.trainable_weights)
        # Names of metrics that are functions of the rows together.
        self.batch_metrics: set[str] = set()

    def accumulate(self) -> Sums:
        """Run all micro-batches, one after the other: that is what saves the memory."""
        batch = self._batch
        self._totals = self._denominators()
        # XLA wants one size in the loop, and compiles it also where it never runs: a size that is
        # in the batch. The rest, if there is one, follows the loop.
        fixed = self._model.jit_compile

        end = batch.full * batch.size if fixed else batch.rows

        def add(start: tf.Tensor, sums: Sums) -> tuple[tf.Tensor, Sums]:
            rest = batch.rows if fixed else batch.rows - start
            size = tf.minimum(batch.size, rest)
            return start + batch.size, self._add(sums, batch.part(start, size))

        start, sums = tf.constant(0), self._init()
        if tf.executing_eagerly():
            while start < end:
                start, sums = add(start, sums)
        else:
            _, sums = tf.while_loop(
                lambda start, _: start < end, add, (start, sums), parallel_iterations=1
            )
        return self._add_rest(sums, batch.rows - end) if fixed else sums

    def _add_rest(self, sums: Sums, rest: tf.Tensor) -> Sums:
        # XLA compiles the branch also where there is no rest, but not for zero rows.
        size = tf.maximum(rest, 1)
        part = functools.partial(self._batch.part, self._batch.rows - size, size)
        return tf.cond(rest > 0, lambda: self._add(sums, part()), lambda: sums)

    def apply(self, sums: Sums) -> None:
        """Apply the gradients once and write the statistics and losses of the batch."""
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
            self._batch_statistics(),
        )

    def _batch_statistics(self) -> BatchStatistics:
        if self._batch_norm is None or tf.executing_eagerly():
            return ()
        forward = functools.partial(_forward, self._model, training=True)
        return self._batch_norm.init(forward, self._batch.leaves[0])

    def halves(self, rows: Any) -> tuple[Part, Part]:
        """Compute loss and gradients of a batch that fits at once, in two parts.

        Both go through the model before a loss is taken, so that what masks and weights count is
        known without another pass.
        """
        batch, whole = self._batch, self._batch.known_rows or self._batch.rows
        passes = [
            self._forward(batch.part(0, rows)),
            self._forward(batch.part(rows, whole - rows)),
        ]
        if output_losses.need_counting(self._model):
            counted = [
                output_losses.denominators(self._model, (y, one.y_pred, weight))
                for one in passes
                for _, y, weight in [one.micro_batch]
            ]
            self._totals = tuple(a + b for a, b in zip(*counted, strict=True))
        first, second = passes
        parts = self._part(first), self._part(second)
        # A metric of the user's own may look at the batch as a whole.
        together = keras.tree.map_structure(_joined, first.y_pred, second.y_pred)
        self._count(self._batch.leaves, together)
        return parts

    def _forward(self, micro_batch: tuple[Any, Any, Any]) -> Forward:
        with tf.GradientTape() as tape, self._observed():
            y_pred = _forward(self._model, micro_batch[0], training=True)
            return Forward(tape, micro_batch, y_pred, list(self._model.losses))

    def _part(self, one: Forward) -> Part:
        """Compute loss and gradients of a micro-batch."""
        model = self._model
        x, y, sample_weight = one.micro_batch
        rows_share = _rows(x) / tf.cast(self._batch.rows, tf.float32)
        with one.tape:
            loss, parts = output_losses.part_of_batch_loss(
                model,
                (x, y, one.y_pred, sample_weight),
                rows_share=rows_share,
                totals=self._totals,
                added_losses=one.added_losses,
            )
            scaled_loss = model.optimizer.scale_loss(loss)
        gradients: Any = one.tape.gradient(scaled_loss, model.trainable_weights)
        reached = [gradient is not None for gradient in gradients]
        self._connected = [a or b for a, b in zip(self._connected, reached, strict=True)]
        return Part(gradients, loss, parts, rows_share)

    def _count(self, data: tuple[Any, Any, Any], y_pred: Any) -> None:
        """Count rows in the metrics."""
        x, y, sample_weight = data
        with _noted_batch_metrics(self._model, self.batch_metrics):
            self._model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def _add(self, sums: Sums, micro_batch: tuple[Any, Any, Any]) -> Sums:
        forward = self._forward(micro_batch)
        part = self._part(forward)
        self._count(micro_batch, forward.y_pred)
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
    """Return w_k |g_k|^2; the gradient of a micro-batch's part of the loss is w_k g_k."""
    return squared_norm(part.gradients) / part.rows_share


def before_update(model: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Read what an update moves: whether it is the first of an epoch, and the loss scale."""
    epoch_begins = tf.equal(tf.convert_to_tensor(model._loss_tracker.count), 0.0)
    return epoch_begins, model.optimizer.scale_loss(tf.ones([]))


def build_variables(model: Any, batch: MicroBatches) -> None:
    """Build weights, metrics, losses and slots before a loop or branch, which cannot."""
    if tf.distribute.has_strategy():
        return  # Keras has done so, outside the replicas.
    if tf.executing_eagerly():
        _build_eagerly(model, batch)
        return
    build_symbolically(model, batch.leaves)


def _build_eagerly(model: Any, batch: MicroBatches) -> None:
    """Build by a call on one row: layers that run eagerly only cannot be called on symbols."""
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


def _joined(first: Any, second: Any) -> Any:
    """Join predictions with their masks."""
    both: Any = tf.concat([first, second], axis=0)
    masks: Any = [getattr(part, "_keras_mask", None) for part in (first, second)]
    if all(mask is not None for mask in masks):
        both._keras_mask = tf.concat(masks, axis=0)
    return both


@contextlib.contextmanager
def _noted_batch_metrics(model: Any, names: set[str]) -> Iterator[None]:
    """Notes which functions given as metrics return one value for all rows."""
    compiled = model._compile_metrics
    metrics: Any = [] if compiled is None else compiled.metrics
    routed = [one for one in metrics if isinstance(one, keras.metrics.MeanMetricWrapper)]
    functions = [metric._fn for metric in routed]

    def noting(metric: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        values = function(*args, **kwargs)
        if len(values.shape) == 0:
            names.add(metric.name)
        return values

    for metric, function in zip(routed, functions, strict=True):
        metric._fn = functools.partial(noting, metric, function)
    try:
        yield
    finally:
        for metric, function in zip(routed, functions, strict=True):
            metric._fn = function


def _rows(x: Any) -> tf.Tensor:
    first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
    return tf.cast(tf.shape(first)[0], tf.float32)
