"""The files of a search: its records, the states of its trials, their checkpoints, its lock."""

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras_tuner
from keras_tuner.engine.trial import Trial, TrialStatus

from kbatch.device.environment import read_environment
from kbatch.device.failures import failure_status, failure_text, failure_traceback
from kbatch.errors import InputError
from kbatch.library_internals import is_oracle_elsewhere, move_project, trial_metrics
from kbatch.records.json_codec import (
    RecordError,
    check_local,
    load_if_readable,
    read_json,
    read_record,
    write_record,
    write_whole_file,
)
from kbatch.records.training_run import COST_NAMES, ExecutionRecord, Outcomes
from kbatch.records.usage import USAGE_METRICS
from kbatch.study.comparison import as_compared
from kbatch.study.names import at_most, outcome
from kbatch.study.study import (
    RECORD_NAME,
    SETTINGS_REMEDY,
    SearchRecord,
    Study,
    load_study,
)
from kbatch.study.trial import Objective, TrialRecord
from kbatch.training.clock import numbers_of

if sys.platform != "win32":
    import fcntl

CHECKPOINT_NAME = "checkpoint.weights.h5"
DRAFT_NAME = "draft.weights.h5"
LOCK_NAME = "kbatch.lock"
ENDED = (TrialStatus.COMPLETED, TrialStatus.FAILED, TrialStatus.INVALID)
STATE_NAME = "trial.json"
_STATUSES = [status for name, status in vars(TrialStatus).items() if name.isupper()]
# What kbatch measures is of the whole run, and stands in the record already, in full.
_MEASURED = ("samples_per_second", *COST_NAMES, *USAGE_METRICS)


class TrialFiles:
    """Writes what a trial showed beside keras-tuner's own files, which average executions away."""

    def __init__(self, tuner: Any, trial: Any):
        check_local(tuner.project_dir)
        self.tuner = tuner
        # keras-tuner's own tuners neither compare searches nor keep the weights of few trials.
        self.of_kbatch_tuner = hasattr(tuner, "_compare_search")
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
        """Return the metrics that keras-tuner takes from what `fit` returned."""
        metrics = trial_metrics(results, self.tuner.oracle.objective)
        numbers = numbers_of(metrics)
        return {name: v for name, v in numbers.items() if name not in _MEASURED}

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Write the settings of the search, or compare them with those found."""
        known = compare_settings(self.project, settings)
        environment = read_environment() if known is None else known.environment
        # What a tuner of kbatch's decides by stands beside what its trials train with.
        settings = {**settings, **getattr(self.tuner, "decides_by", {})}
        found = SearchRecord(settings, environment)
        if found != known:
            write_needed(found, self.project / RECORD_NAME)

    def record(self) -> TrialRecord | None:
        """Read what there is of the trial, None where it is missing, damaged or another's."""
        try:
            record = read_record(TrialRecord, self._file)
        except RecordError:
            return None
        if record.trial_id != self.trial_id:
            return None
        return record if _agree(self._values(), record.hyperparameters) else None

    def begin_attempt(self) -> tuple[ExecutionRecord, ...]:
        """Drop what an interrupted attempt left unfinished."""
        record = self.record()
        found = record.executions if record else ()
        kept = tuple(itertools.takewhile(lambda e: e.status == "completed", found))
        kept = kept[: self.executions]
        if kept:
            self._write_all(kept)
        elif record is not None:
            self._file.unlink()
        elif self._file.exists():  # It is damaged, of another version or of another trial.
            os.replace(self._file, self._file.with_name(f"{RECORD_NAME}.unread"))
        return kept

    def write(self, index: int, execution: ExecutionRecord) -> None:
        before = read_record(TrialRecord, self._file).executions[:index] if index else ()
        self._write_all((*before, execution))

    def earlier_outcomes(self, index: int) -> Outcomes | None:
        """Find the outcomes of the same execution of another trial with this one's settings."""
        for trial_id, trial in sorted(getattr(self.tuner.oracle, "trials", {}).items()):
            if trial_id != self.trial_id and same_settings(trial, self._trial):
                folder = Path(self.tuner.get_trial_dir(trial_id))
                record = load_if_readable(TrialRecord, folder / RECORD_NAME)
                for execution in record.executions[index : index + 1] if record else ():
                    if execution.outcomes is not None and execution.outcomes.key is not None:
                        return execution.outcomes
        return None

    def record_failure(self, hypermodel: Any, hp: Any, error: BaseException) -> None:
        """Record why the trial ended, unless its last execution has already recorded it."""
        record = self.record()
        executions = record.executions if record else ()
        last, number = executions[-1] if executions else None, len(executions)
        if last is not None and last.status == "running":
            number -= 1
        elif last is None or last.status == "completed":
            batch_size, micro_batch_size = hp.get("batch_size"), hypermodel.micro_batch_size
            if micro_batch_size != "auto":  # Else it is found when the training begins.
                micro_batch_size = min(batch_size, micro_batch_size or batch_size)
            last = ExecutionRecord(
                status="running",
                seed=None if hypermodel.seed is None else hypermodel.seed + number,
                batch_size=batch_size,
                micro_batch_size=None if micro_batch_size == "auto" else micro_batch_size,
                dtype_policy=hp.values.get("dtype_policy", hypermodel._search.dtype_policy),
                learning_rate_scaling=hypermodel.learning_rate_scaling,
            )
        else:
            return
        ended = dataclasses.replace(
            last,
            status=failure_status(error),
            failure=failure_text(error),
            traceback=failure_traceback(error),
        )
        self.write(number, ended)

    def _write_all(self, executions: tuple[ExecutionRecord, ...]) -> None:
        # It was there before the trial began.
        check_not_moved(self.project, self.trial_id)
        record = TrialRecord(self.trial_id, self._values(), self.objective, executions)
        write_needed(record, self._file)

    def _values(self) -> dict[str, bool | int | float | str | None]:
        plain = (bool, int, float, str, type(None))
        values = self._trial.hyperparameters.values
        return {name: value for name, value in values.items() if isinstance(value, plain)}


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


