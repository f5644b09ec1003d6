"""One execution of a trial: its training, its callbacks and its record."""

import copy
import dataclasses
import gc
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import keras_tuner

from kbatch.device import failures
from kbatch.device.environment import read_environment
from kbatch.device.memory import workers_on_device
from kbatch.errors import InputError
from kbatch.records.notes import RunNote
from kbatch.records.training_run import COST_NAMES, ExecutionRecord, Outcomes, cost_to_target
from kbatch.search.timed_fit import ExecutionPlan, TimedFit
from kbatch.search.trial_files import CHECKPOINT_NAME, TrialFiles, completed_trials
from kbatch.search.trial_micro_batch import TrialMicroBatch
from kbatch.training.accumulation.whole_batch import sparse_note
from kbatch.training.dtype_policy import PolicyUnsupported, dtype_policy_scope, loss_scaled
from kbatch.training.learning_rate import peak_learning_rate, scaling_of
from kbatch.training.model import replica_count, user_step
from kbatch.training.state import inner_optimizers


class NoUpdate(PolicyUnsupported, keras_tuner.errors.FailedTrialError):
    """Raised where float16 overflow left few or no updates, so that float32 is tried."""


class Execution:
    """One training run, timed and recorded in the files of its trial, where it has some."""

    def __init__(
        self,
        model: keras.Model,
        plan: ExecutionPlan,
        files: TrialFiles | None,
        micro_batch: TrialMicroBatch,
        callbacks: "FreshCallbacks | None" = None,
    ):
        self._model: Any = model
        self._plan = plan
        self._files = files
        self._micro_batch = micro_batch
        # Only where the micro-batch size is found, or the policy may change, it may start again.
        self._may_change = callbacks is not None
        self._callbacks = callbacks or (FreshCallbacks() if micro_batch.is_auto else None)
        self._fit = self._timed_fit()
        optimizer = next(iter(inner_optimizers(self._model)), None)  # None: not compiled yet.
        here = read_environment()
        self._started = ExecutionRecord(
            status="running",
            seed=plan.seed,
            batch_size=plan.batch_size,
            micro_batch_size=micro_batch.size,
            dtype_policy=self._model.dtype_policy.name,
            optimizer=optimizer and type(optimizer).__name__,
            loss_scaled=loss_scaled(model),
            learning_rate=peak_learning_rate(optimizer),
            learning_rate_scaling=plan.learning_rate_scaling,
            jit_compile=bool(model.jit_compile),
            notes=plan.notes,
            workers_on_device=workers_on_device(),
            device=here.device.replace("CPU", here.cpu),
            replicas=replica_count(model),
            scaling=scaling_of(model),
        )

    def run(self, fit: Callable[[], Any]) -> Any:
        """Run the training with the timed `model.fit` in place and write its record."""
        self._write(self.so_far())
        try:
            results = self._completed(self._trained(fit))
            files, best = self._files, self._fit.best_epoch
            reported = {} if files is None else files.reported(results)
            if files and best and files.of_kbatch_tuner:
                record = files.record() if (files.folder / CHECKPOINT_NAME).exists() else None
                best.write_weights(
                    self._model, files.folder, record and record.best_objective_value
                )
            outcomes, order = self._outcomes()
        except BaseException as error:
            ended = self._record(failures.failure_status(error), failures.failure_text(error))
            self._write(dataclasses.replace(ended, traceback=failures.failure_traceback(error)))
            raise
        ended = self._record("completed", None, reported)
        ended = dataclasses.replace(ended, outcomes=outcomes, notes=(*ended.notes, *order))
        if ended.diverged:
            text = "diverged: the loss became NaN or infinite, lower the learning rate"
            ended = dataclasses.replace(ended, status="failed", failure=text)
        self._write(ended)
        return results

    def so_far(self) -> ExecutionRecord:
        return self._record("running", None)

    @property
    def progress(self) -> tuple[int, int]:
        """Epochs and examples trained on so far, zero where no update was made of them."""
        clock = self._fit.clock
        made = clock.examples > 0 and clock.updates > 0
        return (len(clock.epochs), clock.examples) if made else (0, 0)

    def _trained(self, fit: Callable[[], Any]) -> Any:
        while True:
            try:
                # Layers that are built by their first batch are so under the policy too.
                with dtype_policy_scope(self._started.dtype_policy), self._fit:
                    return fit()
            except Exception as error:
                # Half the size is a cure only where it was found by probes, so that it or a smaller
                # one ran before, and where a step ran out: not validation, not a callback.
                found = self._micro_batch.can_shrink and self._fit.clock.in_step
                if not found or not failures.ran_out_of_memory(error, smaller_worked=True):
                    raise
            # Outside of the handler: the frames of the error hold what the step that ran out held.
            gc.collect()
            self._micro_batch.shrink()
            if self._callbacks is not None:
                self._callbacks.start_again()
            self._fit = self._timed_fit()

    def _timed_fit(self) -> TimedFit:
        return TimedFit(
            self._model,
            self._plan,
            prepare=self._micro_batch.prepare,
            callbacks_of=self._callbacks and self._callbacks.of,
        )

    def _completed(self, results: Any) -> Any:
        """Add what was measured to what `fit` returned, where keras-tuner is to have it."""
        wanted = () if self._files is None else self._files.measured_names
        clock, target, monitor = self._fit.clock, self._fit.target, self._fit.monitor
        throughput, usage = clock.throughput, monitor and monitor.usage
        if "samples_per_second" in wanted and throughput is None:
            raise keras_tuner.errors.FailedTrialError(
                "There were too few steps to measure samples/s, which is the objective: train "
                "for more epochs, or leave out the largest batch sizes. "
                f"Received: {clock.reading.batches} steps with "
                f"batch_size={self._plan.batch_size}."
            )
        optimizer: Any = getattr(self._model, "optimizer", None)
        batches, made = sum(epoch.batches or 0 for epoch in clock.epochs), clock.updates
        # So few that a trial of larger batches may have none.
        few = not made or (self._may_change and 2 * made <= batches)
        scaled = clock.epochs and few and self._started.loss_scaled
        # Overflows alone lower the scale; a step of the user's own may use other optimizers.
        if scaled and optimizer.built and float(optimizer.dynamic_scale) < optimizer.initial_scale:
            found = f"few updates: the gradients of {batches - made} of {batches} batches"
            raise NoUpdate(
                f"{found if made else 'no update: the gradients of every batch'} overflowed in "
                'float16. Scale the loss and the inputs down, or give `dtype_policy="float32"`.'
            )
        figures = {} if throughput is None else {"samples_per_second": throughput.mean}
        if target is not None:
            cost = cost_to_target(target, clock.epochs)
            # The least of no value is infinite: keras-tuner ranks a trial that never met it last.
            figures |= {
                name: math.inf if cost is None else float(getattr(cost, part))
                for name, part in COST_NAMES.items()
            }
        taken = usage.metrics(clock.reading.examples) if usage else {}
        if isinstance(results, keras.callbacks.History):
            epochs = len(results.epoch)
            results.history.update({name: [value] * epochs for name, value in taken.items()})
            if wanted:
                # They are the same for all epochs: the other metrics are those of the last one.
                return {name: values[-1] for name, values in results.history.items()} | figures
        return figures | taken | results if isinstance(results, dict) else results

    def _outcomes(self) -> tuple[Outcomes | None, tuple[RunNote, ...]]:
        """Return the metric by blocks of validation examples, which are those of other trials."""
        best = self._fit.best_epoch
        if best is None or self._files is None:
            return None, ()
        outcomes = best.outcomes()
        earlier = self._files.earlier_outcomes(self._plan.number)
        if earlier is None or outcomes.key in (None, earlier.key):
            return outcomes, ()
        if outcomes.set_key == earlier.set_key:
            return outcomes, (RunNote.of("validation_shuffled"),)
        raise InputError(
            "Batch sizes are compared on the same validation data, but this trial was validated on "
            "other rows than an earlier one with the same settings: give arrays, or let a data "
            "function return the same rows for every `batch_size`, without `drop_remainder`, a "
            "random split or a random `take`. Received: "
            f"{outcomes.examples} validation examples with batch_size={self._plan.batch_size} "
            f"({outcomes.set_key}), {earlier.examples} before ({earlier.set_key})."
        )

    def _write(self, record: ExecutionRecord) -> None:
        if self._files is not None:
            self._files.write(self._plan.number, record)

    def _record(
        self, status: str, failure: str | None, reported: Mapping[str, float | None] | None = None
    ) -> ExecutionRecord:
        fit, micro_batch, started = self._fit, self._micro_batch, self._started
        clock, sparse = fit.clock, sparse_note(self._model)
        scaling = scaling_of(self._model)  # Layers may have been built since it began.
        notes = (*started.notes, *([sparse] if sparse else []), *micro_batch.notes)
        record = dataclasses.replace(
            started,
            status=status,
            micro_batch_size=micro_batch.size,
            micro_batch_search_s=micro_batch.search_s,
            most_in_memory=micro_batch.most_in_memory,
            failure=failure,
            reported=reported or {},
            usage=fit.monitor and fit.monitor.usage,
            budget=fit.budget,
            target=fit.target,
            notes=notes,
            steps_per_execution=fit.steps_per_execution,
        )
        if clock.first_step_s is None:
            end = () if status == "running" else (RunNote.of("nothing_timed"),)
            return dataclasses.replace(record, notes=(*notes, *end))
        ruled, seen, notes = started.learning_rate, clock.first_learning_rate, (*notes, *fit.notes)
        if scaling is not None and scaling.fitted:
            names = ", ".join(f"`{name}`" for name in scaling.fitted)
            notes = (*notes, RunNote.of("fitted_by_build", names=names))
        if ruled is not None and seen is not None and not math.isclose(ruled, seen, rel_tol=1e-5):
            notes = (*notes, RunNote.of("first_learning_rate", used=seen, built=ruled))
        reading, (examples, durations_s) = clock.reading, clock.windows
        updates = sum(epoch.updates for epoch in clock.epochs)
        overflowed = None
        # A step of the user's own may make none or several updates of a batch.
        if started.loss_scaled and user_step(self._model) is None:
            overflowed = max(0, sum(epoch.batches or 0 for epoch in clock.epochs) - updates)
        return dataclasses.replace(
            record,
            learning_rate=seen,
            scaling=scaling,
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
            notes=notes,
            averages_validated=fit.averages_validated,
            initial_weights=fit.best_epoch and fit.best_epoch.initial_weights,
            first_order=fit.first_order,
        )


