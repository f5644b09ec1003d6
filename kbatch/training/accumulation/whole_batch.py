"""The train step of batches that go through the device whole: sparse gradients are added up.

The gradient of an embedding has a row for each token that was looked up, so that a word that
occurs n times has n rows. Keras's optimizers square them apart, where the square of the gradient is
that of their sum: Adam and RMSprop then take another step than for the gradient itself, which is
what is accumulated over micro-batches.
"""

from typing import Any

import keras
import tensorflow as tf

from kbatch.library_internals import layers_of, replaced_applies
from kbatch.training.model import TrainStep, user_step


def sum_sparse_gradients(model: keras.Model) -> keras.Model:
    """Make a compiled model add up gradient rows of equal indices, where that matters."""
    return SummingTrainStep(model).install() if differ_in_parts(model) else model


def differ_in_parts(model: keras.Model) -> bool:
    """Return whether Keras's optimizer may treat sparse gradients otherwise than their sum."""
    # SGD is linear in the gradient as long as it is not clipped.
    if user_step(model) is not None or not model.compiled:
        return False
    optimizer: Any = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    clips = (optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)
    if type(optimizer) is keras.optimizers.SGD and not any(clips):
        return False
    trained = [layer for layer in layers_of(model) if layer.trainable]
    own = (not type(layer).__module__.startswith("keras.") for layer in trained)
    return any(own) or any(isinstance(layer, keras.layers.Embedding) for layer in trained)


class SummingTrainStep(TrainStep):
    """`keras.Model.train_step`, but for the gradients that the optimizer gets."""

    def _update(self, data: Any) -> dict[str, Any]:
        applied: list[Any] = []
        with replaced_applies(lambda *arguments: applied.append(arguments)):
            logs = keras.Model.train_step(self.model, data)
        for optimizer, gradients, variables in applied:
            # A dense gradient has one row for each index.
            dense = [
                tf.convert_to_tensor(one) if isinstance(one, tf.IndexedSlices) else one
                for one in gradients
            ]
            optimizer.apply(dense, variables)
        return logs