def same_settings(one: Any, other: Any) -> bool:
    """Return whether trials of keras-tuner differ in their batch size alone."""
    first, second = (trial.hyperparameters.values for trial in (one, other))
    names = {name for name in first | second if not name.startswith("tuner/")}  # Hyperband's own.
    gone = object()
    return all(first.get(n, gone) == second.get(n, gone) for n in names - {"batch_size"})


def write_needed(record: object, file: Path) -> None:
    """Write a record without which the search cannot go on."""
    try:
        write_record(record, file)
    except OSError as error:
        raise RecordError(str(error)) from error


def check_not_moved(project: Path, trial_id: str) -> None:
    """Refuse to go on in a folder that lacks a trial that was begun: another one would be made."""
    begun = project / f"trial_{trial_id}" / STATE_NAME
    if not begun.exists():
        raise moved(project, f"{begun.parent.name}/{begun.name}")


def moved(project: Path, lacking: str) -> RecordError:
    """Return the error of a search whose folder has vanished."""
    return RecordError(
        f"The project directory {project} was moved, renamed or deleted while its search ran: put "
        "it back in its place and run the same script again, which goes on from there. Received: "
        f"a folder without {lacking}."
    )


def compare_settings(project: Path, settings: Mapping[str, object]) -> SearchRecord | None:
    found = recorded_search(project)
    difference = None if found is None else found.difference(settings)
    if difference:
        raise InputError(
            f"The project directory {project} holds a search with other settings: give another "
            f"`project_name`, or `overwrite=True` to start over. Received: {difference}."
        )
    return found


def recorded_search(project: Path) -> SearchRecord | None:
    """Read what holds for all trials of the search in a directory, None where there is none."""
    file = project / RECORD_NAME
    try:
        return read_record(SearchRecord, file) if file.exists() else None
    except RecordError as error:
        raise RecordError(f"{error} {SETTINGS_REMEDY}") from error


def trial_files(callbacks: Sequence[Any]) -> TrialFiles | None:
    """Find the trial of a `HyperModel.fit`: a callback of keras-tuner knows it."""
    for callback in callbacks:
        if hasattr(callback, "tuner") and hasattr(callback, "trial"):
            _keep_to_one_place(callback.tuner, callbacks)
            return TrialFiles(callback.tuner, callback.trial)
    return None


