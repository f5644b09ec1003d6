"""Read and write the files of a search and its trials: settings, records, checkpoints, the lock."""

import contextlib
import dataclasses
import itertools
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import psutil
from keras_tuner.engine.trial import TrialStatus

from kbatch.device.failures import failure_status, failure_text, failure_traceback
from kbatch.device.machine import read_environment
from kbatch.errors import InputError, RecordError
from kbatch.library_internals import trial_metrics
from kbatch.records.json_codec import check_local, load_if_readable, read_record, write_record
from kbatch.records.machine import USAGE_METRICS
from kbatch.records.notes import Note
from kbatch.records.training_run import (
    PROGRESS_NAME,
    RECORD_NAME,
    SETTINGS_REMEDY,
    TIMES,
    ExecutionRecord,
    Progress,
    SearchRecord,
)
from kbatch.study.trial import Objective, TrialRecord
from kbatch.training.callbacks import numbers_of

if sys.platform != "win32":
    import fcntl

LOCK_NAME = "kbatch.lock"
CHECKPOINT_NAME = "checkpoint.weights.h5"
DRAFT_NAME = "draft.weights.h5"
STATE_NAME = "trial.json"
ENDED = (TrialStatus.COMPLETED, TrialStatus.FAILED, TrialStatus.INVALID)
# Metrics that kbatch measures over a whole run. A record stores them outside its epochs.
_MEASURED = (*TIMES, *USAGE_METRICS)
# Settings that may change until a first training run has completed.
_SIZE_SETTINGS = ("batch_sizes", "base_batch_size", "validation_batch_size")
# Callbacks of Keras that write to one path, and the attribute that holds it.
_PATHS = ((keras.callbacks.ModelCheckpoint, "filepath"), (keras.callbacks.CSVLogger, "filename"))
# Directories that this process has locked, because `lockf` does not lock out its own process.
_locked: set[Path] = set()


class TrialFiles:
    """Reads and writes the record of a trial. keras-tuner's file has only means over its runs."""

    def __init__(self, tuner: Any, trial: Any):
        check_local(tuner.project_dir)
        self.tuner = tuner
        #: Whether the tuner is a `BatchSizeTuner`, which compares searches and deletes weights.
        self.of_kbatch_tuner = hasattr(tuner, "run_executions")
        self._trial = trial
        self.project = Path(tuner.project_dir)
        self.trial_id: str = trial.trial_id
        self.folder = Path(tuner.get_trial_dir(trial.trial_id))
        self._file = self.folder / RECORD_NAME
        objective = tuner.oracle.objective
        self.objective = Objective(objective.name, objective.direction)
        parts = getattr(objective, "objectives", ())
        #: If there are several objectives, keras-tuner minimises their sum.
        self.objective_parts = tuple(Objective(part.name, part.direction) for part in parts)
        names = [part.name for part in parts or [objective]]
        if objective.name == "default_objective":
            names = []  # A custom `fit` returns the value itself.
        #: Objectives that are metrics of the model, and those that kbatch measures.
        self.objective_names = tuple(name for name in names if name not in _MEASURED)
        self.measured_names = tuple(name for name in names if name in _MEASURED)
        self.executions: int = getattr(tuner, "executions_per_trial", 1)

    def reported(self, results: Any) -> dict[str, float]:
        """Return the metrics that `fit` returned, without the metrics that kbatch measures."""
        lengths = {len(values) for values in getattr(results, "history", {}).values()}
        if len(lengths) > 1:  # keras-tuner mixes up epochs if some were not validated.
            return {}
        numbers = numbers_of(trial_metrics(results, self.tuner.oracle.objective))
        return {name: v for name, v in numbers.items() if name not in _MEASURED}

    def check_search(self, settings: Mapping[str, Any]) -> None:
        """Raise InputError if the directory holds another search, else write the record."""
        # keras-tuner's own tuners may call `fit` with different arguments in each trial.
        facts, values = self.tuner.identity if self.of_kbatch_tuner else ({}, {})
        recorded = compare_search(self.tuner, settings, facts)
        environment = read_environment() if recorded is None else recorded.environment
        settings = {**settings, **getattr(self.tuner, "study_settings", {})}
        search = SearchRecord(settings, environment, facts, values)
        if search != recorded:
            write_needed(search, self.project / RECORD_NAME)

    def record(self) -> TrialRecord | None:
        """Read the record of the trial. Return None if it is missing or damaged."""
        return trial_record(self.folder)

    def run(self, number: int) -> ExecutionRecord | None:
        """Read the record of a training run by its number, or return None if there is none."""
        record = self.record()
        runs = record.executions[number : number + 1] if record else ()
        return runs[0] if runs else None

    def begin_attempt(self) -> tuple[ExecutionRecord, ...]:
        """Drop unfinished runs from the record, and return the completed ones."""
        record = self.record()
        runs = record.executions if record else ()
        completed = tuple(itertools.takewhile(lambda run: run.status == "completed", runs))
        # A short run stays until it has been continued or repeated. An interrupted run stays too,
        # because the next attempt adds to its times.
        unfinished = tuple(run for run in completed[-1:] if run.length == "short")
        completed = completed[: min(len(completed) - len(unfinished), self.executions)]
        if (done := len(completed)) < self.executions:
            unfinished = unfinished or tuple(filter(_was_interrupted, runs[done : done + 1]))
        if completed or unfinished:
            if completed + unfinished != runs:
                self._write_all(completed + unfinished)
        elif record is not None:
            self._file.unlink()
        elif self._file.exists():  # It is damaged, or of another version or trial.
            os.replace(self._file, self._file.with_name(f"{RECORD_NAME}.unread"))
        return completed

    def write(self, index: int, execution: ExecutionRecord) -> None:
        """Write the record of a training run, and drop the records of later runs."""
        before = read_record(TrialRecord, self._file).executions[:index] if index else ()
        if execution.status == "running" and not self.of_kbatch_tuner:
            write_progress(self.project)
        self._write_all((*before, execution))

    def record_failure(self, hypermodel: Any, hp: Any, error: BaseException) -> None:
        """Record the error that ended the trial, unless the record of its last run has it."""
        record, interrupts = self.record(), isinstance(error, KeyboardInterrupt)
        executions = list(record.executions) if record else []
        if executions and is_short(executions[-1]):
            if interrupts:
                return  # The short run can still be continued.
            executions.pop()
        if executions and not interrupts and _was_interrupted(executions[-1]):
            executions.pop()  # An earlier call of `search` was interrupted, not this one.
        if not executions or executions[-1].status == "completed":  # The run has no record yet.
            executions.append(
                ExecutionRecord(
                    status="running",
                    seed=hypermodel.seed_of(len(executions)),
                    batch_size=hp.get("batch_size"),
                    micro_batch_size=None,
                    dtype_policy=hypermodel.policy_of(hp) or "float32",
                )
            )
        if executions[-1].status == "running":
            executions[-1] = dataclasses.replace(
                executions[-1],
                status=failure_status(error),
                failure=failure_text(error),
                traceback=failure_traceback(error),
            )
            self._write_all(tuple(executions))

    def check_not_moved(self) -> None:
        """Raise RecordError if the user has moved or deleted the project directory."""
        if not (self.folder / STATE_NAME).exists():
            raise RecordError(
                f"The project directory {self.project} was moved, renamed or deleted during the "
                "search: move it back and run the same script again to continue. "
                f"Received: no file {self.folder.name}/{STATE_NAME}."
            )

    def _write_all(self, executions: tuple[ExecutionRecord, ...]) -> None:
        self.check_not_moved()
        types = (bool, int, float, str, type(None))
        values = self._trial.hyperparameters.values
        values = {name: value for name, value in values.items() if isinstance(value, types)}
        write_needed(TrialRecord(self.trial_id, values, self.objective, executions), self._file)


