"""One execution of a trial: what it is asked to do, its steps and its record."""

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import keras_tuner

from kbatch.device.failures import (
    failure_status,
    failure_text,
    failure_traceback,
    ran_out_of_memory,
)
from kbatch.device.gpu_monitor import GpuMonitor
from kbatch.device.memory import workers_on_device
from kbatch.records.notes import RunNote
from kbatch.records.training_run import COST_NAMES, ExecutionRecord, cost_to_target
from kbatch.records.usage import UsageRecord
from kbatch.search.callbacks import FreshCallbacks
from kbatch.search.timed_fit import TimedFit
from kbatch.search.trial_files import TrialFiles
from kbatch.search.trial_micro_batch import TrialCut, TrialMicroBatch
from kbatch.training.accumulation.summed_gradients import differ_in_parts, sparse_note
from kbatch.training.clock import replica_count
from kbatch.training.data.forms import FitData
from kbatch.training.dtype_policy import dtype_policy_scope, loss_scaled
from kbatch.training.learning_rate import current_learning_rate, scaling_of


class ExecutionPlan(NamedTuple):
    """What an execution is asked to do.

    Attributes:
        number: Number of the execution in its trial, from 0.
        seed: Seed of weights and shuffling, or None.
        batch_size: Examples of one optimizer update.
        micro_batch_size: Examples that go through the device at once; None where they are found.
        largest_batch_size: Largest batch size of the search.
        validation_batch_size: Examples in a validation batch.
        validation_is_chosen: Whether a person chose that size.
        learning_rate_scaling: Rule that was applied, or None.
        sparse_gradients: What the optimizer gets of sparse gradients: "summed" or "keras".
        scaling_note: What a reader must know of the noise scale that the rule used, or None.
        metrics: Metrics that each epoch must have.
        to_target: Whether the cost of a target is the objective.
        path_notes: Where callbacks write in place of the path that was given.
    """

    number: int
    seed: int | None
    batch_size: int
    micro_batch_size: int | None
    largest_batch_size: int
    validation_batch_size: int
    validation_is_chosen: bool
    learning_rate_scaling: str | None
    sparse_gradients: str
    scaling_note: RunNote | None
    metrics: tuple[str, ...]
    to_target: bool
    path_notes: tuple[RunNote, ...] = ()


def begun_record(model: keras.Model, plan: ExecutionPlan) -> ExecutionRecord:
    """Return the record of an execution whose training has not begun."""
    optimizer: Any = model.optimizer
    rows, size = -(-plan.batch_size // replica_count(model)), plan.micro_batch_size
    in_parts = size is not None and size < rows
    sparse = sparse_note(model, plan.sparse_gradients, in_parts=in_parts)
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
        notes=(*(note for note in (plan.scaling_note, sparse) if note), *plan.path_notes),
        workers_on_device=workers_on_device(),
        replicas=replica_count(model),
        scaling=scaling_of(model),
        sparse_gradients=plan.sparse_gradients if differ_in_parts(model) else None,
    )


