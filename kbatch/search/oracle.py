"""Which trial comes next, of a grid or of a race, known from the trials on disk alone.

The record of a trial says what its executions gave. keras-tuner's own file adds how the trial
ended, and the space of its hyperparameters, of which training may have declared more than building
did.
"""

import json
import math
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras_tuner
from keras_tuner.engine.trial import Trial, TrialStatus

from kbatch.library_internals import project_directory
from kbatch.records.json_codec import DAMAGED, read_json, write_whole_file
from kbatch.search.files import ENDED, STATE_NAME, trial_record
from kbatch.search.race import RaceStrategy
from kbatch.search.search_time import SearchTime
from kbatch.search.space import Values, untried_in_grid
from kbatch.study.trial import Objective, TrialRecord
from kbatch.training.metrics import required_direction


class BatchSizeOracle(keras_tuner.Oracle):
    """Hands out trials; all its state is their files, so a search may be killed at any moment."""

    # `oracle.json` is neither written nor read. What has not ended by its own `trial.json` is run
    # again under its own id, and the rest follows from the space and the trials.

    def __init__(
        self,
        objective: Any,
        race: "RaceStrategy | None" = None,  # None for the whole grid.
        search_time: SearchTime | None = None,  # What is left of it.
    ):
        # No count of failures in a row ends the search.
        super().__init__(_with_direction(objective), max_consecutive_failed_trials=sys.maxsize)
        self._race, self._time = race, search_time or SearchTime()
        self.stopped = False  # No further trial can have a result.
        self.verbose = 0  # keras-tuner's own display wipes notebook cells.

    @property
    def ended_trials(self) -> list[Any]:
        return [self.trials[i] for i in sorted(self.trials) if self.trials[i].status in ENDED]

    @keras_tuner.synchronized
    def create_trial(self, tuner_id: str) -> Any:
        """Hand out the trial that the tuner runs, one that was interrupted, or a new one."""
        if tuner_id in self.ongoing_trials:
            return self.ongoing_trials[tuner_id]
        trial = self._next_trial()
        if trial is None:
            self.tuner_ids.discard(tuner_id)
            if self.ongoing_trials:  # Their results may ask for more.
                return Trial(self.get_space(), "", TrialStatus.IDLE)
            return Trial(self.get_space(), "", TrialStatus.STOPPED)
        self.tuner_ids.add(tuner_id)
        self.ongoing_trials[tuner_id] = self.trials[trial.trial_id] = trial
        if trial.trial_id not in self.start_order:
            self.start_order.append(trial.trial_id)
        self._save_trial(trial)
        return trial

    @keras_tuner.synchronized
    def update_trial(self, trial_id: str, metrics: Mapping[str, float], step: int = 0) -> Any:
        """Keep the metrics of a trial in place of those that an attempt before a kill reported."""
        trial = self.trials[trial_id]
        trial.metrics = type(trial.metrics)()
        parts = getattr(self.objective, "objectives", [self.objective])
        for name in metrics.keys() - {part.name for part in parts}:
            # keras-tuner would build a metric for its direction, which is of no use for one value.
            if not trial.metrics.exists(name):
                trial.metrics.register(name, "min")
        return super().update_trial(trial_id, metrics, step)

    def get_best_trials(self, num_trials: int = 1) -> list[Any]:
        """Return the best trials that completed, of equal ones the smaller batch size first."""
        objective = Objective(self.objective.name, self.objective.direction)

        def rank(trial: Any) -> tuple[float, int, str]:
            # A trial of another tuner may have no batch size.
            size = trial.hyperparameters.values.get("batch_size", 0)
            return objective.rank(trial.score, batch_size=size, trial_id=trial.trial_id)

        completed = [t for t in self.ended_trials if t.status == TrialStatus.COMPLETED]
        scored = [t for t in completed if t.score is not None and not math.isnan(t.score)]
        return sorted(scored, key=rank)[:num_trials]

    def remaining_trials(self) -> int:
        """Count the trials that have not ended, as far as the space is known."""
        return len(self.values_left())

    def values_left(self) -> list[Values]:
        """Return the hyperparameters of the known trials that have not ended."""
        begun = [t.hyperparameters.values for t in self.trials.values() if t.status not in ENDED]
        return [*begun, *(() if self._race else self._untried())]

    def save(self) -> None:
        """Do nothing: each trial's own file is the state."""

    def reload(self) -> None:
        """Read the trials of the project directory, which may hold none."""
        self.trials = {trial.trial_id: trial for trial in read_trials(project_directory(self))}
        for trial in self.trials.values():
            self.update_space(trial.hyperparameters)
        for trial in self.trials.values():
            # Batch sizes may have come to the space since.
            values, trial.hyperparameters = trial.hyperparameters.values, self.get_space()
            trial.hyperparameters.values = values
        self.start_order = list(self.trials)
        self.end_order = [trial.trial_id for trial in self.ended_trials]
        self.ongoing_trials = {}

    def _next_trial(self) -> Any:
        """Return a trial that nobody runs and that has not ended, else one that is proposed."""
        if self.stopped:
            return None
        if self._race:
            pending = [trial.hyperparameters.values for trial in self.ongoing_trials.values()]
            values = self._race.propose(self.get_space(), pending, self._time)
        else:
            running = {trial.trial_id for trial in self.ongoing_trials.values()}
            begun = [self.trials[trial_id] for trial_id in sorted(self.trials.keys() - running)]
            begun = [t.hyperparameters.values for t in begun if t.status not in ENDED]
            fits = self._time.fits
            untried = (v for v in (*begun, *self._untried()) if fits(v.get("batch_size", 0)))
            values = next(untried, None)
        if values is None:
            return None
        for trial_id, trial in self.trials.items():
            if trial.hyperparameters.values == values:
                return Trial(trial.hyperparameters, trial_id, TrialStatus.RUNNING)
        hyperparameters = self.get_space()
        hyperparameters.values = dict(values)
        # The smallest number that is free: that of a trial whose file is damaged is.
        ids = (f"{number:04d}" for number in range(len(self.trials) + 1))
        free = next(trial_id for trial_id in ids if trial_id not in self.trials)
        return Trial(hyperparameters, free, TrialStatus.RUNNING)

    def _untried(self) -> Iterable[Values]:
        tried = [trial.hyperparameters.values for trial in self.trials.values()]
        untried = untried_in_grid(self.get_space(), tried)
        if self._time.budget_s is None:
            return untried
        # The base size first, then its neighbours: the budget may end the search anywhere.
        base = self._time.base_batch_size
        return sorted(
            untried, key=lambda v: (abs(math.log(v["batch_size"] / base)), -v["batch_size"])
        )

    def _save_trial(self, trial: Any) -> None:
        write_trial(trial, project_directory(self))


