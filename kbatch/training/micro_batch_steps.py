"""Train steps of one model with several micro-batch sizes, borrowed for a measurement."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras

from kbatch.training.accumulation import (
    accumulate_gradients,
    accumulation_of,
    varying_micro_batch,
)
from kbatch.training.borrowed_step import check_one_device, rows_of, wait_for
from kbatch.training.kept_state import KeptState


class MicroBatchSteps:
    """Makes train steps of a model, each with a micro-batch size and a batch of its own.

    A step is what `fit` runs for a batch, and waits for the device: Keras's own where the batch
    goes through at once, else one that accumulates over micro-batches. Those of all micro-batch
    sizes share one graph, unless XLA compiles it.

    Args:
        model: A built, compiled model.
        moments_every: As in `accumulate_gradients`.
    """

    def __init__(self, model: keras.Model, *, moments_every: int):
        self._model: Any = model
        self._moments_every = moments_every
        # A step of the user's own stays; one that accumulates gives way to those asked for.
        own = vars(model).get("train_step")
        known = accumulation_of(model) is None
        self._whole = _Graph(own, function=model.train_function) if known else _Graph(None)
        self._accumulating: _Graph | None = None

    def step(self, batch: Any, micro_batch_size: int) -> Callable[[], None]:
        """Makes the step of a batch; its first call traces and compiles.

        Args:
            batch: Inputs, targets and perhaps sample weights, on the device.
            micro_batch_size: Examples that go through the device at once.
        """
        accumulated = micro_batch_size < rows_of(batch)
        graph = self._accumulate(micro_batch_size) if accumulated else self._whole

        def run() -> None:
            self._use(graph)
            if graph.size is not None:
                graph.size.assign(micro_batch_size)
            # A Python iterator of one batch gives one step, whatever `steps_per_execution` is.
            wait_for(graph.function(iter((batch,))))

        return run

    def _accumulate(self, micro_batch_size: int) -> "_Graph":
        if self._accumulating is not None:
            return self._accumulating
        model = self._model
        with warnings.catch_warnings():
            # Those who train with the size are told; those who measure it need not be.
            warnings.simplefilter("ignore", UserWarning)
            accumulate_gradients(model, micro_batch_size, moments_every=self._moments_every)
        if model.jit_compile:
            return _Graph(model.train_step)
        size = varying_micro_batch(model)
        self._accumulating = _Graph(model.train_step, size)
        return self._accumulating

    def _use(self, graph: "_Graph") -> None:
        """Makes the model train by a graph; a batch of new shapes is traced anew."""
        model = self._model
        if graph.function is not None and model.train_function is graph.function:
            return
        vars(model).pop("train_step", None)
        if graph.train_step is not None:
            model.train_step = graph.train_step
        model.train_function = graph.function
        model.make_train_function()
        graph.function = model.train_function


@dataclasses.dataclass
class _Graph:
    """A train step and the function that Keras made of it."""

    train_step: Any
    size: Any = None
    function: Any = None


@contextlib.contextmanager
def micro_batch_steps(model: keras.Model, *, moments_every: int = 0) -> Iterator[MicroBatchSteps]:
    """Lends train steps of a model, and gives the model back as it was, also after an error.

    Args:
        model: A built, compiled model.
        moments_every: As in `accumulate_gradients`.

    Raises:
        InputError: If the model is spread over several replicas.
    """
    check_one_device(model)
    state, function = KeptState(model), model.train_function
    try:
        yield MicroBatchSteps(model, moments_every=moments_every)
    finally:
        state.restore()
        model.train_function = function
