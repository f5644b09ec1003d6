"""The weights that a search keeps: those of the best epoch of the best trials."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np

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
        """Forgets the training before, which may have ended without `on_train_end`."""
        self._best, self._weights, self._without_value = self._best_before, None, True

    def on_epoch_end(self, epoch: int, logs: Any = None):
        """Takes the weights of an epoch better than all before."""
        if not self._objective.has_value(logs or {}):
            return
        self._without_value = False
        value = float(self._objective.get_value(logs))
        better = self._best is None or self._objective.better_than(value, self._best)
        if np.isfinite(value) and better:
            self._best = value
            self._weights = self._trained.get_weights()

    def on_train_end(self, logs: Any = None):
        """Writes the weights; the model goes on with its last ones."""
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
    """Deletes the checkpoints of trials, where there are any.

    Args:
        project: The project directory.
        trial_ids: Identifiers of the trials.
    """
    for trial_id in trial_ids:
        for name in (CHECKPOINT_NAME, _DRAFT_NAME):
            (project / f"trial_{trial_id}" / name).unlink(missing_ok=True)


def check_kept(project: Path, trial_id: str, *, kept: int) -> None:
    """Checks that there are weights of a trial.

    Args:
        project: The project directory.
        trial_id: Identifier of the trial.
        kept: How many of the best trials keep theirs.

    Raises:
        RuntimeError: If there are none.
    """
    if not (project / f"trial_{trial_id}" / CHECKPOINT_NAME).exists():
        raise RuntimeError(
            f"Trial {trial_id} has no checkpoint: those of the best `keep_checkpoints` trials are "
            "kept, where `fit` is given its callbacks. Search with a larger number, or train a "
            f"model of `get_best_hyperparameters()`. Received: keep_checkpoints={kept}."
        )