def write_trial(trial: Any, project: Path) -> None:
    """Write keras-tuner's state of a trial in one step."""
    # Scores may be NumPy's numbers.
    text = json.dumps(trial.get_state(), default=lambda value: value.item())
    write_whole_file(project / f"trial_{trial.trial_id}" / STATE_NAME, text.encode())


def read_trials(project: Path) -> list[Any]:
    """Read the trials of a project, also another tuner's.

    A trial of which only one file can be read runs again; what had completed is not trained again.
    """
    found = []
    for folder in sorted(project.glob("trial_*")):
        record, trial_id = trial_record(folder), folder.name.removeprefix("trial_")
        try:
            trial: Any = Trial.from_state(read_json(folder / STATE_NAME))
        except DAMAGED:
            trial = None
        if record is not None:
            values = record.hyperparameters
            own = {} if trial is None else trial.hyperparameters.values
            if trial is None or any(own[name] != values[name] for name in own.keys() & values):
                hyperparameters = keras_tuner.HyperParameters()
                hyperparameters.values = dict(values)
                trial = Trial(hyperparameters, trial_id, TrialStatus.RUNNING)
        elif trial is None or trial.status in ENDED:
            warnings.warn(
                f"Trial {trial_id} is run again: its files in {folder} are missing or damaged.",
                stacklevel=2,
            )
            trial = trial and Trial(trial.hyperparameters, trial_id, TrialStatus.RUNNING)
        if trial is not None:
            found.append(trial)
    return found


def trial_result(record: TrialRecord | None) -> tuple[dict[str, float], int] | str:
    """Return the metrics of a trial's best epoch, with its number from 0, or why there is none."""
    if record is None:
        return "Nothing was recorded."
    if record.status != "completed":
        return record.failure or f"The trial ended as {record.status}."
    name, direction = record.objective.name, record.objective.direction
    if record.judged_value is None:
        if name == "seconds_to_target":
            return "The target was never met, so seconds_to_target is not known."
        return f"The objective {name} was not finite or not measured."
    measured = {"samples_per_second": record.samples_per_second}
    measured["seconds_to_target"] = record.seconds_to_target
    known = {name: float(value) for name, value in measured.items() if value is not None}
    best = [execution.best_epoch(name, direction) for execution in record.executions]
    step = int(sum(epoch.epoch for epoch in best if epoch) / len(best))
    return record.metrics | known, step


def _with_direction(objective: Any) -> Any:
    """Add the direction to the name of a metric."""
    if isinstance(objective, list):
        return [_with_direction(part) for part in objective]
    if not isinstance(objective, str):
        return objective
    remedy = f'give `keras_tuner.Objective({objective!r}, "max")`, or "min" if less is better'
    received = f"objective={objective!r}"
    direction = required_direction(objective, remedy=remedy, received=received)
    return keras_tuner.Objective(objective, direction)
