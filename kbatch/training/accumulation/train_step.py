"""Define a train step that accumulates the gradient over micro-batches.

One `tf.while_loop` runs over the micro-batches, then one `apply_gradients` follows. So the
optimizer, its schedule, its moving averages and its loss scale see one large batch.
"""

import warnings
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kbatch import library_internals as internals
from kbatch.records.notes import Note
from kbatch.training.accumulation import gradient_sum, output_losses
from kbatch.training.accumulation.batch_norm import BatchNormUpdate, BatchStatistics
from kbatch.training.accumulation.gradient_sum import MicroBatches, MomentMeans, cut, squared_norm
from kbatch.training.data.forms import each_part, open_spec, parts_of, row_count
from kbatch.training.model import TrainStep, check_model, user_step


class AccumulatingTrainStep(TrainStep):
    """The custom `tf.GradientTape` train step of `accumulate_gradients`."""

    def __init__(self, model: keras.Model, accumulation: Any):
        super().__init__(model)
        self.loss_denominator = accumulation.loss_denominator or self.loss_denominator
        self.accumulation = accumulation._replace(loss_denominator=self.loss_denominator)
        # Names of metrics that become means over micro-batches: their functions need all rows.
        self.batch_metrics: set[str] = set()
        self.warns = False  # Whether to warn of `batch_metrics` after the step is traced.
        every = accumulation.moments_every
        self._moments = MomentMeans(every) if every else None

    def warn_of_metrics(self) -> None:
        if self.warns and self.batch_metrics:
            self.warns = False
            names = ", ".join(sorted(self.batch_metrics))
            warnings.warn(Note.of("metrics_of_parts", names=names), stacklevel=2)

    def _update(self, data: Any) -> dict[str, Any]:
        model = self.model
        check_model(model)  # The user may have compiled it again after the step was installed.
        batch = prepared_batch(model, data, self.accumulation.micro_batch_size)
        if model.built and not model.trainable_weights:
            return super()._update(data)  # Keras warns that nothing is trainable.

        means = self._moments if replicas_in_step() == 1 else None
        due, moments = means and means.due(model), {}
        update = Update(model, batch, due)
        sums = update.accumulate()
        self.batch_metrics = update.batch_metrics
        self.warn_of_metrics()
        if means is not None and due is not None:
            micro = tf.where(due, sums.micro_sq_norm, float("nan"))
            whole = tf.cond(due, lambda: squared_norm(sums.gradients), lambda: tf.zeros([]))
            scale = model.optimizer.scale_loss(tf.ones([]))  # Read it before the update changes it.
            count = -(-batch.rows // batch.size)
            moments = means.add(micro / scale**2, whole / scale**2, batch.rows, count)
        update.apply(sums)
        return model.get_metrics_result() | moments


def prepared_batch(model: Any, data: Any, size: int) -> MicroBatches:
    """Cut a batch, and build the model and its losses, because a loop cannot build them."""
    batch = cut(keras.utils.unpack_x_y_sample_weight(data), size)
    if tf.distribute.has_strategy():
        return batch  # Keras has built the model outside the replicas.
    parts, compile_loss = parts_of(batch.leaves), internals.compile_loss_of(model)
    if not tf.executing_eagerly() and all(isinstance(part, tf.Tensor) for part in parts):
        internals.build_symbolically(model, batch.leaves)
        return batch

    def passed(x: Any, y: Any, sample_weight: Any) -> None:
        y_pred = internals.forward(model, x, training=False)
        if compile_loss is not None:
            compile_loss(y, y_pred, sample_weight)

    # Layers that only run eagerly, and ragged or sparse rows, cannot be built symbolically.
    if not model.built or not (compile_loss is None or compile_loss.built):
        if not tf.executing_eagerly():
            specs = each_part(open_spec, batch.leaves)
            tf.function(passed, autograph=False).get_concrete_function(*specs)
            return batch
        passed(*batch.part(0, 1))
        for tracker in getattr(compile_loss, "metrics", ()):
            tracker.reset_state()
    return batch


def replicas_in_step() -> int:
    """Return the number of replicas of the train step that runs or is traced now."""
    return tf.distribute.get_strategy().num_replicas_in_sync


class Sums(NamedTuple):
    """Sums over the micro-batches so far."""

    gradients: tuple[Any, ...]
    loss: tf.Tensor
    output_losses: tuple[tf.Tensor, ...]
    micro_sq_norm: tf.Tensor  # The sum of w_k |g_k|^2.
    batch_statistics: BatchStatistics


class Update:
    """One optimizer update: `accumulate` the micro-batches, then `apply` their sums."""

    def __init__(self, model: Any, batch: MicroBatches, measured: tf.Tensor | None):
        self.batch_metrics: set[str] = set()
        self.model = model
        self.batch = batch
        self._measured = measured  # Whether to measure the moments. If updates never do, None.
        self.batch_norm = BatchNormUpdate(model)
        self._totals: tuple[tf.Tensor, ...] = ()  # The denominators of the losses of the outputs.
        # Whether the loss depends on each variable. It is known after a micro-batch was traced.
        self._connected = [False] * len(model.trainable_weights)

    def accumulate(self) -> Sums:
        """Run all micro-batches, one after the other, so that only one is in memory."""
        model, batch = self.model, self.batch
        if output_losses.need_counting(model):
            self._totals = self._denominators()
        zeros = Sums(
            gradient_sum.init(model.trainable_weights),
            tf.zeros([]),
            self._no_losses(),
            tf.zeros([]),
            self.batch_norm.init(
                lambda x: internals.forward(model, x, training=True), batch.leaves[0]
            ),
        )
        return batch.fold(self._add, zeros, fixed=model.jit_compile)

    def apply(self, sums: Sums) -> None:
        model = self.model
        variables = model.trainable_weights
        gradients = gradient_sum.finalize(sums.gradients, variables, self._connected)
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.batch_norm.finalize(sums.batch_statistics)
        # With several replicas, Keras has divided the loss by their number.
        loss = sums.loss * replicas_in_step()
        internals.loss_tracker_of(model).update_state(loss, sample_weight=self.batch.rows)
        trackers = getattr(internals.compile_loss_of(model), "metrics", ())
        for tracker, loss in zip(trackers, sums.output_losses, strict=False):
            # Keras weights by rows only if their number is known in the graph.
            tracker.update_state(loss * replicas_in_step(), sample_weight=self.batch.known_rows)

    def _add(self, sums: Sums, micro_batch: tuple[Any, Any, Any]) -> Sums:
        """Add the loss, gradients and statistics of a micro-batch (x, y, sample_weight)."""
        model, (x, y, sample_weight) = self.model, micro_batch
        rows_share = tf.cast(row_count(x), tf.float32) / tf.cast(self.batch.rows, tf.float32)
        with tf.GradientTape() as tape:
            with self.batch_norm.observed():
                y_pred = internals.forward(model, x, training=True)
                added_losses = list(model.losses)
            loss, losses = output_losses.part_of_batch_loss(
                model,
                (x, y, y_pred, sample_weight),
                rows_share=rows_share,
                totals=self._totals,
                added_losses=added_losses,
            )
            scaled_loss = model.optimizer.scale_loss(loss)
        gradients: Any = tape.gradient(scaled_loss, model.trainable_weights)
        self._connected = [
            known or gradient is not None
            for known, gradient in zip(self._connected, gradients, strict=True)
        ]

        def weighted_squared_norm() -> tf.Tensor:
            # The gradient of a micro-batch's part of the loss is w_k g_k.
            return squared_norm(gradients) / rows_share

        micro_sq_norm = sums.micro_sq_norm
        if self._measured is not None:
            micro_sq_norm += tf.cond(self._measured, weighted_squared_norm, lambda: tf.zeros([]))
        self._update_metrics(micro_batch, y_pred)
        losses = zip(sums.output_losses, losses, strict=True)
        return Sums(
            gradient_sum.add(sums.gradients, gradients),
            sums.loss + tf.cast(loss, tf.float32),
            tuple(total + tf.cast(part, tf.float32) for total, part in losses),
            micro_sq_norm,
            self.batch_norm.add(sums.batch_statistics, rows_share),
        )

    def _update_metrics(self, data: tuple[Any, Any, Any], y_pred: Any) -> None:
        """Update the metrics, and collect metric functions that return one value for all rows."""
        x, y, sample_weight = data

        def watched(metric: Any, function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                values = function(*args, **kwargs)
                if len(values.shape) == 0:
                    self.batch_metrics.add(metric.name)
                return values

            return call

        with internals.metric_functions(self.model, watched):
            self.model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    def _denominators(self) -> tuple[tf.Tensor, ...]:
        model, batch = self.model, self.batch

        def add(sums: tuple[tf.Tensor, ...], part: Any) -> tuple[tf.Tensor, ...]:
            x, y, sample_weight = part
            y_pred = internals.forward(model, x, training=False)
            counted = output_losses.denominators(model, (y, y_pred, sample_weight))
            return tuple(s + c for s, c in zip(sums, counted, strict=True))

        if model.jit_compile:
            return add(self._no_losses(), batch.leaves)  # XLA computes only the masks.
        # A graph also computes only the masks, except in recurrent layers. There, micro-batches
        # limit the memory.
        return batch.fold(add, self._no_losses(), fixed=False)

    def _no_losses(self) -> tuple[tf.Tensor, ...]:
        return tuple(tf.zeros([]) for _ in internals.output_losses_of(self.model))


def sum_sparse_gradients(model: keras.Model) -> keras.Model:
    """Make a compiled model add up sparse gradients before the optimizer's step, if this matters.

    The gradient of an embedding has one row for each token that was looked up, so a word that
    occurs n times has n rows. Keras's optimizers square each of these rows, although the gradient
    is their sum. So a step of Adam or RMSprop differs from the step for the gradient itself, which
    micro-batches accumulate.
    """
    return SummingTrainStep(model).install() if needs_summed_gradients(model) else model


def needs_summed_gradients(model: keras.Model) -> bool:
    """Return whether the optimizer's step may change if sparse gradients are summed first."""
    # It does not change with SGD without clipping, which is linear in the gradient.
    if user_step(model) is not None or not model.compiled:
        return False
    optimizer: Any = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    clips = (optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)
    if type(optimizer) is keras.optimizers.SGD and not any(clips):
        return False
    trained = [layer for layer in internals.layers_of(model) if layer.trainable]
    return any(
        isinstance(layer, keras.layers.Embedding) or not type(layer).__module__.startswith("keras.")
        for layer in trained
    )


class SummingTrainStep(TrainStep):
    """Keras's train step, with sparse gradients summed before the optimizer's step."""

    def _update(self, data: Any) -> dict[str, Any]:
        applied: list[Any] = []
        with internals.replaced_applies(lambda *arguments: applied.append(arguments)):
            logs = keras.Model.train_step(self.model, data)
        for optimizer, gradients, variables in applied:
            # A dense gradient has one row for each index.
            dense = [
                tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients
            ]
            optimizer.apply(dense, variables)
        return logs
