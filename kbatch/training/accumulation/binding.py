"""Gradient accumulation turned on for a compiled model."""

import warnings
from typing import Any

import keras

from kbatch.analysis.batch_sizes import check_size
from kbatch.training.accumulation.batch_coupling import coupled_parts, coupling_note
from kbatch.training.accumulation.train_step import AccumulatingTrainStep


def accumulate_gradients(
    model: keras.Model,
    micro_batch_size: int,
    *,
    moments_every: int = 8,
    batch_norm_once: bool = True,
) -> keras.Model:
    """Makes a compiled model train on large batches in micro-batches.

    The model's train step is replaced by one that sends `micro_batch_size` examples at a time
    through the model, sums their gradients and applies them once. `fit`, callbacks, metrics,
    schedules and saved files stay as they are: batch size is how many examples make an update,
    micro-batch size is how many need memory at once.

    Example:

    >>> model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    >>> kbatch.accumulate_gradients(model, micro_batch_size=32)
    >>> model.fit(x, y, batch_size=1024)  # 1024 examples an update, 32 in memory

    Args:
        model: A compiled model without a `train_step` of its own. It is changed.
        micro_batch_size: Examples in a micro-batch. A batch that it does not divide ends in a
            smaller one, and each example keeps its weight.
        moments_every: Every how many updates, from the first of an epoch on, to measure the two
            moments behind the gradient noise scale, reported as `gradient_variance` (tr(Sigma))
            and `gradient_squared_norm` (|G|^2), means over the epoch; 0 for never. Not under a
            strategy of several replicas.
        batch_norm_once: Whether the moving statistics of BatchNormalization advance once an
            update, by the statistics of the whole batch, instead of once a micro-batch.

    Returns:
        The same model.

    Raises:
        TypeError: If `model` is no Keras model or `micro_batch_size` is no integer.
        ValueError: If `micro_batch_size` is not positive, or the model is not compiled, has a
            `train_step` of its own, no trainable weights or an optimizer that already
            accumulates.
    """
    check_model(model)
    size = check_size(micro_batch_size, "micro_batch_size")
    parts = coupled_parts(model)
    if parts:
        warnings.warn(coupling_note(parts), stacklevel=2)
    step = AccumulatingTrainStep(
        model,
        size,
        moments_every=moments_every,
        batch_norm_once=batch_norm_once,
    )
    model.train_step = step.run
    # Keras keeps the function that it built from the train step before.
    model.train_function = None
    return model


def check_model(model: keras.Model) -> None:
    """Checks that kbatch can train a model.

    Raises:
        TypeError: If it is no Keras model.
        ValueError: If it is not compiled or trains in a way of its own.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a compiled `keras.Model`: does the build function end with "
            f"`return model`? Received: {model!r}."
        )
    if not model.compiled:
        raise ValueError(
            "The model must be compiled: call `model.compile(optimizer, loss)` first. "
            f"Received: model={model.name!r}."
        )
    if type(model).train_step is not keras.Model.train_step:
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
