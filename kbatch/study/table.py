"""The table of a study, a row for each batch size or each of its settings, and its conditions."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kbatch.analysis.intervals import Estimate, ranged_columns
from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.page.numbers import count_range, one_line
from kbatch.records.search import Plan
from kbatch.records.training_run import COST_NAMES
from kbatch.study.caveats import MUCH_DATA_WAIT
from kbatch.study.comparison import is_time, rates_of_settings
from kbatch.study.decision import Decision, Row, starting_rate
from kbatch.study.names import TrialNames, caption, metric_words, outcome, trained_runs
from kbatch.study.trial import Objective, TrialRecord, is_fraction

if TYPE_CHECKING:
    from kbatch.study.study import Study

# What the outcome of a trial is where it is compared.
COMPARED = ("take", "best", "as good", "not told apart", "worse")
_LONGEST_REASON = 60
_COSTS = {
    "samples_per_second": "samples/s",
    "seconds_to_target": "time to target (s)",
    "updates_to_target": "updates to target",
    "examples_to_target": "examples to target",
}


def rows_of(
    found: Decision, trials: Sequence[TrialRecord], names: TrialNames, quality: Objective | None
) -> list[Row]:
    """Write trials as rows with the same columns: of several learning rates the best."""
    rows: list[Row] = []
    waited = any((trial.data_wait_share or 0.0) > MUCH_DATA_WAIT for trial in trials)
    cut = any((trial.accumulation_steps or 1) > 1 for trial in trials)
    for trial, *others in rates_of_settings(trials):
        objective, judged = trial.objective, judged_part(found, trial)
        row: Row = {"batch size": trial.batch_size}
        row |= {name: trial.hyperparameters.get(name) for name in names.hyperparameters}
        row |= {"dtype policy": trial.dtype_policy} if names.several_policies else {}
        row |= {"micro-batch size": trial.micro_batch_size} if cut else {}
        row["learning rate"] = starting_rate(trial)
        if FACTOR_NAME in trial.hyperparameters:
            row["rates tried"] = 1 + len(others)
        row |= ranged_columns("samples/s", trial.throughput)
        if quality is not None and quality.name != objective.name:
            row |= ranged_columns(metric_words(quality.name), trial.metric(quality.name))
        if not is_time(objective):
            row |= ranged_columns(metric_words(objective.name), judged.metric(objective.name))
        if trial.target is not None:
            costs = dict.fromkeys(("seconds_to_target", "updates_to_target", objective.name))
            row |= {_COSTS[name]: trial.cost(name) for name in costs if name in COST_NAMES}
        row |= _against_best(found, trial)
        if (scale := trial.noise_scale) is not None:
            row |= ranged_columns("noise scale (examples)", scale)
        if waited and trial.data_wait_share is not None:
            row["waiting for data (%)"] = 100 * trial.data_wait_share
        if (used := trial.mean(lambda e: e.usage and e.usage.gpu_utilization)) is not None:
            row["GPU utilization (%)"] = 100 * used
        if (joules := trial.mean(lambda e: e.joules_per_sample)) is not None:
            row["energy (J/sample)"] = joules
        rows.append(row | {"runs": len(trial.executions), "outcome": _outcome(found, trial)})
    every, last = dict.fromkeys(name for row in rows for name in row), ("runs", "outcome")
    columns = [*(name for name in every if name not in last), *last]
    return [{name: row.get(name) for name in columns} for row in rows]


def objective_column(objective: Objective) -> str:
    """Name the column that holds the objective."""
    return _COSTS.get(objective.name) or metric_words(objective.name)


def _pair(found: Decision, trial: TrialRecord) -> tuple[int, float] | None:
    """Return the pair that judges a trial, None where it is not compared."""
    pairs = found.judgement.pairs if found.judgement else ()
    compared = zip(found.trials, pairs, strict=False)
    return next((pair for one, pair in compared if one.trial_id == trial.trial_id), None)


def judged_part(found: Decision, trial: TrialRecord) -> TrialRecord:
    """Return a trial with the executions that judge it: the first of a race chose its pairs."""
    pair, count = _pair(found, trial), len(trial.executions)
    if found.judgement is None or pair is None or found.judgement.rounds[pair] != count - 1:
        return trial
    return dataclasses.replace(trial, executions=trial.executions[1:])


def _against_best(found: Decision, trial: TrialRecord) -> Row:
    """Write how much worse a trial is than the best mean, and its time over the least."""
    judgement, pair = found.judgement, _pair(found, trial)
    if judgement is None or pair is None or len(found.trials) < 2:
        return {}
    unit, factor = (" (points)", 100) if is_fraction(trial.objective.name) else ("", 1)
    gap = judgement.gaps.get(pair)
    gap = Estimate(0.0) if pair == judgement.leader else gap and gap.times(factor)
    return {**ranged_columns(f"worse by{unit}", gap), "relative time": judgement.costs.get(pair)}


def _outcome(found: Decision, trial: TrialRecord) -> str:
    """Say what is known of a trial: how it compares, why it is not compared, or how it ended."""
    if found.trial is not None and trial.trial_id == found.trial.trial_id:
        return "take"
    if (pair := _pair(found, trial)) is not None and found.judgement is not None:
        if trial.batch_size in found.worse:
            return "worse"
        if pair in found.judgement.certified and not found.judgement.obstacle:
            return "as good"
        return "not told apart" if trial.batch_size in found.tied else "best"
    why = {one.trial_id: reason for one, reason in found.left_out}
    if trial.trial_id in why:
        met = trial.target is None or trial.cost("updates_to_target") is not None
        return why[trial.trial_id] if met else "never met the target"
    ended = outcome(trial)
    if ended != "failed" or not trial.failure:
        return ended
    return f"{ended}: {one_line(trial.failure)[:_LONGEST_REASON]}"


def settings_of(study: "Study") -> dict[str, str]:
    """List the conditions of a study, a text each."""
    if not study.trials:
        return {}
    page, given = study.decide().page, study.search.settings if study.search else {}
    executions = [e for trial in study.trials for e in trial.executions]
    examples = [run.epochs[0].examples for run in trained_runs(study.trials)]

    def different(values: Iterable[object]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))

    found = {
        "searched": page.search,
        "compared": caption(study.trials, study.environment),
        "against the base size": page.change,
        "to train with it": page.settings,
        "plan": "" if study.plan is None else _plan_text(study.plan),
        **{name: json.dumps(value, ensure_ascii=False) for name, value in given.items()},
        "training data": f"{count_range(examples, 'example')} an epoch" if examples else "",
        "optimizer": different(e.optimizer for e in executions),
        "jit_compile": different(e.jit_compile for e in executions),
        "seeds of the executions": different(e.seed for e in executions),
    }
    return {name: text for name, text in found.items() if text}


def _plan_text(plan: Plan) -> str:
    """Say what a search settled before its first training."""
    most, cut = plan.micro_batch_size, plan.reason in ("given", "cut")
    size = f"micro-batches of up to {most:,}" if cut and most else "batches go through whole"
    why = {"given": "as given", "fits": "the largest fits", "cut": "the most that fit"}
    parts = {None: "", True: ", seen to train as the whole batch does", False: ", not exact"}
    size = f"{size} ({why.get(plan.reason, plan.reason)}){parts[plan.parts_equal]}"
    policy = plan.dtype_policy or "the policy of each trial"
    return f"number {plan.number}, made in {plan.duration_s:.1f} s: {policy}; {size}"
