"""The files of a search and of its trials: settings, records, the weights of the best epoch."""

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
# What kbatch measures is of the whole run, and stands in the record already, in full.
_MEASURED = (*TIMES, *USAGE_METRICS)


class TrialFiles:
    """Writes what a trial showed beside keras-tuner's own files, which average executions away."""

    def __init__(self, tuner: Any, trial: Any):
        check_local(tuner.project_dir)
        self.tuner = tuner
        # keras-tuner's own tuners neither compare searches nor keep the weights of few trials.
        self.of_kbatch_tuner = hasattr(tuner, "run_executions")
        self._trial = trial
        self.project = Path(tuner.project_dir)
        self.trial_id: str = trial.trial_id
        self.folder = Path(tuner.get_trial_dir(trial.trial_id))
        self._file = self.folder / RECORD_NAME
        given = tuner.oracle.objective
        self.objective = Objective(given.name, given.direction)
        several = getattr(given, "objectives", ())
        # Those whose sum keras-tuner minimises.
        self.objective_parts = tuple(Objective(part.name, part.direction) for part in several)
        names = [part.name for part in several or [given]]
        if given.name == "default_objective":
            names = []  # The user's own `fit` returns the value itself.
        # Metrics of a model that the search optimises, and what of it kbatch measures.
        self.objective_names = tuple(name for name in names if name not in _MEASURED)
        self.measured_names = tuple(name for name in names if name in _MEASURED)
        self.executions: int = getattr(tuner, "executions_per_trial", 1)

    def reported(self, results: Any) -> dict[str, float]:
        """Return the metrics of what `fit` returned, without those that kbatch measures."""
        lengths = {len(values) for values in getattr(results, "history", {}).values()}
        if len(lengths) > 1:  # Not each epoch was validated, and it would mistake one for another.
            return {}
        numbers = numbers_of(trial_metrics(results, self.tuner.oracle.objective))
        return {name: v for name, v in numbers.items() if name not in _MEASURED}

    def check_search(self, settings: Mapping[str, Any]) -> None:
        """Compare what holds for all trials with what is there, and write what is new."""
        # keras-tuner's own tuners may give each trial other arguments of `fit`.
        facts, values = self.tuner.identity if self.of_kbatch_tuner else ({}, {})
        known = compare_search(self.tuner, settings, facts)
        environment = read_environment() if known is None else known.environment
        # What a tuner of kbatch's decides by is written with what its trials train with.
        settings = {**settings, **getattr(self.tuner, "decides_by", {})}
        found = SearchRecord(settings, environment, facts, values)
        if found != known:
            write_needed(found, self.project / RECORD_NAME)

    def record(self) -> TrialRecord | None:
        """Read what there is of the trial, None where it is missing, damaged or another's."""
        return trial_record(self.folder)

    def begin_attempt(self) -> tuple[ExecutionRecord, ...]:
        """Drop what an interrupted attempt left unfinished; return what completed before."""
        record = self.record()
        found = record.executions if record else ()
        kept = tuple(itertools.takewhile(lambda e: e.status == "completed", found))
        # A short run stays until it has been continued or repeated.
        short = tuple(run for run in kept[-1:] if run.length == "short")
        kept = kept[: min(len(kept) - len(short), self.executions)]
        # So does the first run if it was interrupted: the next attempt takes its times over.
        left = () if kept or short else self._interrupted(found)
        if kept or short or left:
            if kept + short + left != found:
                self._write_all(kept + short + left)
        elif record is not None:
            self._file.unlink()
        elif self._file.exists():  # It is damaged, of another version or of another trial.
            os.replace(self._file, self._file.with_name(f"{RECORD_NAME}.unread"))
        return kept

    @staticmethod
    def _interrupted(runs: Sequence[ExecutionRecord]) -> tuple[ExecutionRecord, ...]:
        return tuple(run for run in runs[:1] if run.status == "interrupted" and run.spans)

    def spans_before(self, number: int) -> tuple[tuple[float, ...], ...]:
        """Return the times of the run of this number that is short, or was interrupted."""
        record = self.record()
        runs = record.executions[number : number + 1] if record else ()
        return runs[0].spans if runs else ()

    def forget(self) -> None:
        """Drop all training runs of the trial."""
        self._file.unlink(missing_ok=True)

    def short_run(self, number: int) -> ExecutionRecord | None:
        """Return the short run of this number that is continued or repeated, None without one."""
        record = self.record()
        runs = record.executions[number : number + 1] if record else ()
        return next((r for r in runs if (r.status, r.length) == ("completed", "short")), None)

    def write(self, index: int, execution: ExecutionRecord) -> None:
        before = read_record(TrialRecord, self._file).executions[:index] if index else ()
        if execution.status == "running" and not self.of_kbatch_tuner:
            write_progress(self.project)
        self._write_all((*before, execution))

    def record_failure(self, hypermodel: Any, hp: Any, error: BaseException) -> None:
        """Record why the trial ended, unless its last execution has already recorded it."""
        record = self.record()
        executions = list(record.executions) if record else []
        if executions and self.short_run(len(executions) - 1):
            if isinstance(error, KeyboardInterrupt):
                return  # The run that was to replace it begins again later.
            executions.pop()
        if not isinstance(error, KeyboardInterrupt) and self._interrupted(executions[-1:]):
            executions.pop()  # That of an earlier call of `search`.
        if not executions or executions[-1].status == "completed":  # None began.
            seed, number = hypermodel.seed, len(executions)
            begun = ExecutionRecord(
                status="running",
                seed=None if seed is None else seed + number,
                batch_size=hp.get("batch_size"),
                micro_batch_size=None,
                dtype_policy=hypermodel.policy_of(hp) or "float32",
            )
            executions.append(begun)
        if executions[-1].status == "running":
            executions[-1] = dataclasses.replace(
                executions[-1],
                status=failure_status(error),
                failure=failure_text(error),
                traceback=failure_traceback(error),
            )
            self._write_all(tuple(executions))

    def check_not_moved(self) -> None:
        """Refuse to continue in a folder that lacks a trial that was begun."""
        begun = self.folder / STATE_NAME
        if not begun.exists():
            raise RecordError(
                f"The project directory {self.project} was moved, renamed or deleted while its "
                "search ran: put it back in its place and run the same script again, to "
                f"continue from there. Received: no folder {begun.parent.name}/{begun.name}."
            )

    def _write_all(self, executions: tuple[ExecutionRecord, ...]) -> None:
        self.check_not_moved()
        plain = (bool, int, float, str, type(None))
        values = self._trial.hyperparameters.values
        known = {name: value for name, value in values.items() if isinstance(value, plain)}
        write_needed(TrialRecord(self.trial_id, known, self.objective, executions), self._file)


