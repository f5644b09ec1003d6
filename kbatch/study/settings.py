"""What a search was made with and what else it found, as the folded part of its page."""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.analysis.rate_search import RateModel
from kbatch.page.numbers import count_range, format_number, in_brackets
from kbatch.records.search import Plan
from kbatch.study.comparison import other_hyperparameters, runs_of
from kbatch.study.names import caption, trained_runs
from kbatch.study.trial import TrialRecord

if TYPE_CHECKING:
    from kbatch.study.study import Study

# The slope of log rate against log batch size by each rule.
_SLOPES = {"linear": 1.0, "sqrt": 0.5}


def settings_of(study: "Study") -> dict[str, str]:
    """List what a study was made with, a text each."""
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
        "learning rate by batch size": _slope_text(study),
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


def _slope_text(study: "Study") -> str:
    """Say how the best learning rate grows with the batch size, where rates were searched."""
    best = study.decide().trial
    scaling = best and best.executions[0].scaling
    if best is None or scaling is None or FACTOR_NAME not in best.hyperparameters:
        return ""
    others = other_hyperparameters(best.hyperparameters)
    trials: Sequence[TrialRecord] = [
        t for t in study.trials if other_hyperparameters(t.hyperparameters) == others
    ]
    (runs, _), larger = runs_of(trials), best.objective.direction == "max"
    pairs = list(dict.fromkeys(run.pair for run in runs))
    tolerance = study.decide().tolerance or 0.01
    model = RateModel.of(runs, pairs, larger_is_better=larger, tolerance=tolerance)
    if model is None or len({size for size, _ in pairs}) < 2 or scaling.rule not in _SLOPES:
        return ""
    slope = model.slope(_SLOPES[scaling.rule])
    return (
        f"the best one grows as the batch size to the power of "
        f"{format_number(slope.value, 2)}{in_brackets(slope, 2)}; the linear rule takes 1, the "
        f"sqrt rule 0.5, both from the model's rate at batch size {scaling.base_batch_size:,}"
    )
