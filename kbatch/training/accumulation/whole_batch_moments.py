"""The moments behind the noise scale where batches go through the device whole.

They need gradients of two sizes, so every n-th batch is cut into halves: their gradients together
are that of the batch, and the update is the one of Keras's own step. All other batches are that
step's.
"""

from typing import Any

import keras
import tensorflow as tf

from kbatch.records.notes import RunNote
from kbatch.training.accumulation import gradient_sum
from kbatch.training.accumulation.accumulate import coupled_parts
from kbatch.training.accumulation.gradient_sum import MicroBatches, cut
from kbatch.training.accumulation.moments import MomentMeans, squared_norm
from kbatch.training.accumulation.summed_gradients import SummingTrainStep, summed
from kbatch.training.accumulation.train_step import (
    Sums,
    Update,
    before_update,
    build_variables,
    weighted_squared_norm,
)
from kbatch.training.model import check_model, with_data


def measure_moments(model: keras.Model, *, every: int) -> keras.Model:
    """Make a compiled model measure the gradient moments, and leave its updates as they are.

    They are reported as with `accumulate_gradients(..., moments_every=every)`. A model whose
    batches cannot be cut is left alone.
    """
    if uncut_part(model) is None:
        step = getattr(vars(model).get("train_step"), "__self__", None)
        summing = step if isinstance(step, SummingTrainStep) else None
        model.train_step = _HalvingTrainStep(model, every, summing).run
        model.train_function = None
    return model


def uncut_part(model: keras.Model) -> str | None:
    """Name what keeps a batch from being cut with an equal update, None if it can be.

    Where a batch is to go through whole, a loss or method of the user's own may look at it as
    one: it is not cut behind their back.
    """
    parts = coupled_parts(model)
    if parts:
        return parts[0]
    own = [n for n in ("compute_loss", "compute_metrics") if _is_own(model, n)]
    own += [_name(loss) for loss in keras.tree.flatten(model.loss) if not _is_of_keras(loss)]
    own += [layer.name for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    if model.distribute_strategy.num_replicas_in_sync > 1:
        own.append("a distribution strategy")
    return own[0] if own else None


def uncut_note(reason: str) -> RunNote:
    """Say in a sentence that the noise scale was not measured, and how it would be."""
    return RunNote.of("noise_scale_not_measured", reason=reason)


class _HalvingTrainStep:
    """Keras's train step or the one that sums, with every n-th batch in two halves."""

    def __init__(self, model: keras.Model, every: int, summing: SummingTrainStep | None):
        self._model: Any = model
        self._moments = MomentMeans(every)
        self._summing = summing

    def run(self, data: Any) -> dict[str, Any]:
        """Make one optimizer update from one batch, as `keras.Model.train_step` does."""
        with with_data(data):
            return self._update(data)

    def _update(self, data: Any) -> dict[str, Any]:
        model = self._model
        check_model(model)
        batch = cut(keras.utils.unpack_x_y_sample_weight(data), 1)
        build_variables(model, batch)
        epoch_begins, scale = before_update(model)
        halved = self._moments.is_due(epoch_begins) & (batch.rows > 1)
        micro, whole = tf.cond(halved, lambda: self._halved(batch), lambda: self._whole(data))
        moments = self._moments.update(
            micro / scale**2, whole / scale**2, batch.rows, 2, epoch_begins
        )
        return model.get_metrics_result() | moments

    def _whole(self, data: Any) -> tuple[tf.Tensor, tf.Tensor]:
        if self._summing is not None:
            self._summing.run(data)
        else:
            keras.Model.train_step(self._model, data)
        return tf.constant(float("nan")), tf.zeros([])

    def _halved(self, batch: MicroBatches) -> tuple[tf.Tensor, tf.Tensor]:
        rows = batch.known_rows or batch.rows
        half = (rows + 1) // 2
        update = Update(self._model, batch, batch_norm_once=False, measured=None)
        # Both are traced in turn, not looped over: gradients stay as sparse as they were.
        first, second = update.halves(half)
        gradients: Any = gradient_sum.joined(first.gradients, second.gradients)
        if self._summing is not None:
            gradients = summed(gradients)
        micro = weighted_squared_norm(first) + weighted_squared_norm(second)
        losses = zip(first.output_losses, second.output_losses, strict=True)
        update.apply(
            Sums(
                gradients,
                tf.cast(first.loss, tf.float32) + tf.cast(second.loss, tf.float32),
                tuple(tf.cast(a, tf.float32) + tf.cast(b, tf.float32) for a, b in losses),
                micro,
                (),
            )
        )
        return micro, squared_norm(gradients)


def _is_own(model: keras.Model, method: str) -> bool:
    own = getattr(type(model), method) is not getattr(keras.Model, method)
    return own or method in vars(model)


def _is_of_keras(loss: Any) -> bool:
    if loss is None or isinstance(loss, str):
        return True
    function = getattr(loss, "fn", loss)
    kind = function if hasattr(function, "__name__") else type(function)
    return kind.__module__.split(".")[0] == "keras"


def _name(loss: Any) -> str:
    return f"the loss {getattr(loss, 'name', None) or getattr(loss, '__name__', loss)}"