def trial_record(folder: Path) -> TrialRecord | None:
    """Read the record of the trial that a folder is named after, None where it has none."""
    record = load_if_readable(TrialRecord, folder / RECORD_NAME)
    return record if record is not None and folder.name == f"trial_{record.trial_id}" else None


def readable_trials(project: Path | None) -> Iterator[TrialRecord]:
    """Read the trials of a project in order; loading the study names those that are damaged."""
    for file in sorted(project.glob(f"trial_*/{RECORD_NAME}")) if project else ():
        if record := load_if_readable(TrialRecord, file):
            yield record


def completed_trials(project: Path | None) -> Iterator[TrialRecord]:
    """Read the trials of a project of which an execution has completed, one after the other."""
    for record in readable_trials(project):
        if "completed" in {run.status for run in record.executions}:
            yield record


def write_progress(project: Path, *, runs: bool = True, **known: float | None) -> None:
    """Write how far the search of this process has come, and whether it still runs."""
    here = (os.getpid(), psutil.Process().create_time()) if runs else (None, None)
    if project.exists():  # It may have been moved.
        found = Progress(platform.node(), *here, time.time(), **known)
        with contextlib.suppress(OSError):  # A search that has ended opens on a read-only disk.
            write_record(found, project / PROGRESS_NAME)


def write_needed(record: object, file: Path) -> None:
    """Write a record without which the search cannot continue."""
    try:
        write_record(record, file)
    except OSError as error:
        raise RecordError(str(error)) from error


_OF_SIZES = ("batch_sizes", "base_batch_size", "validation_batch_size")