def _keep_to_one_place(tuner: Any, callbacks: Sequence[Any]) -> None:
    """Make the project of a tuner absolute: callbacks may change the working directory."""
    if os.path.isabs(tuner.project_dir) or is_oracle_elsewhere():
        return
    move_project(tuner, Path(tuner.project_dir).absolute())
    for saver in callbacks:
        if type(saver).__module__.startswith("keras_tuner.") and hasattr(saver, "filepath"):
            saver.filepath = os.path.abspath(saver.filepath)


def reopen_trials(tuner: Any) -> list[str]:
    """Set the trials that lack their record or executions to run again; return what to report."""
    found = []
    for trial in tuner.oracle.ended_trials:
        files = TrialFiles(tuner, trial)
        record = files.record()
        if record is None:
            # Its result is in no study.
            trial.status = TrialStatus.RUNNING
            found.append(
                f"Trial {trial.trial_id} ended, but its {RECORD_NAME} was missing or could not be "
                f"read: it was run again, and what could not be read is {RECORD_NAME}.unread."
            )
            continue
        if files.objective != record.objective:
            raise ValueError(
                f"The project directory {tuner.project_dir} holds a search with another "
                "objective: give another `project_name`, or `overwrite=True` to start over. "
                f"Received: objective={files.objective}, there: {record.objective}."
            )
        completed = sum(run.status == "completed" for run in record.executions)
        # Further executions were asked for.
        if completed < files.executions and trial.status == TrialStatus.COMPLETED:
            trial.status = TrialStatus.RUNNING
    return found


def no_best_trial(project: Path) -> str:
    try:
        study = load_study(project)
    except FileNotFoundError:
        study = Study(project.name, ())
    if not study.trials:
        return f"There is no best trial: call `search` first. Received: no trial in {project}."
    page = study.decide().page
    causes = [f"batch size {t.batch_size}: {t.failure or outcome(t)}" for t in study.trials]
    return (
        f"There is no best trial. {page.headline} {page.certainty} Trials that failed are kept as "
        "results: give another `project_name`, or `overwrite=True`, to run them again. "
        f"Received: {'; '.join(at_most(causes))}."
    )


def write_trial_state(trial: Any, project: Path) -> None:
    """Write keras-tuner's state of a trial in one step."""
    # Scores may be NumPy's numbers.
    text = json.dumps(trial.get_state(), default=lambda value: value.item())
    write_whole_file(project / f"trial_{trial.trial_id}" / STATE_NAME, text.encode())


def read_trial_states(project: Path) -> list[Any]:
    """Read the trials of a project, also another tuner's.

    The record is the truth: where keras-tuner's file is missing, damaged or says something else, it
    is made again from the record. A trial that has no record either is run again, with a warning.
    """
    found = []
    for folder in sorted(project.glob("trial_*")):
        file = folder / STATE_NAME
        state = _read(file) if file.exists() else None
        record = load_if_readable(TrialRecord, folder / RECORD_NAME)
        if record is not None and folder.name != f"trial_{record.trial_id}":
            record = None  # Of another trial.
        if record is not None and not _says(state, record.hyperparameters):
            state = trial_of(record)
            with contextlib.suppress(OSError):  # A disk that cannot be written now.
                write_trial_state(state, project)
        if isinstance(state, Trial):
            found.append(state)
        elif state is not None:
            warnings.warn(f"{file} is damaged, its trial is run again: {state}", stacklevel=2)
    return sorted(found, key=lambda trial: trial.trial_id)


def _says(state: Any, values: Mapping[str, Any]) -> bool:
    return isinstance(state, Trial) and _agree(values, state.hyperparameters.values)


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    # Training may have declared more of them since.
    return all(one[name] == other[name] for name in one.keys() & other.keys())


def trial_of(record: TrialRecord) -> Any:
    """Make keras-tuner's trial from our record; to infer a direction it would build the metric."""
    hyperparameters = keras_tuner.HyperParameters()
    hyperparameters.values = dict(record.hyperparameters)
    trial: Any = Trial(hyperparameters, record.trial_id, TrialStatus.RUNNING)
    if record.status in ("running", "interrupted"):
        return trial
    result = trial_result(record)
    if isinstance(result, str):
        trial.status, trial.message = TrialStatus.FAILED, result
        return trial
    metrics, step = result
    name, direction = record.objective.name, record.objective.direction
    for metric, value in metrics.items():
        trial.metrics.register(metric, direction if metric == name else "min")
        trial.metrics.update(metric, value, step=step)
    trial.status, trial.best_step = TrialStatus.COMPLETED, step
    trial.score = record.objective_value
    return trial


