"""One execution of a trial: its training, its callbacks and its record."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import keras_tuner

from kbatch.analysis.learning_rate import LearningRateScaling
from kbatch.device import failures
from kbatch.device.environment import read_environment
from kbatch.device.memory import workers_on_device
from kbatch.errors import InputError
from kbatch.records.notes import Note
from kbatch.records.training_run import ExecutionRecord, seconds_to_target
from kbatch.search.files import CHECKPOINT_NAME, TrialFiles
from kbatch.search.plan import Build, PlanHalved, most_in_memory
from kbatch.search.timed_fit import ExecutionSettings, TimedFit
from kbatch.training.accumulation import sum_sparse_gradients
from kbatch.training.data.training_data import FitCall, TrainingData
from kbatch.training.dtype_policy import dtype_policy_scope, skips_all_updates
from kbatch.training.fingerprint import model_fingerprint
from kbatch.training.learning_rate import peak_learning_rate
from kbatch.training.model import ModelFacts, uninstall_step
from kbatch.training.state import inner_optimizers, seed_of, seeded


class Execution:
    """One training run, timed and recorded in the files of its trial."""

    def __init__(
        self,
        model: keras.Model,
        settings: ExecutionSettings,
        files: TrialFiles,
        build: Build,
        scaling: LearningRateScaling | None,
    ):
        self._model: Any = model
        self._settings = settings
        self._files = files
        self._build = build
        self._fit = TimedFit(model, settings, scaling=scaling, prepare=self._prepare)
        self._facts = ModelFacts(model)
        # Examples that go through a device at once; None before it is found.
        self._micro_batch_size = settings.search.size_of(self._facts.rows(settings.batch_size))
        self._search_notes = settings.search.plan.notes if settings.search.plan is not None else ()
        self._described: str | None = None  # The model as it was cut.
        self._plan_s: float | None = None
        optimizer = next(iter(inner_optimizers(self._model)), None)  # None: not compiled yet.
        here = read_environment()
        self._started = ExecutionRecord(
            status="running",
            seed=settings.seed,
            batch_size=settings.batch_size,
            micro_batch_size=self._micro_batch_size,
            dtype_policy=self._facts.dtype_policy,
            optimizer=optimizer and type(optimizer).__name__,
            loss_scaled=self._facts.loss_scaled,
            learning_rate=peak_learning_rate(optimizer),
            jit_compile=bool(model.jit_compile),
            notes=settings.notes,
            workers_on_device=workers_on_device(),
            device=here.device.replace("CPU", here.cpu),
            replicas=self._facts.replicas,
        )

    def run(self, inner: Any, hp: Any, call: FitCall) -> Any:
        """Let a HyperModel train with the timed `model.fit` in place, and write the record of it.

        Raises:
            PlanHalved: If memory ran out in a step that smaller micro-batches may run.
        """
        files, number, best = self._files, self._settings.number, self._fit.best_epoch
        files.write(number, self.so_far())
        try:
            # Layers that are built by their first batch are so under the policy too, and draw
            # their weights here, and not in `build`.
            seeds = seeded(seed_of(self._settings.seed, 1))
            with seeds, dtype_policy_scope(self._started.dtype_policy), self._fit:
                results = inner.fit(hp, self._model, *call.arguments, **call.keywords)
            results = self._completed(results)
            reported = files.reported(results)
            if files.of_kbatch_tuner:
                record = files.record() if (files.folder / CHECKPOINT_NAME).exists() else None
                best.write_weights(
                    self._model, files.folder, record and record.best_objective_value
                )
            outcomes = best.outcomes()
        except BaseException as error:
            ended = self._record(failures.failure_status(error), failures.failure_text(error))
            ended = dataclasses.replace(ended, traceback=failures.failure_traceback(error))
            files.write(number, ended)
            size, rows = self._micro_batch_size, self._facts.rows(self._settings.batch_size)
            # In a train step: not in validation, not in a callback.
            if (
                size is not None
                and self._fit.clock.in_step
                and failures.ran_out_of_memory(error, smaller_worked=True)
                and self._settings.search.halve(self._facts, rows, size)
            ):
                raise PlanHalved(
                    f"Memory ran out in training: trials have smaller micro-batches from now on. "
                    f"Received: {failures.failure_text(error)}"
                ) from error
            raise
        ended = self._record("completed")
        ended = dataclasses.replace(ended, reported=reported, outcomes=outcomes)
        if ended.diverged:
            text = "diverged: the loss became NaN or infinite, lower the learning rate"
            ended = dataclasses.replace(ended, status="failed", failure=text)
        files.write(number, ended)
        return results

    def so_far(self) -> ExecutionRecord:
        return self._record("running")

    def _prepare(self, data: TrainingData) -> int | None:
        """Make the model train by the plan; return the most that fit at once, where known."""
        search, model = self._settings.search, self._model
        before = search.plan
        # A `fit` of the user's may unfreeze layers or compile before a training: what was seen of
        # the model before then says nothing.
        self._facts, described = ModelFacts(model), model_fingerprint(model)
        changed = self._described is not None and self._described != described
        plan = search.settle(model, self._facts, data, self._build)
        if plan is not before:
            self._plan_s = plan.duration_s
        if changed and self._facts.cut_by_user is None:
            uninstall_step(model)
            sum_sparse_gradients(model)
        if changed or self._described is None:
            size, self._search_notes = search.cut(
                model, self._facts, self._settings.batch_size, data
            )
            self._micro_batch_size = size
        self._described = described
        return plan.micro_batch_size if search.micro_batch_size == "auto" else None

    def _completed(self, results: Any) -> Any:
        """Add what was measured to what `fit` returned, where keras-tuner is to have it."""
        wanted = self._files.measured_names
        clock, target, monitor = self._fit.clock, self._fit.target, self._fit.monitor
        throughput, usage = clock.throughput, monitor and monitor.usage
        if "samples_per_second" in wanted and throughput is None:
            raise keras_tuner.errors.FailedTrialError(
                "There were too few steps to measure samples/s, which is the objective: train "
                "for more epochs, or leave out the largest batch sizes. "
                f"Received: {clock.reading.batches} steps with "
                f"batch_size={self._settings.batch_size}."
            )
        if clock.epochs and not clock.updates and skips_all_updates(self._model):
            raise keras_tuner.errors.FailedTrialError(
                "no update: the gradients of every batch overflowed in float16. Scale the loss and "
                'the inputs down, or give `dtype_policy="float32"`.'
            )
        figures = {} if throughput is None else {"samples_per_second": throughput.value}
        if target is not None:
            seconds = seconds_to_target(target, clock.epochs)
            # The least of no value is infinite: keras-tuner ranks a trial that never met it last.
            figures["seconds_to_target"] = math.inf if seconds is None else seconds
        taken = usage.metrics(clock.reading.examples) if usage else {}
        if isinstance(results, keras.callbacks.History):
            epochs = len(results.epoch)
            results.history.update({name: [value] * epochs for name, value in taken.items()})
            if wanted:
                # They are the same for all epochs: the other metrics are those of the last one.
                return {name: values[-1] for name, values in results.history.items()} | figures
        return figures | taken | results if isinstance(results, dict) else results

    def _record(self, status: str, failure: str | None = None) -> ExecutionRecord:
        fit, started, plan = self._fit, self._started, self._settings.search.plan
        clock, notes = fit.clock, [*started.notes, *self._search_notes]
        record = dataclasses.replace(
            started,
            status=status,
            micro_batch_size=self._micro_batch_size,
            plan=plan and plan.number,
            plan_s=self._plan_s,
            most_in_memory=None if plan is None else most_in_memory(plan),
            failure=failure,
            usage=fit.monitor and fit.monitor.usage,
            budget=fit.budget,
            target=fit.target,
            steps_per_execution=fit.steps_per_execution,
            epochs_asked=fit.epochs_asked,
            steps_per_epoch=fit.steps_per_epoch,
            scaling=fit.scaling,  # Layers may have been built since it began.
        )
        if clock.first_step_s is None:
            notes += [] if status == "running" else [Note.of("nothing_timed")]
            return dataclasses.replace(record, notes=tuple(notes))
        notes += fit.notes
        ruled, seen = started.learning_rate, clock.first_learning_rate
        if ruled is not None and seen is not None and not math.isclose(ruled, seen, rel_tol=1e-5):
            notes.append(Note.of("first_learning_rate", used=seen, built=ruled))
        reading, (examples, durations_s) = clock.reading, clock.windows
        if not examples and status != "running":
            notes.append(Note.of("too_short_to_time"))
        updates = sum(epoch.updates for epoch in clock.epochs)
        overflowed = None
        # A step of the user's own may make none or several updates of a batch.
        if started.loss_scaled and not self._facts.own_step:
            overflowed = max(0, sum(epoch.batches or 0 for epoch in clock.epochs) - updates)
        return dataclasses.replace(
            record,
            learning_rate=seen,
            batch_size_seen=reading.largest_batch or None,
            window_examples=tuple(examples),
            window_durations_s=tuple(durations_s),
            first_step_s=clock.first_step_s,
            examples_seen=reading.examples,
            batches=reading.batches,
            updates=updates,
            overflowed_updates=overflowed,
            train_s=clock.train_s,
            data_wait_s=reading.wait_s,
            total_s=fit.total_s,
            epochs=tuple(clock.epochs),
            notes=tuple(notes),
            averages_validated=fit.averages_validated,
            initial_weights=fit.best_epoch.initial_weights,
            first_order=fit.first_order,
        )


# Callbacks of Keras that write to one path, and the attribute that holds it.
_PATHS = ((keras.callbacks.ModelCheckpoint, "filepath"), (keras.callbacks.CSVLogger, "filename"))


def give_own_paths(callbacks: Sequence[Any], *, trial_id: str, execution: int) -> tuple[Note, ...]:
    """Let callbacks write to a folder of their execution, and not over the file of another's."""
    notes = []
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise InputError(
                "A search goes on by itself after an interruption, and a backup would begin a "
                "trial in the state of another one: leave out `BackupAndRestore`. Received: "
                f"a {type(callback).__name__} among `callbacks`."
            )
        for writer, name in _PATHS:
            if isinstance(callback, writer):
                given = Path(getattr(callback, name))
                own = given.parent / trial_id / f"execution{execution}" / given.name
                own.parent.mkdir(parents=True, exist_ok=True)
                setattr(callback, name, str(own))
                places = given.parent / "<trial id>" / "execution<number>" / given.name
                kind = type(callback).__name__
                notes.append(Note.of("own_path", callback=kind, own=str(places), given=str(given)))
    return tuple(dict.fromkeys(notes))
