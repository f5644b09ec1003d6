"""The decision that a study supports, in sentences, with how sure it is."""

from typing import NamedTuple

from kbatch.records.study import Study
from kbatch.records.trial import Objective, TrialRecord
from kbatch.reporting.conditions import (
    STATUS_WORDS,
    Conditions,
    conditions_of,
    epochs_text,
    executions_text,
)
from kbatch.reporting.metric_names import metric_words
from kbatch.reporting.number_text import counted, listed, percent, readable


class Decision(NamedTuple):
    """The decision in sentences.

    Attributes:
        headline: Which batch size had the best objective.
        speed: Its throughput against the fastest, None if it was not measured.
        compared: What was compared: sizes, budget, executions, device.
        certainty: How sure the order is.
    """

    headline: str
    speed: str | None
    compared: str
    certainty: str


def decision(study: Study) -> Decision:
    """Words the decision of a study with at least one trial."""
    best = study.best_trial()
    if best is None:
        return _no_decision(study)
    return Decision(
        headline=_headline(study, best),
        speed=_speed(study, best),
        compared=_compared(study),
        certainty=_certainty(study, best),
    )


def _no_decision(study: Study) -> Decision:
    completed = [trial for trial in study.trials if trial.status == "completed"]
    if completed:
        reason = f"no completed trial has the objective {study.trials[0].objective.name}"
    else:
        words = [STATUS_WORDS[trial.status] for trial in study.trials]
        kinds = listed(f"{words.count(word):,} {word}" for word in dict.fromkeys(words))
        reason = f"none of {counted(len(words), 'trial')} completed ({kinds})"
    return Decision(
        headline=f"No batch size can be named: {reason}.",
        speed=None,
        compared=_compared(study),
        certainty="Read the failures below, then search again; a smaller micro-batch size "
        "needs less memory.",
    )


def _headline(study: Study, best: TrialRecord) -> str:
    several = len({trial.dtype_policy for trial in study.trials}) > 1
    policy = f" under {best.dtype_policy}" if several else ""
    words, value = metric_words(best.objective.name), best.objective_value
    number = readable(value, 4) if value is not None else "n/a (not measured)"
    unit = " samples/s" if best.objective.name == "samples_per_second" else ""
    return f"Batch size {best.batch_size:,}{policy} had the best {words}: {number}{unit}."


def _speed(study: Study, best: TrialRecord) -> str | None:
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
        return f"It was also the fastest, with {readable(rate)} samples/s."
    return (
        f"It trained at {readable(rate)} samples/s, {percent(rate / fastest_rate)} of the fastest "
        f"trial (batch size {fastest.batch_size:,}, {readable(fastest_rate)} samples/s)."
    )


def _compared(study: Study) -> str:
    conditions = conditions_of(study)
    sizes = sorted({trial.batch_size for trial in study.trials})
    between = f" from {sizes[0]:,} to {sizes[-1]:,}" if len(sizes) > 1 else f" of {sizes[0]:,}"
    return (
        f"Compared: {counted(len(sizes), 'batch size')}{between} in "
        f"{counted(conditions.trials, 'trial')}, {executions_text(conditions)}, "
        f"{_budget(conditions)}, on {conditions.device or 'a device that was not recorded'}."
    )


def _budget(conditions: Conditions) -> str:
    if conditions.epochs is None:
        return "none of them completed"
    return f"trained for {epochs_text(conditions.epochs)}"


def _certainty(study: Study, best: TrialRecord) -> str:
    others = [t for t in study.trials if t.status == "completed" and t is not best]
    if not others:
        return "It is the only trial that completed, so nothing was compared."
    if len(best.executions) == 1:
        return (
            "It is a single execution without an interval: whether it would win again is not known."
        )
    ties = [trial for trial in others if _overlap(best, trial, best.objective)]
    if not ties:
        return "Its 95 % interval overlaps that of no other trial."
    sizes = listed(dict.fromkeys(f"{trial.batch_size:,}" for trial in ties))
    return f"It cannot be told apart from batch size {sizes}: their 95 % intervals overlap."


def _overlap(best: TrialRecord, other: TrialRecord, objective: Objective) -> bool:
    """Whether two trials may be equally good; without an interval that is not excluded."""
    if objective.name == "samples_per_second":
        first, second = best.samples_per_second_interval, other.samples_per_second_interval
    else:
        first = best.metric_interval(objective.name)
        second = other.metric_interval(objective.name)
    if first is None or second is None:
        return True
    return first.low <= second.high and second.low <= first.high
