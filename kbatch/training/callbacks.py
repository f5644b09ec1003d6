"""Callbacks of a training: its clock, what ends it, and scalars for TensorBoard."""

import math
import numbers
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import psutil
import tensorflow as tf

from kbatch.analysis.batch_sizes import check_size
from kbatch.analysis.intervals import Estimate
from kbatch.analysis.noise_scale import MOMENT_METRICS
from kbatch.device.memory import DeviceMemory
from kbatch.errors import InputError
from kbatch.records.training_run import Budget, EpochRecord, Target, throughput_of_windows
from kbatch.training.data.batches import InputMeter, InputReading
from kbatch.training.learning_rate import current_learning_rate, peak_learning_rate
from kbatch.training.metrics import required_direction
from kbatch.training.model import inner_optimizers, installed_step, updates_made
from kbatch.training.steps_per_execution import FEWEST_STEADY, set_steps


def numbers_of(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics that are one number, as a scalar or, as in `F1Score`, an array of one."""
    arrays = {name: np.asarray(value) for name, value in (logs or {}).items()}
    return {n: float(a.item()) for n, a in arrays.items() if a.size == 1 and a.dtype != object}


class TrainingClock(keras.callbacks.Callback):
    """Times each train step; one that may have compiled is not steady."""

    # A step begins after all other callbacks' `on_train_batch_begin` and ends before their
    # `on_train_batch_end`: data loading is in it, other callbacks and validation are not. So the
    # clock stands first among the callbacks and `clock.last` stands last.
    def __init__(
        self,
        meter: InputMeter,
        *,
        every_shape_compiles: bool = False,  # XLA: for a new length of any axis, not only of rows.
        now: Callable[[], float] = time.perf_counter,
    ):
        super().__init__()
        self.first_step_s: float | None = None  # Tracing and compiling included.
        self.first_learning_rate: float | None = None
        self.train_s = 0.0  # In train steps.
        self.epochs: list[EpochRecord] = []
        self.in_step = False  # An error then came from the step.
        # Starts the steps and ends the epochs after all other callbacks.
        self.last: keras.callbacks.Callback = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs=None: self.begin_step(),
            on_epoch_end=lambda epoch, logs=None: self.keep_epoch(epoch, logs or {}),
        )
        self._meter = meter
        self._every_shape_compiles = every_shape_compiles
        self._now = now
        self._steady: list[tuple[int, float]] = []  # Examples and seconds of each steady step.
        self._shapes: set[float] = set()
        self._begun_s = 0.0
        self._first_of_fit = True
        self._reading = self._epoch_reading = meter.read()
        self._epoch_train_s = 0.0
        self._epoch_iterations = 0
        self._epoch_begun = False

    @property
    def windows(self) -> tuple[list[int], list[float]]:
        """Examples and seconds of the windows of steady training."""
        return steady_windows(self._steady)

    @property
    def throughput(self) -> Estimate[float] | None:
        """Examples per second of the steady steps, None before there are three."""
        return throughput_of_windows(*self.windows)

    @property
    def reading(self) -> InputReading:
        return self._meter.read()

    @property
    def updates(self) -> int:
        """Optimizer updates so far, those that overflowed not counted."""
        now = updates_made(self.model, self._reading.batches) - self._epoch_iterations
        return sum(epoch.updates for epoch in self.epochs) + (now if self._epoch_begun else 0)

    def on_train_begin(self, logs: Any = None):
        """Begin with a step that is not steady: a new `fit` may build a new train function."""
        self._first_of_fit = True
        self.in_step = False

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        self._meter.begin_epoch()
        self._epoch_reading = self._reading = self._meter.read()
        self._epoch_train_s = self.train_s
        self._epoch_iterations = updates_made(self.model, self._reading.batches)
        self._epoch_begun = True

    def begin_step(self) -> None:
        self.in_step = True
        if self.first_learning_rate is None:
            found = inner_optimizers(self.model)
            self.first_learning_rate = peak_learning_rate(next(iter(found), None))
        self._begun_s = self._now()

    def on_train_batch_end(self, batch: int, logs: Any = None):
        self.in_step = False
        duration_s = self._now() - self._begun_s
        self._meter.end_step()
        reading = self._meter.read()
        examples = reading.examples - self._reading.examples
        self._reading = reading
        if self.first_step_s is None:
            self.first_step_s = duration_s
        shape = reading.shape_number if self._every_shape_compiles else float(examples)
        if not self._first_of_fit and shape in self._shapes:
            self._steady.append((examples, duration_s))
        self._first_of_fit = False
        self._shapes.add(shape)
        self.train_s += duration_s

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        """Add `samples_per_second` to the logs, for the callbacks that follow."""
        throughput = self.throughput
        if logs is not None and throughput is not None:
            logs["samples_per_second"] = throughput.value

    def keep_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Keep the epoch with the metrics that all callbacks have left."""
        before, now = self._epoch_reading, self._reading
        self._epoch_begun = False
        waited_s = None if now.wait_s is None else now.wait_s - (before.wait_s or 0.0)
        self.epochs.append(
            EpochRecord(
                epoch=epoch,
                metrics={
                    name: value if math.isfinite(value) else None
                    for name, value in numbers_of(logs).items()
                },
                examples=now.examples - before.examples,
                batches=now.batches - before.batches,
                # A callback that compiles the model again starts the count over.
                updates=max(0, updates_made(self.model, now.batches) - self._epoch_iterations),
                train_s=self.train_s - self._epoch_train_s,
                data_wait_s=waited_s,
                learning_rate=current_learning_rate(next(iter(inner_optimizers(self.model)), None)),
            )
        )


_SHORTEST_WINDOW_S, _FEWEST_WINDOWS, _MOST_WINDOWS = 0.05, 5, 200


def steady_windows(steps: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Join consecutive steady steps, each with its examples and its seconds, into windows.

    A window has 50 ms or more, or less if the training has no time for five. There are at most 200.
    What is left joins the last window.
    """
    if len(steps) < FEWEST_STEADY:
        return [], []
    # Neither is computed from the sum of the seconds, which a pause of the process may dominate.
    fewest = -(-len(steps) // _MOST_WINDOWS)
    usual_s = statistics.median(s for _, s in steps) * len(steps)
    shortest_s = min(_SHORTEST_WINDOW_S, usual_s / _FEWEST_WINDOWS)
    examples, durations_s, count = [0], [0.0], 0
    for n, s in steps:
        if count >= fewest and durations_s[-1] >= shortest_s:
            examples.append(0)
            durations_s.append(0.0)
            count = 0
        examples[-1] += n
        durations_s[-1] += s
        count += 1
    if len(examples) > 1 and (count < fewest or durations_s[-1] < shortest_s):
        rest, rest_s = examples.pop(), durations_s.pop()
        examples[-1] += rest
        durations_s[-1] += rest_s
    return examples, durations_s


class BudgetCallback(keras.callbacks.Callback):
    """Ends training once a budget is spent, counted by a search's clock or by itself."""

    unit: str  # Of `Budget` and of `TrainingClock`.
    _spent: Callable[[], float]  # What training has spent, where no search counts it.

    def __init__(self, most: Any):
        super().__init__()
        self.budget = Budget(**{self.unit: most})  # What training may spend.
        self._clock: TrainingClock | None = None

    def count_by(self, clock: TrainingClock) -> None:
        """Read what a search counts over all `fit` calls of a trial, instead of its own count."""
        self._clock = clock

    def on_train_batch_end(self, batch: int, logs: Any = None):
        spent = self._spent() if self._clock is None else getattr(self._clock, self.unit)
        if spent >= getattr(self.budget, self.unit):
            model: Any = self.model
            model.stop_training = True


class TimeBudget(BudgetCallback):
    """Ends training after so many seconds of train steps.

    What counts is what a record calls `train_s`: train steps with the wait for their data, the
    first one with its tracing and compiling; validation, checkpoints and other callbacks do not
    count. It ends after the step that spends the budget, or the execution of several steps, in the
    middle of an epoch too, and the epoch is validated as any other. Give `epochs` large enough that
    the budget ends first.

    Example:

    >>> tuner.search(x, y, validation_data=(xv, yv), epochs=1000,
    ...              callbacks=[kbatch.TimeBudget(60)])

    Args:
        seconds: The budget, in seconds.

    Raises:
        ValueError: If it is not positive.
    """

    unit = "train_s"

    def __init__(self, seconds: float):
        if not _is_number(seconds) or not 0 < seconds < 1e12:
            raise ValueError(f"`seconds` must be a positive number. Received: seconds={seconds!r}.")
        super().__init__(float(seconds))
        self._now: Callable[[], float] = time.perf_counter
        self._spent_s = 0.0
        self._begun_s = 0.0

    def on_train_begin(self, logs: Any = None):
        self._spent_s = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None):
        self._begun_s = self._now()

    def _spent(self) -> float:
        self._spent_s += self._now() - self._begun_s
        return self._spent_s


class UpdateBudget(BudgetCallback):
    """Ends training after so many optimizer updates, those that overflowed not counted.

    Under `steps_per_execution` the last execution runs only the steps that are left.

    Args:
        updates: The budget.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is not positive.
    """

    unit = "updates"

    def __init__(self, updates: int):
        super().__init__(check_size(updates, "updates", unit=""))
        self._before = 0
        self._steps = 1  # Of an execution.

    def on_train_begin(self, logs: Any = None):
        model: Any = self.model
        self._before = updates_made(model)
        # In a search, `EndInTime` sets the steps.
        self._steps = 1 if self._clock else int(model.steps_per_execution)
        if self._steps > 1:  # The train function that `fit` made has the number in its graph.
            set_steps(model, self._steps)
            model.make_train_function()

    def on_train_batch_begin(self, batch: int, logs: Any = None):
        """Let an execution run at most the updates that are left."""
        if self._steps > 1:
            left = (self.budget.updates or 0) - self._spent()
            set_steps(self.model, max(1, min(self._steps, left)))

    def on_train_batch_end(self, batch: int, logs: Any = None):
        super().on_train_batch_end(batch, logs)
        if self._steps > 1:  # A validation is one of whole executions.
            set_steps(self.model, self._steps)

    def _spent(self) -> int:
        return updates_made(self.model) - self._before


def joint_budget(callbacks: list[BudgetCallback]) -> Budget | None:
    """Return what a run with these callbacks may spend, None without any."""
    limits: dict[str, Any] = {}
    for one in callbacks:  # Of two of a kind the smaller one ends it.
        spent = getattr(one.budget, one.unit)
        limits[one.unit] = min(spent, limits.get(one.unit, spent))
    return Budget(**limits) if limits else None


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


class StopAtTarget(keras.callbacks.Callback):
    """Ends training at the end of the first epoch whose metric meets a value.

    A search records `seconds_to_target`, the seconds of training that the target took (as
    `TimeBudget` counts them). This can be the objective. A trial that never meets the target is a
    result too, and a budget ends it.

    Example:

    >>> tuner = keras_tuner.GridSearch(
    ...     hypermodel, keras_tuner.Objective("seconds_to_target", "min"))
    >>> tuner.search(x, y, validation_data=(xv, yv), epochs=1000, callbacks=[
    ...     kbatch.StopAtTarget("val_accuracy", 0.97), kbatch.TimeBudget(60)])

    Args:
        monitor: Name of the metric, as in the logs of an epoch.
        value: The value to meet.
        mode: `"max"` where more is better, `"min"` where less is, `"auto"` to decide by the name.

    Raises:
        ValueError: If the name does not decide it, or the value is no finite number.
    """

    def __init__(self, monitor: str, value: float, mode: Literal["auto", "min", "max"] = "auto"):
        super().__init__()
        if not _is_number(value) or not abs(float(value)) < 1e300:
            raise ValueError(f"`value` must be a finite number. Received: value={value!r}.")
        if mode not in ("min", "max"):
            if mode != "auto":
                raise InputError(
                    '`mode` must be "auto", "max" if more of the metric is better, or "min" if '
                    f"less is. Received: mode={mode!r}."
                )
            remedy = 'give `mode="max"`, or `mode="min"` if less is better'
            received = f"monitor={monitor!r}, mode={mode!r}"
            mode = required_direction(monitor, remedy=remedy, received=received)
        self.target = Target(monitor, float(value), mode)
        self._seen: set[str] = set()

    def on_train_begin(self, logs: Any = None):
        self._seen = set()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        """End training if the epoch meets the target; an epoch without validation does not."""
        numbers = numbers_of(logs)
        self._seen.update(numbers)
        value = numbers.get(self.target.metric)
        if value is not None and self.target.is_met(value):
            model: Any = self.model
            model.stop_training = True

    def on_train_end(self, logs: Any = None):
        if self._seen and self.target.metric not in self._seen:
            raise InputError(
                "`monitor` must be a metric of the epochs that is one number: give "
                "`validation_data` for one that starts with val_, or compile the model with it. "
                f"Received: monitor={self.target.metric!r}, the epochs have {sorted(self._seen)}."
            )


# Batches of each epoch in which callbacks are watched.
_WATCHED_BATCHES = 2


def watch_rates(model: Any, callbacks: list[Any], setters: dict[str, None]) -> list[Any]:
    """Put behind each callback another one that names it in `setters` if it sets the rate."""
    known: list[float | None] = [None]

    def watch(owner: Any) -> Any:
        def look(*_: Any) -> None:
            rate = current_learning_rate(next(iter(inner_optimizers(model)), None))
            if None not in (rate, *known) and rate != known[0]:
                if owner is not None:
                    setters[type(owner).__name__] = None
                elif not setters:  # It is set in a later batch.
                    setters["a callback or the train step"] = None
            known[0] = rate

        def look_at_first(batch: int, logs: Any) -> None:
            if batch < _WATCHED_BATCHES:
                look()

        return keras.callbacks.LambdaCallback(
            on_train_begin=look,
            on_epoch_begin=look,
            on_epoch_end=look,
            on_train_batch_begin=look_at_first,
            on_train_batch_end=look_at_first,
        )

    followed = (part for one in callbacks for part in (one, watch(one)))
    return [watch(None), *followed] if callbacks else []


class TensorBoardScalars(keras.callbacks.Callback):
    """Writes throughput, memory, noise scale and sizes where a TensorBoard callback writes."""

    # They are a run of their own below its folder: TensorBoard reads one file a run at a time, and
    # takes every run below the hyperparameters of a trial for its metrics.

    def __init__(self, board: keras.callbacks.TensorBoard, batch_size: int):
        super().__init__()
        self._batch_size = batch_size
        self._writer: Any = tf.summary.create_file_writer(str(Path(board.log_dir) / "kbatch"))
        self._memory = DeviceMemory()
        self._memory.reset()

    def on_epoch_end(self, epoch: int, logs: Any = None):
        how: Any = getattr(installed_step(self.model), "how", None)
        size = self._batch_size
        found = {"batch_size": size, "micro_batch_size": how.micro_batch_size if how else size}
        if self._memory.device == "CPU:0":  # Its allocator counts large blocks only.
            found["host_memory_bytes"] = psutil.Process().memory_info().rss
        else:
            found["peak_memory_bytes"] = self._memory.peak_bytes
        if "samples_per_second" in logs:
            found["samples_per_second"] = logs["samples_per_second"]
        variance, norm = (logs.get(name, 0) for name in MOMENT_METRICS)
        # Means over the epoch, divided last; noise may outweigh what there is to see.
        if variance > 0 and norm > 0:
            found["noise_scale"] = variance / norm
        with self._writer.as_default(step=epoch):
            for name, value in found.items():
                tf.summary.scalar(name, float(value))
        self._writer.flush()

    def on_train_end(self, logs: Any = None):
        self._writer.close()
