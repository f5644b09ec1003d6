"""Whether kbatch can train a model."""

from typing import Any

import keras

from kbatch.errors import InputTypeError


def check_compiled(model: Any) -> None:
    """Checks that a model is compiled.

    Raises:
        TypeError: If it is no Keras model.
        ValueError: If it is not compiled.
    """
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
    """Checks that kbatch can train a model.

    Raises:
        TypeError: If it is no Keras model.
        ValueError: If it is not compiled or trains in a way of its own.
    """
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
