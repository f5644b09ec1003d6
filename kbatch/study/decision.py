"""The decision that a study supports, in sentences, with how sure it is."""

from collections.abc import Iterable
from typing import NamedTuple

from kbatch.analysis.intervals import FEWEST_VALUES, Interval
from kbatch.document.number_text import counted, listed, percent, readable, setting
from kbatch.records.target import COST_NAMES
from kbatch.study.binding_limit import binding_limits
from kbatch.study.conditions import Conditions, budget_text, conditions_of, executions_text
from kbatch.study.metric_names import metric_words
from kbatch.study.no_decision import missing_reason, what_to_do
from kbatch.study.study_record import Study
from kbatch.study.trial import TrialRecord
from kbatch.study.trial_names import TrialNames, trial_names

_MOST_NAMED = 5


class Decision(NamedTuple):
    """The decision in sentences.

    Attributes:
        headline: Which batch size had the best objective.
        speed: Its throughput against the fastest, None if it was not measured or stands in the
            headline.
        limit: Which limit binds, None where the trials do not tell.
        compared: What was compared: sizes, budget, executions, device.
        certainty: How sure the order is, and how ties were decided.
    """

    headline: str
    speed: str | None
    limit: str | None
    compared: str
    certainty: str


def decision(study: Study) -> Decision:
    """Words the decision of a study with at least one trial."""
    best, names = study.best_trial(), trial_names(study.trials)
    if best is None:
        return Decision(
            headline=f"No batch size can be named: {missing_reason(study)}.",
            speed=None,
            limit=None,
            compared=_compared(study, names),
            certainty=what_to_do(study),
        )
    tied = _tied(study, best)
    return Decision(
        headline=_headline(best, tied, names),
        speed=_speed(study, best, names),
        limit=" ".join(limit.text for limit in binding_limits(study)) or None,
        compared=_compared(study, names),
        certainty=" ".join(filter(None, (_tie(tied, names), _certainty(study, best, names)))),
    )


def _tied(study: Study, best: TrialRecord) -> list[TrialRecord]:
    return [
        trial
        for trial in study.trials
        if trial is not best
        and trial.status == "completed"
        and trial.objective_value == best.objective_value
    ]


def _headline(best: TrialRecord, tied: list[TrialRecord], names: TrialNames) -> str:
    words, value = metric_words(best.objective.name), best.objective_value
    number = readable(value, 4) if value is not None else "n/a (not measured)"
    if best.objective.name in COST_NAMES and best.target is not None:
        words = f"{words} ({best.target.metric} {setting(best.target.value)})"
    unit = " samples/s" if best.objective.name == "samples_per_second" else ""
    others = f", tied with {counted(len(tied), 'other trial')}" if tied else ""
    return f"Batch size {names.name(best)} had the best {words}: {number}{unit}{others}."


def _tie(tied: list[TrialRecord], names: TrialNames) -> str:
    if not tied:
        return ""
    return (
        f"The same value was reached by batch size {_named(tied, names)}: of tied trials the "
        "first is named, the one with the smallest batch size."
    )


def _speed(study: Study, best: TrialRecord, names: TrialNames) -> str | None:
    rate = best.samples_per_second
    rates = [
        (trial.samples_per_second, trial)
        for trial in study.trials
        if trial.status == "completed" and trial.samples_per_second is not None
    ]
    if rate is None:
        return None
    fastest_rate, fastest = max(rates, key=lambda pair: pair[0])
    if fastest is best:
        if best.objective.name == "samples_per_second":
            return None
        return f"It was also the fastest, with {readable(rate)} samples/s."
    named = ", ".join((f"batch size {fastest.batch_size:,}", *names.settings(fastest)))
    return (
        f"It trained at {readable(rate)} samples/s, {percent(rate / fastest_rate)} of the fastest "
        f"trial ({named}, {readable(fastest_rate)} samples/s)."
    )


def _compared(study: Study, names: TrialNames) -> str:
    conditions = conditions_of(study)
    sizes = sorted({trial.batch_size for trial in study.trials})
    between = f" from {sizes[0]:,} to {sizes[-1]:,}" if len(sizes) > 1 else f" of {sizes[0]:,}"
    varied = ("dtype policy",) if names.several_policies else ()
    differ = (*names.hyperparameters, *varied)
    also = f" that differ in {listed(differ)} too" if differ else ""
    return (
        f"Compared: {counted(len(sizes), 'batch size')}{between} in "
        f"{counted(conditions.trials, 'trial')}{also}, {executions_text(conditions)}, "
        f"{_budget(conditions)}, on {conditions.device or 'a device that was not recorded'}"
        f"{conditions.clocks and f' ({conditions.clocks})'}."
    )


def _budget(conditions: Conditions) -> str:
    if conditions.epochs is None:
        return "none of them completed"
    text = budget_text(conditions)
    return f"trained {text}" if text.startswith("until") else f"trained for {text}"


def _certainty(study: Study, best: TrialRecord, names: TrialNames) -> str:
    others = [t for t in study.trials if t.status == "completed" and t is not best]
    if not others:
        return "It is the only trial that completed, so nothing was compared."
    if len(best.executions) == 1:
        return (
            "It is a single execution without an interval: whether it would win again is not known."
        )
    first = _interval(best)
    if first is None:
        return (
            f"It has {counted(len(best.executions), 'execution')}, too few for an interval: "
            "whether it would win again is not known."
        )
    intervals = [(trial, _interval(trial)) for trial in others]
    near = [trial for trial, second in intervals if second is None or _overlap(first, second)]
    if not near:
        return "Its 95 % interval overlaps that of no other trial."
    unknown = " or are not known" if any(second is None for _, second in intervals) else ""
    return (
        f"It cannot be told apart from batch size {_named(near, names)}: their 95 % intervals "
        f"overlap{unknown}."
    )


def _interval(trial: TrialRecord) -> Interval | None:
    """Gives the interval of the objective over executions, None for too few of them."""
    if len(trial.executions) < FEWEST_VALUES:
        return None
    return trial.objective_interval


def _overlap(first: Interval, second: Interval) -> bool:
    return first.low <= second.high and second.low <= first.high


def _named(trials: Iterable[TrialRecord], names: TrialNames) -> str:
    ordered = sorted(trials, key=lambda trial: (trial.batch_size, names.order(trial)))
    found = list(dict.fromkeys(names.name(trial) for trial in ordered))
    more = len(found) - _MOST_NAMED
    return listed([*found[:_MOST_NAMED], f"{more:,} more"] if more > 0 else found)
