"""Choose the next trial of a grid or a race, from the files of the trials alone.

The record of a trial holds the results of its training runs. keras-tuner's file adds how the trial
ended and its hyperparameters, some of which training may have declared.
"""

import json
import math
import shutil
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras_tuner
from keras_tuner.engine.trial import Trial, TrialStatus

from kbatch.analysis.learning_rate import FACTOR_NAME, FACTORS
from kbatch.library_internals import project_directory
from kbatch.records.json_codec import DAMAGED, load_if_readable, read_json, write_whole_file
from kbatch.records.training_run import PLAN_NAME, RECORD_NAME, Plan
from kbatch.search.files import ENDED, STATE_NAME, readable_trials, trial_record
from kbatch.search.race import RaceStrategy, Values, untried_in_grid
from kbatch.search.search_progress import SearchTime
from kbatch.study.compared_trials import complete_trainings
from kbatch.study.trial import Objective, TrialRecord
from kbatch.training.metrics import required_direction


class BatchSizeOracle(keras_tuner.Oracle):
    """Hands out the trials of a race, or of a grid if `race` is None.

    The files of the trials are its only state, so a search may be killed at any moment. It neither
    writes nor reads `oracle.json`. If the `trial.json` of a trial does not say that the trial has
    ended, the trial runs again with the same id.
    """

    def __init__(
        self,
        objective: Any,
        race: RaceStrategy | None = None,
        search_time: SearchTime | None = None,
    ):
        # By default, keras-tuner ends a search after three failed trials in a row.
        super().__init__(_with_direction(objective), max_consecutive_failed_trials=sys.maxsize)
        self._race, self._search_time = race, search_time or SearchTime()
        self.stopped = False  # True if every trial would diverge, because the data contain NaN.
        self.verbose = 0  # keras-tuner's own display clears notebook cells.

    @property
    def ended_trials(self) -> list[Any]:
        return [self.trials[i] for i in sorted(self.trials) if self.trials[i].status in ENDED]

    @keras_tuner.synchronized
    def create_trial(self, tuner_id: str) -> Any:
        """Hand out the trial that the tuner runs, an interrupted one, or a new one."""
        if tuner_id in self.ongoing_trials:
            return self.ongoing_trials[tuner_id]
        trial = self._next_trial()
        if trial is None:
            self.tuner_ids.discard(tuner_id)
            # The results of ongoing trials may lead to further trials.
            status = TrialStatus.IDLE if self.ongoing_trials else TrialStatus.STOPPED
            return Trial(self.get_space(), "", status)
        self.tuner_ids.add(tuner_id)
        self.ongoing_trials[tuner_id] = self.trials[trial.trial_id] = trial
        if trial.trial_id not in self.start_order:
            self.start_order.append(trial.trial_id)
        self._save_trial(trial)
        return trial

    @keras_tuner.synchronized
    def update_trial(self, trial_id: str, metrics: Mapping[str, float], step: int = 0) -> Any:
        """Replace the metrics of a trial, which may be from before the search was killed."""
        trial = self.trials[trial_id]
        trial.metrics = type(trial.metrics)()
        parts = getattr(self.objective, "objectives", [self.objective])
        for name in metrics.keys() - {part.name for part in parts}:
            # Otherwise, keras-tuner builds a Keras metric only to find the direction.
            if not trial.metrics.exists(name):
                trial.metrics.register(name, "min")
        return super().update_trial(trial_id, metrics, step)

    def get_best_trials(self, num_trials: int = 1) -> list[Any]:
        """Return the best completed trials. If two are equal, the smaller batch size is first."""
        objective = Objective(self.objective.name, self.objective.direction)

        def rank(trial: Any) -> tuple[float, int, str]:
            # A trial of keras-tuner's own tuners may have no batch size.
            size = trial.hyperparameters.values.get("batch_size", 0)
            return objective.rank(trial.score, batch_size=size, trial_id=trial.trial_id)

        completed = [t for t in self.ended_trials if t.status == TrialStatus.COMPLETED]
        scored = [t for t in completed if t.score is not None and not math.isnan(t.score)]
        return sorted(scored, key=rank)[:num_trials]

    def remaining_trials(self) -> int:
        """Return how many trials have not ended, with the trials of a grid that have not begun."""
        return len(self._values_left())

    def _values_left(self) -> list[Values]:
        """Return the hyperparameters of the trials that have not ended."""
        begun = [t.hyperparameters.values for t in self.trials.values() if t.status not in ENDED]
        return [*begun, *(() if self._race else self._untried())]

    def trainings_left(
        self, batch_sizes: Sequence[int], executions: int
    ) -> tuple[dict[int, float], float]:
        """Return how many complete runs are left for each size, and the maximum of the search."""
        left: dict[int, float] = dict.fromkeys(batch_sizes, 0.0)
        if self._race is None:
            for values in self._values_left():
                left[values["batch_size"]] += executions
            done = complete_trainings(readable_trials(project_directory(self)))
            return left, done + sum(left.values())
        done, expected = self._race.done_and_expected(self.get_space(), self._search_time)
        # About half of the runs of a race have the base size, because it looks for the rate there.
        half = (expected - done) / 2
        left = dict.fromkeys(batch_sizes, half / len(batch_sizes))
        left[self._search_time.base_batch_size] += half
        return left, self._race.most_trainings()

    def conclude(self, trial: Any) -> None:
        """Set the status and the score of a trial whose runs have ended."""
        result = trial_result(trial_record(self._folder(trial.trial_id)))
        if isinstance(result, str):
            trial.status, trial.message = TrialStatus.FAILED, trial.message or result
        else:
            self.update_trial(trial.trial_id, *result)
            trial.status = TrialStatus.COMPLETED

    def conclude_completed(self) -> None:
        """Conclude trials that completed before a kill, because a race may not run them again."""
        for trial in self.trials.values():
            record = trial_record(self._folder(trial.trial_id))
            if trial.status not in ENDED and record is not None and record.status == "completed":
                self.conclude(trial)
                if trial.status == TrialStatus.COMPLETED:
                    self.score_trial(trial)
                self._save_trial(trial)

    def reopen_other_policies(self) -> None:
        """Let trials that trained before the search moved to float32 train again."""
        plan = load_if_readable(Plan, project_directory(self) / PLAN_NAME)
        if plan is None or plan.dtype_policy is None or plan.number == 1:
            return
        for trial in self.trials.values():
            folder = self._folder(trial.trial_id)
            record = trial_record(folder)
            runs = record.executions if record else ()
            if any(run.dtype_policy != plan.dtype_policy for run in runs):
                (folder / RECORD_NAME).unlink(missing_ok=True)
                trial.status = TrialStatus.RUNNING

    def reopen_trials(self, executions: int) -> None:
        """Let completed trials train again if they have fewer completed runs than asked for."""
        for trial in self.ended_trials:
            record = trial_record(self._folder(trial.trial_id))
            assert record is not None
            completed = sum(run.status == "completed" for run in record.executions)
            if completed < executions and trial.status == TrialStatus.COMPLETED:
                trial.status = TrialStatus.RUNNING

    def declare_rates(self) -> None:
        """Add factors of the learning rate to the space and to all trials."""
        space = self.get_space()
        space.Choice(FACTOR_NAME, list(FACTORS), default=1.0)
        self.update_space(space)
        for trial in self.trials.values():  # An earlier grid may have begun them without factors.
            trial.hyperparameters.values.setdefault(FACTOR_NAME, 1.0)

    def drop_other_sizes(self, batch_sizes: Sequence[int]) -> None:
        """Delete trials without results whose size is no longer among the batch sizes."""
        for trial in [*self.trials.values()]:
            size = trial.hyperparameters.values.get("batch_size")
            if trial.status not in ENDED and size not in (None, *batch_sizes):
                del self.trials[trial.trial_id]
                shutil.rmtree(self._folder(trial.trial_id))

    def save(self) -> None:
        """Do nothing, because the file of each trial is the state."""

    def reload(self) -> None:
        """Read the trials of the project directory."""
        self.trials = {trial.trial_id: trial for trial in read_trials(project_directory(self))}
        for trial in self.trials.values():
            self.update_space(trial.hyperparameters)
        for trial in self.trials.values():
            # The space may have more batch sizes than when the trial was written.
            values, trial.hyperparameters = trial.hyperparameters.values, self.get_space()
            trial.hyperparameters.values = values
        self.start_order = list(self.trials)
        self.end_order = [trial.trial_id for trial in self.ended_trials]
        self.ongoing_trials = {}

    def _next_trial(self) -> Any:
        """Return the next trial to run. If there is none, return None."""
        if self.stopped:
            return None
        if self._race:
            pending = [trial.hyperparameters.values for trial in self.ongoing_trials.values()]
            values = self._race.propose(self.get_space(), pending, self._search_time)
        else:
            running = {trial.trial_id for trial in self.ongoing_trials.values()}
            begun = [self.trials[trial_id] for trial_id in sorted(self.trials.keys() - running)]
            begun = [t.hyperparameters.values for t in begun if t.status not in ENDED]
            fits = self._search_time.fits
            untried = (v for v in (*begun, *self._untried()) if fits(v.get("batch_size", 0)))
            values = next(untried, None)
        if values is None:
            return None
        for trial_id, trial in self.trials.items():
            if trial.hyperparameters.values == values:
                return Trial(trial.hyperparameters, trial_id, TrialStatus.RUNNING)
        hyperparameters = self.get_space()
        hyperparameters.values = dict(values)
        # The smallest free number, because trials with damaged files are left out of `trials`.
        ids = (f"{number:04d}" for number in range(len(self.trials) + 1))
        free_id = next(trial_id for trial_id in ids if trial_id not in self.trials)
        return Trial(hyperparameters, free_id, TrialStatus.RUNNING)

    def _untried(self) -> Iterable[Values]:
        tried = [trial.hyperparameters.values for trial in self.trials.values()]
        untried = untried_in_grid(self.get_space(), tried)
        if self._search_time.budget_s is None:
            return untried
        # The budget may end the search after any trial, so the base size is trained first, and
        # then the sizes near it.
        base = self._search_time.base_batch_size
        return sorted(
            untried, key=lambda v: (abs(math.log(v["batch_size"] / base)), -v["batch_size"])
        )

    def _folder(self, trial_id: str) -> Path:
        return project_directory(self) / f"trial_{trial_id}"

    def _save_trial(self, trial: Any) -> None:
        write_trial(trial, project_directory(self))


