"""Train steps of batches that go through the device whole.

One adds up equal indices of a sparse gradient before the optimizer sees it. The gradient of an
embedding has a row for each token that was looked up, so that a word that occurs n times has n
rows. Keras's optimizers square them apart, where the square of the gradient is that of their sum:
Adam and RMSprop then take another step than for the gradient itself, which is what is accumulated
over micro-batches.

The other measures the moments behind the noise scale. They need gradients of two sizes, so every
n-th batch is cut into halves: their gradients together are that of the batch, and the update is
the one of Keras's own step. All other batches are that step's.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kbatch.library_internals import layers_of, replaced_applies
from kbatch.records.notes import RunNote
from kbatch.training.accumulation.moments import MomentMeans, squared_norm
from kbatch.training.accumulation.train_step import Update, prepared_batch
from kbatch.training.model import TrainStep, check_model, installed_step, user_step


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


def sparse_note(model: keras.Model, sparse_gradients: str, *, in_parts: bool) -> RunNote | None:
    """Say how the updates of a model differ from those of a plain `fit`, None where they do not."""
    if not differ_in_parts(model):
        return None
    if sparse_gradients == "keras":
        return RunNote.of("embedding_in_parts") if in_parts else None
    embeddings = [one for one in layers_of(model) if isinstance(one, keras.layers.Embedding)]
    looks_up = any(layer.trainable for layer in embeddings)
    return RunNote.of("embedding_summed") if looks_up else None


def summed(gradients: Sequence[Any]) -> list[Any]:
    """Add up the rows of equal indices; the result is dense, as in Keras's optimizers."""
    return [
        tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
        for gradient in gradients
    ]


class SummingTrainStep(TrainStep):
    """`keras.Model.train_step`, but for the gradients that the optimizer gets."""

    def _update(self, data: Any) -> dict[str, Any]:
        check_model(self.model)
        applied: list[Any] = []
        with replaced_applies(lambda *arguments: applied.append(arguments)):
            logs = keras.Model.train_step(self.model, data)
        for optimizer, gradients, variables in applied:
            optimizer.apply(summed(gradients), variables)
        return logs


def measure_moments(model: keras.Model, *, every: int) -> keras.Model:
    """Make a compiled model measure the gradient moments, and leave its updates as they are."""
    # That halves train as the whole is to be known.
    return _HalvingTrainStep(model, every).install()


def uncut_reason(model: keras.Model) -> str | None:
    """Return why a batch that goes through whole cannot be halved now and then, None if it can."""
    if model.distribute_strategy.num_replicas_in_sync > 1:
        return "a distribution strategy shares the batch among its replicas"
    own = type(model).compute_metrics is not keras.Model.compute_metrics
    if own or "compute_metrics" in vars(model):
        return "`compute_metrics` is the model's own, and what it returns would be lost"
    return None


def uncut_note(reason: str) -> RunNote:
    """Say in a sentence that the noise scale was not measured, and how it would be."""
    cure = "Where micro-batches are right, give a `micro_batch_size` of at most half the batch"
    return RunNote.of("noise_scale_not_measured", reason=f"{reason}. {cure}")


OWN_STEP_NOTE = RunNote.of("noise_scale_not_measured", reason="the model has its own `train_step`")


class _HalvingTrainStep(TrainStep):
    """Keras's train step or the one that sums, with every n-th batch in two halves."""

    def __init__(self, model: keras.Model, every: int):
        super().__init__(model)
        self._moments = MomentMeans(every)
        before = installed_step(model)
        self._summing = before if isinstance(before, SummingTrainStep) else None

    def _update(self, data: Any) -> dict[str, Any]:
        batch = prepared_batch(self.model, data, 1)

        def whole() -> tuple[tf.Tensor, tf.Tensor]:
            (self._summing or TrainStep(self.model)).run(data)
            return tf.constant(float("nan")), tf.zeros([])

        def halved() -> tuple[tf.Tensor, tf.Tensor]:
            update = Update(self.model, batch, batch_norm_once=False, measured=True)
            sums = update.halves()
            if self._summing is not None:
                sums = sums._replace(gradients=tuple(summed(sums.gradients)))
            update.apply(sums)
            return sums.micro_sq_norm, squared_norm(sums.gradients)

        def squared_norms(due: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return tf.cond(due & (batch.rows > 1), halved, whole)

        return self._moments.measured(self.model, batch.rows, 2, squared_norms)