def is_short(run: ExecutionRecord) -> bool:
    """Return whether a run completed as a short one, which can be continued."""
    return (run.status, run.length) == ("completed", "short")


def _was_interrupted(run: ExecutionRecord) -> bool:
    """Return whether a run was interrupted after training began."""
    return run.status == "interrupted" and bool(run.spans)


def trial_record(folder: Path) -> TrialRecord | None:
    """Read the record of a trial from its folder. Return None if it is missing or damaged."""
    record = load_if_readable(TrialRecord, folder / RECORD_NAME)
    return record if record is not None and folder.name == f"trial_{record.trial_id}" else None


def readable_trials(project: Path | None) -> Iterator[TrialRecord]:
    """Read the records of all trials in order, and leave out damaged ones."""
    for file in sorted(project.glob(f"trial_*/{RECORD_NAME}")) if project else ():
        if record := load_if_readable(TrialRecord, file):
            yield record


def completed_trials(project: Path | None) -> Iterator[TrialRecord]:
    """Read the records of the trials that have a completed training run."""
    for record in readable_trials(project):
        if "completed" in {run.status for run in record.executions}:
            yield record


def write_progress(project: Path, *, running: bool = True, **known: float | None) -> None:
    """Write how far the search of this process has come. `running`: whether it still runs."""
    process = (os.getpid(), psutil.Process().create_time()) if running else (None, None)
    if project.exists():  # It may have been moved.
        progress = Progress(platform.node(), *process, time.time(), **known)
        with contextlib.suppress(OSError):  # A search that has ended may be on a read-only disk.
            write_record(progress, project / PROGRESS_NAME)


def write_needed(record: object, file: Path) -> None:
    """Write a record that the search cannot continue without, or raise RecordError."""
    try:
        write_record(record, file)
    except OSError as error:
        raise RecordError(str(error)) from error