def write_trial(trial: Any, project: Path) -> None:
    """Write keras-tuner's state of a trial in one step."""
    # A score may be a number of NumPy.
    text = json.dumps(trial.get_state(), default=lambda value: value.item())
    write_whole_file(project / f"trial_{trial.trial_id}" / STATE_NAME, text.encode())


def read_trials(project: Path) -> list[Any]:
    """Read the trials of a project directory of any tuner of keras-tuner.

    If only one of the two files of a trial can be read, the trial continues after the runs that
    its record has.
    """
    trials = []
    for folder in sorted(project.glob("trial_*")):
        record, trial_id = trial_record(folder), folder.name.removeprefix("trial_")
        try:
            trial: Any = Trial.from_state(read_json(folder / STATE_NAME))
        except DAMAGED:
            trial = None
        if record is not None:
            values = record.hyperparameters
            stated = {} if trial is None else trial.hyperparameters.values
            shared = stated.keys() & values
            if trial is None or any(stated[name] != values[name] for name in shared):
                hyperparameters = keras_tuner.HyperParameters()
                hyperparameters.values = dict(values)
                trial = Trial(hyperparameters, trial_id, TrialStatus.RUNNING)
        elif trial is None or trial.status in ENDED:
            warnings.warn(
                f"Trial {trial_id} runs again, because its files in {folder} are missing or "
                "damaged.",
                stacklevel=2,
            )
            trial = trial and Trial(trial.hyperparameters, trial_id, TrialStatus.RUNNING)
        if trial is not None:
            trials.append(trial)
    return trials


