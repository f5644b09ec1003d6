"""The strategy "goodput": a throughput sweep, a pilot trial, then sizes that may be better."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import keras_tuner

from kbatch.analysis.next_size import next_size
from kbatch.records.target import COST_NAMES
from kbatch.search.goodput_runs import costs_of, ended_trials, runs_of
from kbatch.search.grid import Values, grid
from kbatch.study.goodput import GoodputRecord, SizeDecision, read_goodput, write_goodput
from kbatch.study.goodput_text import decision_text
from kbatch.study.trial import Objective
from kbatch.training.budgets import TimeBudget
from kbatch.training.stop_at_target import StopAtTarget

# A run that took this much longer than the best one has lost, whatever its seed.
_LOST = 1.3


class GoodputStrategy:
    """Gives the one trial that the model of goodput asks for, from the records on disk.

    All its state is the sweep's file and the trials' own records, so a search that is killed goes
    on where it was. Combinations of other hyperparameters are searched one after the other.

    Args:
        pilot: Batch size to begin with, None for the one that suits most noise scales.
    """

    def __init__(self, pilot: int | None = None):
        self._pilot = pilot
        self._project = Path()
        self._objective = Objective("", "min")
        self._sweep: GoodputRecord | None = None

    def begin(
        self,
        project: Path,
        objective: Any,
        *,
        callbacks: Any,
        batch_sizes: tuple[int, ...],
        sweep: Callable[[], GoodputRecord],
    ) -> str:
        """Reads what an earlier run of the search measured, or measures it.

        Args:
            project: The project directory.
            objective: keras-tuner's objective.
            callbacks: The callbacks of the search.
            batch_sizes: Its sizes: all are timed again where there were fewer before.
            sweep: Times an update of each size.

        Returns:
            What was measured, in words.

        Raises:
            ValueError: If sizes cannot be compared by this objective and budget.
        """
        check_comparable(objective, callbacks)
        self._project = project
        self._objective = Objective(objective.name, objective.direction)
        known = read_goodput(project)
        if known is not None and known.batch_sizes == batch_sizes:
            self._sweep, took = known, "from an earlier run"
        else:
            decisions = known.decisions if known else ()
            self._sweep = dataclasses.replace(sweep(), decisions=decisions)
            write_goodput(self._sweep, project)
            took = f"in {self._sweep.sweep_s:.1f} s"
        return f"Timed an update of {len(self._sweep.batch_sizes)} batch sizes {took}."

    def __call__(
        self, space: keras_tuner.HyperParameters, tried: Iterable[Values]
    ) -> Iterator[Values]:
        """Gives the values of the next trial; none when the search is at its end.

        Args:
            space: The hyperparameters.
            tried: Values of the trials there are, which are known from their records.
        """
        known = list(tried)
        for decision, values in self._decisions(space):
            # One whose record cannot be read is not run for ever.
            if values is not None and values not in known:
                self._keep(decision)
                yield values
                return

    def ends(self, space: keras_tuner.HyperParameters) -> list[str]:
        """Keeps why the search stopped, and gives it in sentences."""
        decisions = [decision for decision, values in self._decisions(space) if values is None]
        for decision in decisions:
            self._keep(decision)
        return [decision_text(decision) for decision in decisions]

    def time_cap_s(self, values: Mapping[str, Any]) -> float | None:
        """Gives the seconds of training after which a trial has lost, None where none is known.

        Args:
            values: Hyperparameters of the trial.
        """
        if self._objective.name != "seconds_to_target":
            return None
        trials = ended_trials(self._project, _others(values))
        costs = [run.cost for run in runs_of(trials, self._objective) if run.cost is not None]
        return _LOST * min(costs) if costs else None

    def _decisions(
        self, space: keras_tuner.HyperParameters
    ) -> Iterator[tuple[SizeDecision, Values | None]]:
        """Gives what is to be done for each combination of the other hyperparameters."""
        if self._sweep is None:
            return
        done: list[Values] = []
        for values in grid(space):
            others = _others(values)
            if others in done:
                continue
            done.append(others)
            decision = self._decision(self._sweep, others)
            size = decision.batch_size
            yield decision, None if size is None else values | {"batch_size": size}

    def _decision(self, sweep: GoodputRecord, others: Values) -> SizeDecision:
        trials = ended_trials(self._project, others)
        costs = costs_of(sweep, trials, objective=self._objective)
        found = next_size(costs, runs_of(trials, self._objective), pilot=self._pilot)
        return SizeDecision(**found._asdict(), hyperparameters=others)

    def _keep(self, decision: SizeDecision) -> None:
        if self._sweep is not None:
            self._sweep = self._sweep.with_decision(decision)
            write_goodput(self._sweep, self._project)


def goodput_strategy(hypermodel: Any) -> GoodputStrategy:
    """Makes the strategy of a search.

    Args:
        hypermodel: The `BatchSizeHyperModel`: with the rule "noise" its base size comes first.
    """
    ruled = hypermodel.learning_rate_scaling == "noise"
    return GoodputStrategy(pilot=hypermodel.base_batch_size if ruled else None)


def check_comparable(objective: Any, callbacks: Any) -> None:
    """Checks that batch sizes can be compared by what they need.

    Raises:
        ValueError: If they cannot.
    """
    given = keras.tree.flatten(callbacks or [])
    timed = any(isinstance(callback, TimeBudget) for callback in given)
    target = any(isinstance(callback, StopAtTarget) for callback in given)
    name = getattr(objective, "name", None)
    single = isinstance(objective, keras_tuner.Objective) and not hasattr(objective, "objectives")
    metric = timed and name not in ("samples_per_second", "default_objective")
    if single and ((name in COST_NAMES and target) or (name not in COST_NAMES and metric)):
        return
    raise ValueError(
        '`strategy="goodput"` compares batch sizes by what they need for the same: search for '
        '`keras_tuner.Objective("seconds_to_target", "min")` with `callbacks='
        "[kbatch.StopAtTarget(monitor, value)]`, or for a metric with `callbacks="
        f"[kbatch.TimeBudget(seconds)]`. Received: objective={name!r}, "
        f"{len(given)} callbacks."
    )


def _others(values: Mapping[str, Any]) -> Values:
    return {name: value for name, value in values.items() if name != "batch_size"}
