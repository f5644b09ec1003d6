"""Trials as runs of a search by goodput: what each took to come to the target."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kbatch.analysis.next_size import SizeCosts, Tried
from kbatch.records.json_files import RecordError, read_record
from kbatch.records.target import COST_NAMES, Target, cost_to_target
from kbatch.study.goodput import GoodputRecord
from kbatch.study.loading import RECORD_NAME
from kbatch.study.trial import Objective, TrialRecord

_ENDED = ("completed", "out_of_memory", "failed")
# The part of a run's epochs whose median is what the run held in the end.
_LAST_PART = 4


def ended_trials(project: Path, others: Mapping[str, Any]) -> list[TrialRecord]:
    """Reads the trials of a project that ended, in order.

    Args:
        project: The project directory.
        others: Their hyperparameters beside the batch size.
    """
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


def runs_of(trials: Sequence[TrialRecord], objective: Objective) -> list[Tried]:
    """Gives what each trial took.

    Where the objective is the cost of a target, it is that. Where it is a metric, for runs of equal
    time, it is the seconds to what the first trial held in the end, the median of the last quarter
    of its epochs: the size that is there first has the most time left.

    Args:
        trials: The trials that ended, in order.
        objective: What the search optimises.
    """
    pilot = next((t for t in trials if t.status == "completed"), None)
    target = None if pilot is None else _target(pilot, objective)
    name = objective.name if objective.name in COST_NAMES else "seconds_to_target"
    return [_run(trial, target, COST_NAMES[name]) for trial in trials]


def costs_of(
    sweep: GoodputRecord, trials: Sequence[TrialRecord], *, objective: Objective
) -> SizeCosts:
    """Gives what updates cost, with what the first trial tells beside the sweep.

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


def _run(trial: TrialRecord, target: Target | None, part: str) -> Tried:
    scale = trial.noise_scale
    costs = [None if target is None else cost_to_target(target, e.epochs) for e in trial.executions]
    met = [cost for cost in costs if cost is not None]
    reached = trial.status == "completed" and len(met) == len(costs)
    if reached:
        updates = statistics.fmean(cost.updates for cost in met)
    else:
        updates = statistics.fmean(e.updates or 0 for e in trial.executions) or None
    return Tried(
        trial.batch_size,
        cost=statistics.fmean(getattr(cost, part) for cost in met) if reached else None,
        # One that failed, diverged or ran out of memory says nothing of its size's speed.
        updates=updates if trial.status == "completed" else None,
        noise_scale=scale and scale.value,
        noise_at_least=scale and scale.at_least,
    )
