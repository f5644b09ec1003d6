"""What a training run tells while it runs."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from kbatch.device.memory_use import memory_use_bytes, reset_memory_use

_SHORTEST_PAUSE_S = 0.2


@dataclasses.dataclass(frozen=True)
class FitProgress:
    """How far a trial is.

    Attributes:
        execution: Number of the execution that runs, from 0.
        share: Share of the trial that is done, from 0 to 1, by whole epochs where their steps are
            not known.
        epoch: Number of the epoch that runs, from 0.
        epochs: Epochs of an execution.
        samples_per_second: Examples per second so far without the first steps, None before others.
        memory_bytes: Memory in use, of the GPU or of the process.
        metrics: Metrics of the last epoch that ended.
        epoch_ended: Whether an epoch has just ended.
    """

    execution: int
    share: float
    epoch: int
    epochs: int
    samples_per_second: float | None
    memory_bytes: int
    metrics: Mapping[str, float]
    epoch_ended: bool = False


class FitReporter(keras.callbacks.Callback):
    """Tells how far training is, a few times a second.

    Args:
        tell: Receives what there is to tell.
        execution: Number of the execution, from 0.
        executions: Executions of the trial.
        now: Gives the time, in seconds.
    """

    def __init__(
        self,
        tell: Callable[[FitProgress], None],
        *,
        execution: int,
        executions: int,
        now: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self._tell = tell
        self._execution = execution
        self._executions = executions
        self._now = now
        self._metrics: dict[str, float] = {}
        self._epoch = 0
        self._told_s = 0.0

    def on_train_begin(self, logs: Any = None):
        """Begins a new peak of memory."""
        reset_memory_use()
        self._told_s = self._now()

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        """Follows the number of the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None):
        """Tells how far the epoch is, unless it has just been told."""
        if self._now() - self._told_s >= _SHORTEST_PAUSE_S:
            steps = self._of("steps")
            self._report((batch + 1) / steps if steps else 0.0)

    def on_epoch_end(self, epoch: int, logs: Any = None):
        """Tells the metrics of the epoch."""
        self._metrics = _numbers(logs or {})
        self._report(1.0, epoch_ended=True)

    def _report(self, share_of_epoch: float, *, epoch_ended: bool = False) -> None:
        self._told_s = self._now()
        epochs = self._of("epochs") or 1
        share = (self._epoch + min(share_of_epoch, 1.0)) / epochs
        self._tell(
            FitProgress(
                execution=self._execution,
                share=(self._execution + share) / self._executions,
                epoch=self._epoch,
                epochs=epochs,
                samples_per_second=self._metrics.get("samples_per_second"),
                memory_bytes=memory_use_bytes(),
                metrics=self._metrics,
                epoch_ended=epoch_ended,
            )
        )

    def _of(self, name: str) -> int | None:
        return (self.params or {}).get(name)


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items() if np.size(value) == 1}
