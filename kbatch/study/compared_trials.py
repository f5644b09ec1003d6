"""Choose the trials to compare, one of each batch size, and prepare their runs and names."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.analysis.run_table import Run
from kbatch.page.numbers import count_range, pluralize, setting, where_measured
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note
from kbatch.records.training_run import TIMES, Budget, ExecutionRecord, NoOutcomes, epochs_to_target
from kbatch.study.trial import OWN_COLUMNS, Objective, TrialRecord, device_kinds
from kbatch.training.metrics import is_fraction

# Default tolerance of metrics from 0 to 1 if larger is better. Others have 2 % of the best value.
_DEFAULT_TOLERANCE = 0.01
# Why a completed trial is not compared, or not judged in a race.
LeftOutReason = Literal[
    "other_settings",
    "another_budget",
    "another_device",
    "no_value",
    "another_trial",
    "another_rate",
    "far_rate",
]
LeftOut = tuple[TrialRecord, LeftOutReason]
# Why runs are compared only by their values, and not by validation example.
Unpaired = NoOutcomes | Literal["time", "not_recorded", "other_examples", "other_blocks"]


def as_compared(trials: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return each trial with its complete runs only, if it has any."""
    return tuple(with_complete_runs(trial) or trial for trial in trials)


def with_complete_runs(trial: TrialRecord) -> TrialRecord | None:
    """Return a trial with its complete runs only; None if it failed or has no complete run."""
    complete = tuple(itertools.takewhile(is_complete, trial.executions))
    if not complete or trial.status in ("failed", "out_of_memory"):
        return None
    all_complete = len(complete) == len(trial.executions)
    return trial if all_complete else dataclasses.replace(trial, executions=complete)


def is_complete(run: ExecutionRecord) -> bool:
    """Return whether a run completed and the search did not end it early."""
    return run.status == "completed" and run.length == "complete"


def comparable_trials(
    trials: Sequence[TrialRecord],
) -> tuple[tuple[TrialRecord, ...], list[LeftOut]]:
    """Choose a trial of each size, with settings and budget of the best one; say why not others."""
    completed = [*filter(None, map(with_complete_runs, trials))]
    # A run has no value if it never met the target, or if its metric was not finite.
    scored = [trial for trial in completed if None not in trial.judged_values]
    if not scored:
        return (), []
    best = min(scored, key=lambda trial: trial.rank)
    settings, budget, timed = compared_settings(best), _budget(best), is_time(best.objective)
    # If a size has several trials, the one with the most runs is chosen, whatever its value.
    ordered = sorted(completed, key=lambda t: (t is not best, -len(t.executions), t.trial_id))
    chosen: dict[int, TrialRecord] = {}
    left_out: list[LeftOut] = []
    for trial in ordered:
        if compared_settings(trial) != settings:
            left_out.append((trial, "other_settings"))
        elif _budget(trial) != budget:
            left_out.append((trial, "another_budget"))
        elif trial is not best and timed and len(device_kinds([trial, best])) > 1:
            left_out.append((trial, "another_device"))
        elif None in trial.judged_values:
            left_out.append((trial, "no_value"))
        elif trial.batch_size in chosen:
            left_out.append((trial, "another_trial"))
        else:
            chosen[trial.batch_size] = trial
    return tuple(chosen[size] for size in sorted(chosen)), left_out


def rates_of_settings(trials: Sequence[TrialRecord]) -> list[list[TrialRecord]]:
    """Group trials that differ only in the learning rate of the search. The best comes first."""
    groups: dict[object, list[TrialRecord]] = {}
    for trial in trials:
        settings = repr((trial.batch_size, compared_settings(trial), _budget(trial)))
        key = settings if FACTOR_NAME in trial.hyperparameters else trial.trial_id
        groups.setdefault(key, []).append(trial)

    def order(trial: TrialRecord) -> tuple[Any, ...]:
        incomplete = trial.status != "completed" or not any(map(is_complete, trial.executions))
        return incomplete, None in trial.judged_values, -len(trial.executions), trial.rank

    return [sorted(group, key=order) for group in groups.values()]


