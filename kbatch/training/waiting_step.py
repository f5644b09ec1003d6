"""Train steps that wait for their data.

At the end of data of unknown length Keras runs its compiled step once more, with none. What needs
them fails, but the optimizer counts an update and decays the weights all the same. Batches that are
made from other batches have no known length.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf


def with_data(data: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes all that is built in the context wait for tensors, None among them left out."""
    leaves = tf.nest.flatten(data, expand_composites=True)
    return tf.control_dependencies([leaf for leaf in leaves if leaf is not None])


@contextlib.contextmanager
def waiting_for_data(model: Any, dataset: tf.data.Dataset) -> Iterator[None]:
    """Makes Keras's own train step wait for its data, where their length is not known.

    Args:
        model: A compiled model.
        dataset: Its training data.
    """
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
        """Makes one optimizer update from one batch, as `keras.Model.train_step` does."""
        with with_data(data):
            return keras.Model.train_step(self._model, data)
