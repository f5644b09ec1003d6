"""The search of batch size and learning rate together: pairs that may be the best, one a time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras_tuner

from kbatch.analysis.joint_search import (
    EXECUTIONS_PER_SIZE,
    FACTOR_NAME,
    FACTORS,
    NextPair,
    PairRun,
    next_pair,
)
from kbatch.document.numbers import join_words, percent
from kbatch.errors import InputError
from kbatch.search.oracle import Values, settings_in_grid
from kbatch.search.trial_files import readable_trials
from kbatch.study.decision import tolerance_in_units
from kbatch.study.learning_rates import other_hyperparameters, pair_runs

_ENDS = {
    "settled": "no other pair is likely to be better by more than the tolerance",
    "budget": "its executions are spent",
    "all tried": "no pair is left to try",
}


class JointStrategy:
    """Proposes the pair of batch size and learning rate to execute next, from the records on disk.

    A pair that was executed before is proposed again to be repeated. Combinations of other
    hyperparameters are searched one after the other, each by `max_executions`, or six a batch size.
    """

    def __init__(
        self, batch_sizes: Sequence[int], *, tolerance: float | None, max_executions: int | None
    ):
        self._batch_sizes = tuple(batch_sizes)
        self._tolerance = tolerance
        self._most = max_executions or EXECUTIONS_PER_SIZE * len(batch_sizes)
        self._project = Path()
        self._space = keras_tuner.HyperParameters()
        self._ended = ""

    def begin(self, project: Path, objective: Any, space: keras_tuner.HyperParameters) -> str:
        """Check the objective, and describe how long the search will be."""
        name = getattr(objective, "name", None)
        if hasattr(objective, "objectives") or name in (None, "samples_per_second"):
            raise InputError(
                '`learning_rate_scaling="joint"` finds the pair of batch size and learning rate '
                'that trains best: give one metric as objective, such as "val_accuracy". '
                f"Received: objective={name!r}."
            )
        self._project, self._space = project, space
        several = len(list(settings_in_grid(space))) > 1
        each = " for each combination of the other hyperparameters" if several else ""
        return (
            f"Batch size and learning rate are searched together: of {len(self._batch_sizes)} "
            f"sizes and {len(FACTORS)} rates at most {self._most} executions{each} "
            "(`max_executions`)."
        )

    def __call__(
        self,
        space: keras_tuner.HyperParameters,
        tried: Iterable[Values],
        pending: Sequence[Values] | None = (),
    ) -> Iterator[Values]:
        """Return the values of the next execution; none when the search is at its end."""
        known = list(tried)
        for found, _, values in self._decisions(space, pending):
            # One whose record cannot be read is not run for ever.
            if found.pair is not None and (found.kind == "final" or values not in known):
                yield values
                return

    def executions(
        self,
        space: keras_tuner.HyperParameters,
        values: Values,
        tried: Iterable[Values],
        pending: Sequence[Values] | None = (),
    ) -> int:
        """Return how many executions a trial that is handed out is to have."""
        own = other_hyperparameters(values)
        pair = values["batch_size"], values[FACTOR_NAME]
        for found, runs, proposed in self._decisions(space, pending):
            if other_hyperparameters(proposed) == own:
                done = sum((run.batch_size, run.factor) == pair for run in runs)
                return max(1, done + (found.pair == pair))
        return 1

    def news(self) -> str | None:
        """Describe why the search ended, once; None before."""
        found = [(found, values) for found, _, values in self._decisions(self._space)]
        if self._ended or any(one.pair is not None for one, _ in found):
            return None
        self._ended = " ".join(_end_text(*one) for one in found)
        return self._ended

    def _decisions(
        self, space: keras_tuner.HyperParameters, pending: Sequence[Values] | None = ()
    ) -> Iterator[tuple[NextPair, list[PairRun], Values]]:
        """Return what to do for each combination of the other hyperparameters, with its values."""
        trials = readable_trials(self._project)
        for values, others in settings_in_grid(space):
            same = [
                trial
                for trial in trials
                if {n: v for n, v in trial.hyperparameters.items() if n in others} == others
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
                    for one in pending or ()
                    if other_hyperparameters(one) == other_hyperparameters(values)
                ],
            )
            if found.pair is not None:
                values = values | dict(zip(("batch_size", FACTOR_NAME), found.pair, strict=True))
            yield found, runs, values


def _end_text(found: NextPair, values: Mapping[str, Any]) -> str:
    others = [f"{name} {value}" for name, value in other_hyperparameters(values).items()]
    where = f" ({join_words(others)})" if others else ""
    chance = "" if found.probability is None else f" (probability {percent(found.probability)})"
    return f"Stopped{where}: {_ENDS[found.kind]}{chance}."