def trial_result(record: TrialRecord | None) -> tuple[dict[str, float], int] | str:
    """Return the metrics of a trial's best epoch, with its number from 0, or why there is none."""
    if record is None:
        return "Nothing was recorded."
    if record.status != "completed":
        return record.failure or f"The trial ended as {record.status}."
    name, direction = record.objective.name, record.objective.direction
    if record.objective_value is None:
        if name in COST_NAMES:
            return f"The target was never met, so {name} is not known."
        return f"The objective {name} was not finite or not measured."
    measured = {"samples_per_second": record.samples_per_second}
    measured |= {cost: record.cost(cost) for cost in COST_NAMES}
    known = {name: float(value) for name, value in measured.items() if value is not None}
    best = [execution.best_epoch(name, direction) for execution in record.executions]
    step = int(sum(epoch.epoch for epoch in best if epoch) / len(best))
    return record.metrics | known, step


def _read(file: Path) -> Any:
    """Read keras-tuner's state of a trial, or return what is wrong with it."""
    try:
        trial: Any = Trial.from_state(read_json(file))
        # Its id names files, its score is compared, and its status decides what runs.
        known = f"trial_{trial.trial_id}" == file.parent.name and trial.status in _STATUSES
        if known and (trial.score is None or isinstance(trial.score, (int, float))):
            return trial
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{error!r}."
    return f"trial {trial.trial_id!r}, status {trial.status!r}, score {trial.score!r}."


def write_checkpoint(model: Any, folder: Path) -> None:
    # One name a trial: what a killed process left is written over.
    draft = folder / DRAFT_NAME
    model.save_weights(draft)
    os.replace(draft, folder / CHECKPOINT_NAME)


def decided_trials(project: Path) -> set[str]:
    """Return the id of the trial that the study of a project decides on, where it does."""
    trial = load_study(project).decide().trial if any(project.glob("trial_*")) else None
    return set() if trial is None else {trial.trial_id}


def open_trials(project: Path) -> set[str]:
    """Return the ids of trials with a checkpoint that their search may still decide on."""
    # They are those that are not worse than the best, and of other settings, which are not
    # compared, those within the tolerance of it: no other can be certified later.
    files = [file.parent / RECORD_NAME for file in project.glob(f"trial_*/{CHECKPOINT_NAME}")]
    trials = [trial for file in files if (trial := load_if_readable(TrialRecord, file))]
    search = load_if_readable(SearchRecord, project / RECORD_NAME)
    study = Study(project.name, as_compared(trials), search)
    decision = study.decide()
    best = None if decision.best is None else decision.best.objective_value
    tolerance = decision.tolerance
    if best is None or tolerance is None:
        return set()
    # A race may repeat another learning rate of a size later, and a size that seems worse while a
    # round is not complete.
    raced = search is not None and search.settings.get("strategy") == "race"
    others = {trial.trial_id for trial, _ in decision.left_out}

    def is_open(trial: TrialRecord) -> bool:
        value = trial.objective_value
        if trial.status != "completed" or value is None:
            return False
        if trial.trial_id in others:
            return raced or abs(value - best) <= tolerance
        trained_on = raced and len(trial.executions) >= decision.executions
        return trained_on or trial.batch_size not in decision.worse

    return {trial.trial_id for trial in study.trials if is_open(trial)}


# Of locks that this process holds. A child that is forked, as those of a pool are, would keep them
# when this process is killed, and the search could not go on.
_held: set[int] = set()


def _close_held() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_held)


@contextlib.contextmanager
def search_lock(project: Path) -> Iterator[None]:
    """Hold the lock of a project directory, where the system has locks and this process rights."""
    if sys.platform == "win32":
        yield
        return
    try:
        descriptor = os.open(project / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield
        return
    _held.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise InputError(
                f"Another search runs in the project directory {project}: wait for its end, or "
                f"give another `project_name`. Received: a lock of process {holder}."
            ) from error
        except OSError:  # A file system without locks, as some over the network are.
            pass
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        _held.discard(descriptor)
        os.close(descriptor)
