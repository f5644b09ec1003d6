"""Call the compiled train step of a model without `fit`, and restore the model afterwards."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.training.data.forms import each_part, parts_of
from kbatch.training.model import replica_count, user_step
from kbatch.training.state import KeptState
from kbatch.training.steps_per_execution import GraphCount, set_steps


def endless(batch: Any) -> tf.data.Dataset:
    """Return a dataset that repeats one batch."""
    options = tf.data.Options()
    # The longer a tuned iterator has run, the longer TensorFlow takes to free it.
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensors(batch).repeat().with_options(options)


class StepCall:
    """Calls the train step of a model on batches outside of `fit`.

    The overhead of `fit` is longer than some small steps, and `fit` does not show when the device
    has finished. A call waits until it has, or `wait` does after `launch`.

    Args:
        model: The model.
        state: The state of the model to restore, from `kept_state`.
        several: Whether one execution may run several steps, if the model allows it.
    """

    def __init__(self, model: Any, state: KeptState, *, several: bool = False):
        self._model, self._state = model, state
        self._shapes: set[tuple[Any, ...]] = set()
        self._outputs: Any = ()
        # The steps of an eager model, or of a custom `train_step`, run in a Python loop.
        if several and not model.run_eagerly and user_step(model) is None:
            set_steps(model, int(model.steps_per_execution))
        #: Whether one execution can run any number of steps.
        self.several = isinstance(model.steps_per_execution, GraphCount)
        model.make_train_function()

    def __call__(self, batch: Any) -> None:
        """Train on a batch once, and wait for the device."""
        self.launch(batch)
        self.wait()

    def launch(self, batch: Any) -> None:
        """Start to train on a batch. A GPU may still be working when this returns."""
        self._shapes.add(_shapes_of(batch))
        # A Python iterator of one batch gives one step, whatever `steps_per_execution` is.
        self._outputs = self._model.train_function(iter((batch,)))

    def execute(self, batches: Any, steps: int) -> None:
        """Run some steps on the batches of a dataset iterator, in one execution if possible."""
        if self.several and self._model.steps_per_execution != steps:
            set_steps(self._model, steps)
        for _ in range(1 if self.several else steps):
            self._outputs = self._model.train_function(batches)
            self.wait()

    def wait(self) -> None:
        """Wait for all outputs of a step, because a single output may come from the host."""
        for output in keras.tree.flatten(self._outputs):
            np.asarray(output)

    def has_seen(self, batch: Any) -> bool:
        """Return whether the step has run on a batch of these shapes. New shapes may compile."""
        return _shapes_of(batch) in self._shapes

    def restore(self) -> None:
        """Restore weights, optimizer state, random seeds and metrics."""
        function = self._model.train_function
        self._state.restore()
        self._model.train_function = function  # Later calls use the same function.


def check_one_device(model: keras.Model) -> None:
    if (replicas := replica_count(model)) > 1:
        raise InputError(
            "kbatch measures the train step on one device: build the model outside "
            f"`strategy.scope()`. Received: a model on {replicas} replicas."
        )


def held_by_host(batch: Any) -> Any:
    """Copy a batch to the host, so that each step copies it to the GPU, as in `fit`."""
    with tf.device("CPU:0"):
        return each_part(tf.identity, batch)


def _shapes_of(batch: Any) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) for leaf in parts_of(batch))
