"""The trials of a directory as keras-tuner knows them, made from their records; its lock.

The record of a trial says how it ended. keras-tuner's own file adds the space of its
hyperparameters, of which training may have declared more than building did.
"""

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras_tuner
from keras_tuner.engine.trial import Trial, TrialStatus

from kbatch.errors import InputError
from kbatch.records.json_codec import DAMAGED, load_if_readable, read_json, write_whole_file
from kbatch.records.search import RECORD_NAME, SearchRecord
from kbatch.records.training_run import COST_NAMES
from kbatch.search.trial_files import CHECKPOINT_NAME, ENDED, STATE_NAME
from kbatch.study.comparison import as_compared
from kbatch.study.names import at_most, outcome
from kbatch.study.study import Study, load_study
from kbatch.study.trial import TrialRecord

if sys.platform != "win32":
    import fcntl

LOCK_NAME = "kbatch.lock"


def write_trial(trial: Any, project: Path) -> None:
    """Write keras-tuner's state of a trial in one step."""
    # Scores may be NumPy's numbers.
    text = json.dumps(trial.get_state(), default=lambda value: value.item())
    write_whole_file(project / f"trial_{trial.trial_id}" / STATE_NAME, text.encode())


def read_trials(project: Path) -> list[Any]:
    """Read the trials of a project, also another tuner's; one without a record runs again."""
    found = []
    for folder in sorted(project.glob("trial_*")):
        trial_id = folder.name.removeprefix("trial_")
        record, kept = load_if_readable(TrialRecord, folder / RECORD_NAME), _kept(folder)
        if record is not None and record.trial_id == trial_id:
            trial, values = trial_of(record), record.hyperparameters
            own = {} if kept is None else kept.hyperparameters.values
            if kept is not None and all(own[n] == values[n] for n in own.keys() & values.keys()):
                trial.hyperparameters = kept.hyperparameters
                if kept.status not in ENDED:  # A mistake or a lost device ended its search.
                    trial.status = TrialStatus.RUNNING
            else:
                with contextlib.suppress(OSError):  # A disk that cannot be written now.
                    write_trial(trial, project)
            found.append(trial)
            continue
        if kept is None or kept.status in ENDED:
            warnings.warn(
                f"Trial {trial_id} is run again: its files in {folder} are missing or damaged.",
                stacklevel=2,
            )
        if kept is not None:
            found.append(Trial(kept.hyperparameters, trial_id, TrialStatus.RUNNING))
    return found


def _kept(folder: Path) -> Any:
    """Read keras-tuner's state of a trial, None where it is missing or damaged."""
    try:
        return Trial.from_state(read_json(folder / STATE_NAME))
    except DAMAGED:
        return None


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


def decided_trials(project: Path, *, or_alike: bool = False) -> set[str]:
    """Return the id of the trial that the study of a project decides on, where it does.

    `or_alike` adds those that are told apart from it by epochs that are timed later.
    """
    if not any(project.glob("trial_*")):
        return set()
    found = load_study(project).decide()
    decided = set() if found.trial is None else {found.trial.trial_id}
    sizes = found.alike_in_time if or_alike else ()
    return decided | {trial.trial_id for trial in found.trials if trial.batch_size in sizes}


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
