"""Training in stretches of a few updates, each looked at on examples that are held out."""

from typing import Any

import keras

from kbatch.training.data import Batches, FitData, in_batches
from kbatch.training.held_out import with_held_out

_VALIDATION_BATCH_SIZE = 256


def held_out_batches(
    data: FitData, model: keras.Model, *, batch_size: int, seed: int | None
) -> Batches:
    """Puts data into batches, a part of arrays without validation data held out of them.

    Args:
        data: Arguments of `fit`.
        model: The model to train.
        batch_size: Examples in a batch.
        seed: Seed of the order and of what is held out.
    """
    return in_batches(
        with_held_out(data, seed=seed),
        model,
        batch_size=batch_size,
        largest_batch_size=1,  # What is too few the caller tells.
        validation_batch_size=_VALIDATION_BATCH_SIZE,
        seed=seed,
    )


def fit_in_stretches(
    model: keras.Model, batches: Batches, *, stretch: int, watch: keras.callbacks.Callback
) -> None:
    """Trains until `watch` stops it; each stretch is an epoch to Keras.

    Args:
        model: The model.
        batches: Its data, which begin again where they end.
        stretch: Updates from one look at the held-out examples to the next.
        watch: Is told of every stretch, and ends training.
    """
    trained: Any = model
    trained.fit(
        batches.dataset.repeat(),
        validation_data=batches.validation_data,
        validation_batch_size=_VALIDATION_BATCH_SIZE,
        steps_per_epoch=stretch,
        epochs=10**9,
        callbacks=[watch],
        verbose=0,
        shuffle=False,
    )


def steps_at_once(model: Any) -> int:
    """Gives the updates that one call of a model's train function makes."""
    return max(1, int(getattr(model, "steps_per_execution", 1)))
