"""A train step that accumulates the gradient over micro-batches.

One `tf.while_loop` over the micro-batches, then one `apply_gradients`: the optimizer, its
schedule, its moving averages and its loss scale see one large batch.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kbatch.training.accumulation import gradient_sum, output_losses
from kbatch.training.accumulation.micro_batches import MicroBatches, cut


class _Sums(NamedTuple):
    """What the loop carries: sums over the micro-batches so far."""

    gradients: tuple[tf.Tensor, ...]
    loss: tf.Tensor
    output_losses: tuple[tf.Tensor, ...]


class AccumulatingTrainStep:
    """The custom `tf.GradientTape` train step behind `accumulate_gradients`.

    Attributes:
        micro_batch_size: Examples that go through the device at once.
    """

    def __init__(self, model: keras.Model, micro_batch_size: int):
        self._model = model
        self.micro_batch_size = micro_batch_size
        self._connected: list[bool] = []

    def run(self, data: Any) -> dict[str, Any]:
        """Makes one optimizer update from one batch, as `keras.Model.train_step` does.

        Args:
            data: Inputs, targets and sample weights, each nested tensors of shape (rows, ...).

        Returns:
            The metrics, by name.
        """
        model = self._model
        batch = cut(keras.utils.unpack_x_y_sample_weight(data), self.micro_batch_size)
        _build(model, batch)
        sums = self._accumulate(batch)
        variables = model.trainable_weights
        gradients = gradient_sum.finalize(sums.gradients, variables, self._connected)
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self._track_losses(sums, batch.rows)
        return model.get_metrics_result()

    def _accumulate(self, batch: MicroBatches) -> _Sums:
        totals = self._denominators(batch)

        def update(index, sums, size):
            return self._update(sums, batch.at(index, size), batch.rows, totals)

        def last_size(index):
            return tf.minimum(batch.size, batch.rows - index * batch.size)

        # XLA wants one size in the loop: the rest, if there is one, follows it.
        fixed = self._model.jit_compile
        _, sums = tf.while_loop(
            lambda index, _: index < (batch.full if fixed else batch.count),
            lambda index, sums: (
                index + 1,
                update(index, sums, batch.size if fixed else last_size(index)),
            ),
            (tf.constant(0), self._init()),
            # Micro-batches one after the other: that is what saves the memory.
            parallel_iterations=1,
        )
        if not fixed:
            return sums
        rest = batch.rows - batch.full * batch.size
        return tf.cond(rest > 0, lambda: update(batch.full, sums, rest), lambda: sums)

    def _init(self) -> _Sums:
        outputs = 0
        if not output_losses.is_opaque(self._model):
            outputs = output_losses.output_count(self._model)
        return _Sums(
            gradient_sum.init(self._model.trainable_weights),
            tf.zeros([]),
            tuple(tf.zeros([]) for _ in range(outputs)),
        )

    def _update(self, sums: _Sums, micro_batch, rows: tf.Tensor, totals) -> _Sums:
        model = self._model
        x, y, sample_weight = micro_batch
        with tf.GradientTape() as tape:
            y_pred = self._forward(x, training=True)
            loss, parts = output_losses.part_of_batch_loss(
                model,
                (x, y, y_pred, sample_weight),
                rows_share=_rows(x) / tf.cast(rows, tf.float32),
                totals=totals,
            )
            scaled_loss = model.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, model.trainable_weights)
        self._connected = [gradient is not None for gradient in gradients]
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return _Sums(
            gradient_sum.add(sums.gradients, gradients),
            sums.loss + tf.cast(loss, tf.float32),
            tuple(
                s + tf.cast(p, tf.float32) for s, p in zip(sums.output_losses, parts, strict=True)
            ),
        )

    def _denominators(self, batch: MicroBatches) -> tuple[tf.Tensor, ...]:
        model = self._model
        if not output_losses.need_counting(model):
            return ()

        def counted(x, y, sample_weight):
            y_pred = self._forward(x, training=False)
            return output_losses.denominators(model, (y, y_pred, sample_weight))

        if not tf.executing_eagerly():
            # In a graph the whole batch may be counted at once: what the masks do not need of
            # the forward pass is pruned.
            return counted(*batch.leaves)
        indices: Any = tf.unstack(tf.range(batch.count))
        counts = [
            counted(*batch.at(index, min(batch.size, int(batch.rows) - index * batch.size)))
            for index in indices
        ]
        return tuple(tf.add_n(column) for column in zip(*counts, strict=True))

    def _forward(self, x: Any, training: bool) -> Any:
        if self._model._call_has_training_arg:
            return self._model(x, training=training)
        return self._model(x)

    def _track_losses(self, sums: _Sums, rows: tf.Tensor) -> None:
        # A loss is divided by the replicas for the sum over them; a tracker reports it whole.
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        self._model._loss_tracker.update_state(sums.loss * replicas, sample_weight=rows)
        compile_loss = self._model._compile_loss
        if compile_loss is not None and sums.output_losses:
            for tracker, loss in zip(compile_loss.metrics, sums.output_losses, strict=False):
                tracker.update_state(loss * replicas)


def _build(model: keras.Model, batch: MicroBatches) -> None:
    """Builds weights, metrics and losses before the loop, which cannot create variables."""
    if tf.distribute.has_strategy():
        return  # Keras has done so, outside the replicas.
    symbols = keras.tree.map_structure(
        lambda leaf: None if leaf is None else keras.KerasTensor(leaf.shape, leaf.dtype.name),
        batch.leaves,
    )
    with tf.init_scope():
        model._symbolic_build(data_batch=symbols)


def _rows(x: Any) -> tf.Tensor:
    first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
    return tf.cast(tf.shape(first)[0], tf.float32)
