"""Which trial a search runs next, and how often: the grid, a race, or joint pairs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from kbatch.analysis.joint_search import (
    EXECUTIONS_PER_SIZE,
    FACTOR_NAME,
    FACTORS,
    NextPair,
    PairRun,
    next_pair,
)
from kbatch.analysis.paired_runs import LOOKS, Candidate, RaceState, race
from kbatch.document.numbers import join_words, percent
from kbatch.errors import InputError
from kbatch.search.oracle import (
    SearchState,
    Values,
    grid,
    in_grid,
    settings_in_grid,
    untried_in_grid,
)
from kbatch.search.trial_files import readable_trials
from kbatch.study.comparison import (
    comparable_trials,
    completed_executions,
    other_hyperparameters,
    pair_runs,
    runs_of,
    tolerance_in_units,
)
from kbatch.study.decision import decide
from kbatch.study.trial import TrialRecord

_RACE_ENDS = {
    "certain": "The race has ended.",
    "certified": (
        "The race has ended: finding out whether a faster size is as good would take too many "
        "executions."
    ),
    "examples": (
        "The race has stopped: the validation set is too small. Use a larger tolerance or more "
        "validation examples."
    ),
    "executions": "The race has stopped undecided: it made all executions that it may make.",
}
_JOINT_ENDS = {
    "settled": "no other pair is likely to be better by more than the tolerance",
    "budget": "its executions are spent",
    "all tried": "no pair is left to try",
}


class Strategy:
    """Runs the whole grid; the others decide by the records on disk, after a kill too."""

    counts_trials = True  # Whether the number of trials is known.
    _project = Path()  # Until the search begins.

    def begin(self, project: Path, objective: Any, space: Any) -> str | None:
        """Check that the search can lead to an answer, and describe how it begins."""

    def __call__(self, state: SearchState) -> Iterator[Values]:
        """Return the values still to try; those of an earlier trial to execute it once more."""
        return untried_in_grid(state.space, state.tried)

    def executions(self, state: SearchState, values: Values) -> int | None:
        """Return how many executions a trial is to have, None where the tuner says that."""

    def news(self, state: SearchState) -> list[str]:
        """Describe what was found since the last call."""
        return []


class RaceStrategy(Strategy):
    """Executes all combinations three times, then races the sizes at the best other setting."""

    counts_trials = False

    def __init__(self, tolerance: float | None, confidence: float, max_executions: int | None):
        self._tolerance, self._confidence, self._most = tolerance, confidence, max_executions
        self._described = 0  # Executions at the last look that was described.

    def begin(self, project: Path, objective: Any, space: Any) -> None:
        name = objective.name
        if hasattr(objective, "objectives") or name == "default_objective":
            raise InputError(
                "A race compares batch sizes by one objective that training reports: give the name "
                f"of one metric. Received: objective={name!r}."
            )
        self._project, most = project, self._most
        combinations = sum(1 for _ in grid(space))
        if most is not None and most < LOOKS[0] * combinations:
            raise InputError(
                f"A race executes each of {combinations} combinations {LOOKS[0]} times before it "
                "can certify anything: allow `max_executions` of at least "
                f"{LOOKS[0] * combinations}, or give fewer `batch_sizes`. Received: "
                f"max_executions={most}."
            )

    def __call__(self, state: SearchState) -> Iterator[Values]:
        space, counts = state.space, {}
        trials = {in_grid(space, t.hyperparameters): t for t in readable_trials(self._project)}
        known = {in_grid(space, values): values for values in state.tried}
        racing = {
            in_grid(space, t.hyperparameters): t for t in completed_executions(trials.values())
        }
        running = {in_grid(space, values) for values in state.pending}
        for values in grid(space):
            key = in_grid(space, values)
            # A trial with an unreadable record is not repeated for ever. If one runs, all wait.
            if key in racing or key in running or not (key in trials or key in known):
                executions = len(racing[key].executions) if key in racing else 0
                counts[key] = executions, known.get(key, values)
        fewest = min((count for count, _ in counts.values()), default=LOOKS[0])
        if fewest < LOOKS[0]:
            yield from (values for count, values in counts.values() if count == fewest)
            return
        raced, standing = self._standing()
        for k in standing.following if standing else ():
            own = raced[k].hyperparameters
            # A damaged file of keras-tuner's loses no executions.
            yield known.get(in_grid(space, own), dict(own))

    def executions(self, state: SearchState, values: Values) -> int:
        """Return the completed executions of a trial, and one more if it is its turn."""
        key = in_grid(state.space, values)
        found = [t for t in self._trials() if in_grid(state.space, t.hyperparameters) == key]
        # A search may have been killed between an execution and the end of its trial.
        following = self(state._replace(pending=[]))
        wanted = any(in_grid(state.space, one) == key for one in following)
        return max(1, sum(len(trial.executions) for trial in found) + wanted)

    def news(self, state: SearchState) -> list[str]:
        trials, standing = self._standing()
        if standing is None or standing.rounds <= self._described:
            return []
        self._described = standing.rounds
        found = decide(
            trials,
            tolerance=self._tolerance,
            confidence=self._confidence,
            raced=True,
        )
        sure = "" if found.certain else ", which is not certain"
        end = _RACE_ENDS.get(standing.ended or "", "")
        return [f"After {standing.rounds} rounds: batch size {found.batch_size:,}{sure}. {end}"]

    def _standing(self) -> tuple[tuple[TrialRecord, ...], RaceState | None]:
        """Judge the setting of the best mean, once all of it were executed three times."""
        completed = self._trials()
        trials, _ = comparable_trials(completed)
        if not trials or min(len(trial.executions) for trial in trials) < LOOKS[0]:
            return trials, None
        candidates = list(map(_candidate, trials))
        others = sum(len(t.executions) for t in completed if t not in trials)
        state = race(
            candidates,
            larger_is_better=trials[0].objective.direction == "max",
            tolerance=tolerance_in_units(trials, self._tolerance),
            confidence=self._confidence,
            max_executions=None if self._most is None else self._most - others,
        )
        return trials, state

    def _trials(self) -> list[TrialRecord]:
        return completed_executions(readable_trials(self._project))


def _candidate(trial: TrialRecord) -> Candidate:
    runs, _ = runs_of([trial])
    values = [run.value for run in runs if run.value is not None]
    blocks = [run.outcomes for run in runs if run.outcomes is not None]
    seconds = [run.seconds for run in runs if run.seconds is not None]
    return Candidate(
        values,
        np.stack(blocks) if len(blocks) == len(values) else None,
        fmean(seconds) if len(seconds) == len(values) else None,
        runs[0].examples,
    )


class JointStrategy(Strategy):
    """Searches batch size and learning rate together, one pair that may be the best at a time."""

    counts_trials = False

    def __init__(
        self, batch_sizes: Sequence[int], tolerance: float | None, max_executions: int | None
    ):
        self._batch_sizes, self._tolerance = tuple(batch_sizes), tolerance
        self._most = max_executions or EXECUTIONS_PER_SIZE * len(batch_sizes)
        self._end_described = False

    def begin(self, project: Path, objective: Any, space: Any) -> str:
        name = getattr(objective, "name", None)
        if hasattr(objective, "objectives") or name in (None, "samples_per_second"):
            raise InputError(
                '`learning_rate_scaling="joint"` finds the pair of batch size and learning rate '
                'that trains best: give one metric as objective, such as "val_accuracy". '
                f"Received: objective={name!r}."
            )
        self._project = project
        several = len(list(settings_in_grid(space))) > 1
        each = " for each combination of the other hyperparameters" if several else ""
        return (
            f"Batch size and learning rate are searched together: of {len(self._batch_sizes)} "
            f"sizes and {len(FACTORS)} rates at most {self._most} executions{each} "
            "(`max_executions`)."
        )

    def __call__(self, state: SearchState) -> Iterator[Values]:
        for found, _, values in self._decisions(state):
            # One whose record cannot be read is not run for ever.
            if found.pair is not None and (found.kind == "final" or values not in state.tried):
                yield values
                return

    def executions(self, state: SearchState, values: Values) -> int:
        """Return the executions of a pair that ended, and one more if it comes next."""
        own = other_hyperparameters(values)
        pair = values["batch_size"], values[FACTOR_NAME]
        for found, runs, proposed in self._decisions(state):
            if other_hyperparameters(proposed) == own:
                done = sum((run.batch_size, run.factor) == pair for run in runs)
                return max(1, done + (found.pair == pair))
        return 1

    def news(self, state: SearchState) -> list[str]:
        if state.pending or self._end_described:
            return []  # Their results may change it.
        texts = []
        for found, _, values in self._decisions(state):
            if found.pair is not None:
                return []
            others = [f"{name} {value}" for name, value in other_hyperparameters(values).items()]
            where = f" ({join_words(others)})" if others else ""
            chance = found.probability
            sure = "" if chance is None else f" (probability {percent(chance)})"
            texts.append(f"Stopped{where}: {_JOINT_ENDS[found.kind]}{sure}.")
        self._end_described = True
        return [" ".join(texts)]

    def _decisions(self, state: SearchState) -> Iterator[tuple[NextPair, list[PairRun], Values]]:
        """Return what to do for each combination of the other hyperparameters, with its values."""
        trials = readable_trials(self._project)
        for values, others in settings_in_grid(state.space):
            same = [
                trial
                for trial in trials
                if {**trial.hyperparameters, **others} == trial.hyperparameters
            ]
            runs, scored = pair_runs(same), [t for t in same if t.objective_value is not None]
            found = next_pair(
                self._batch_sizes,
                FACTORS,
                runs,
                larger_is_better=bool(scored) and scored[0].objective.direction == "max",
                tolerance=tolerance_in_units(scored, self._tolerance) if scored else 0.0,
                most=self._most,
                pending=[
                    (one["batch_size"], one[FACTOR_NAME])
                    for one in state.pending
                    if other_hyperparameters(one) == other_hyperparameters(values)
                ],
            )
            if found.pair is not None:
                values = values | dict(zip(("batch_size", FACTOR_NAME), found.pair, strict=True))
            yield found, runs, values
