"""One execution of a trial, from its first step to its record."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from kbatch.instruments.failures import failure_status, failure_text
from kbatch.records.execution import ExecutionRecord
from kbatch.training.dtype_policy import loss_scaled
from kbatch.training.fit import TimedFit
from kbatch.training.learning_rate import current_learning_rate


class Settings(NamedTuple):
    """What an execution was asked to do."""

    seed: int | None
    batch_size: int
    micro_batch_size: int
    learning_rate_scaling: str | None


class Execution:
    """Follows one training run and makes its record."""

    def __init__(self, model: keras.Model, settings: Settings, timed_fit: TimedFit):
        optimizer: Any = model.optimizer
        self._started = ExecutionRecord(
            status="running",
            **settings._asdict(),
            dtype_policy=model.dtype_policy.name,
            optimizer=type(getattr(optimizer, "inner_optimizer", optimizer)).__name__,
            loss_scaled=loss_scaled(model),
            learning_rate=current_learning_rate(optimizer),
            jit_compile=bool(model.jit_compile),
        )
        self._fit = timed_fit

    @contextlib.contextmanager
    def recorded(self, write: Callable[[ExecutionRecord], Any]) -> Iterator[None]:
        """Writes the record when the run starts, and again when it ends in whatever way."""
        write(self._started)
        try:
            yield
        except BaseException as error:
            write(self._record(failure_status(error), failure_text(error)))
            raise
        write(self._record("completed"))

    def with_throughput(self, results: Any) -> Any:
        """Adds samples/s to metrics that a `fit` of the user's returned as a dict."""
        throughput = self._fit.clock.throughput
        if not isinstance(results, dict) or throughput is None:
            return results
        return {"samples_per_second": throughput.median} | results

    def _record(self, status: str, failure: str | None = None) -> ExecutionRecord:
        clock = self._fit.clock
        reading = clock.reading
        examples, durations_s = clock.windows
        return dataclasses.replace(
            self._started,
            status=status,
            batch_size_seen=reading.largest_batch or None,
            window_examples=tuple(examples),
            window_durations_s=tuple(durations_s),
            first_step_s=clock.first_step_s,
            examples_seen=reading.examples,
            updates=reading.batches,
            train_s=clock.train_s,
            data_wait_s=reading.wait_s,
            total_s=self._fit.total_s,
            epochs=tuple(clock.epochs),
            failure=failure,
        )