def compare_search(
    tuner: Any, settings: Mapping[str, Any], facts: Mapping[str, str] | None = None
) -> SearchRecord | None:
    """Read what holds for all trials of a project; refuse to continue another search there."""
    project, trials = Path(tuner.project_dir), getattr(tuner.oracle, "trials", {})
    ended = any(trial.status in ENDED for trial in trials.values())
    found = recorded_search(project)
    has_results = ended or any(completed_trials(project))
    # As long as there is no result, its data, its model and its sizes may change.
    if not has_results:
        facts = None
        settings = {name: value for name, value in settings.items() if name not in _OF_SIZES}
    difference = None if found is None else found.difference(settings, facts)
    if difference:
        raise InputError(
            f"The project directory {project} holds another search: give another `project_name` or "
            f"`directory`, or `overwrite=True` to start over. Received: {difference}."
        )
    return found


def compare_runs(project: Path, epochs: int, hypermodel: Any) -> None:
    """Refuse to continue trials of another search whose settings are gone."""
    for record in completed_trials(project):
        for number, run in enumerate(record.executions):
            seed = None if hypermodel.seed is None else hypermodel.seed + number
            difference = None
            if run.batch_size not in hypermodel.batch_sizes:
                difference = f"batch_sizes={list(hypermodel.batch_sizes)}, there {run.batch_size}"
            elif run.epochs_asked not in (None, epochs):
                difference = f"epochs={epochs}, there {run.epochs_asked}"
            elif run.seed != seed:
                difference = f"seed={hypermodel.seed}, there {run.seed} in run {number}"
            if difference:
                raise InputError(
                    f"The project directory {project} holds trials of another search, and its "
                    f"{RECORD_NAME} is gone: give the arguments of that search, another "
                    "`project_name`, or `overwrite=True` to start over. Received: "
                    f"{difference} (trial {record.trial_id})."
                )


def recorded_search(project: Path) -> SearchRecord | None:
    """Read the record of the search in a directory. If there is none, return None."""
    file = project / RECORD_NAME
    try:
        return read_record(SearchRecord, file) if file.exists() else None
    except RecordError as error:
        raise RecordError(f"{error} {SETTINGS_REMEDY}") from error


def trial_files(callbacks: Sequence[Any]) -> TrialFiles:
    """Find the trial of a `HyperModel.fit`: a callback of keras-tuner knows it."""
    for callback in callbacks:
        if hasattr(callback, "tuner") and hasattr(callback, "trial"):
            return TrialFiles(callback.tuner, callback.trial)
    raise InputError(
        "`BatchSizeHyperModel.fit` trains in a trial of a tuner, which it knows by keras-tuner's "
        "`TunerCallback`: let a `run_trial` of your own call `super().run_trial`. Received: "
        "callbacks without one."
    )


# Callbacks of Keras that write to one path, and the attribute that holds it.
_PATHS = ((keras.callbacks.ModelCheckpoint, "filepath"), (keras.callbacks.CSVLogger, "filename"))


def give_own_paths(callbacks: Sequence[Any], *, trial_id: str, execution: int) -> tuple[Note, ...]:
    """Let callbacks write to a folder of their execution, and not over the file of another's."""
    notes = []
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise InputError(
                "A search continues by itself after an interruption, and a backup would begin a "
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


def write_checkpoint(model: Any, folder: Path) -> None:
    # One name a trial: what a killed process left is written over.
    draft = folder / DRAFT_NAME
    model.save_weights(draft)
    os.replace(draft, folder / CHECKPOINT_NAME)


_locked: set[Path] = set()  # By this process, whose own locks never exclude each other.


@contextlib.contextmanager
def search_lock(project: Path) -> Iterator[None]:
    """Lock a project directory, where the system has locks and this process may write."""
    if project in _locked:
        raise InputError(
            f"Another search of this process runs in the project directory {project}: wait for its "
            "end, or give another `project_name`. Received: a search within a search."
        )
    _locked.add(project)
    try:
        with _file_lock(project):
            yield
    finally:
        _locked.discard(project)


@contextlib.contextmanager
def _file_lock(project: Path) -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # No right to write, or no locks, as over some networks.
            file = stack.enter_context(open(project / LOCK_NAME, "a+"))
            try:
                # A child that is forked, as those of a pool are, does not have it, and may live on.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.seek(0)
                raise InputError(
                    f"Another search runs in the project directory {project}: wait for its end, or "
                    "give another `project_name`. Received: a lock of process "
                    f"{file.read(32).strip() or 'unknown'}."
                ) from None
            file.truncate(0)
            print(os.getpid(), file=file, flush=True)
        yield
