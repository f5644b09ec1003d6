"""The strategy "goodput": a throughput sweep, a pilot trial, then sizes that may be better."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import keras_tuner

from kbatch.analysis.next_size import FinishedRun, SizeCosts, next_size
from kbatch.records.json_codec import RecordError, read_record
from kbatch.records.training_run import COST_NAMES, Target, cost_to_target
from kbatch.search.oracle import Values, grid
from kbatch.study.decision import decision_text
from kbatch.study.loading import RECORD_NAME
from kbatch.study.study import GoodputRecord, SizeDecision, read_goodput, write_goodput
from kbatch.study.trial import Objective, TrialRecord
from kbatch.training.callbacks import StopAtTarget, TimeBudget

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
        """Read what an earlier run of the search measured, or measures it."""
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
        """Return the values of the next trial; none when the search is at its end."""
        known = list(tried)
        for decision, values in self._decisions(space):
            # One whose record cannot be read is not run for ever.
            if values is not None and values not in known:
                self._keep(decision)
                yield values
                return

    def ends(self, space: keras_tuner.HyperParameters) -> list[str]:
        """Keep why the search stopped, and return it in sentences."""
        decisions = [decision for decision, values in self._decisions(space) if values is None]
        for decision in decisions:
            self._keep(decision)
        return [decision_text(decision) for decision in decisions]

    def time_cap_s(self, values: Mapping[str, Any]) -> float | None:
        """Return the seconds of training after which a trial has lost, None where none is known."""
        if self._objective.name != "seconds_to_target":
            return None
        trials = ended_trials(self._project, _others(values))
        costs = [run.cost for run in runs_of(trials, self._objective) if run.cost is not None]
        return _LOST * min(costs) if costs else None

    def _decisions(
        self, space: keras_tuner.HyperParameters
    ) -> Iterator[tuple[SizeDecision, Values | None]]:
        """Return what is to be done for each combination of the other hyperparameters."""
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
    """Make the strategy of a search."""
    ruled = hypermodel.learning_rate_scaling == "noise"
    return GoodputStrategy(pilot=hypermodel.base_batch_size if ruled else None)


def check_comparable(objective: Any, callbacks: Any) -> None:
    """Check that batch sizes can be compared by what they need."""
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


_ENDED = ("completed", "out_of_memory", "failed")
# The part of a run's epochs whose median is what the run held in the end.
_LAST_PART = 4


def ended_trials(project: Path, others: Mapping[str, Any]) -> list[TrialRecord]:
    """Read the trials of a project that ended, in order."""
    found = []
    for file in sorted(project.glob(f"trial_*/{RECORD_NAME}")):
        try:
            trial = read_record(TrialRecord, file)
        except RecordError:
            continue  # The trial is run again, or loading the study names it.
        mine = {n: v for n, v in trial.hyperparameters.items() if n in others}
        if trial.status in _ENDED and mine == dict(others):
            found.append(trial)
    return found


def runs_of(trials: Sequence[TrialRecord], objective: Objective) -> list[FinishedRun]:
    """Return what each trial took.

    Where the objective is the cost of a target, it is that. Where it is a metric, for runs of equal
    time, it is the seconds to what the first trial held in the end, the median of the last quarter
    of its epochs: the size that is there first has the most time left.
    """
    pilot = next((t for t in trials if t.status == "completed"), None)
    target = None if pilot is None else _target(pilot, objective)
    name = objective.name if objective.name in COST_NAMES else "seconds_to_target"
    return [_run(trial, target, COST_NAMES[name]) for trial in trials]


def costs_of(
    sweep: GoodputRecord, trials: Sequence[TrialRecord], *, objective: Objective
) -> SizeCosts:
    """Return what updates cost, with what the first trial tells beside the sweep.

    A search trains with callbacks and an input pipeline, whose seconds an update are those that
    the first trial took above the sweep.
    """
    if objective.name == "updates_to_target":
        return SizeCosts(dict.fromkeys(sweep.batch_sizes, 1.0))
    if objective.name == "examples_to_target":
        return SizeCosts({size: float(size) for size in sweep.batch_sizes})
    times_s = dict(zip(sweep.batch_sizes, sweep.update_times_s, strict=True))
    for trial in trials:
        if trial.samples_per_second and trial.batch_size in times_s:
            real_s, swept_s = trial.batch_size / trial.samples_per_second, times_s[trial.batch_size]
            beside_s, factor = max(0.0, real_s - swept_s), min(1.0, real_s / swept_s)
            times_s = {size: factor * seconds + beside_s for size, seconds in times_s.items()}
            return SizeCosts(times_s, trial.mean(lambda e: e.first_step_s) or 0.0)
    return SizeCosts(times_s)


def _target(pilot: TrialRecord, objective: Objective) -> Target | None:
    if objective.name in COST_NAMES:
        return pilot.target
    values = [v for e in pilot.executions[0].epochs if (v := e.finite(objective.name)) is not None]
    if not values:
        return None
    held = statistics.median(values[-max(1, len(values) // _LAST_PART) :])
    return Target(objective.name, held, objective.direction)


def _run(trial: TrialRecord, target: Target | None, part: str) -> FinishedRun:
    scale = trial.noise_scale
    costs = [None if target is None else cost_to_target(target, e.epochs) for e in trial.executions]
    met = [cost for cost in costs if cost is not None]
    reached = trial.status == "completed" and len(met) == len(costs)
    if reached:
        updates = statistics.fmean(cost.updates for cost in met)
    else:
        updates = statistics.fmean(e.updates or 0 for e in trial.executions) or None
    return FinishedRun(
        trial.batch_size,
        cost=statistics.fmean(getattr(cost, part) for cost in met) if reached else None,
        # One that failed, diverged or ran out of memory says nothing of its size's speed.
        updates=updates if trial.status == "completed" else None,
        noise_scale=scale and scale.value,
        noise_at_least=scale and scale.at_least,
    )
