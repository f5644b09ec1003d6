"""The strategy "race": executions of all batch sizes in rounds, until the answer is certain."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras_tuner

from kbatch.analysis.race import LOOKS, RaceState, race
from kbatch.errors import InputError
from kbatch.search.oracle import Values, grid, in_grid
from kbatch.search.trial_files import readable_trials
from kbatch.study.decision import (
    candidates_of,
    comparable_trials,
    count_race_looks,
    decide,
    raced_trials,
    tolerance_in_units,
)
from kbatch.study.trial import TrialRecord

_ENDS = {
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


class RaceStrategy:
    """Chooses the next execution of a race from the records on disk.

    Each combination of the space is executed three times, in rounds. Then only the batch sizes at
    the setting of the other hyperparameters with the best mean are raced. Failed trials are left
    out.
    """

    def __init__(self, tolerance: float | None, confidence: float, max_executions: int | None):
        self._tolerance, self._confidence, self._most = tolerance, confidence, max_executions
        self._project = Path()
        self._described = 0  # Executions at the last look that was described.

    def begin(self, project: Path, objective: Any, space: keras_tuner.HyperParameters) -> None:
        """Check that the race can lead to an answer."""
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

    def __call__(
        self,
        space: keras_tuner.HyperParameters,
        tried: Iterable[Values],
        pending: Sequence[Values] | None = (),
    ) -> Iterator[Values]:
        """Return the values of the trials to execute once more, in order; none at the end."""
        trials = {in_grid(space, t.hyperparameters): t for t in readable_trials(self._project)}
        known, counts = {in_grid(space, values): values for values in tried}, {}
        racing = {in_grid(space, t.hyperparameters): t for t in raced_trials(trials.values())}
        running = {in_grid(space, values) for values in pending or ()}
        for values in grid(space):
            key = in_grid(space, values)
            # One whose record cannot be read is not run for ever. All wait for one that runs.
            if key in racing or key in running or not (key in trials or key in known):
                executions = len(racing[key].executions) if key in racing else 0
                counts[key] = executions, known.get(key, values)
        fewest = min((count for count, _ in counts.values()), default=LOOKS[0])
        if fewest < LOOKS[0]:
            yield from (values for count, values in counts.values() if count == fewest)
            return
        raced, state = self._standing()
        for k in state.following if state else ():
            own = raced[k].hyperparameters
            # A damaged file of keras-tuner's loses no executions.
            yield known.get(in_grid(space, own), dict(own))

    def executions(
        self,
        space: keras_tuner.HyperParameters,
        values: Values,
        tried: Iterable[Values],
        pending: Sequence[Values] = (),
    ) -> int:
        """Return how many executions a trial that is handed out is to have."""
        key = in_grid(space, values)
        found = [t for t in self._trials() if in_grid(space, t.hyperparameters) == key]
        # A search may have been killed between an execution and the end of its trial.
        wanted = any(in_grid(space, v) == key for v in self(space, tried))
        return max(1, sum(len(trial.executions) for trial in found) + wanted)

    def news(self) -> str | None:
        """Describe the last look, None where it was described or there was none."""
        trials, state = self._standing()
        if state is None or state.rounds <= self._described:
            return None
        self._described = state.rounds
        found = decide(
            trials,
            tolerance=self._tolerance,
            confidence=self._confidence,
            looks=count_race_looks(self._trials(), self._most),
        )
        size = f"batch size {found.batch_size:,}"
        end = _ENDS.get(state.ended or "", "")
        return f"After {state.rounds} rounds: {size}. {found.reason} {end}".rstrip()

    def _standing(self) -> tuple[tuple[TrialRecord, ...], RaceState | None]:
        """Judge the setting of the best mean, once all of it were executed three times."""
        completed = self._trials()
        trials = comparable_trials(completed).trials
        if not trials or min(len(trial.executions) for trial in trials) < LOOKS[0]:
            return trials, None
        candidates, _ = candidates_of(trials, max(len(trial.executions) for trial in trials))
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
        return raced_trials(readable_trials(self._project))