def runs_of(trials: Sequence[TrialRecord]) -> tuple[list[Run], Unpaired | None]:
    """Return the runs of trials, and why they have no values for blocks of examples, if so."""
    executions = [e for trial in trials for e in trial.executions if e.status == "completed"]
    objective = trials[0].objective
    unpaired = _unpaired_reason(executions, objective)
    single = objective.name == "samples_per_second" and len(executions) == len(trials)
    windows = min((len(run.window_examples) for run in executions), default=0)
    if single and windows > 1:  # The windows of a single run show how its speed varies.
        rates = [np.divide(t.last.window_examples, t.last.window_durations_s) for t in trials]
        return [
            Run(trial.batch_size, rate_factor(trial), number, float(rate))
            for trial, of_windows in zip(trials, rates, strict=True)
            for number, rate in enumerate(of_windows[:windows])
        ], unpaired
    timed = not any(map(ends_by_time, executions)) and len(device_kinds(trials)) < 2
    valued = [
        (trial, run, value)
        for trial in trials
        for run, value in zip(trial.executions, trial.judged_values, strict=True)
    ]
    runs: list[Run] = []
    for trial, run, value in sorted(valued, key=lambda item: item[1].place or 0):
        pair = trial.batch_size, rate_factor(trial)
        if run.status != "completed":
            if run.diverged or run.status in ("failed", "out_of_memory"):
                ended: Any = "diverged" if run.diverged else run.status
                runs.append(Run(*pair, run.seed, None, ended=ended))
            continue
        outcomes, step, resolution_s = None if unpaired else run.outcomes, None, 0.0
        if outcomes:
            step = math.inf if outcomes.step is None else outcomes.step
        if objective.name == "seconds_to_target" and run.target:  # It is known to one epoch.
            needed = epochs_to_target(run.target, run.epochs)
            resolution_s = needed[-1].train_s if needed else 0.0
        curve: Any = tuple(epoch.finite(objective.name) for epoch in run.epochs)
        runs.append(
            Run(
                *pair,
                run.seed,
                value,
                training_seconds(run) if timed else None,
                outcomes=np.array(outcomes.values) if outcomes else None,
                examples=outcomes and outcomes.examples,
                step=step,
                resolution=resolution_s,
                weights=run.initial_weights,
                order=run.first_order,
                ended="stopped_early" if run.length == "stopped_early" else "completed",
                epochs=None if run.length == "complete" else len(run.epochs),
                curve=() if None in curve else curve,
            )
        )
    return runs, unpaired


def rate_factor(trial: TrialRecord) -> float:
    """Return the factor by which the learning rate of a trial differs from the rule's rate."""
    factor = trial.hyperparameters.get(FACTOR_NAME)
    return float(factor) if isinstance(factor, (int, float)) and factor else 1.0