def trial_result(record: TrialRecord | None) -> tuple[dict[str, float], int] | str:
    """Return the metrics and the best epoch of a trial, or a text that says why it has none."""
    if record is None:
        return "kbatch has no saved measurements of this trial."
    if record.status != "completed":
        return record.failure or f"The trial ended as {record.status}."
    name, direction = record.objective.name, record.objective.direction
    if record.judged_value is None:
        if name == "seconds_to_target":
            return "The target was never met, so seconds_to_target is unknown."
        return f"The objective {name} was not finite or not measured."
    measured = {"samples_per_second": record.samples_per_second}
    measured["seconds_to_target"] = record.seconds_to_target
    known = {name: float(value) for name, value in measured.items() if value is not None}
    best = [execution.best_epoch(name, direction) for execution in record.executions]
    step = int(sum(epoch.epoch for epoch in best if epoch) / len(best))
    return record.metrics | known, step


def _with_direction(objective: Any) -> Any:
    """Make an objective with a direction of the name of a metric."""
    if isinstance(objective, list):
        return [_with_direction(part) for part in objective]
    if not isinstance(objective, str):
        return objective
    remedy = f'give `keras_tuner.Objective({objective!r}, "max")`, or "min" if less is better'
    received = f"objective={objective!r}"
    direction = required_direction(objective, remedy=remedy, received=received)
    return keras_tuner.Objective(objective, direction)
