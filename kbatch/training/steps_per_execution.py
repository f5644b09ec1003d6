"""How many train steps one execution runs: chosen by what a step takes, and set in a model.

Several steps an execution give the same weights, to the last bit, in less time: Keras starts each
execution from Python. As many as take about 100 ms are enough.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.library_internals import profiles_batches, validation_steps
from kbatch.records.training_run import Budget
from kbatch.training.model import user_step

_TRAIN_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_TEST_HOOKS = ("on_test_batch_begin", "on_test_batch_end")
# Steps of a validation in one execution.
_MOST_VALIDATED = 64
FEWEST_STEADY = 3  # Of fewer steady steps, one that is disturbed would decide.

Steps = int | Literal["auto"] | None


class GraphCount(int):
    """A number of steps that a traced graph reads again each time it runs."""

    _variable: Any
    _after: Any

    def __new__(cls, value: int, variable: Any = None, *, after: Any = None):
        self = super().__new__(cls, value)
        self._after = after  # A variable: what a graph writes there is written before it reads.
        with tf.init_scope(), tf.device("CPU:0"):  # Loops are counted there.
            self._variable = variable
            if variable is None:
                self._variable = tf.Variable(tf.constant(value, tf.int32), trainable=False)
        return self

    def changed(self, value: int) -> "GraphCount":
        """Return the number that the graphs of this one read from now on."""
        self._variable.assign(value)
        return GraphCount(value, self._variable, after=self._after)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        written = [] if self._after is None else [tf.convert_to_tensor(self._after.value)]
        with tf.control_dependencies(written):
            return tf.cast(self._variable.read_value(), dtype or tf.int32, name=name)

    def __eq__(self, other: object) -> bool:
        # Keras asks while it traces whether it is 1, which makes a graph without a loop.
        return not tf.inside_function() and int(self) == other

    __hash__ = int.__hash__

    def __reduce__(self):
        return int, (int(self),)


def counted_steps(model: Any, steps: int) -> GraphCount:
    """Return a number of steps an execution, each of which asks for data when the last has ended.

    Else a step would ask while another computes, and seem to wait for data that the pipeline has
    time to make.
    """
    return GraphCount(steps, after=model.optimizer and model.optimizer.iterations)


# Seconds of an execution of several steps.
EXECUTION_S = 0.1


def execution_steps(
    step_s: float, epoch_steps: int | None, *, execution_s: float = EXECUTION_S
) -> int:
    """Return how many steps take about as long as an execution should, at most those of an epoch.

    Keras starts each execution from Python, which takes as long as the step itself where that is
    small. Beyond 100 ms that start no longer counts, and callbacks still act several times a
    second.
    """
    steps = max(1, round(execution_s / step_s))
    return steps if epoch_steps is None else min(epoch_steps, steps)


class Training(NamedTuple):
    """What one training is to run."""

    batch_size: int
    epoch_steps: int | None  # None where it is not known.
    epochs: int
    budget: Budget | None
    callbacks: Sequence[keras.callbacks.Callback]


def why_one(model: Any, callbacks: Sequence[Any] = ()) -> str | None:
    """Return why an execution must have one step, None where it may have several."""
    if model.run_eagerly:
        return "the model is run eagerly"
    if user_step(model) is not None:
        return "the model has its own `train_step`"
    acting = next((one for one in callbacks if acts_on_batches(one)), None)
    return None if acting is None else f"`{type(acting).__name__}` acts on each batch"


def steps_within(step_s: float, training: Training) -> int:
    """Return as many steps as take about 100 ms, and leave enough executions to time."""
    epoch_steps, budget = training.epoch_steps or 1, training.budget or Budget()
    ends = (
        epoch_steps * training.epochs,
        budget.updates,
        budget.train_s and budget.train_s // step_s,
    )
    epochs, rest = divmod(int(min(end for end in ends if end is not None)), epoch_steps)

    def steady(steps: int) -> int:
        """Count the executions that are like an earlier one: the last of an epoch has less."""
        executions = epochs * -(-epoch_steps // steps) + -(-rest // steps)
        return executions - (1 if steps >= epoch_steps else 2)

    steps = execution_steps(step_s, epoch_steps)
    while steps > 1 and steady(steps) < FEWEST_STEADY:
        steps -= 1
    executions = -(-epoch_steps // steps)
    return -(-epoch_steps // executions)  # About as many in each.


def whole_steps(steps: int, epoch_steps: int | None, length: int) -> int:
    """Return the most steps, up to `steps`, that make exactly `epoch_steps` updates an epoch.

    Args:
        steps: Integer. The steps of an execution that are wanted.
        epoch_steps: `steps_per_epoch` of `fit`, or `None`.
        length: Integer. The cardinality of the dataset.
    """
    # Keras 3.15 runs whole executions, and counts an execution that the data ended as a whole one:
    # `steps_per_epoch=10` makes 12 updates in executions of 4. Data of unknown length that end with
    # an execution leave the next epoch without an update.
    if epoch_steps is None or 0 <= length <= epoch_steps:  # Each epoch ends with the data.
        return steps
    if length == tf.data.UNKNOWN_CARDINALITY:
        return 1
    return next(n for n in range(steps, 0, -1) if epoch_steps % n == 0)


def set_steps(model: Any, steps: int) -> None:
    """Let an execution of a model run so many steps: its graphs read the number."""
    known = model.steps_per_execution
    if isinstance(known, GraphCount):
        model.steps_per_execution = known.changed(steps)
    else:
        model.steps_per_execution = counted_steps(model, steps)
        # What was made before runs the number of steps that was set then.
        model.train_function = model.test_function = None
    if (steps > 1) != (int(known) > 1):
        model.predict_function = None  # Its kind follows the number.


def acts_on_batches(callback: Any) -> bool:
    """Return whether a callback does at each train batch what it would not at every execution."""
    if _overrides(callback, _TRAIN_HOOKS):
        return True
    counted = (getattr(callback, name, None) for name in ("save_freq", "update_freq"))
    if any(one not in (None, "epoch") for one in counted):
        return True
    if isinstance(callback, keras.callbacks.TensorBoard):
        return profiles_batches(callback)
    return isinstance(callback, keras.callbacks.TerminateOnNaN)


def _overrides(callback: Any, names: Sequence[str]) -> bool:
    # kbatch's and keras-tuner's own are written for executions.
    hooks = [getattr(callback, name, None) for name in names]
    owners = {str(getattr(hook, "__module__", None)).split(".")[0] for hook in hooks if hook}
    return bool(owners - {"keras", "keras_tuner", "kbatch"})


class EndInTime(keras.callbacks.Callback):
    """Sets the steps of each execution: fewer at an end, and all of a validation at once."""

    def __init__(self, training: Training, clock: Any, *, endless: bool, validation: int):
        super().__init__()
        self._training, self._budget = training, training.budget or Budget()
        self._clock = clock  # A `TrainingClock`.
        self._endless = endless  # Data that go on; else they end an execution.
        # Steps of a validation, 0 where they are those of training.
        watched = any(_overrides(one, _TEST_HOOKS) for one in training.callbacks)
        self._validation = 0 if watched else min(validation, _MOST_VALIDATED)
        self._steps = 1

    def on_train_begin(self, logs: Any = None):
        model: Any = self.model
        self._steps = int(model.steps_per_execution)

    def on_train_batch_begin(self, batch: int, logs: Any = None):
        """Set the steps that are left; what overflows is made up by a further execution."""
        left = [self._steps]
        if self._endless:
            left.append((self._training.epoch_steps or 1) - batch)
        if self._budget.updates is not None:
            left.append(self._budget.updates - self._clock.updates)
        self._set(max(1, min(left)))

    def on_train_batch_end(self, batch: int, logs: Any = None):
        # Keras opens the iterator of a validation for the steps that are set when an epoch ends.
        most = self._training.epoch_steps
        ends = most is not None and batch + 1 >= most
        self._set((ends and self._validation) or self._steps)

    def on_test_begin(self, logs: Any = None):
        """Run the steps that the iterator counts, also where the data ended an execution."""
        self._set(validation_steps(self.model) or self._steps)

    def on_test_end(self, logs: Any = None):
        self._set(self._steps)

    def _set(self, steps: int) -> None:
        model: Any = self.model
        if model.steps_per_execution != steps:
            set_steps(model, steps)


def check_epoch(asked: Steps, epoch_steps: int | None) -> None:
    """Check that an execution is not longer than an epoch."""
    if isinstance(asked, int) and epoch_steps is not None and asked > epoch_steps:
        raise InputError(
            "An execution cannot have more steps than an epoch: give a smaller "
            f"`steps_per_execution`, or leave out the largest `batch_sizes`. Received: "
            f"steps_per_execution={asked} for epochs of {epoch_steps} "
            f"{'step' if epoch_steps == 1 else 'steps'}."
        )