def rate_setters(trials: Iterable[TrialRecord], *, sure: bool = False) -> tuple[str, ...]:
    """Name the callbacks that replace the learning rates of runs; empty if there are none.

    Callbacks replace the rates if two runs that were built with different rates trained at equal
    ones, in the first update or in the later half of their epochs. A callback that multiplies the
    rate does not replace it. If all runs were built with one rate and none trained at it, both are
    possible. Then the callbacks are named too, unless the answer must be `sure`.
    """
    runs = [
        run
        for trial in trials
        for run in trial.executions
        # This callback multiplies the rate, so two runs may have equal rates by chance.
        if run.scaling and run.epochs and run.rate_callbacks != ("ReduceLROnPlateau",)
    ]
    names = tuple(dict.fromkeys(name for run in runs for name in run.rate_callbacks))
    rates = list(dict.fromkeys(map(_rates_of, runs)))
    for (built, *first), (other_built, *second) in itertools.combinations(rates, 2):
        equal = [_are_close(*pair) for pair in zip(first, second, strict=False)]
        later = equal[1 + (len(equal) - 1) // 2 :]
        if not _are_close(built, other_built) and (equal[0] or (later and all(later))):
            return names
    one_rate = len({f"{built:.3g}" for built, *_ in rates}) == 1
    trained = any(_are_close(built, rate) for built, *trained in rates for rate in trained)
    return names if one_rate and not trained and not sure else ()


def _rates_of(run: ExecutionRecord) -> tuple[float, ...]:
    """Return the built rate, the rate of the first update, and the rate at each epoch's end."""
    built = run.scaling.learning_rate if run.scaling else 0.0
    at_ends = (epoch.learning_rate for epoch in run.epochs)
    return built, *(rate or 0.0 for rate in (run.learning_rate, *at_ends))


def _are_close(rate: float, other: float) -> bool:
    return rate > 0 and math.isclose(rate, other, rel_tol=1e-3)


def other_hyperparameters(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in values.items() if name not in ("batch_size", FACTOR_NAME)}


def check_tolerance(tolerance: Any, confidence: Any, metric: str = "") -> None:
    """Check the arguments of a decision. The tolerance of an accuracy must be below 1."""
    number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    most, limit = (1, "below 1") if is_fraction(metric) else (math.inf, "finite")
    if tolerance is not None and not (number and 0 <= tolerance < most):
        raise ValueError(
            f"`tolerance` must be at least 0 and {limit}, in the unit of the metric (0.01 is one "
            "percentage point of accuracy). If None, the metric's default is used. "
            f"Received: tolerance={tolerance!r}."
        )
    if not isinstance(confidence, (int, float)) or not 0.5 < confidence < 1:
        raise ValueError(f"`confidence` must be above 0.5 and below 1. Received: {confidence=}.")


def tolerance_in_units(trials: Sequence[TrialRecord], tolerance: float | None) -> float:
    """Return the tolerance in the metric's unit. If it is None, use the metric's default."""
    if tolerance is not None:
        return float(tolerance)
    best = min(trials, key=lambda trial: trial.rank).judged_value or 0.0
    absolute = _is_tolerance_absolute(trials[0].objective, best)
    return _DEFAULT_TOLERANCE if absolute else 2 * _DEFAULT_TOLERANCE * abs(best)


def _is_tolerance_absolute(objective: Objective, best: float) -> bool:
    """Return whether the tolerance of a metric is absolute, and not a share of the best value."""
    return objective.direction == "max" and 0 <= best <= 1


def tolerance_text(best: TrialRecord | None, tolerance: float | None) -> str:
    """Write a tolerance in the metric's unit or as a share of the best value."""
    value, tolerance = (best and best.judged_value) or 0.0, tolerance or 0.0
    if best is None or not value or _is_tolerance_absolute(best.objective, value):
        return setting(tolerance)
    return f"{100 * tolerance / abs(value):.2g} %"


def training_seconds(run: ExecutionRecord) -> float | None:
    """Return the seconds of training without tracing and compiling, which the first steps do."""
    rate = run.samples_per_second
    return run.examples_seen / rate if rate and run.examples_seen else run.train_s


def complete_trainings(trials: Iterable[TrialRecord]) -> float:
    """Count training runs as complete trainings: a run of e of E epochs counts e / E."""
    count = 0.0
    for run in (run for trial in trials for run in trial.executions):
        epochs = run.epochs_asked or 1
        count += 1.0 if is_complete(run) else min(1.0, len(run.epochs) / epochs)
        count += run.epochs_repeated / epochs
    return count


def ends_by_time(run: ExecutionRecord) -> bool:
    return run.target is None and run.budget is not None and run.budget.train_s is not None


def is_time(objective: Objective) -> bool:
    return objective.name in TIMES


def compared_settings(trial: TrialRecord) -> tuple[str, dict[str, str]]:
    """Return the policy and the settings that trials must share to be compared."""
    # As texts, True and 1 are different.
    return trial.dtype_policy, {name: repr(value) for name, value in _others(trial).items()}


def _others(trial: TrialRecord) -> dict[str, Any]:
    """Return the hyperparameters other than batch size, policy and learning rate."""
    columns, values = (*OWN_COLUMNS, FACTOR_NAME), trial.hyperparameters.items()
    return {name: v for name, v in values if name not in columns and not name.startswith("tuner/")}


def _budget(trial: TrialRecord) -> tuple[object, ...]:
    """Return the limits of a trial's training, and the epochs that keras-tuner's Hyperband set."""
    run, rung = trial.last, ("tuner/initial_epoch", "tuner/epochs")
    return (run.budget, run.target, *(trial.hyperparameters.get(name) for name in rung))


def _unpaired_reason(runs: Sequence[ExecutionRecord], objective: Objective) -> Unpaired | None:
    """Return why runs cannot be compared by validation example; None if they can."""
    if is_time(objective):
        return "time"
    known = [run.outcomes for run in runs if run.outcomes is not None]
    for outcomes in known:
        if outcomes.reason is not None:
            return outcomes.reason
    if len(known) < len(runs) or {outcomes.metric for outcomes in known} != {objective.name}:
        return "not_recorded"
    if len({outcomes.key for outcomes in known}) > 1:
        return "other_examples"
    return "other_blocks" if len({outcomes.block_examples for outcomes in known}) > 1 else None


def differing(trials: Iterable[TrialRecord]) -> tuple[str, ...]:
    """Name the hyperparameters in which trials differ, and the dtype policy if it differs."""
    trials = tuple(trials)
    names = dict.fromkeys(name for trial in trials for name in _others(trial))
    return tuple(n for n in (*names, "dtype_policy") if len({value_of(t, n) for t in trials}) > 1)


def value_of(trial: TrialRecord, name: str) -> bool | int | float | str | None:
    """Return a hyperparameter, or the dtype policy that was active."""
    return trial.dtype_policy if name == "dtype_policy" else trial.hyperparameters.get(name)


def setting_texts(trial: TrialRecord, names: Iterable[str]) -> list[str]:
    """List settings of a trial, such as `["units=8", "float32"]`."""
    texts = ((name, value_text(value_of(trial, name))) for name in names)
    return [text if name == "dtype_policy" else f"{name}={text}" for name, text in texts]


def trial_name(trial: TrialRecord, names: Iterable[str]) -> str:
    """Name a trial, such as `"64 (units=8)"`."""
    settings = ", ".join(setting_texts(trial, names))
    return f"{trial.batch_size:,} ({settings})" if settings else f"{trial.batch_size:,}"


def value_text(value: bool | int | float | str | None) -> str:
    return setting(value) if isinstance(value, float) else str(value)


def missing_text(missing: int) -> str:
    """Say that trials of a study are missing; empty if none is."""
    return Note.of("trials_missing", count=missing) if missing else ""


def trained_runs(trials: Iterable[TrialRecord]) -> list[ExecutionRecord]:
    """List the complete training runs that have epochs."""
    return [e for t in trials for e in t.executions if is_complete(e) and e.epochs]


def budget_text(trials: Iterable[TrialRecord]) -> str:
    """Describe how long complete runs trained; empty if there are none."""
    runs = trained_runs(trials)
    if not runs:
        return ""
    epochs = count_range((len(run.epochs) for run in runs), "epoch")
    if ends := dict.fromkeys(filter(None, map(end_text, runs))):
        return f"{' or '.join(ends)} ({epochs})"
    return f"{epochs} of {count_range((run.epochs[0].examples for run in runs), 'example')}"


def end_text(execution: ExecutionRecord) -> str:
    """Describe the limits of a run; empty if only its number of epochs limits it."""
    budget, target, limits = execution.budget or Budget(), execution.target, []
    if budget.train_s is not None:
        limits.append(f"{setting(budget.train_s)} s of training")
    if budget.updates is not None:
        limits.append(pluralize(budget.updates, "update"))
    if target is None:
        return " or ".join(limits)
    sign = "≥" if target.direction == "max" else "≤"
    until = f"until {target.metric} {sign} {setting(target.value)}"
    return f"{until}, at most {' or '.join(limits)}" if limits else until


def conditions(trials: Sequence[TrialRecord], environment: EnvironmentRecord | None) -> list[str]:
    """List the conditions of a comparison: devices, versions, policies, runs and their length."""
    machine, kinds = where_measured(environment), device_kinds(trials)
    if len(kinds) > 1:
        machine[0] = " and ".join(kinds)
    runs = count_range((len(trial.executions) for trial in trials), "run")
    return [
        *machine,
        ", ".join(dict.fromkeys(trial.dtype_policy for trial in trials)),
        f"{pluralize(len(trials), 'trial')} of {runs}",
        *filter(None, [budget_text(comparable_trials(trials)[0] or trials)]),
    ]
