"""Define callbacks: the clock of a run, budgets, targets, and scalars for TensorBoard."""

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

_WATCHED_BATCHES = 2  # Callbacks are watched in these first batches of each epoch.
_SHORTEST_WINDOW_S, _FEWEST_WINDOWS, _MOST_WINDOWS = 0.05, 5, 200


def numbers_of(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics that are one number, or an array of one number, as of `F1Score`."""
    arrays = {name: np.asarray(value) for name, value in (logs or {}).items()}
    return {n: float(a.item()) for n, a in arrays.items() if a.size == 1 and a.dtype != object}


class TrainingClock(keras.callbacks.Callback):
    """Times each train step. A step is steady if it did not compile.

    A step begins after all other callbacks' `on_train_batch_begin` and ends before their
    `on_train_batch_end`. It includes data loading, but no other callbacks and no validation. So the
    clock must be the first callback, and `clock.last` the last one.
    """

    def __init__(
        self,
        meter: InputMeter,
        *,
        every_shape_compiles: bool = False,  # True for XLA, which compiles each new shape.
        now: Callable[[], float] = time.perf_counter,
    ):
        super().__init__()
        self.first_step_s: float | None = None  # Includes tracing and compiling.
        self.first_learning_rate: float | None = None
        self.train_s = 0.0  # The sum of all train steps.
        self.epochs: list[EpochRecord] = []
        self.in_step = False  # If True, an error that is raised now comes from the train step.
        # The last callback: it begins the steps and ends the epochs.
        self.last: keras.callbacks.Callback = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs=None: self.begin_step(),
            on_epoch_end=lambda epoch, logs=None: self.keep_epoch(epoch, logs or {}),
        )
        self._meter, self._now, self._every_shape_compiles = meter, now, every_shape_compiles
        self._steady: list[tuple[int, float]] = []  # Examples and seconds of each steady step.
        self._shapes: set[float] = set()  # `shape_number` or examples of the batches so far.
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
        """Examples per second of the steady steps. None before there are three."""
        return throughput_of_windows(*self.windows)

    @property
    def reading(self) -> InputReading:
        return self._meter.read()

    @property
    def updates(self) -> int:
        """Optimizer updates so far, without updates that were skipped after an overflow."""
        now = updates_made(self.model, self._reading.batches) - self._epoch_iterations
        return sum(epoch.updates for epoch in self.epochs) + (now if self._epoch_begun else 0)

    def on_train_begin(self, logs: Any = None):
        # The first step is not steady: a new `fit` may build a new train function.
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
            self.first_learning_rate = peak_learning_rate(_main_optimizer(self.model))
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
        """Add `samples_per_second` to the logs, for all later callbacks."""
        throughput = self.throughput
        if logs is not None and throughput is not None:
            logs["samples_per_second"] = throughput.value

    def keep_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Record the epoch, with the metrics as all callbacks have left them."""
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
                # If a callback compiles the model again, the count restarts.
                updates=max(0, updates_made(self.model, now.batches) - self._epoch_iterations),
                train_s=self.train_s - self._epoch_train_s,
                data_wait_s=waited_s,
                learning_rate=current_learning_rate(_main_optimizer(self.model)),
            )
        )


def _main_optimizer(model: Any) -> Any:
    return next(iter(inner_optimizers(model)), None)