class Float32Fallback:
    """Trains a whole search in float32 where its model cannot train under its dtype policy."""

    def __init__(self, policies: Sequence[str]):
        self._policies = policies
        self.note: RunNote | None = None  # Why all trials train in float32, if they do.

    def may_begin(self, project: Path | None) -> bool:
        """Return whether the whole search may go to float32: no trial has completed."""
        return len(self._policies) == 1 and not self.note and not any(completed_trials(project))

    def run(
        self,
        project: Path | None,
        train: Callable[[], Any],
        progress: Callable[[], tuple[int, int]],
    ) -> Any:
        """Run what trains, else in float32, where the search stays if that gets further."""
        try:
            return train()
        except PolicyUnsupported as error:
            if not self.may_begin(project):
                raise
            reached, (policy,) = progress(), self._policies
            self.note = RunNote.of("float32_instead", policy=policy, reason=str(error))
            warnings.warn(self.note, stacklevel=2)
            if project is None:  # The next model that is built trains in float32.
                raise
        try:
            return train()
        except BaseException:
            if progress() <= reached:
                self.note = None
            raise


class FreshCallbacks:
    """Copies of callbacks to start again with: best values would else go on from what failed."""

    # Those of keras-tuner and of kbatch's search stay themselves, for others hold them, and get
    # back their best value. One that cannot be copied stays itself too. What a callback keeps in
    # files is as the attempt left it.

    def __init__(self):
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._given: dict[int, Any] | None = None
        # The best values of keras-tuner's `SaveBestEpoch`s, as they came.
        self._best: dict[int, Any] = {}

    def start_again(self) -> None:
        self._given = {}

    def of(self, callbacks: list[Any], model: keras.Model) -> list[Any]:
        """Return the callbacks of a `fit`: themselves first, then copies from before training."""
        new = [c for c in callbacks if id(c) not in self._kept and not _of_search(c)]
        # They may refer to one another.
        stay = {id(model): model} | {id(c): c for c in callbacks if _of_search(c)}
        for callback, copied in zip(new, _copied(new, stay), strict=True):
            self._kept[id(callback)] = (callback, copied)
        for own in filter(_of_search, callbacks):
            before = self._best.setdefault(id(own), getattr(own, "best_value", None))
            if self._given is not None and id(own) not in self._given:
                self._given[id(own)] = own
                if hasattr(own, "best_value"):
                    own.best_value = before
        if self._given is None:
            return callbacks
        missing = [id(c) for c in callbacks if id(c) in self._kept and id(c) not in self._given]
        copies = _copied([self._kept[number][1] for number in missing], stay)
        self._given.update(zip(missing, copies, strict=True))
        return [self._given.get(id(callback), callback) for callback in callbacks]


def _copied(callbacks: list[Any], stay: dict[int, Any]) -> list[Any]:
    try:
        return copy.deepcopy(callbacks, dict(stay))
    except Exception:  # Whatever a user's class raises: a lock, a file, a process.
        if len(callbacks) == 1:
            return callbacks
    return [_copied([callback], stay)[0] for callback in callbacks]


def _of_search(callback: Any) -> bool:
    module = type(callback).__module__
    known = module.partition(".")[0] == "keras_tuner" or module.startswith("kbatch.search.")
    return known or hasattr(callback, "tuner") or hasattr(callback, "trial")


# Callbacks of Keras that write to one path, and the attribute that holds it.
_PATHS = ((keras.callbacks.ModelCheckpoint, "filepath"), (keras.callbacks.CSVLogger, "filename"))


def give_own_paths(callbacks: Any, *, trial_id: str, execution: int) -> tuple[RunNote, ...]:
    """Let callbacks write to a folder of their execution, and not over the file of another's."""
    notes = []
    for callback in keras.tree.flatten(callbacks or []):
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
                notes.append(
                    RunNote.of("own_path", callback=kind, own=str(places), given=str(given))
                )
    return tuple(dict.fromkeys(notes))
