"""Training in stretches of a few updates, each looked at on examples that are held out."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.training.data import Batches, FitData, in_batches
from kbatch.training.held_out import with_held_out
from kbatch.training.scaled_model import scale_late_layers

_VALIDATION_BATCH_SIZE = 256
# A look is taken some fifty times.
_MOST_HELD_OUT = 1024


def held_out_batches(
    data: FitData, model: keras.Model, *, batch_size: int, seed: int | None
) -> Batches:
    """Puts data into batches, a part of arrays without validation data held out of them.

    Of validation data that are given, 1,024 examples are looked at.

    Args:
        data: Arguments of `fit`.
        model: The model to train.
        batch_size: Examples in a batch.
        seed: Seed of the order and of what is held out.
    """
    batches = in_batches(
        with_held_out(data, seed=seed),
        model,
        batch_size=batch_size,
        largest_batch_size=1,  # What is too few the caller tells.
        validation_batch_size=_VALIDATION_BATCH_SIZE,
        seed=seed,
    )
    return batches._replace(validation_data=_few(batches.validation_data, seed))


def _few(given: Any, seed: int | None) -> Any:
    if isinstance(given, tf.data.Dataset):
        return given.take(_MOST_HELD_OUT // _VALIDATION_BATCH_SIZE)
    leaves = keras.tree.flatten(given) if isinstance(given, tuple) else []
    rows = min((len(leaf) for leaf in leaves if hasattr(leaf, "__len__")), default=0)
    if rows <= _MOST_HELD_OUT:
        return given
    kept = np.sort(np.random.default_rng(seed).permutation(rows)[:_MOST_HELD_OUT])
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.gather(leaf, kept), given
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
    scale_late_layers(model, batches.dataset)
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
