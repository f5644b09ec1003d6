"""The train step of a model, borrowed for a measurement and returned as it was."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kbatch.device.failures import failure_text
from kbatch.errors import InputError
from kbatch.training.data.forms import each_part, parts_of
from kbatch.training.model import build_ahead, check_one_device, user_step, wait_for
from kbatch.training.state import KeptState, kept_state


class BorrowedStep:
    """The train step of a model as `fit` runs it, one batch a call."""

    def __init__(self, model: keras.Model, state: KeptState):
        self._model: Any = model
        self._state = state
        self._shapes: set[tuple[Any, ...]] = set()
        self._outputs: Any = ()
        model.make_train_function()

    def __call__(self, batch: Any) -> None:
        """Train on a batch, and wait for the device."""
        self.launch(batch)
        self.wait()

    def launch(self, batch: Any) -> None:
        """Begin to train on a batch: a GPU may still be at work when this returns."""
        self._shapes.add(_shapes_of(batch))
        # A Python iterator of one batch gives one step, whatever `steps_per_execution` is.
        self._outputs = self._model.train_function(iter((batch,)))

    def wait(self) -> None:
        wait_for(self._outputs)

    def has_seen(self, batch: Any) -> bool:
        """Return whether a batch of these shapes has been trained on: a new one may compile."""
        return _shapes_of(batch) in self._shapes

    def restore(self) -> None:
        """Put weights, optimizer state, random seeds and metrics back."""
        function = self._model.train_function
        self._state.restore()
        self._model.train_function = function  # Made once for all blocks.


@contextlib.contextmanager
def borrowed_step(model: keras.Model, batch: Any) -> Iterator[BorrowedStep]:
    """Lend the train step of a model, which keeps the weights that it gets from the batch."""
    check_one_device(model)
    if user_step(model) is not None:
        build_ahead(model, each_part(tf.type_spec_from_value, batch))
    elif not model.built:
        with fitting_data():
            model(keras.utils.unpack_x_y_sample_weight(batch)[0])
    with kept_state(model) as state:
        yield BorrowedStep(model, state)


@contextlib.contextmanager
def fitting_data() -> Iterator[None]:
    """Turn what a model says of data that do not fit it into an error that names both."""
    try:
        yield
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        raise InputError(
            "The model cannot be trained on these data: give inputs and targets of the shapes and "
            f"dtypes that the model and its loss take. Received: {failure_text(error)}"
        ) from error


def _shapes_of(batch: Any) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) for leaf in parts_of(batch))
