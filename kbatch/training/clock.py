"""The clock of a training run."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from kbatch.analysis.intervals import Estimate
from kbatch.records.training_run import EpochRecord, throughput_of_windows
from kbatch.training.data.batches import InputMeter, InputReading
from kbatch.training.learning_rate import peak_learning_rate, set_learning_rate
from kbatch.training.state import inner_optimizers, updates_made


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
        self._examples: list[int] = []
        self._durations_s: list[float] = []
        self._steady: list[bool] = []
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
        return steady_windows(self._examples, self._durations_s, self._steady)

    @property
    def throughput(self) -> Estimate[float] | None:
        """Examples per second of the steady steps, None before there are three."""
        return throughput_of_windows(*self.windows)

    @property
    def reading(self) -> InputReading:
        return self._meter.read()

    @property
    def examples(self) -> int:
        return self._reading.examples

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
        self._steady.append(not self._first_of_fit and shape in self._shapes)
        self._first_of_fit = False
        self._shapes.add(shape)
        self._examples.append(examples)
        self._durations_s.append(duration_s)
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
        waited_s = None
        if now.wait_s is not None and before.wait_s is not None:
            waited_s = now.wait_s - before.wait_s
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
                learning_rate=set_learning_rate(next(iter(inner_optimizers(self.model)), None)),
            )
        )


_SHORTEST_WINDOW_S = 0.05
_MOST_WINDOWS = 200
FEWEST_STEADY = 3  # Of fewer steady steps, one that is disturbed would decide.


def steady_windows(
    examples: Sequence[int], durations_s: Sequence[float], steady: Sequence[bool]
) -> tuple[list[int], list[float]]:
    """Join consecutive steady steps into windows of 50 ms or more, what is left with the last."""
    counted = [(n, s) for n, s, ok in zip(examples, durations_s, steady, strict=True) if ok]
    if len(counted) < FEWEST_STEADY:
        return [], []
    shortest = max(_SHORTEST_WINDOW_S, sum(s for _, s in counted) / _MOST_WINDOWS)
    windows: list[tuple[int, float]] = []
    rows, seconds = 0, 0.0
    for n, s in counted:
        rows, seconds = rows + n, seconds + s
        if seconds >= shortest:
            windows.append((rows, seconds))
            rows, seconds = 0, 0.0
    if rows:
        more_rows, more_s = windows.pop() if windows else (0, 0.0)
        windows.append((more_rows + rows, more_s + seconds))
    return [rows for rows, _ in windows], [seconds for _, seconds in windows]
