"""One execution of a trial, from its first step to its record."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from kbatch.instruments.failures import failure_status, failure_text
from kbatch.records.execution import ExecutionRecord
from kbatch.training.accumulation.batch_coupling import coupled_parts, coupling_note
from kbatch.training.dtype_policy import loss_scaled
from kbatch.training.fit import TimedFit
from kbatch.training.learning_rate import current_learning_rate
from kbatch.tuning.trial_files import TrialFiles


class ExecutionPlan(NamedTuple):
    """What an execution is asked to do.

    Attributes:
        number: Number of the execution in its trial, from 0.
        seed: Seed of weights and shuffling, or None.
        batch_size: Examples of one optimizer update.
        micro_batch_size: Examples that go through the device at once.
        largest_batch_size: Largest batch size of the search.
        validation_batch_size: Examples in a validation batch.
        learning_rate_scaling: Rule that was applied, or None.
        metrics: Metrics that each epoch must have.
    """

    number: int
    seed: int | None
    batch_size: int
    micro_batch_size: int
    largest_batch_size: int
    validation_batch_size: int
    learning_rate_scaling: str | None
    metrics: tuple[str, ...]


class Execution:
    """One training run, timed and recorded."""

    def __init__(self, model: keras.Model, plan: ExecutionPlan, files: TrialFiles | None):
        self._model: Any = model
        self._plan = plan
        self._files = files
        self._fit = TimedFit(
            model,
            batch_size=plan.batch_size,
            largest_batch_size=plan.largest_batch_size,
            validation_batch_size=plan.validation_batch_size,
            seed=plan.seed,
            metrics=plan.metrics,
        )
        self._started = _started(model, plan)

    def run(self, fit: Callable[[], Any]) -> Any:
        """Runs the training with the timed `model.fit` in place and writes its record.

        Args:
            fit: Trains the model.

        Returns:
            What `fit` returns; to a dict of metrics samples/s is added.
        """
        self._write(self._started)
        self._model.fit = self._fit
        try:
            results = fit()
        except BaseException as error:
            self._write(self._ended(failure_status(error), failure_text(error)))
            raise
        finally:
            del self._model.fit
        self._write(self._ended(*self._outcome()))
        throughput = self._fit.clock.throughput
        if isinstance(results, dict) and throughput is not None:
            return {"samples_per_second": throughput.median} | results
        return results

    def _outcome(self) -> tuple[str, str | None]:
        for epoch in self._fit.clock.epochs:
            if epoch.metrics.get("loss", 0.0) is None:
                return "failed", (
                    f"diverged: the loss is NaN or infinite after epoch {epoch.epoch + 1}, lower "
                    "the learning rate"
                )
        return "completed", None

    def _write(self, record: ExecutionRecord) -> None:
        if self._files is not None:
            self._files.write(self._plan.number, record)

    def _ended(self, status: str, failure: str | None = None) -> ExecutionRecord:
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


def _started(model: keras.Model, plan: ExecutionPlan) -> ExecutionRecord:
    optimizer: Any = model.optimizer
    return ExecutionRecord(
        status="running",
        seed=plan.seed,
        batch_size=plan.batch_size,
        micro_batch_size=plan.micro_batch_size,
        dtype_policy=model.dtype_policy.name,
        optimizer=type(getattr(optimizer, "inner_optimizer", optimizer)).__name__,
        loss_scaled=loss_scaled(model),
        learning_rate=current_learning_rate(optimizer),
        learning_rate_scaling=plan.learning_rate_scaling,
        jit_compile=bool(model.jit_compile),
        notes=_notes(model, plan),
    )


def _notes(model: keras.Model, plan: ExecutionPlan) -> tuple[str, ...]:
    parts = coupled_parts(model)
    accumulated = plan.micro_batch_size < plan.batch_size
    return (coupling_note(parts),) if parts and accumulated else ()
