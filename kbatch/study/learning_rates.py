"""What a joint search found of the learning rate: the best rate of each size, and its slope."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kbatch.analysis.joint_search import FACTOR_NAME, PairModel, PairRun
from kbatch.analysis.learning_rate import LearningRateScaling
from kbatch.document.numbers import format_number, interval_text, setting
from kbatch.document.tables import Cell, Column, Row, Table
from kbatch.study.names import metric_words
from kbatch.study.study import Study
from kbatch.study.trial import TrialRecord

# The slope of log rate against log batch size by each rule.
_SLOPES = {"linear": 1.0, "sqrt": 0.5}


def pair_runs(trials: Iterable[TrialRecord]) -> list[PairRun]:
    """Return the executions of a joint search that ended, as its model takes them."""
    found = []
    for trial in trials:
        factor = trial.hyperparameters.get(FACTOR_NAME)
        if not isinstance(factor, (int, float)):
            continue
        pair = trial.batch_size, float(factor or 1)
        for run, value in zip(trial.executions, trial.objective_values, strict=True):
            if run.status == "completed":
                found.append(PairRun(*pair, value))
            elif run.diverged or run.status in ("failed", "out_of_memory"):
                outcome = "diverged" if run.diverged else run.status
                found.append(PairRun(*pair, None, outcome))
    return found


def learning_rate_table(study: Study) -> Table | None:
    """Write the best learning rate of each size beside the rules'; None if it was not searched."""
    decision = study.decide()
    best, scaling = decision.trial, decision.trial and decision.trial.executions[0].scaling
    if best is None or scaling is None or FACTOR_NAME not in best.hyperparameters:
        return None
    own = other_hyperparameters(best.hyperparameters)
    trials = [t for t in study.trials if other_hyperparameters(t.hyperparameters) == own]
    by_size: dict[int, list[TrialRecord]] = {}
    for trial in trials:
        if trial.objective_value is not None and trial.executions[0].scaling is not None:
            by_size.setdefault(trial.batch_size, []).append(trial)
    rows = []
    for _, tried in sorted(by_size.items()):
        found = min(tried, key=lambda t: (-len(t.executions), t.rank))
        rows.append(_row(found, len(tried), best=found is best))
    words = metric_words(best.objective.name)
    titles = ("Batch size", "Best learning rate", "Linear rule", "Sqrt rule", "Rates tried")
    titles = (*titles, "Executions of the best", words[0].upper() + words[1:])
    return Table(
        title="Learning rate of each batch size",
        columns=tuple(Column(title, True) for title in titles),
        rows=tuple(rows),
        footnote=_slope_text(trials, scaling, decision.tolerance or 0.01),
        best_means="the pair to take",
    )


def _row(trial: TrialRecord, tried: int, *, best: bool) -> Row:
    scaling, value = trial.executions[0].scaling, trial.objective_value
    assert scaling is not None
    base = scaling.learning_rate / scaling.learning_rate_ratio
    rates = (scaling.learning_rate, base * scaling.kappa, base * scaling.kappa**0.5)
    cells = [
        Cell(f"{trial.batch_size:,}", trial.batch_size),
        *(Cell(setting(rate), rate) for rate in rates),
        *(Cell(f"{count:,}", count) for count in (tried, len(trial.executions))),
        Cell(format_number(value or 0.0, 4), value),
    ]
    return Row(trial.trial_id, trial.status, best, tuple(cells))


def _slope_text(
    trials: Sequence[TrialRecord], scaling: LearningRateScaling, tolerance: float
) -> str:
    runs, larger = pair_runs(trials), trials[0].objective.direction == "max"
    pairs = list(dict.fromkeys((run.batch_size, run.factor) for run in runs))
    model = PairModel.of(runs, pairs, larger_is_better=larger, tolerance=tolerance)
    if model is None or len({size for size, _ in pairs}) < 2 or scaling.rule not in _SLOPES:
        return ""
    slope, interval = model.slope(_SLOPES[scaling.rule])
    return (
        "The best learning rate grows as the batch size to the power of "
        f"{format_number(slope, 2)} ({interval_text(interval, 2)}); the linear rule takes 1, the "
        f"sqrt rule 0.5, both from the model's rate at batch size {scaling.base_batch_size:,}."
    )


def other_hyperparameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters beside batch size and learning rate."""
    return {name: v for name, v in values.items() if name not in ("batch_size", FACTOR_NAME)}
