"""The clock of a training run: Keras callbacks that time its steps."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import keras
import numpy as np

from kbatch.analysis.throughput import Throughput, steady_windows, throughput_of_windows
from kbatch.records.execution import EpochRecord
from kbatch.training.input_meter import InputReading
from kbatch.training.learning_rate import current_learning_rate
from kbatch.training.update_count import updates_made


class _Meter(Protocol):
    def read(self) -> InputReading: ...


class TrainingClock(keras.callbacks.Callback):
    """Times each train step and keeps the steady ones apart.

    A step begins after all other callbacks' `on_train_batch_begin` and ends before their
    `on_train_batch_end`, which waits for the device: data loading is in it; validation,
    checkpoints and what other callbacks do are not. So the clock stands first among the
    callbacks and `clock.last` stands last. The first step of a `fit`, and a step whose batch has
    a shape not seen before, may have compiled: they are not steady, and all others are.

    Args:
        meter: Counts what reaches the train step.
        every_shape_compiles: Whether a new length of any axis compiles anew (XLA), not only a
            new number of rows.
        now: Gives the time, in seconds.

    Attributes:
        first_step_s: Seconds of the first step, tracing and compiling included.
        first_learning_rate: Learning rate at the first update.
        train_s: Seconds in train steps, in all.
        epochs: The epochs so far.
        in_step: Whether a step has begun and not ended: an error then came from it.
        last: The callback that stands last.
    """

    def __init__(
        self,
        meter: _Meter,
        *,
        every_shape_compiles: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ):
        super().__init__()
        self.first_step_s: float | None = None
        self.first_learning_rate: float | None = None
        self.train_s = 0.0
        self.epochs: list[EpochRecord] = []
        self.in_step = False
        self.last: keras.callbacks.Callback = _Last(self)
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
    def throughput(self) -> Throughput | None:
        """Examples per second of the steady steps, None before there is one."""
        return throughput_of_windows(*self.windows)

    @property
    def reading(self) -> InputReading:
        """What the model has received so far."""
        return self._meter.read()

    @property
    def examples(self) -> int:
        """Examples trained on so far."""
        return self._reading.examples

    @property
    def updates(self) -> int:
        """Optimizer updates so far, those that overflowed not counted."""
        now = updates_made(self.model) - self._epoch_iterations if self._epoch_begun else 0
        return sum(epoch.updates for epoch in self.epochs) + now

    def on_train_begin(self, logs: Any = None):
        """Begins with a step that is not steady: a new `fit` may build a new train function."""
        self._first_of_fit = True
        self.in_step = False

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        """Notes where the epoch starts."""
        self._epoch_reading = self._reading = self._meter.read()
        self._epoch_train_s = self.train_s
        self._epoch_iterations = updates_made(self.model)
        self._epoch_begun = True

    def begin_step(self) -> None:
        """Starts a step."""
        self.in_step = True
        if self.first_learning_rate is None:
            self.first_learning_rate = current_learning_rate(getattr(self.model, "optimizer", None))
        self._begun_s = self._now()

    def on_train_batch_end(self, batch: int, logs: Any = None):
        """Ends the step."""
        self.in_step = False
        duration_s = self._now() - self._begun_s
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
        """Adds `samples_per_second` to the logs, for the callbacks that follow."""
        throughput = self.throughput
        if logs is not None and throughput is not None:
            logs["samples_per_second"] = throughput.mean

    def keep_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Keeps the epoch with the metrics that all callbacks have left."""
        before = self._epoch_reading
        self._epoch_begun = False
        self.epochs.append(
            EpochRecord(
                epoch=epoch,
                metrics=_scalars(logs),
                examples=self._reading.examples - before.examples,
                batches=self._reading.batches - before.batches,
                # A callback that compiles the model again starts the count over.
                updates=max(0, updates_made(self.model) - self._epoch_iterations),
                train_s=self.train_s - self._epoch_train_s,
                data_wait_s=_difference(self._reading.wait_s, before.wait_s),
            )
        )


class _Last(keras.callbacks.Callback):
    """Starts the steps and ends the epochs of a clock after all other callbacks."""

    def __init__(self, clock: TrainingClock):
        super().__init__()
        self._clock = clock

    def on_train_batch_begin(self, batch: int, logs: Any = None):
        self._clock.begin_step()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        self._clock.keep_epoch(epoch, logs or {})


def _difference(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before


def _scalars(logs: dict[str, Any]) -> dict[str, float | None]:
    numbers = {name: np.asarray(value) for name, value in logs.items()}
    floats = {name: float(n) for name, n in numbers.items() if n.size == 1 and n.dtype != object}
    return {name: value if np.isfinite(value) else None for name, value in floats.items()}
