"""What the figure of the cost of a target shows, computed before anything is drawn."""

from collections.abc import Sequence
from typing import NamedTuple

from kbatch.analysis.intervals import mean_interval
from kbatch.analysis.steps_to_target import StepsToTarget, fit_steps_to_target
from kbatch.document.number_text import counted, listed, readable, setting
from kbatch.records.target import Cost, Target, cost_to_target
from kbatch.study.conditions import caption, conditions_of
from kbatch.study.empty_study import refuse_empty
from kbatch.study.estimates import Estimate, estimate
from kbatch.study.figures.incomplete import incomplete_text, none_completed
from kbatch.study.metric_names import metric_words
from kbatch.study.outcomes import outcome
from kbatch.study.study_record import Study
from kbatch.study.trial import TrialRecord


class TargetPoint(NamedTuple):
    """The cost of the target at one batch size, that of the trial that needed least updates.

    Attributes:
        batch_size: Examples of one optimizer update.
        trial_id: The trial that is shown.
        met: Whether every execution met the target.
        seconds: Seconds of training; all that were spent where it was not met.
        updates: Updates, likewise.
        runs: Updates of each execution that met it.
    """

    batch_size: int
    trial_id: str
    met: bool
    seconds: Estimate
    updates: Estimate
    runs: tuple[int, ...]


class TimeToTargetInfo(NamedTuple):
    """What the figure shows.

    Attributes:
        name: Name of the study.
        target: The target.
        points: One a batch size, ascending.
        incomplete_sizes: Batch sizes without any result, with the reason.
        fit: The fitted S_min (1 + B_crit / B), None where there are too few sizes that met it.
        fit_text: What the fit says, or why there is none.
        nothing: Why there is no point, an empty text where there is one.
        notes: Which trials are shown and what the bars are.
        incomplete: Which trials have no result, an empty text where all have one.
        conditions: Device, versions and budget.
    """

    name: str
    target: Target
    points: tuple[TargetPoint, ...]
    incomplete_sizes: tuple[tuple[int, str], ...]
    fit: StepsToTarget | None
    fit_text: str
    nothing: str
    notes: tuple[str, ...]
    incomplete: str
    conditions: str

    @property
    def met(self) -> tuple[TargetPoint, ...]:
        """The points that met the target."""
        return tuple(point for point in self.points if point.met)

    @property
    def target_text(self) -> str:
        """The target in words, such as `"validation accuracy ≥ 0.95"`."""
        sign = "≥" if self.target.direction == "max" else "≤"
        return f"{metric_words(self.target.metric)} {sign} {setting(self.target.value)}"


def time_to_target_info(study: Study, *, target: float | None = None) -> TimeToTargetInfo:
    """Computes what each batch size took to come to a target.

    Args:
        study: A study with at least one trial.
        target: Value of `study.quality_metric` to come to; that of `StopAtTarget` if None.

    Raises:
        ValueError: If the study is empty or has no target, with what to do.
    """
    refuse_empty(study)
    aim = _target(study, target)
    sizes = sorted({trial.batch_size for trial in study.trials})
    found = {size: _points(study, size, aim) for size in sizes}
    points = tuple(_least(candidates) for candidates in found.values() if candidates)
    fit = _fit(points)
    return TimeToTargetInfo(
        name=study.name,
        target=aim,
        points=points,
        incomplete_sizes=tuple(
            (size, _why(study, size)) for size, candidates in found.items() if not candidates
        ),
        fit=fit,
        fit_text=_fit_text(points, fit),
        nothing="" if points else none_completed(study),
        notes=tuple(_notes(study, points)),
        incomplete=incomplete_text(study) if points else "",
        conditions=caption(conditions_of(study)),
    )


def alt_text(info: TimeToTargetInfo) -> str:
    """Describes the figure in sentences, for those who do not see it."""
    if not info.points:
        return f"An empty chart of the cost of {info.target_text}. {info.nothing}."
    sentences = [
        f"Two charts over batch size on logarithmic axes: seconds of training, and updates, to "
        f"{info.target_text}.",
    ]
    if info.met:
        cost = listed(
            f"{p.updates.value:,.0f} updates and {readable(p.seconds.value)} s at batch size "
            f"{p.batch_size:,}"
            for p in info.met
        )
        sentences.append(f"It took {cost}.")
    missed = [f"{point.batch_size:,}" for point in info.points if not point.met]
    if missed:
        sentences.append(f"Batch size {listed(missed)} did not meet it.")
    return " ".join([*sentences, info.fit_text, *([info.incomplete] if info.incomplete else [])])


