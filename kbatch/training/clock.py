"""The clock of a training run: a Keras callback that times its steps."""

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from kbatch.analysis.throughput import Throughput, steady_windows, throughput_of_windows
from kbatch.records.execution import EpochRecord
from kbatch.training.input_meter import InputMeter, InputReading

# The first steps trace, compile and fill caches.
WARM_UP_STEPS = 2


class TrainingClock(keras.callbacks.Callback):
    """Times each train step and keeps the steady ones apart.

    A step lasts from Keras's `on_train_batch_begin` to `on_train_batch_end`, which waits for
    the device: data loading is in it; validation, checkpoints and callbacks at the end of an
    epoch are not. The first steps, and a step of a batch length not seen before (it may have
    compiled), are not steady.

    Attributes:
        first_step_s: Seconds of the first step, tracing and compiling included.
        train_s: Seconds in train steps, in all.
        epochs: The epochs so far.
    """

    def __init__(self, meter: InputMeter, now: Callable[[], float] = time.perf_counter):
        super().__init__()
        self.first_step_s: float | None = None
        self.train_s = 0.0
        self.epochs: list[EpochRecord] = []
        self._meter = meter
        self._now = now
        self._examples: list[int] = []
        self._durations_s: list[float] = []
        self._steady: list[bool] = []
        self._lengths: set[int] = set()
        self._reading = self._epoch_reading = meter.read()
        self._epoch_train_s = 0.0
        self._begun_s = 0.0
        self._steps_since_begin = 0

    @property
    def windows(self) -> tuple[list[int], list[float]]:
        """Examples and seconds of the windows of steady training."""
        return steady_windows(self._examples, self._durations_s, self._steady)

    @property
    def throughput(self) -> Throughput | None:
        """Examples per second of the steady part, None before there is one."""
        return throughput_of_windows(*self.windows)

    @property
    def reading(self) -> InputReading:
        """What the model has received so far."""
        return self._meter.read()

    def on_train_begin(self, logs: Any = None):
        """Starts the warm-up: a new `fit` may build a new train function."""
        self._steps_since_begin = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        """Notes where the epoch starts."""
        self._epoch_reading = self._meter.read()
        self._epoch_train_s = self.train_s

    def on_train_batch_begin(self, batch: int, logs: Any = None):
        """Starts the step."""
        self._begun_s = self._now()

    def on_train_batch_end(self, batch: int, logs: Any = None):
        """Ends the step."""
        duration_s = self._now() - self._begun_s
        reading = self._meter.read()
        examples = reading.examples - self._reading.examples
        self._reading = reading
        if self.first_step_s is None:
            self.first_step_s = duration_s
        warm = self._steps_since_begin >= WARM_UP_STEPS and examples in self._lengths
        self._steps_since_begin += 1
        self._lengths.add(examples)
        self._examples.append(examples)
        self._durations_s.append(duration_s)
        self._steady.append(warm)
        self.train_s += duration_s

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None):
        """Keeps the epoch; adds `samples_per_second` to its logs."""
        reading, before = self._meter.read(), self._epoch_reading
        self.epochs.append(
            EpochRecord(
                epoch=epoch,
                metrics=_scalars(logs or {}),
                examples=reading.examples - before.examples,
                updates=reading.batches - before.batches,
                train_s=self.train_s - self._epoch_train_s,
                data_wait_s=reading.wait_s - before.wait_s,
            )
        )
        throughput = self.throughput
        if logs is not None and throughput is not None:
            # Callbacks after this one, keras-tuner's among them, see it as a metric.
            logs["samples_per_second"] = throughput.median


def _scalars(logs: dict[str, Any]) -> dict[str, float | None]:
    numbers = {name: np.asarray(value) for name, value in logs.items()}
    floats = {name: float(n) for name, n in numbers.items() if n.size == 1 and n.dtype != object}
    return {name: value if np.isfinite(value) else None for name, value in floats.items()}