def steady_windows(steps: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Join consecutive steady steps (examples, seconds) into windows.

    A window takes at least 50 ms, unless there would be fewer than five windows. There are at most
    200. Remaining steps join the last window.
    """
    if len(steps) < FEWEST_STEADY:
        return [], []
    # Use the median, because a pause of the process may dominate the sum.
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
    """Ends training when a budget is spent. A search counts it by its clock."""

    unit: str  # The attribute of `Budget` with the limit, and of `TrainingClock` with the amount.
    _spent: Callable[[], float]  # Returns the amount that training has spent outside a search.

    def __init__(self, most: Any):
        super().__init__()
        self.budget = Budget(**{self.unit: most})
        self._clock: TrainingClock | None = None

    def count_by(self, clock: TrainingClock) -> None:
        """Use the clock of a search, which counts over all `fit` calls of a trial."""
        self._clock = clock

    def on_train_batch_end(self, batch: int, logs: Any = None):
        spent = self._spent() if self._clock is None else getattr(self._clock, self.unit)
        if spent >= getattr(self.budget, self.unit):
            model: Any = self.model
            model.stop_training = True


class TimeBudget(BudgetCallback):
    """End training after a number of seconds of train steps.

    The budget is compared with `train_s` of a record: the time of all train steps, including the
    wait for data, tracing and compiling. Validation, checkpoints and other callbacks do not count.
    Training ends after the step (or the execution of several steps) that spends the budget, also
    in the middle of an epoch, which is then validated. Give more `epochs` than fit into the
    budget.

    Example:

    >>> tuner.search(x, y, validation_data=(xv, yv), epochs=1000,
    ...              callbacks=[kbatch.TimeBudget(60)])

    Args:
        seconds: Float. The budget, in seconds.

    Raises:
        ValueError: If `seconds` is not positive.
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
    """End training after a number of optimizer updates.

    Updates that a loss scale skips after an overflow do not count. With `steps_per_execution`, the
    last execution runs only the remaining steps.

    Example:

    >>> model.fit(x, y, epochs=1000, callbacks=[kbatch.UpdateBudget(5000)])

    Args:
        updates: Integer. The budget, in updates.

    Raises:
        TypeError: If `updates` is not an integer.
        ValueError: If `updates` is not positive.
    """

    unit = "updates"

    def __init__(self, updates: int):
        super().__init__(check_size(updates, "updates", unit=""))
        self._before = 0
        self._steps = 1  # Steps per execution.

    def on_train_begin(self, logs: Any = None):
        model: Any = self.model
        self._before = updates_made(model)
        # In a search, `ExecutionSteps` sets the steps.
        self._steps = 1 if self._clock else int(model.steps_per_execution)
        if self._steps > 1:  # The number is a constant in the train function that `fit` made.
            set_steps(model, self._steps)
            model.make_train_function()

    def on_train_batch_begin(self, batch: int, logs: Any = None):
        if self._steps > 1:
            left = (self.budget.updates or 0) - self._spent()
            set_steps(self.model, max(1, min(self._steps, left)))

    def on_train_batch_end(self, batch: int, logs: Any = None):
        super().on_train_batch_end(batch, logs)
        if self._steps > 1:  # A validation may follow, whose executions have all steps.
            set_steps(self.model, self._steps)

    def _spent(self) -> int:
        return updates_made(self.model) - self._before


def joint_budget(callbacks: list[BudgetCallback]) -> Budget | None:
    """Return the smallest budget of several callbacks, or None if there are no callbacks."""
    limits: dict[str, Any] = {}
    for callback in callbacks:
        limit = getattr(callback.budget, callback.unit)
        limits[callback.unit] = min(limit, limits.get(callback.unit, limit))
    return Budget(**limits) if limits else None


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


class StopAtTarget(keras.callbacks.Callback):
    """End training after the first epoch whose metric reaches a value.

    A search records `seconds_to_target`, the seconds of training until then (as `TimeBudget` counts
    them), which can be the objective. Add a budget, so that trials that never reach the target end.

    Example:

    >>> tuner = keras_tuner.GridSearch(
    ...     hypermodel, keras_tuner.Objective("seconds_to_target", "min"))
    >>> tuner.search(x, y, validation_data=(xv, yv), epochs=1000, callbacks=[
    ...     kbatch.StopAtTarget("val_accuracy", 0.97), kbatch.TimeBudget(60)])

    Args:
        monitor: String. Name of the metric in the logs of an epoch.
        value: Float. The value to reach.
        mode: `"max"` if larger values are better, `"min"` if smaller values are better, `"auto"` to
            decide by the name of the metric. Default: `"auto"`.

    Raises:
        ValueError: If `mode` is `"auto"` and the name is unknown, or if `value` is not finite.
    """

    def __init__(self, monitor: str, value: float, mode: Literal["auto", "min", "max"] = "auto"):
        super().__init__()
        if not _is_number(value) or not abs(float(value)) < 1e300:
            raise ValueError(f"`value` must be a finite number. Received: value={value!r}.")
        if mode not in ("min", "max"):
            if mode != "auto":
                raise InputError(
                    '`mode` must be "auto", or "max" if larger values are better, or "min" if '
                    f"smaller values are better. Received: mode={mode!r}."
                )
            remedy = 'give `mode="max"`, or `mode="min"` if smaller values are better'
            received = f"monitor={monitor!r}, mode={mode!r}"
            mode = required_direction(monitor, remedy=remedy, received=received)
        self.target = Target(monitor, float(value), mode)
        self._seen: set[str] = set()

    def on_train_begin(self, logs: Any = None):
        self._seen = set()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        metrics = numbers_of(logs)
        self._seen.update(metrics)
        value = metrics.get(self.target.metric)  # None in an epoch without validation.
        if value is not None and self.target.is_met(value):
            model: Any = self.model
            model.stop_training = True

    def on_train_end(self, logs: Any = None):
        if self._seen and self.target.metric not in self._seen:
            raise InputError(
                "`monitor` must be a metric that training logs as one number: compile the model "
                "with this metric, and give `validation_data` if its name starts with val_. "
                f"Received: monitor={self.target.metric!r}, the logs have {sorted(self._seen)}."
            )


def watch_rates(model: Any, callbacks: list[Any], setters: dict[str, None]) -> list[Any]:
    """Return the callbacks, with a further one after each that sees whether it sets the rate.

    The names of callbacks that set the learning rate are added to `setters`.
    """
    last_rate: float | None = None

    def watch(owner: Any) -> Any:
        def look(*_: Any) -> None:
            nonlocal last_rate
            rate = current_learning_rate(_main_optimizer(model))
            if None not in (rate, last_rate) and rate != last_rate:
                if owner is not None:
                    setters[type(owner).__name__] = None
                elif not setters:  # The rate was set in a batch that is not watched.
                    setters["a callback or the train step"] = None
            last_rate = rate

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

    watched = (part for callback in callbacks for part in (callback, watch(callback)))
    return [watch(None), *watched] if callbacks else []


class TensorBoardScalars(keras.callbacks.Callback):
    """Writes throughput, memory, noise scale and sizes to the folder of a TensorBoard callback.

    They are in a subfolder, because TensorBoard reads only one file of a folder at a time. It shows
    all subfolders of a trial as metrics of the trial.
    """

    def __init__(self, board: keras.callbacks.TensorBoard, batch_size: int):
        super().__init__()
        self._batch_size = batch_size
        self._writer: Any = tf.summary.create_file_writer(str(Path(board.log_dir) / "kbatch"))
        self._memory = DeviceMemory()
        self._memory.reset()

    def on_epoch_end(self, epoch: int, logs: Any = None):
        how: Any = getattr(installed_step(self.model), "accumulation", None)
        size = self._batch_size
        scalars = {"batch_size": size, "micro_batch_size": how.micro_batch_size if how else size}
        if self._memory.device == "CPU:0":  # TensorFlow counts only large blocks of host memory.
            scalars["host_memory_bytes"] = psutil.Process().memory_info().rss
        else:
            scalars["peak_memory_bytes"] = self._memory.peak_bytes
        if "samples_per_second" in logs:
            scalars["samples_per_second"] = logs["samples_per_second"]
        variance, norm = (logs.get(name, 0) for name in MOMENT_METRICS)
        # Both are unbiased means over the epoch, so noise may make one of them negative.
        if variance > 0 and norm > 0:
            scalars["noise_scale"] = variance / norm
        with self._writer.as_default(step=epoch):
            for name, value in scalars.items():
                tf.summary.scalar(name, float(value))
        self._writer.flush()

    def on_train_end(self, logs: Any = None):
        self._writer.close()