def compare_search(
    tuner: Any, settings: Mapping[str, Any], facts: Mapping[str, str] | None = None
) -> SearchRecord | None:
    """Read the record of a directory's search. If it is another search, raise InputError."""
    project, trials = Path(tuner.project_dir), getattr(tuner.oracle, "trials", {})
    search = recorded_search(project)
    # Before the first result, the data, the model and the sizes may still be changed.
    ended = any(trial.status in ENDED for trial in trials.values())
    if not ended and not any(completed_trials(project)):
        facts = None
        settings = {name: v for name, v in settings.items() if name not in _SIZE_SETTINGS}
    if search is not None and (difference := search.difference(settings, facts)):
        raise InputError(
            f"The project directory {project} holds another search: give another `project_name` or "
            f"`directory`, or `overwrite=True` to start over. Received: {difference}."
        )
    return search


def compare_runs(project: Path, epochs: int, hypermodel: Any) -> None:
    """Raise InputError if trials without a record of their search have other settings."""
    for record in completed_trials(project):
        for number, run in enumerate(record.executions):
            difference = None
            if run.batch_size not in hypermodel.batch_sizes:
                difference = f"batch_sizes={list(hypermodel.batch_sizes)}, but {run.batch_size}"
            elif run.epochs_asked not in (None, epochs):
                difference = f"epochs={epochs}, but {run.epochs_asked}"
            elif run.seed != hypermodel.seed_of(number):
                difference = f"seed={hypermodel.seed}, but {run.seed}"
            if difference:
                raise InputError(
                    f"The project directory {project} holds trials of another search, and its "
                    f"{RECORD_NAME} is missing: give the arguments of that search, another "
                    "`project_name`, or `overwrite=True` to start over. Received: "
                    f"{difference} in run {number} of trial {record.trial_id}."
                )


def recorded_search(project: Path) -> SearchRecord | None:
    """Read the record of the search in a directory, or return None if there is none."""
    file = project / RECORD_NAME
    try:
        return read_record(SearchRecord, file) if file.exists() else None
    except RecordError as error:
        raise RecordError(f"{error} {SETTINGS_REMEDY}") from error


def trial_files(callbacks: Sequence[Any]) -> TrialFiles:
    """Return the files of the trial that keras-tuner's callback names."""
    for callback in callbacks:
        if hasattr(callback, "tuner") and hasattr(callback, "trial"):
            return TrialFiles(callback.tuner, callback.trial)
    raise InputError(
        "`BatchSizeHyperModel.fit` needs keras-tuner's `TunerCallback` among `callbacks`: call "
        "`super().run_trial` if your tuner overrides `run_trial`. "
        f"Received: callbacks={list(callbacks)!r}."
    )


def give_own_paths(callbacks: Sequence[Any], *, trial_id: str, execution: int) -> tuple[Note, ...]:
    """Let callbacks write to one folder for each training run, so that they overwrite nothing."""
    notes = []
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise InputError(
                "`callbacks` must not contain `BackupAndRestore`, because it would start a trial "
                "with the weights of another trial: leave it out. To continue an interrupted "
                f"search, run the same script again. Received: {type(callback).__name__}."
            )
        for writer, name in _PATHS:
            if isinstance(callback, writer):
                given = Path(getattr(callback, name))
                path = given.parent / trial_id / f"execution{execution}" / given.name
                path.parent.mkdir(parents=True, exist_ok=True)
                setattr(callback, name, str(path))
                pattern = given.parent / "<trial id>" / "execution<number>" / given.name
                kind = type(callback).__name__
                notes.append(Note.of("own_path", callback=kind, own=str(pattern), given=str(given)))
    return tuple(dict.fromkeys(notes))


def write_checkpoint(model: Any, folder: Path) -> None:
    """Write the checkpoint of a trial to another file first, so that it is never half written."""
    draft = folder / DRAFT_NAME
    model.save_weights(draft)
    os.replace(draft, folder / CHECKPOINT_NAME)


def delete_files(*files: Path) -> None:
    for file in files:
        with contextlib.suppress(OSError):  # The disk may be read-only.
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def search_lock(project: Path) -> Iterator[None]:
    """Lock a project directory, if the system has locks and this process may write to it."""
    if project in _locked:
        raise _locked_error(project, "this process")
    _locked.add(project)
    with contextlib.ExitStack() as stack:
        stack.callback(_locked.discard, project)
        # The directory may be read-only, or on a file system without locks.
        with contextlib.suppress(OSError):
            if sys.platform != "win32":
                _lock_file(stack.enter_context(open(project / LOCK_NAME, "a+")), project)
        yield


def _locked_error(project: Path, owner: str) -> InputError:
    return InputError(
        f"Another search runs in the project directory {project}: wait until it ends, or "
        f"give another `project_name`. Received: a directory that {owner} uses."
    )


def _lock_file(file: Any, project: Path) -> None:
    try:
        # Unlike with `flock`, a forked child does not hold the lock, and may outlive this process.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        raise _locked_error(project, f"process {file.read(32).strip() or 'unknown'}") from None
    file.truncate(0)
    print(os.getpid(), file=file, flush=True)
