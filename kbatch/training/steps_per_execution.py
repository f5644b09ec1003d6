"""Choose and set `steps_per_execution`, the number of train steps in one execution.

Several steps per execution give exactly the same weights in less time, because Keras starts each
execution from Python. kbatch chooses executions of about 100 ms.
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
_MOST_VALIDATED = 64  # Steps of a validation in one execution.
FEWEST_STEADY = 3  # With fewer steady steps, one disturbed step would decide the result.
EXECUTION_S = 0.1  # Seconds of an execution of several steps.

Steps = int | Literal["auto"] | None


class GraphCount(int):
    """A number of steps that a traced graph reads again each time it runs."""

    _variable: Any
    _after: Any

    def __new__(cls, value: int, variable: Any = None, *, after: Any = None):
        self = super().__new__(cls, value)
        self._after = after  # A variable: the graph writes it before it reads the number.
        with tf.init_scope(), tf.device("CPU:0"):  # The host counts the loop.
            self._variable = variable
            if variable is None:
                self._variable = tf.Variable(tf.constant(value, tf.int32), trainable=False)
        return self

    def changed(self, value: int) -> "GraphCount":
        """Change the number that graphs read from now on, and return it."""
        self._variable.assign(value)
        return GraphCount(value, self._variable, after=self._after)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        written = [] if self._after is None else [tf.convert_to_tensor(self._after.value)]
        with tf.control_dependencies(written):
            return tf.cast(self._variable.read_value(), dtype or tf.int32, name=name)

    def __eq__(self, other: object) -> bool:
        # While Keras traces, it compares the number with 1, to make a graph without a loop.
        return not tf.inside_function() and int(self) == other

    __hash__ = int.__hash__

    def __reduce__(self):
        return int, (int(self),)


def counted_steps(model: Any, steps: int) -> GraphCount:
    """Return a `GraphCount` that makes each step request data after the previous step has ended.

    Otherwise, a step would request data while the previous one computes, and its waiting time would
    include that computation.
    """
    return GraphCount(steps, after=model.optimizer and model.optimizer.iterations)


def execution_steps(
    step_s: float, epoch_steps: int | None, *, execution_s: float = EXECUTION_S
) -> int:
    """Return how many steps take about `execution_s`, at most the steps of an epoch.

    Keras starts each execution from Python, which takes as long as a small step. In 100 ms that
    start is negligible, and callbacks still act several times a second.
    """
    steps = max(1, round(execution_s / step_s))
    return steps if epoch_steps is None else min(epoch_steps, steps)


class Training(NamedTuple):
    """The batch size, length, budget and callbacks of a training run."""

    batch_size: int
    epoch_steps: int | None  # None if unknown.
    epochs: int
    budget: Budget | None
    callbacks: Sequence[keras.callbacks.Callback]


def why_single_step(model: Any, callbacks: Sequence[Any] = ()) -> str | None:
    """Return why an execution must have a single step, or None if it may have several."""
    if model.run_eagerly:
        return "the model is run eagerly"
    if user_step(model) is not None:
        return "the model has its own `train_step`"
    names = [type(callback).__name__ for callback in callbacks if acts_on_batches(callback)]
    return f"`{names[0]}` acts on each batch" if names else None


def steps_within(step_s: float, training: Training) -> int:
    """Return how many steps take about 100 ms, or fewer, so that a run has executions to time."""
    epoch_steps, budget = training.epoch_steps or 1, training.budget or Budget()
    timed_steps = budget.train_s and budget.train_s // step_s
    ends = epoch_steps * training.epochs, budget.updates, timed_steps
    epochs, rest = divmod(int(min(end for end in ends if end is not None)), epoch_steps)

    def steady(steps: int) -> int:
        # The first execution compiles, and so does the first shorter one, at the end of an epoch.
        executions = epochs * -(-epoch_steps // steps) + -(-rest // steps)
        return executions - (1 if steps >= epoch_steps else 2)

    steps = execution_steps(step_s, epoch_steps)
    while steps > 1 and steady(steps) < FEWEST_STEADY:
        steps -= 1
    executions = -(-epoch_steps // steps)
    return -(-epoch_steps // executions)  # Make all executions about equally long.


def whole_steps(steps: int, epoch_steps: int | None, length: int) -> int:
    """Return the largest steps per execution, up to `steps`, that do not change an epoch's length.

    Args:
        steps: Integer. The preferred steps per execution.
        epoch_steps: `steps_per_epoch` of `fit`, or None.
        length: Integer. The cardinality of the dataset.
    """
    # Keras 3.15 runs complete executions and counts an execution that the data ended as a complete
    # one: `steps_per_epoch=10` makes 12 updates in executions of 4. If data of unknown length end
    # together with an execution, the next epoch has no update.
    if epoch_steps is None or 0 <= length <= epoch_steps:  # Each epoch ends with the data.
        return steps
    if length == tf.data.UNKNOWN_CARDINALITY:
        return 1
    return next(n for n in range(steps, 0, -1) if epoch_steps % n == 0)


def set_steps(model: Any, steps: int) -> None:
    """Set the steps per execution of a model, as a `GraphCount` that its graphs read."""
    known = model.steps_per_execution
    if isinstance(known, GraphCount):
        model.steps_per_execution = known.changed(steps)
    else:
        model.steps_per_execution = counted_steps(model, steps)
        # In earlier traces the number is a constant.
        model.train_function = model.test_function = None
    if (steps > 1) != (int(known) > 1):
        model.predict_function = None  # It is another function for several steps.


def acts_on_batches(callback: Any) -> bool:
    """Return whether a callback must be called after each batch, not only each execution."""
    if _overrides(callback, _TRAIN_HOOKS):
        return True
    frequencies = (getattr(callback, name, None) for name in ("save_freq", "update_freq"))
    if any(frequency not in (None, "epoch") for frequency in frequencies):
        return True
    if isinstance(callback, keras.callbacks.TensorBoard):
        return profiles_batches(callback)
    return isinstance(callback, keras.callbacks.TerminateOnNaN)


def _overrides(callback: Any, names: Sequence[str]) -> bool:
    # Hooks of kbatch, Keras and keras-tuner can be called once for an execution.
    hooks = [getattr(callback, name, None) for name in names]
    owners = {str(getattr(hook, "__module__", None)).split(".")[0] for hook in hooks if hook}
    return bool(owners - {"keras", "keras_tuner", "kbatch"})


class ExecutionSteps(keras.callbacks.Callback):
    """Sets the steps of each execution: fewer at the end of a run, and many in a validation."""

    def __init__(self, training: Training, clock: Any, *, endless: bool, validation: int):
        super().__init__()
        self._training, self._budget = training, training.budget or Budget()
        self._clock = clock  # A `TrainingClock`.
        self._endless = endless  # Whether the data has no end that ends the last execution.
        # Steps per execution in a validation. 0 means the same as in training.
        watched = any(_overrides(callback, _TEST_HOOKS) for callback in training.callbacks)
        self._validation = 0 if watched else min(validation, _MOST_VALIDATED)
        self._steps = 1

    def on_train_begin(self, logs: Any = None):
        model: Any = self.model
        self._steps = int(model.steps_per_execution)

    def on_train_batch_begin(self, batch: int, logs: Any = None):
        # Updates that overflow do not count, so later executions replace them.
        left = [self._steps]
        if self._endless:
            left.append((self._training.epoch_steps or 1) - batch)
        if self._budget.updates is not None:
            left.append(self._budget.updates - self._clock.updates)
        self._set(max(1, min(left)))

    def on_train_batch_end(self, batch: int, logs: Any = None):
        # When an epoch ends, Keras opens the iterator of the validation for the steps set then.
        most = self._training.epoch_steps
        ends = most is not None and batch + 1 >= most
        self._set((ends and self._validation) or self._steps)

    def on_test_begin(self, logs: Any = None):
        # The validation must run the steps that its iterator counts.
        self._set(validation_steps(self.model) or self._steps)

    def on_test_end(self, logs: Any = None):
        self._set(self._steps)

    def _set(self, steps: int) -> None:
        model: Any = self.model
        if model.steps_per_execution != steps:
            set_steps(model, steps)


def check_epoch(asked: Steps, epoch_steps: int | None) -> None:
    """Raise InputError if an execution is longer than an epoch."""
    if isinstance(asked, int) and epoch_steps is not None and asked > epoch_steps:
        raise InputError(
            "`steps_per_execution` must not be larger than the steps of an epoch: give a smaller "
            "one, or leave out the largest `batch_sizes`. Received: "
            f"steps_per_execution={asked} for epochs of {epoch_steps} "
            f"{'step' if epoch_steps == 1 else 'steps'}."
        )
