"""Choose the next trial of a race or a grid, from the hyperparameters and the recorded trials."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras_tuner

from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.analysis.race import (
    NextRun,
    NoRun,
    expected_trainings,
    least_values,
    next_run,
    short_epochs,
)
from kbatch.analysis.run_table import first_seed
from kbatch.errors import InputError
from kbatch.page.numbers import setting
from kbatch.records.training_run import AskedRun
from kbatch.search.files import readable_trials, trial_record
from kbatch.search.search_progress import SearchTime
from kbatch.study.compared_trials import (
    complete_trainings,
    is_complete,
    other_hyperparameters,
    rate_factor,
    runs_of,
)
from kbatch.study.decision import race_task

Values = dict[str, Any]  # The hyperparameters of a trial, by name.
Key = frozenset[tuple[str, str]]  # The same, hashable.

# The most combinations of other hyperparameters. Each one costs a short run at the base size.
_MOST_COMBINATIONS = 4
# A text for each reason why a race ends.
_END_TEXTS: dict[Any, str] = {
    "settled": "more training runs would hardly change the answer",
    "trainings": "no further training run fits in {most} complete trainings (`max_trainings`)",
    "time": "no further training run fits in `time_budget_s`",
    "alone": "only one batch size can be trained",
    "diverged": (
        "every learning rate diverged, even the smallest, {smallest} times the model's: build the "
        "model with a smaller rate"
    ),
    "failed": "no training run has a value of the objective",
}


class RaceStrategy:
    """Asks the race what to train next, and finds the trial for it."""

    def __init__(self):
        # `begin` sets the directory and the settings of the decision.
        self._project = Path()
        self._settings: Mapping[str, Any] = {}
        self._proposed: dict[Key, NextRun] = {}  # The last run that was proposed for each trial.
        # What the race asked for last, and the smallest learning rate factor that had been tried.
        self._last_step: NextRun | NoRun = "pending"
        self._smallest_factor = 1.0

    def begin(self, project: Path, space: Any, settings: Mapping[str, Any]) -> None:
        """Begin in a directory, which may hold the trials of an earlier call of `search`."""
        _combinations(space)
        self._project, self._settings = project, settings

    def propose(self, space: Any, pending: list[Values], time: SearchTime) -> Values | None:
        """Return the values of the next run, or None. A trial that has them trains again."""
        following = self._next(space, pending, time)
        if following is None or following[0] in pending:
            return None
        values, run = following
        if not time.fits(run.batch_size, run.epochs / self._settings["epochs"]):
            self._last_step = "time"
            return None
        self._proposed[key_of(values)] = run
        return values

    def asked(self, trial_id: str, values: Values) -> AskedRun:
        """Return the settings of the next training run of a trial."""
        record = trial_record(self._project / f"trial_{trial_id}")
        run = self._proposed.get(key_of(values))
        if run is None:  # The trial is from an earlier call of `search`. It needs no further run.
            return AskedRun(max(1, len(record.executions) if record else 0))
        trials = [*readable_trials(self._project)]
        complete = run.epochs >= self._settings["epochs"]
        runs = runs_of(trials)[0] if trials and complete else []
        seed, task = run.number + first_seed(runs), race_task(trials, self._settings)
        return AskedRun(
            executions=run.number + 1,
            epochs=None if complete else run.epochs,
            place=1 + max((e.place or 0 for t in trials for e in t.executions), default=0),
            least=least_values(task, runs, seed) if runs else (),
        )

    def most_trainings(self) -> float:
        return race_task([], self._settings).max_trainings

    def done_and_expected(self, space: Any, time: SearchTime) -> tuple[float, float]:
        """Return how many complete training runs have ended, and how many are expected in total."""
        done = complete_trainings(readable_trials(self._project))
        self.propose(space, [], time)
        if self._last_step in _END_TEXTS and self._last_step != "time":
            return done, done
        return done, max(done + 1, expected_trainings(race_task([], self._settings)))

    def ending(self) -> str | None:
        """Say why the search has ended, or return None if it has not ended."""
        if (text := _END_TEXTS.get(self._last_step)) is None:
            return None
        most = setting(self.most_trainings())
        end = text.format(smallest=setting(self._smallest_factor), most=most)
        return f"The search has ended: {end}."

    def _next(
        self, space: Any, pending: list[Values], time: SearchTime
    ) -> tuple[Values, NextRun] | None:
        """Return the hyperparameters of the next run and the run, or None if there is none."""
        trials = [*readable_trials(self._project)]
        # A grid may have begun the search. Its trials have no factor, and train at the rule's rate.
        if "search_learning_rate" not in self._settings:
            at_rule = {FACTOR_NAME: 1.0}
            trials = [
                dataclasses.replace(trial, hyperparameters=at_rule | dict(trial.hyperparameters))
                for trial in trials
            ]
        factors: list[Any] = [trial.hyperparameters.get(FACTOR_NAME, 1.0) for trial in trials]
        self._last_step, self._smallest_factor = "pending", min(factors, default=1.0)
        combinations = _combinations(space)  # Training may have declared more of them.
        best, others = combinations[0]
        task = race_task([], self._settings)
        if len(combinations) > 1:
            # Each combination has a short run at the base size. The race continues with the best.
            base = task.base_batch_size
            first = [_values_at(values, base, 1.0) for values, _ in combinations]
            begun = [t.hyperparameters for t in trials] + pending
            if missing := [values for values in first if values not in begun]:
                return missing[0], NextRun(base, 1.0, 0, short_epochs(task))
            if any(values in pending for values in first):
                return None
            scores = {
                key_of(t.hyperparameters): t.objective.sign * value
                for t in trials
                if t.executions and (value := t.judged_values[0]) is not None
            }
            ranks = [scores.get(key_of(values), -math.inf) for values in first]
            best, others = combinations[ranks.index(max(ranks))]
        same = [t for t in trials if other_hyperparameters(t.hyperparameters) == others]
        spent = complete_trainings(trial for trial in trials if trial not in same)
        task = race_task(same, self._settings)
        # If a callback sets the learning rate, trials with other factors did not train by them.
        if not task.search_rate:
            same = [trial for trial in same if rate_factor(trial) == 1]
        task = dataclasses.replace(task, max_trainings=task.max_trainings - spent)
        left_s = time.left_s()
        run = self._last_step = next_run(
            task,
            runs_of(same)[0] if same else [],
            pending=[
                run
                for values in pending
                if other_hyperparameters(values) == others
                and (run := self._proposed.get(key_of(values)))
            ],
            seconds_left=None if left_s is None else left_s * time.training_share,
        )
        if isinstance(run, str):
            return None
        values = _values_at(best, run.batch_size, run.factor)
        for trial in same:
            ended = [r for r in trial.executions if is_complete(r) or r.length == "stopped_early"]
            if trial.hyperparameters == values and len(ended) > run.number:
                # The run has completed, but has no value of the objective.
                self._last_step = "failed"
                return None
        return values, run


def _values_at(values: Values, size: int, factor: float) -> Values:
    """Return the values with another batch size and another factor of the learning rate."""
    rate = {FACTOR_NAME: factor} if FACTOR_NAME in values else {}
    return values | {"batch_size": size} | rate


def _combinations(space: Any) -> list[tuple[Values, Values]]:
    """List the combinations of other hyperparameters as pairs: all values, these values alone."""
    combinations: list[tuple[Values, Values]] = []
    for values in grid(space):
        combination = other_hyperparameters(values)
        if all(combination != known for _, known in combinations):
            combinations.append((values, combination))
    if len(combinations) > _MOST_COMBINATIONS:
        raise InputError(
            f'`strategy="race"` tries at most {_MOST_COMBINATIONS} combinations of hyperparameters '
            "other than batch size and learning rate: give them fewer values, tune them in another "
            f'search, or give `strategy="grid"`. Received: {len(combinations)} combinations.'
        )
    return combinations


def untried_in_grid(
    space: keras_tuner.HyperParameters, tried: Iterable[Values]
) -> Iterator[Values]:
    """Return the combinations of a space that no trial has, in the order of `grid`."""
    keys_tried = {grid_key(space, values) for values in tried}
    return (values for values in grid(space) if grid_key(space, values) not in keys_tried)


def grid_key(space: keras_tuner.HyperParameters, values: Mapping[str, Any]) -> Key:
    """Return the key of a trial, with defaults for hyperparameters that the trial lacks."""
    combination: Values = {}
    for parameter in space.space:
        if parameter.name not in combination and _is_active(parameter, combination):
            combination[parameter.name] = values.get(parameter.name, parameter.default)
    return key_of(combination)


def grid(space: keras_tuner.HyperParameters) -> Iterator[Values]:
    """Return all combinations of a space, defaults first. The last name changes fastest."""
    return _extensions({}, tuple(space.space))


def _extensions(values: Values, parameters: Sequence[Any]) -> Iterator[Values]:
    if not parameters:
        yield values
        return
    first, rest = parameters[0], parameters[1:]
    choices = [values]
    if first.name not in values and _is_active(first, values):
        # keras-tuner samples a range into a set, which has no order.
        samples = sorted(first.values) if hasattr(first, "min_value") else first.values
        # Trials that are read from files have numbers of Python, not of NumPy.
        samples = (v.item() if hasattr(v, "item") else v for v in (first.default, *samples))
        choices = [values | {first.name: value} for value in dict.fromkeys(samples)]
    for choice in choices:
        yield from _extensions(choice, rest)


def _is_active(parameter: Any, values: Values) -> bool:
    return all(condition.is_active(values) for condition in parameter.conditions)


def key_of(values: Mapping[str, Any]) -> Key:
    # A text for each value, because `True == 1` and hashes the same.
    return frozenset((name, repr(value)) for name, value in values.items())
