"""The train steps of a model by micro-batch size, for a measurement; it is returned as it was."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kbatch.training.accumulation import Accumulation, accumulation_of, varying_micro_batch
from kbatch.training.data.forms import rows_of
from kbatch.training.model import check_one_device, user_step, wait_for
from kbatch.training.one_graph import counted_steps
from kbatch.training.state import kept_state


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
