"""The files of a search beside its records: trial states, checkpoints and the lock."""

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras_tuner.src.engine.trial import Trial, TrialStatus

from kbatch.errors import InputError
from kbatch.records.json_codec import RecordError, read_json, write_whole_file

ENDED = (TrialStatus.COMPLETED, TrialStatus.FAILED, TrialStatus.INVALID)
STATE_NAME = "trial.json"
STATE_VERSION = 1
_STATUSES = [status for name, status in vars(TrialStatus).items() if name.isupper()]
_VERSION_KEY = "kbatch_state"


def write_trial_state(trial: Any, project: Path) -> None:
    """Write keras-tuner's state of a trial so that a reader sees the old one or the new one.

    keras-tuner's readers pass over the version that is added.
    """
    state = {_VERSION_KEY: STATE_VERSION, **trial.get_state()}
    text = json.dumps(state, default=_plain)
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
            return _checked(Trial.from_state(state), file)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        warnings.warn(f"{file} is damaged, its trial is run again: {error!r}.", stacklevel=2)
        return None
    raise RecordError(
        f"{file} has state version {version}, this kbatch reads up to {STATE_VERSION}: upgrade "
        "kbatch (pip install --upgrade kbatch)."
    )


def _checked(trial: Any, file: Path) -> Any:
    """Return the trial; its id names files, and its score is compared."""
    if f"trial_{trial.trial_id}" != file.parent.name:
        raise ValueError(f"it holds trial {trial.trial_id!r}")
    if trial.score is not None and not isinstance(trial.score, (int, float)):
        raise ValueError(f"its score is {trial.score!r}")
    if trial.status not in _STATUSES:
        raise ValueError(f"its status is {trial.status!r}")
    return trial


def _plain(value: Any) -> Any:
    """Return NumPy's numbers, which scores may be, as Python's."""
    return value.item()


CHECKPOINT_NAME = "checkpoint.weights.h5"
_DRAFT_NAME = "draft.weights.h5"


class BestWeights(keras.callbacks.Callback):
    """Keeps the weights of the best epoch in memory and writes them once, when training ends.

    keras-tuner writes a checkpoint at each better epoch, and at every epoch where the objective is
    not in the logs; here an objective that is known only after training takes the last epoch.

    Args:
        objective: keras-tuner's objective.
        folder: Folder of the trial.
        best: Best value of the objective in the trial's executions before, None if there was none.
    """

    def __init__(self, objective: Any, folder: Path, best: float | None = None):
        super().__init__()
        self._objective = objective
        self._folder = folder
        self._best = self._best_before = best
        self._weights: list[np.ndarray] | None = None
        self._without_value = True

    def on_train_begin(self, logs: Any = None):
        """Forget the training before, which may have ended without `on_train_end`."""
        self._best, self._weights, self._without_value = self._best_before, None, True

    def on_epoch_end(self, epoch: int, logs: Any = None):
        """Take the weights of an epoch better than all before."""
        if not self._objective.has_value(logs or {}):
            return
        self._without_value = False
        value = float(self._objective.get_value(logs))
        better = self._best is None or self._objective.better_than(value, self._best)
        if np.isfinite(value) and better:
            self._best = value
            self._weights = self._trained.get_weights()

    def on_train_end(self, logs: Any = None):
        """Write the weights; the model goes on with its last ones."""
        self._best_before = self._best
        if self._without_value:
            self._write()
        elif self._weights is not None:
            last = self._trained.get_weights()
            self._trained.set_weights(self._weights)
            self._write()
            self._trained.set_weights(last)
            self._weights = None

    @property
    def _trained(self) -> Any:
        return self.model

    def _write(self) -> None:
        # One name a trial: what a killed process left is written over.
        draft = self._folder / _DRAFT_NAME
        self._trained.save_weights(draft)
        os.replace(draft, self._folder / CHECKPOINT_NAME)


def delete_checkpoints(project: Path, trial_ids: Iterable[str]) -> None:
    """Delete the checkpoints of trials, where there are any."""
    for trial_id in trial_ids:
        for name in (CHECKPOINT_NAME, _DRAFT_NAME):
            (project / f"trial_{trial_id}" / name).unlink(missing_ok=True)


def check_kept(project: Path, trial_id: str, *, kept: int) -> None:
    """Check that there are weights of a trial."""
    if not (project / f"trial_{trial_id}" / CHECKPOINT_NAME).exists():
        raise RuntimeError(
            f"Trial {trial_id} has no checkpoint: those of the best `keep_checkpoints` trials are "
            "kept, where `fit` is given its callbacks. Search with a larger number, or train a "
            f"model of `get_best_hyperparameters()`. Received: keep_checkpoints={kept}."
        )


if sys.platform != "win32":
    import fcntl

LOCK_NAME = "kbatch.lock"


@contextlib.contextmanager
def search_lock(project: Path) -> Iterator[None]:
    """Hold the lock of a project directory.

    The operating system drops it with the process, however that ends. Where the file system has no
    locks, nothing is held.
    """
    descriptor = _opened(project)
    if descriptor is None:
        yield
        return
    try:
        if not _flock(descriptor, take=True):
            raise InputError(
                f"Another search runs in the project directory {project}: wait for its end, or "
                f"give another `project_name`. Received: a lock of process {_holder(descriptor)}."
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        # A child that was forked meanwhile has the same lock: closing alone would leave it there.
        _flock(descriptor, take=False)
        os.close(descriptor)


def check_unlocked(project: Path) -> None:
    """Check that no search runs in a project directory that is to be deleted."""
    if (project / LOCK_NAME).exists():
        with search_lock(project):
            pass


def _opened(project: Path) -> int | None:
    """Open the file of the lock; None without locks here, or rights, which others miss too."""
    if sys.platform == "win32":
        return None
    try:
        return os.open(project / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None


def _flock(descriptor: int, *, take: bool) -> bool:
    """Take or drop a lock; False where another one holds it."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if take else fcntl.LOCK_UN)
    except BlockingIOError:
        return False
    except OSError:  # A file system without locks, as some over the network are.
        return True
    return True


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
