"""Which trial a race runs next, and how often, by the records on disk: after a kill too."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.analysis.race import NextRun, Race, RaceStep
from kbatch.errors import InputError
from kbatch.page.numbers import format_number, setting
from kbatch.records.training_run import COST_NAMES
from kbatch.search.oracle import Values, settings_in_grid
from kbatch.search.trial_files import readable_trials, trial_record
from kbatch.study.comparison import other_hyperparameters, runs_of, tolerance_in_units
from kbatch.study.trial import TrialRecord

# Executions a batch size on average, where no number is given.
_EXECUTIONS_PER_SIZE = 6
# Combinations of other hyperparameters that a race tries at the base size.
_MOST_SETTINGS = 4
_ENDS = {
    "certain": "the answer is certain",
    "certified": "a size is certified, and no other is likely to be preferred",
    "out of reach": "certainty would take more executions than are left",
    "executions": "no further round fits in `max_executions`",
    "alone": "only one batch size can be trained",
    "diverged": (
        "every learning rate diverged, the smallest at {smallest} of the rule's: build the model "
        "with a smaller one"
    ),
    "failed": "no execution has a value of the objective",
}


class RaceStrategy:
    """Looks for the learning rate of each size, then repeats what may be the answer."""

    def __init__(self, tolerance: float | None, confidence: float, max_executions: int | None):
        self._tolerance, self._confidence, self._most = tolerance, confidence, max_executions
        # `begin` sets these and the objective.
        self._project, self._base = Path(), 0
        self._objective: Any = None
        self._asked: dict[Any, int] = {}  # Executions of the trials that were proposed.
        # What followed from the trials so far, and the smallest factor of the rate among them.
        self._last: RaceStep | None = None
        self._smallest = 1.0

    def begin(self, project: Path, oracle: Any, base_batch_size: int) -> str:
        """Check that the search can lead to an answer, and describe how it begins."""
        objective, space = oracle.objective, oracle.get_space()
        name = getattr(objective, "name", "")
        timed = name in ("samples_per_second", *COST_NAMES)
        if hasattr(objective, "objectives") or name == "default_objective" or timed:
            raise InputError(
                "A race compares batch sizes by one metric that training reports: give its name, "
                f'such as "val_accuracy". Received: objective={name!r}.'
            )
        several = len(list(settings_in_grid(space)))
        if several > _MOST_SETTINGS:
            raise InputError(
                f"A race tries at most {_MOST_SETTINGS} combinations of other hyperparameters, at "
                "the base batch size: give fewer values, or tune them first by keras-tuner's "
                f"tuners at one batch size. Received: {several} combinations."
            )
        self._project, self._base, self._objective = project, base_batch_size, objective
        sizes, most = _batch_sizes(space), self._most_of(space)
        what = "Batch size and learning rate are" if _searches_rate(space) else "The batch size is"
        return f"{what} raced: {len(sizes)} sizes, at most {most} executions (`max_executions`)."

    def propose(self, space: Any, pending: list[Values]) -> Values | None:
        """Return the values to try next, those of an earlier trial to execute it once more."""
        following = self._next(space, pending)
        if following is None or following[0] in pending:
            return None
        values, number = following
        self._asked[_key(values)] = number + 1
        return values

    def executions(self, trial_id: str, values: Values) -> int:
        """Return how many executions a trial is to have: what completed, and what was asked for."""
        record = trial_record(self._project / f"trial_{trial_id}")
        runs = record.executions if record else ()
        completed = sum(run.status == "completed" for run in runs)
        return max(1, completed, self._asked.get(_key(values), 0))

    def ending(self) -> str | None:
        """Describe why nothing more was proposed."""
        step = self._last
        if step is None or step.ended is None:
            return None
        end = _ENDS[step.ended].format(smallest=setting(self._smallest))
        found = step.judgement
        if step.ended == "out of reach" and found is not None:
            smallest = found.smallest_tolerance
            if found.executions_needed is not None:
                end += f"; about {found.executions_needed:,} of each size would settle it"
            elif smallest is not None and smallest > (self._tolerance or 0.0):
                end += f"; with more a tolerance of {format_number(smallest, 2)} would do"
                if found.examples_needed is not None:
                    end += f", or {found.examples_needed:,} validation examples"
        return f"The race has ended: {end}."

    def _next(self, space: Any, pending: list[Values]) -> tuple[Values, int] | None:
        """Return what to run next, with the number of its execution."""
        trials = list(readable_trials(self._project))
        if _searches_rate(space):  # Trials of a grid before are at the rule's rate.
            at_rule = {FACTOR_NAME: 1.0}
            trials = [
                dataclasses.replace(one, hyperparameters=at_rule | dict(one.hyperparameters))
                for one in trials
            ]
        factors: list[Any] = [one.hyperparameters.get(FACTOR_NAME, 1.0) for one in trials]
        self._last, self._smallest = None, min(factors, default=1.0)
        settings = list(settings_in_grid(space))
        chosen, others = settings[0]
        if len(settings) > 1:
            # The best at the base size, by one execution each, is raced.
            first = [
                {**values, **self._pair_values(space, self._base, 1.0)} for values, _ in settings
            ]
            begun = [t.hyperparameters for t in trials] + pending
            if lacking := [values for values in first if values not in begun]:
                return lacking[0], 0
            if any(values in pending for values in first):
                return None
            chosen, others = settings[self._best_of(first, trials)]
        same = [t for t in trials if other_hyperparameters(t.hyperparameters) == others]
        runs = runs_of(same)[0] if same else []
        scored = [t for t in same if t.objective_value is not None]
        tolerance = tolerance_in_units(scored, self._tolerance) if scored else 0.0
        made = {_key(t.hyperparameters): _ended(t) for t in same}
        running = [
            NextRun(one["batch_size"], one.get(FACTOR_NAME, 1.0), made.get(_key(one), 0))
            for one in pending
            if other_hyperparameters(one) == others
        ]
        race = Race(
            runs,
            _batch_sizes(space),
            base_batch_size=self._base,
            larger_is_better=self._objective.direction == "max",
            tolerance=tolerance,
            confidence=self._confidence,
            max_executions=self._most_of(space) - sum(_ended(t) for t in trials if t not in same),
            pending=running,
            search_rate=_searches_rate(space),
        )
        self._last = race.step()
        if self._last.run is None:
            return None
        size, factor, number = self._last.run
        return {**chosen, **self._pair_values(space, size, factor)}, number

    @staticmethod
    def _pair_values(space: Any, size: int, factor: float) -> Values:
        rate = {FACTOR_NAME: factor} if _searches_rate(space) else {}
        return {"batch_size": size, **rate}

    def _best_of(self, first: list[Values], trials: list[TrialRecord]) -> int:
        """Return the place of the setting whose trial at the base size has the best value."""
        by_values = {_key(t.hyperparameters): t for t in trials if t.executions}
        found = [by_values.get(_key(values)) for values in first]
        sign = -1 if self._objective.direction == "max" else 1
        ranked = [
            (sign * one.objective_values[0], place)
            for place, one in enumerate(found)
            if one is not None and one.objective_values[0] is not None
        ]
        return min(ranked, default=(0, 0))[1]

    def _most_of(self, space: Any) -> int:
        return self._most or _EXECUTIONS_PER_SIZE * len(_batch_sizes(space))


def _ended(trial: TrialRecord) -> int:
    """Count the executions that ended, however they did."""
    return len(runs_of([trial])[0])


def _batch_sizes(space: Any) -> list[int]:
    (found,) = {tuple(one.values) for one in space.space if one.name == "batch_size"}
    return sorted(found)


def _searches_rate(space: Any) -> bool:
    return any(one.name == FACTOR_NAME for one in space.space)


def _key(values: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    return frozenset((name, repr(value)) for name, value in values.items())
