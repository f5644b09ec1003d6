"""Keras's train step with equal indices of a sparse gradient added up before the optimizer sees it.

The gradient of an embedding has a row for each token that was looked up, so that a word that
occurs n times has n rows. Keras's optimizers square them apart, where the square of the gradient
is that of their sum: Adam and RMSprop then take another step than for the gradient itself, which
is what is accumulated over micro-batches.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kbatch.records.notes import RunNote
from kbatch.training.model import check_model, with_data

_SPARSE_GRADIENTS = ("summed", "keras")


def check_sparse_gradients(value: str) -> str:
    """Check the argument `sparse_gradients`."""
    if value not in _SPARSE_GRADIENTS:
        raise ValueError(
            f"`sparse_gradients` must be one of {_SPARSE_GRADIENTS}. "
            f"Received: sparse_gradients={value!r}."
        )
    return value


def sum_sparse_gradients(model: keras.Model) -> keras.Model:
    """Make a compiled model add up gradient rows of equal indices, where that matters."""
    if differ_in_parts(model):
        model.train_step = SummingTrainStep(model).run
        model.train_function = None
    return model


def differ_in_parts(model: keras.Model) -> bool:
    """Return whether Keras's optimizer may treat sparse gradients otherwise than their sum.

    A layer of the user's own may look up rows as `Embedding` does. SGD is linear in the gradient,
    as long as it is not clipped.
    """
    optimizer: Any = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    clips = (optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)
    linear = type(optimizer) is keras.optimizers.SGD and not any(clips)
    return not linear and any(_may_look_up(layer) for layer in model._flatten_layers())


def sparse_note(model: keras.Model, sparse_gradients: str, *, in_parts: bool) -> RunNote | None:
    """Say how the updates of a model differ from those of a plain `fit`, None where they do not."""
    if not differ_in_parts(model):
        return None
    if sparse_gradients == "keras":
        return RunNote.of("embedding_in_parts") if in_parts else None
    looks_up = any(_is_embedding(layer) for layer in model._flatten_layers())
    return RunNote.of("embedding_summed") if looks_up else None


def summed(gradients: Sequence[Any]) -> list[Any]:
    """Add up the rows of equal indices; the result is dense, as in Keras's optimizers."""
    return [
        tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
        for gradient in gradients
    ]


class SummingTrainStep:
    """`keras.Model.train_step`, but for the gradients that the optimizer gets."""

    def __init__(self, model: keras.Model):
        self._model: Any = model

    def run(self, data: Any) -> dict[str, Any]:
        """Make one optimizer update from one batch."""
        with with_data(data):
            return self._update(*keras.utils.unpack_x_y_sample_weight(data))

    def _update(self, x: Any, y: Any, sample_weight: Any) -> dict[str, Any]:
        model = self._model
        check_model(model)
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
            loss = model._compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
            )
            # A loss is divided by the replicas for the sum over them; a tracker reports it whole.
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            first = next(leaf for leaf in keras.tree.flatten(x) if leaf is not None)
            model._loss_tracker.update_state(loss * replicas, sample_weight=tf.shape(first)[0])
            scaled = model.optimizer.scale_loss(loss)
        variables = model.trainable_weights
        gradients = summed(tape.gradient(scaled, variables))
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _may_look_up(layer: keras.Layer) -> bool:
    own = type(layer).__module__.split(".")[0] != "keras"
    return _is_embedding(layer) or (own and layer.trainable)


def _is_embedding(layer: keras.Layer) -> bool:
    return layer.trainable and isinstance(layer, keras.layers.Embedding)