def _target(study: Study, value: float | None) -> Target:
    if value is not None:
        metric = study.quality_metric
        if metric is None:
            raise ValueError(
                "`target` is a value of the study's metric of quality, and no trial has one. "
                f"Received: target={value}."
            )
        return Target(metric.name, value, metric.direction)
    targets = dict.fromkeys(trial.target for trial in study.trials if trial.target is not None)
    if len(targets) == 1:
        return next(iter(targets))
    held = "several targets" if targets else "no target"
    raise ValueError(
        "A figure of the cost of a target needs one: give `target=0.95`, say (in a terminal "
        "`--target 0.95`), or search with `callbacks=[kbatch.StopAtTarget(monitor, value)]`. "
        f"Received: target=None, and a study with {held}."
    )


def _points(study: Study, size: int, target: Target) -> list[TargetPoint]:
    trials = [t for t in study.trials if t.batch_size == size and t.status == "completed"]
    return [_point(trial, target) for trial in trials if all(e.epochs for e in trial.executions)]


def _point(trial: TrialRecord, target: Target) -> TargetPoint:
    costs = [cost_to_target(target, execution.epochs) for execution in trial.executions]
    met = [cost for cost in costs if cost is not None]
    # What was not met in what was spent takes more than that.
    counted_costs = met if len(met) == len(costs) else [_spent(trial)]
    seconds = _of([cost.train_s for cost in counted_costs])
    updates = _of([float(cost.updates) for cost in counted_costs])
    return TargetPoint(
        trial.batch_size,
        trial.trial_id,
        len(met) == len(costs),
        seconds,
        updates,
        tuple(cost.updates for cost in met),
    )


def _spent(trial: TrialRecord) -> Cost:
    """Gives the most that an execution spent."""
    totals = [
        Cost(
            sum(epoch.train_s for epoch in execution.epochs),
            sum(epoch.updates for epoch in execution.epochs),
            sum(epoch.examples for epoch in execution.epochs),
        )
        for execution in trial.executions
    ]
    return max(totals, key=lambda cost: cost.updates)


def _of(values: Sequence[float]) -> Estimate:
    found = estimate(sum(values) / len(values), mean_interval(values))
    assert found is not None
    # A logarithmic axis has no place for what is not positive.
    if found.low is not None and found.low <= 0:
        return found._replace(low=min(values))
    return found


def _least(candidates: Sequence[TargetPoint]) -> TargetPoint:
    return min(candidates, key=lambda point: (not point.met, point.updates.value))


def _fit(points: Sequence[TargetPoint]) -> StepsToTarget | None:
    runs = [(p.batch_size, updates) for p in points if p.met for updates in p.runs]
    if len(runs) < 3 or len({size for size, _ in runs}) < 3:
        return None
    return fit_steps_to_target(*zip(*runs, strict=True))


def _fit_text(points: Sequence[TargetPoint], fit: StepsToTarget | None) -> str:
    if fit is None:
        met = sum(point.met for point in points)
        return (
            "No curve is fitted: it needs three batch sizes that met the target, and "
            f"{counted(met, 'size')} did."
        )
    critical = fit.critical_batch_size
    begun = "Fitted updates: S_min (1 + B_crit / B)"
    if critical.value is None or critical.interval is None:
        bound = f", above {readable(critical.at_least)}" if critical.at_least else ""
        return f"{begun}; B_crit is larger than these batch sizes can tell{bound}."
    doubt = " The trials leave this curve by more than their noise." if fit.holds is False else ""
    return (
        f"{begun}, S_min {readable(fit.fewest_steps)}, B_crit {readable(critical.value)} "
        f"({readable(critical.interval.low)} to {readable(critical.interval.high)}).{doubt}"
    )


def _notes(study: Study, points: Sequence[TargetPoint]) -> list[str]:
    notes = [
        "The target is looked at when an epoch ends: costs are those of whole epochs. Training "
        "time has the tracing of the first step in it, but no validation."
    ]
    if len(study.trials) > len({trial.batch_size for trial in study.trials}):
        notes.append("Shown: the trial of each batch size that needed the fewest updates.")
    if any(point.updates.bar for point in points):
        notes.append("Bars: 95 % interval of the mean over executions.")
    rules = {e.learning_rate_scaling for t in study.trials for e in t.executions}
    if rules == {None}:
        notes.append(
            "One learning rate for all batch sizes: large ones may need more updates for it alone."
        )
    return notes


def _why(study: Study, size: int) -> str:
    words = (outcome(t) for t in study.trials if t.batch_size == size and t.status != "completed")
    return ", ".join(dict.fromkeys(words)) or "no epochs"
