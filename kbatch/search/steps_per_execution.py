"""How many train steps one execution runs: chosen from a few timed steps, and set in a model.

Several steps an execution give the same weights, to the last bit, in less time: Keras starts each
execution from Python. As many as take about 100 ms are enough.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from kbatch.analysis.batch_sizes import check_size
from kbatch.analysis.throughput import FEWEST_STEADY
from kbatch.errors import InputError
from kbatch.library_internals import profiles_batches
from kbatch.records.machine import SHORTEST_S
from kbatch.records.notes import Note
from kbatch.records.search import StepSeconds
from kbatch.records.training_run import Budget
from kbatch.training.clock import TrainingClock
from kbatch.training.model import build_ahead, replica_count, user_step, wait_for
from kbatch.training.one_graph import GraphCount, counted_steps, execution_steps
from kbatch.training.state import kept_seeds, kept_state

_TIMED_S = 0.03
_MOST_TIMED = 1024
# Times the smallest batch size: a larger batch may not fit into memory as one.
_LARGEST_TIMED = 8
_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")

Steps = int | Literal["auto"] | None


def check_steps(steps: Steps) -> Steps:
    """Check what a search is given."""
    if steps is None or (isinstance(steps, str) and steps == "auto"):
        return steps
    if isinstance(steps, str):
        raise ValueError(
            '`steps_per_execution` must be "auto", a positive integer or None. '
            f"Received: steps_per_execution={steps!r}."
        )
    return check_size(steps, "steps_per_execution", unit="")


class Training(NamedTuple):
    """What one training is to run."""

    batch_size: int
    spec: Any  # Of its batches.
    epoch_steps: int | None  # None where the data do not tell.
    epochs: int
    budget: Budget | None
    callbacks: Sequence[keras.callbacks.Callback]
    most_at_once: int | None = None  # Examples that fit into memory, where that is known.


def choose_steps(
    asked: Steps,
    model: Any,
    training: Training,
    *,
    stock_fit: bool,
    timed: Callable[[], float],  # Returns the seconds of a step; infinite where none was timed.
) -> tuple[int, tuple[Note, ...]]:
    """Return how many steps an execution of a training runs, and what to say of it."""
    built: int = int(model.steps_per_execution)
    if asked is None or asked == built or built > 1:  # Or `build` sets it.
        return built, ()
    if isinstance(asked, int):
        # The steps of replicas are counted by executions.
        exact = training.budget and (training.budget.updates or training.budget.examples)
        return (1 if exact and replica_count(model) > 1 else asked), ()
    if (reason := _why_one(model, training)) is not None:
        return 1, (Note.of("one_step_an_execution", reason=reason),)
    if training.epoch_steps is None or replica_count(model) > 1 or not stock_fit:
        return 1, ()
    step_s = timed()
    if math.isinf(step_s):
        reason = "no step could be timed apart from the data"
        return 1, (Note.of("one_step_an_execution", reason=reason),)
    return steps_within(step_s, training), ()


def _why_one(model: Any, training: Training) -> str | None:
    if model.run_eagerly:
        return "the model is run eagerly"
    if user_step(model) is not None:
        return "the model has its own `train_step`"
    acting = next((one for one in training.callbacks if acts_on_batches(one)), None)
    return None if acting is None else f"`{type(acting).__name__}` acts on each batch"


def steps_within(step_s: float, training: Training) -> int:
    """Return as many steps as take about 100 ms, and leave enough executions to time."""
    epoch_steps, budget = training.epoch_steps or 1, training.budget or Budget()
    ends = (
        epoch_steps * training.epochs,
        budget.updates,
        budget.examples and -(-budget.examples // training.batch_size),
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


def set_steps(model: Any, steps: int) -> None:
    """Let an execution of a model run so many steps: its graphs read the number."""
    known = model.steps_per_execution
    if isinstance(known, GraphCount):
        model.steps_per_execution = known.changed(steps)
    else:
        model.steps_per_execution = counted_steps(model, steps)
        # What was made before runs the number of steps that was set then.
        model.train_function = model.test_function = None
    if steps != known:
        model.predict_function = None


def acts_on_batches(callback: Any) -> bool:
    """Return whether a callback does at each train batch what it would not at every execution."""
    # kbatch's and keras-tuner's own are written for executions.
    hooks = [getattr(callback, name, None) for name in _BATCH_HOOKS]
    owners = {str(getattr(hook, "__module__", None)).split(".")[0] for hook in hooks if hook}
    if owners - {"keras", "keras_tuner", "kbatch"}:
        return True
    counted = (getattr(callback, name, None) for name in ("save_freq", "update_freq"))
    if any(one not in (None, "epoch") for one in counted):
        return True
    if isinstance(callback, keras.callbacks.TensorBoard):
        return profiles_batches(callback)
    return isinstance(callback, keras.callbacks.TerminateOnNaN)


def time_steps(model: Any, training: Training, batch_sizes: Sequence[int]) -> StepSeconds:
    """Time the train step of a model, which is left as it was but for its graph."""
    spec, most = training.spec, training.most_at_once or sys.maxsize
    most = min(_LARGEST_TIMED * batch_sizes[0], most)
    larger = [size for size in batch_sizes if size <= most][-1:]
    parts = tf.nest.flatten(spec)
    known = all(
        isinstance(part, tf.TensorSpec) and part.shape.rank and part.shape[1:].is_fully_defined()
        for part in parts
    )
    if not known or not model.built:
        return StepSeconds()
    fixed = {part.shape[0] for part in parts} - {None}  # Another size would need another graph.
    asked = {batch_sizes[0], training.batch_size, *larger}
    sizes = sorted(size for size in asked if fixed <= {size})
    found: dict[int, float] = {}
    set_steps(model, 1)
    model.make_train_function()
    try:
        with kept_seeds(), kept_state(model):
            build_ahead(model, spec)
            for size in (sizes[0], sizes[-1]) if sizes else ():
                found[size] = _seconds_of(model, iter(_ones(spec, size)))
    except Exception:  # Training raises it again, where it is looked at.
        pass
    finally:
        set_steps(model, 1)
    return StepSeconds(tuple(found), tuple(found.values()))


def _ones(spec: Any, batch_size: int) -> tf.data.Dataset:
    """Make an endless dataset of one batch, which takes nothing from the data of a training."""

    def part(one: tf.TensorSpec) -> tf.Tensor:
        shape = [batch_size, *one.shape[1:]]
        return tf.fill(shape, "") if one.dtype == tf.string else tf.ones(shape, one.dtype)

    return endless(tf.nest.map_structure(part, spec), spec)


def endless(batch: Any, spec: Any) -> tf.data.Dataset:
    """Repeat one batch, in a dataset of the spec of a training, whose graph then takes it."""
    batches = tf.data.Dataset.from_tensors(batch).repeat()
    return tf.data.experimental.from_variant(tf.data.experimental.to_variant(batches), spec)


def _seconds_of(model: Any, iterator: Any) -> float:
    def execution(steps: int) -> float:
        set_steps(model, steps)
        begun_s = time.perf_counter()
        wait_for(model.train_function(iterator))
        return time.perf_counter() - begun_s

    execution(1)  # It traces, and compiles.
    steps = 1
    while (taken_s := execution(steps)) < _TIMED_S and steps < _MOST_TIMED:
        steps *= 2
    return max(SHORTEST_S, min(taken_s, execution(steps)) / steps)


class EndInTime(keras.callbacks.Callback):
    """Shortens an execution that would pass the end of an epoch, or of the training."""

    def __init__(
        self, budget: Budget | None, clock: TrainingClock, batch_size: int, epoch_steps: int | None
    ):
        super().__init__()
        self._budget = budget or Budget()
        self._clock = clock
        self._batch_size = batch_size
        self._epoch_steps = epoch_steps  # Of data that go on; else they end an execution.
        self._steps = 1

    def on_train_begin(self, logs: Any = None):
        model: Any = self.model
        self._steps = int(model.steps_per_execution)

    def on_train_batch_begin(self, batch: int, logs: Any = None):
        """Set the steps that are left; what overflows is made up by a further execution."""
        left = [self._steps]
        if self._epoch_steps is not None:
            left.append(self._epoch_steps - batch)
        if self._budget.updates is not None:
            left.append(self._budget.updates - self._clock.updates)
        if self._budget.examples is not None:
            examples = self._budget.examples - self._clock.examples
            left.append(-(-examples // self._batch_size))
        self._set(max(1, min(left)))

    def on_train_batch_end(self, batch: int, logs: Any = None):
        self._set(self._steps)

    def on_test_begin(self, logs: Any = None):
        """Set the steps of a validation too: no batch ends where the data end."""
        self._set(self._steps)

    def _set(self, steps: int) -> None:
        model: Any = self.model
        if model.steps_per_execution != steps:
            model.steps_per_execution = model.steps_per_execution.changed(steps)


def check_epoch(asked: Steps, epoch_steps: int | None) -> None:
    """Check that an execution is not longer than an epoch."""
    if isinstance(asked, int) and epoch_steps is not None and asked > epoch_steps:
        raise InputError(
            "An execution cannot have more steps than an epoch: give a smaller "
            f"`steps_per_execution`, or leave out the largest `batch_sizes`. Received: "
            f"steps_per_execution={asked} for epochs of {epoch_steps} "
            f"{'step' if epoch_steps == 1 else 'steps'}."
        )