class Execution:
    """One training run, timed and recorded.

    Args:
        model: The model to train.
        plan: What is asked.
        files: Where it is written, or None.
        cut: Makes the model train with the micro-batches that the plan has.
        micro_batch: Finds the micro-batch size, None where the plan has it.
    """

    def __init__(
        self,
        model: keras.Model,
        plan: ExecutionPlan,
        files: TrialFiles | None,
        cut: TrialCut,
        micro_batch: TrialMicroBatch | None = None,
    ):
        self._model: Any = model
        self._plan = plan
        self._files = files
        self._cut = cut
        self._micro_batch = micro_batch
        self._callbacks = FreshCallbacks()
        self._fit = self._timed_fit()
        self._monitor: GpuMonitor | None = None
        self._watched = contextlib.ExitStack()
        self._started = begun_record(model, plan)

    def run(self, fit: Callable[[], Any]) -> Any:
        """Run the training with the timed `model.fit` in place and write its record."""
        self._write(self._started)
        try:
            results = self._with_usage(self._trained(fit))
            reported = {} if self._files is None else self._files.reported(results)
        except BaseException as error:
            ended = self._ended(failure_status(error), failure_text(error))
            self._write(dataclasses.replace(ended, traceback=failure_traceback(error)))
            raise
        ended = self._ended("completed", None, reported)
        if ended.diverged:
            text = "diverged: the loss became NaN or infinite, lower the learning rate"
            ended = dataclasses.replace(ended, status="failed", failure=text)
        self._write(ended)
        return results

    def so_far(self) -> ExecutionRecord:
        """Return the record of what there is while it runs."""
        return self._ended("running", None)

    def _trained(self, fit: Callable[[], Any]) -> Any:
        while True:
            self._model.fit = self._fit
            try:
                # Layers that are built by their first batch are so under the policy too.
                with dtype_policy_scope(self._started.dtype_policy), self._watched:
                    return self._with_figures(fit())
            except Exception as error:
                if not self._goes_on(error):
                    raise
            finally:
                del self._model.fit
            gc.collect()  # What the step that ran out held, by the frames of its error.
            self._callbacks.start_again()
            self._fit, self._monitor = self._timed_fit(), None

    def _prepare(self, data: FitData, call: Mapping[str, Any]) -> int | None:
        """Find the micro-batch size, then watches what training takes: the search is not in it."""
        found, most = self._micro_batch, None
        if found is not None:
            most = found.prepare(data, call)
        elif self._plan.micro_batch_size is not None:
            self._cut.apply(self._plan.micro_batch_size, data)
        if self._monitor is None:
            self._monitor = self._watched.enter_context(GpuMonitor())
        return None if self._plan.validation_is_chosen else most

    def _goes_on(self, error: Exception) -> bool:
        """Make the micro-batches smaller where a step ran out, and return whether it could."""
        # The size was found by probes, so that it or a smaller one ran before.
        if self._micro_batch is None or not ran_out_of_memory(error, smaller_worked=True):
            return False
        if not self._fit.clock.in_step:
            return False  # Validation or a callback ran out: smaller micro-batches are no cure.
        return self._micro_batch.shrink()

    def _timed_fit(self) -> TimedFit:
        plan = self._plan
        return TimedFit(
            self._model,
            batch_size=plan.batch_size,
            largest_batch_size=plan.largest_batch_size,
            validation_batch_size=plan.validation_batch_size,
            seed=plan.seed,
            metrics=plan.metrics,
            to_target=plan.to_target,
            prepare=self._prepare,
            # Only where the micro-batch size is found a trial may start again.
            callbacks_of=None if self._micro_batch is None else self._callbacks.of,
        )

    def _with_figures(self, results: Any) -> Any:
        """Add samples/s and the cost of the target, where keras-tuner is to have them."""
        wanted = () if self._files is None else self._files.measured_names
        figures = self._figures()
        if "samples_per_second" in wanted and "samples_per_second" not in figures:
            raise keras_tuner.errors.FailedTrialError(
                "There were too few steps to measure samples/s, which is the objective: train "
                "for more epochs, or leave out the largest batch sizes. "
                f"Received: {self._fit.clock.reading.batches} steps with "
                f"batch_size={self._plan.batch_size}."
            )
        if isinstance(results, dict):
            return figures | results
        if wanted and isinstance(results, keras.callbacks.History):
            # They are the same for all epochs: the other metrics are those of the last one.
            return {name: values[-1] for name, values in results.history.items()} | figures
        return results

    @property
    def _usage(self) -> UsageRecord | None:
        return None if self._monitor is None else self._monitor.usage

    def _with_usage(self, results: Any) -> Any:
        usage = self._usage
        known = usage.metrics(self._fit.clock.reading.examples) if usage else {}
        if isinstance(results, keras.callbacks.History):
            epochs = len(results.epoch)
            results.history.update({name: [value] * epochs for name, value in known.items()})
            return results
        return known | results if isinstance(results, dict) else results

    def _figures(self) -> dict[str, float]:
        clock, target = self._fit.clock, self._fit.target
        throughput = clock.throughput
        figures = {} if throughput is None else {"samples_per_second": throughput.mean}
        if target is None:
            return figures
        cost = cost_to_target(target, clock.epochs)
        # The least of no value is infinite: keras-tuner ranks a trial that never met it last.
        costs = {
            name: math.inf if cost is None else float(getattr(cost, part))
            for name, part in COST_NAMES.items()
        }
        return figures | costs

    def _write(self, record: ExecutionRecord) -> None:
        if self._files is not None:
            self._files.write(self._plan.number, record)

    def _ended(
        self, status: str, failure: str | None, reported: Mapping[str, float | None] | None = None
    ) -> ExecutionRecord:
        clock = self._fit.clock
        ended = dataclasses.replace(
            self._started_with_micro_batch(),
            status=status,
            failure=failure,
            reported=reported or {},
            usage=self._usage,
            budget=self._fit.budget,
            target=self._fit.target,
        )
        if clock.first_step_s is None:
            note = RunNote.of("nothing_timed")
            return dataclasses.replace(ended, notes=(*ended.notes, note))
        reading, (examples, durations_s) = clock.reading, clock.windows
        return dataclasses.replace(
            ended,
            learning_rate=clock.first_learning_rate,
            scaling=scaling_of(self._model),  # Layers may have been built since it began.
            batch_size_seen=reading.largest_batch or None,
            window_examples=tuple(examples),
            window_durations_s=tuple(durations_s),
            first_step_s=clock.first_step_s,
            examples_seen=reading.examples,
            batches=reading.batches,
            updates=sum(epoch.updates for epoch in clock.epochs),
            train_s=clock.train_s,
            data_wait_s=reading.wait_s,
            total_s=self._fit.total_s,
            epochs=tuple(clock.epochs),
            notes=(*ended.notes, *self._fit.notes, *self._learning_rate_note()),
        )

    def _started_with_micro_batch(self) -> ExecutionRecord:
        found = self._micro_batch
        notes = (*self._started.notes, *self._cut.notes)
        if found is None:
            return dataclasses.replace(self._started, notes=notes)
        return dataclasses.replace(
            self._started,
            micro_batch_size=found.size,
            micro_batch_search_s=found.search_s,
            most_in_memory=found.most_in_memory,
            notes=tuple(dict.fromkeys((*notes, *self._sparse_note(found.size), *found.notes))),
        )

    def _sparse_note(self, size: int | None) -> tuple[RunNote, ...]:
        plan = self._plan
        in_parts = size is not None and size < -(-plan.batch_size // replica_count(self._model))
        note = sparse_note(self._model, plan.sparse_gradients, in_parts=in_parts)
        return () if note is None else (note,)

    def _learning_rate_note(self) -> tuple[RunNote, ...]:
        ruled, seen = self._started.learning_rate, self._fit.clock.first_learning_rate
        if ruled is None or seen is None or math.isclose(ruled, seen, rel_tol=1e-5):
            return ()
        return (RunNote.of("first_learning_rate", used=seen, built=ruled),)
