"""A race as keras-tuner runs it: which trial comes next, known from the trials on disk alone."""

import dataclasses
from pathlib import Path
from typing import Any

from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.analysis.rounds import NextRun, Race, RaceStep
from kbatch.errors import InputError
from kbatch.page.numbers import pluralize, setting
from kbatch.records.training_run import AskedRun
from kbatch.search.files import readable_trials, trial_record
from kbatch.search.search_time import SearchTime
from kbatch.search.space import Key, Values, grid, key_of
from kbatch.study.compare import (
    is_time,
    other_hyperparameters,
    rate_factor,
    rate_setters,
    runs_of,
    tolerance_in_units,
)
from kbatch.study.trial import TrialRecord

# Executions a batch size on average, where no number is given.
_EXECUTIONS_PER_SIZE = 6
# Combinations of other hyperparameters that a race tries at the base size.
_MOST_SETTINGS = 4
_ENDS = {
    "certain": "more rounds would not change the answer",
    "certified": "a size is certified, and more rounds would hardly change the answer",
    "out of reach": "certainty would take more executions than are left",
    "executions": "no further round fits in `max_trainings`",
    "alone": "only one batch size can be trained",
    "diverged": (
        "every learning rate diverged, the smallest at {smallest} of the rule's: build the model "
        "with a smaller one"
    ),
    "failed": "no execution has a value of the objective",
}


