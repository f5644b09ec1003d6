"""A part of the training data that is held out, so that training can be seen to end."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.training.data.data import FitData, is_dataset, tensors_of

_SHARE = 0.2
_MOST = 1024


def with_held_out(data: FitData, *, seed: int | None) -> FitData:
    """Holds out a fifth of the rows of arrays, drawn at random, 1,024 at most.

    Args:
        data: Arguments of `fit`. Where they have validation data, or are no arrays, they stay as
            they are.
        seed: Seed of the draw, None for another one each time.

    Raises:
        InputError: If the arrays cannot be cut into batches.
    """
    if data.validation_data is not None or is_dataset(data.x) or callable(data.x):
        return data
    arrays, rows = tensors_of(data)
    count = min(_MOST, int(_SHARE * rows))
    if count == 0:
        return data
    order = np.random.default_rng(seed).permutation(rows)
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    x, y, weight = (*_rows(arrays, kept), None, None)[:3]
    return data._replace(
        x=x,
        y=y,
        sample_weight=weight,
        class_weight=None,  # It is in the sample weights already.
        validation_data=_rows(arrays, held),
    )


def _rows(arrays: Any, rows: np.ndarray) -> Any:
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.gather(leaf, rows), arrays
    )
