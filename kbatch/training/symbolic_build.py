"""A model built from the shapes of its data alone."""

from typing import Any

import keras
import tensorflow as tf


def build_symbolically(model: Any, batch: Any) -> None:
    """Builds weights, metrics and losses, without running the model.

    Args:
        model: A compiled model.
        batch: Inputs, targets and sample weights: nested tensors or specs of shape (rows, ...),
            None where a part is absent.
    """
    symbols = keras.tree.map_structure(
        lambda leaf: None if leaf is None else keras.KerasTensor(leaf.shape, leaf.dtype.name), batch
    )
    with tf.init_scope():
        model._symbolic_build(data_batch=symbols)