class RaceStrategy:
    """Looks for the learning rate of each size, then repeats what may be the answer."""

    def __init__(self, tolerance: float | None, confidence: float, max_trainings: float | None):
        self._tolerance, self._confidence, self._most = tolerance, confidence, max_trainings
        # `begin` sets these.
        self._project, self._base = Path(), 0
        self._sizes: list[int] = []
        self._searches_rate = self._larger_is_better = False
        self._asked: dict[Key, int] = {}  # Executions of the trials that were proposed.
        # What followed from the trials so far, and the smallest factor of the rate among them.
        self._last: RaceStep | None = None
        self._smallest = 1.0

    def begin(
        self, project: Path, oracle: Any, base_batch_size: int, *, epochs: int, short_runs: bool
    ) -> str:
        """Check that the search can lead to an answer, and describe how it begins."""
        objective, space = oracle.objective, oracle.get_space()
        if objective.name in ("default_objective", "multi_objective") or is_time(objective):
            raise InputError(
                "A race compares batch sizes by one metric that training reports: give its name, "
                f'such as "val_accuracy". Received: objective={objective.name!r}.'
            )
        _settings_of(space)
        self._project, self._base = project, base_batch_size
        self._larger_is_better = objective.direction == "max"
        declared = {one.name: one for one in space.space}
        self._sizes = sorted(declared["batch_size"].values)
        self._searches_rate = FACTOR_NAME in declared
        self._most = self._most or _EXECUTIONS_PER_SIZE * len(self._sizes)
        what = "Batch size and learning rate are" if self._searches_rate else "The batch size is"
        sizes = pluralize(len(self._sizes), "size")
        return f"{what} raced: {sizes}, at most {self._most:g} trainings (`max_trainings`)."

    def propose(self, space: Any, pending: list[Values], time: SearchTime) -> Values | None:
        """Return the values to try next, those of an earlier trial to execute it once more."""
        following = self._next(space, pending)
        if following is None or following[0] in pending:
            return None
        values, number = following
        self._asked[key_of(values)] = number + 1
        return values

    def asked(self, trial_id: str, values: Values) -> AskedRun:
        """Return how many executions a trial is to have: what completed, and what was asked for."""
        record = trial_record(self._project / f"trial_{trial_id}")
        runs = record.executions if record else ()
        completed = sum(run.status == "completed" for run in runs)
        return AskedRun(max(1, completed, self._asked.get(key_of(values), 0)))

    def trainings(self) -> tuple[float, float, float]:
        """Return the trainings so far, and from how many to how many are expected in all."""
        return float(self.ended_executions()), float(len(self._sizes)), self._most or 0.0

    def ended_executions(self) -> int:
        """Count the executions that have ended, those of earlier runs of the search included."""
        return sum(map(_ended, readable_trials(self._project)))

    def ending(self) -> str | None:
        """Describe why nothing more was proposed."""
        step = self._last
        if step is None or step.ended is None:
            return None
        end = _ENDS[step.ended].format(smallest=setting(self._smallest))
        return f"The race has ended: {end}."

    def _next(self, space: Any, pending: list[Values]) -> tuple[Values, int] | None:
        """Return what to run next, with the number of its execution."""
        trials = list(readable_trials(self._project))
        if self._searches_rate:  # Trials of a grid before are at the rule's rate.
            at_rule = {FACTOR_NAME: 1.0}
            trials = [
                dataclasses.replace(one, hyperparameters=at_rule | dict(one.hyperparameters))
                for one in trials
            ]
        factors: list[Any] = [one.hyperparameters.get(FACTOR_NAME, 1.0) for one in trials]
        self._last, self._smallest = None, min(factors, default=1.0)
        settings = _settings_of(space)  # Training may have declared more.
        chosen, others = settings[0]
        if len(settings) > 1:
            # The best at the base size, by one execution each, is raced.
            first = [self._at(values, self._base, 1.0) for values, _ in settings]
            begun = [t.hyperparameters for t in trials] + pending
            if lacking := [values for values in first if values not in begun]:
                return lacking[0], 0
            if any(values in pending for values in first):
                return None
            chosen, others = settings[self._best_of(first, trials)]
        same = [t for t in trials if other_hyperparameters(t.hyperparameters) == others]
        searches_rate = self._searches_rate and not rate_setters(trials, sure=True)
        if not searches_rate:  # Those at other factors trained at the rates of a callback.
            same = [t for t in same if rate_factor(t) == 1]
        runs = runs_of(same)[0] if same else []
        scored = [t for t in same if t.judged_value is not None]
        tolerance = tolerance_in_units(scored, self._tolerance) if scored else 0.0
        made = {key_of(t.hyperparameters): _ended(t) for t in same}
        running = [
            NextRun(one["batch_size"], one.get(FACTOR_NAME, 1.0), made.get(key_of(one), 0))
            for one in pending
            if other_hyperparameters(one) == others
        ]
        race = Race(
            runs,
            self._sizes,
            base_batch_size=self._base,
            larger_is_better=self._larger_is_better,
            tolerance=tolerance,
            confidence=self._confidence,
            max_executions=int(self._most or 0) - sum(_ended(t) for t in trials if t not in same),
            pending=running,
            search_rate=searches_rate,
        )
        self._last = race.step()
        if self._last.run is None:
            return None
        size, factor, number = self._last.run
        return self._at(chosen, size, factor), number

    def _at(self, values: Values, size: int, factor: float) -> Values:
        """Return the values at a pair of batch size and factor of the rate."""
        rate = {FACTOR_NAME: factor} if self._searches_rate else {}
        return values | {"batch_size": size} | rate

    def _best_of(self, first: list[Values], trials: list[TrialRecord]) -> int:
        """Return the place of the setting whose trial at the base size has the best value."""
        by_values = {key_of(t.hyperparameters): t.judged_values[0] for t in trials if t.executions}
        sign = -1 if self._larger_is_better else 1
        ranked = [
            (sign * value, place)
            for place, values in enumerate(first)
            if (value := by_values.get(key_of(values))) is not None
        ]
        return min(ranked, default=(0, 0))[1]


def _settings_of(space: Any) -> list[tuple[Values, Values]]:
    """Return the first values of each setting beside batch size and rate, and that setting."""
    found: list[tuple[Values, Values]] = []
    for values in grid(space):
        others = other_hyperparameters(values)
        if all(others != known for _, known in found):
            found.append((values, others))
    if len(found) > _MOST_SETTINGS:
        raise InputError(
            f"A race tries at most {_MOST_SETTINGS} combinations of other hyperparameters, at the "
            "base batch size: give fewer values, or tune them first by keras-tuner's tuners at "
            f"one batch size. Received: {len(found)} combinations."
        )
    return found


def _ended(trial: TrialRecord) -> int:
    """Count the executions that ended, however they did."""
    return len(runs_of([trial])[0])
