"""Whether kbatch can train a model, and how it is built and stepped from its data.

Train steps that wait for their data.

At the end of data of unknown length Keras runs its compiled step once more, with none. What needs
them fails, but the optimizer counts an update and decays the weights all the same. Batches that are
made from other batches have no known length.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kbatch.errors import InputTypeError


def check_compiled(model: Any) -> None:
    """Check that a model is compiled."""
    if not isinstance(model, keras.Model):
        raise InputTypeError(
            "`model` must be a compiled `keras.Model`: does the build function end with "
            f"`return model`? Received: model={model!r}."
        )
    if not model.compiled:
        raise ValueError(
            "The model must be compiled: call `model.compile(optimizer, loss)` first. "
            f"Received: model={model.name!r}."
        )


def check_model(model: keras.Model) -> None:
    """Check that kbatch can train a model."""
    check_compiled(model)
    bound = vars(model).get("train_step")
    ours = type(getattr(bound, "__self__", None)).__module__.startswith("kbatch.")
    if type(model).train_step is not keras.Model.train_step or (bound is not None and not ours):
        raise ValueError(
            "The model has a `train_step` of its own, which kbatch would replace: move what it "
            "computes into `compute_loss`, or train it without kbatch. "
            f"Received: a {type(model).__name__}."
        )
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "The optimizer already accumulates over `fit` batches: leave out "
            "`gradient_accumulation_steps`, kbatch cuts each batch instead. Received: "
            f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}."
        )
    losses: list[Any] = keras.tree.flatten(model.loss)
    if any(getattr(loss, "reduction", "sum") in (None, "none") for loss in losses):
        raise ValueError(
            "A loss with `reduction=None` is one value a row, and training minimises a single "
            "one: give the loss another reduction. Received: reduction=None."
        )
    if model.built and not model.trainable_weights:
        raise ValueError(
            "The model has no trainable weights: unfreeze a layer before training. "
            f"Received: model={model.name!r}."
        )


def build_symbolically(model: Any, batch: Any) -> None:
    """Build weights, metrics and losses, without running the model."""
    symbols = keras.tree.map_structure(
        lambda leaf: None if leaf is None else keras.KerasTensor(leaf.shape, leaf.dtype.name), batch
    )
    with tf.init_scope():
        model._symbolic_build(data_batch=symbols)


def with_data(data: Any) -> contextlib.AbstractContextManager[Any]:
    """Make all that is built in the context wait for tensors, None among them left out."""
    leaves = tf.nest.flatten(data, expand_composites=True)
    return tf.control_dependencies([leaf for leaf in leaves if leaf is not None])


@contextlib.contextmanager
def waiting_for_data(model: Any, dataset: tf.data.Dataset) -> Iterator[None]:
    """Make Keras's own train step wait for its data, where their length is not known."""
    known = dataset.cardinality() != tf.data.UNKNOWN_CARDINALITY
    if known or "train_step" in vars(model):  # Those of kbatch wait.
        yield
        return
    model.train_step = _WaitingTrainStep(model).run
    model.train_function = None
    try:
        yield
    finally:
        del model.train_step
        model.train_function = None


class _WaitingTrainStep:
    def __init__(self, model: keras.Model):
        self._model = model

    def run(self, data: Any) -> dict[str, Any]:
        """Make one optimizer update from one batch, as `keras.Model.train_step` does."""
        with with_data(data):
            return keras.Model.train_step(self._model, data)
