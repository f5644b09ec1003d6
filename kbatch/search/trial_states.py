"""The files of a search beside its records: trial states, checkpoints and the lock."""

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from keras_tuner.engine.trial import Trial, TrialStatus

from kbatch.errors import InputError
from kbatch.records.json_codec import RecordError, load_if_readable, read_json, write_whole_file
from kbatch.study.study import RECORD_NAME, SearchRecord, Study, as_compared, load_study
from kbatch.study.trial import TrialRecord

if sys.platform != "win32":
    import fcntl

CHECKPOINT_NAME = "checkpoint.weights.h5"
_DRAFT_NAME = "draft.weights.h5"
LOCK_NAME = "kbatch.lock"
ENDED = (TrialStatus.COMPLETED, TrialStatus.FAILED, TrialStatus.INVALID)
STATE_NAME = "trial.json"
STATE_VERSION = 1
_STATUSES = [status for name, status in vars(TrialStatus).items() if name.isupper()]
_VERSION_KEY = "kbatch_state"


def write_trial_state(trial: Any, project: Path) -> None:
    """Write keras-tuner's state of a trial in one step, with a version that it passes over."""
    state = {_VERSION_KEY: STATE_VERSION, **trial.get_state()}
    # Scores may be NumPy's numbers.
    text = json.dumps(state, default=lambda value: value.item())
    write_whole_file(project / f"trial_{trial.trial_id}" / STATE_NAME, text.encode())


def read_trial_states(project: Path) -> list[Any]:
    """Read the trials of a project, also those that another tuner of keras-tuner wrote.

    A damaged file is passed over with a warning: what it held is run again.
    """
    found = [_read(file) for file in sorted(project.glob(f"trial_*/{STATE_NAME}"))]
    return sorted((trial for trial in found if trial), key=lambda trial: trial.trial_id)


def _read(file: Path) -> Any:
    try:
        state = read_json(file)
        version = state.get(_VERSION_KEY, 0)
        if version <= STATE_VERSION:
            trial: Any = Trial.from_state(state)
            # Its id names files, and its score is compared.
            if f"trial_{trial.trial_id}" != file.parent.name:
                raise ValueError(f"it holds trial {trial.trial_id!r}")
            if trial.score is not None and not isinstance(trial.score, (int, float)):
                raise ValueError(f"its score is {trial.score!r}")
            if trial.status not in _STATUSES:
                raise ValueError(f"its status is {trial.status!r}")
            return trial
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        warnings.warn(f"{file} is damaged, its trial is run again: {error!r}.", stacklevel=2)
        return None
    raise RecordError(
        f"{file} has state version {version}, this kbatch reads up to {STATE_VERSION}: upgrade "
        "kbatch (pip install --upgrade kbatch)."
    )


def write_checkpoint(model: Any, folder: Path) -> None:
    # One name a trial: what a killed process left is written over.
    draft = folder / _DRAFT_NAME
    model.save_weights(draft)
    os.replace(draft, folder / CHECKPOINT_NAME)


def delete_checkpoints(project: Path, trial_ids: Iterable[str]) -> None:
    for trial_id in trial_ids:
        for name in (CHECKPOINT_NAME, _DRAFT_NAME):
            (project / f"trial_{trial_id}" / name).unlink(missing_ok=True)


def decided_trials(project: Path) -> set[str]:
    """Return the id of the trial that the study of a project decides on, where it does."""
    trial = load_study(project).decide().trial if any(project.glob("trial_*")) else None
    return set() if trial is None else {trial.trial_id}


def open_trials(project: Path) -> set[str]:
    """Return the ids of trials with a checkpoint that their search may still decide on.

    They are those that are not worse than the best, and of other settings, which are not compared,
    those within the tolerance of it: no other can be certified later, when the best is better. A
    race may still name each that it has not dropped.
    """
    files = [file.parent / RECORD_NAME for file in project.glob(f"trial_*/{CHECKPOINT_NAME}")]
    trials = [trial for file in files if (trial := load_if_readable(TrialRecord, file))]
    search = load_if_readable(SearchRecord, project / RECORD_NAME)
    study = as_compared(Study(project.name, tuple(trials), search))
    decision = study.decide()
    best = None if decision.best is None else decision.best.objective_value
    tolerance = decision.tolerance
    if best is None or tolerance is None:
        return set()
    # A race goes on at the setting of the best mean, which may be another one later, and with what
    # is worse between two of its looks.
    raced = search is not None and search.settings.get("strategy") == "race"
    others = {one.trial.trial_id for one in decision.left_out if one.why != "fewer executions"}

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
    """Hold the lock of a project directory.

    The operating system drops it with the process, however that ends. Where the system or the file
    has no locks, or this process no rights, which others miss too, nothing is held.
    """
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


def check_unlocked(project: Path) -> None:
    """Check that no search runs in a project directory that is to be deleted."""
    if (project / LOCK_NAME).exists():
        with search_lock(project):
            pass
