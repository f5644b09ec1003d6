"""The train step of a model, borrowed for a measurement and returned as it was."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.device.failures import failure_text
from kbatch.errors import InputError
from kbatch.training.accumulation import Accumulation, accumulation_of, varying_micro_batch
from kbatch.training.data.forms import each_part, parts_of, rows_of
from kbatch.training.model import build_ahead, replica_count, user_step
from kbatch.training.one_graph import counted_steps
from kbatch.training.state import KeptState, kept_state

_EXECUTION_S = 0.1


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


def wait_for(outputs: Any) -> None:
    """Wait for all outputs of a step: one of them may lie on the host from the start."""
    for output in keras.tree.flatten(outputs):
        np.asarray(output)


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


def check_one_device(model: keras.Model) -> None:
    if (replicas := replica_count(model)) > 1:
        raise InputError(
            "The train step is measured on one device: build the model outside of "
            f"`strategy.scope()`. Received: a model on {replicas} replicas."
        )


def _shapes_of(batch: Any) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) for leaf in parts_of(batch))


class MicroBatchSteps:
    """Makes train steps of a model, each with a micro-batch size and a batch of its own."""

    # Keras's own where the batch goes through at once, else one that accumulates. Those of all
    # micro-batch sizes share one graph, unless XLA compiles it.

    def __init__(self, model: keras.Model):
        self._model: Any = model
        # A step of the user's own stays; one that accumulates gives way to those asked for.
        stays = accumulation_of(model) is None
        self._whole = vars(model).get("train_step") if stays else None
        self._cut: tuple[Any, tf.Variable | None] | None = None  # A step, with a size that varies.
        # What Keras made of a step, for one or several an execution.
        self._functions: dict[tuple[Any, bool], Any] = {}
        if stays and model.train_function is not None:
            self._functions[self._whole, False] = model.train_function
        self._count: Any = None  # Of the functions that run several steps.

    @property
    def can_run_together(self) -> bool:
        """Whether an execution may run several steps."""
        return not self._model.run_eagerly and user_step(self._model) is None

    def step(
        self, batch: Any, micro_batch_size: int, steps: int | None = None
    ) -> Callable[[], None]:
        """Make the step of a batch, or an execution of steps; the first call compiles."""
        train_step, size = self._whole, None
        if micro_batch_size < rows_of(batch):
            train_step, size = self._accumulating(micro_batch_size)
        key, batches = (train_step, steps is not None), None
        if steps is not None:
            batches = iter(tf.data.Dataset.from_tensors(batch).repeat())

        def run() -> None:
            model = self._model
            function: Any = self._functions.get(key)
            if steps is not None:
                self._count = (self._count or counted_steps(model, 1)).changed(steps)
                model.steps_per_execution = self._count
            if function is None or model.train_function is not function:
                vars(model).pop("train_step", None)
                if train_step is not None:
                    model.train_step = train_step
                model.train_function = function
                model.make_train_function()
                function = self._functions[key] = model.train_function
            if size is not None:
                size.assign(micro_batch_size)
            # A Python iterator gives one step, a dataset's as many as the model is set to.
            wait_for(function(batches or iter((batch,))))

        return run

    def _accumulating(self, micro_batch_size: int) -> tuple[Any, tf.Variable | None]:
        xla = self._model.jit_compile
        if self._cut is None or xla:
            Accumulation(micro_batch_size).apply(self._model)
            size = None if xla else varying_micro_batch(self._model)
            self._cut = self._model.train_step, size
        return self._cut


@contextlib.contextmanager
def micro_batch_steps(model: keras.Model) -> Iterator[MicroBatchSteps]:
    check_one_device(model)
    steps = model.steps_per_execution
    try:
        with kept_state(model):
            yield MicroBatchSteps(model)
    finally:
        model.steps_per_execution = steps


def execution_steps(step_s: float, epoch_steps: int | None) -> int:
    """Return how many steps take about as long as an execution should, at most those of an epoch.

    Keras starts each execution from Python, which takes as long as the step itself where that is
    small. Beyond 100 ms that start no longer counts, and callbacks still act several times a
    second.
    """
    steps = max(1, round(_EXECUTION_S / step_s))
    return steps if epoch_steps is None else min(epoch_steps, steps)
