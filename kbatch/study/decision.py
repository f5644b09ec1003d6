"""The decision that a study supports, in sentences, or why it supports none."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kbatch.analysis.batch_sizes import equal_parts
from kbatch.analysis.intervals import Interval
from kbatch.document.numbers import format_number, join_words, percent, pluralize, setting
from kbatch.records.training_run import COST_NAMES
from kbatch.study.conditions import budget_text, executions_text
from kbatch.study.names import (
    TrialNames,
    at_most,
    metric_words,
    noise_scale_text,
    outcome,
    trial_names,
)
from kbatch.study.study import SizeDecision, Study
from kbatch.study.trial import TrialRecord

# Above this share of the training time, waiting for data is what the samples/s show.
MUCH_DATA_WAIT = 0.2
# A gain in samples/s below this share is none: the device is saturated.
_SMALL_GAIN = 0.1


class Decision(NamedTuple):
    """The decision in sentences."""

    headline: str  # Which batch size had the best objective.
    # Its throughput against the fastest, None if it was not measured or stands in the headline.
    speed: str | None
    limit: str | None  # Which limit binds, None where the trials do not show it.
    compared: str  # Sizes, budget, executions and device.
    certainty: str  # How sure the order is, and how ties were decided.


def decision(study: Study) -> Decision:
    """Word the decision of a study with at least one trial."""
    best, names = study.best_trial(), trial_names(study.trials)
    compared = _compared(study, names)
    if best is None:
        headline = f"No batch size can be named: {missing_reason(study)}."
        return Decision(headline, None, None, compared, what_to_do(study))
    completed = [t for t in study.trials if t.status == "completed"]
    others = [t for t in completed if t is not best]
    tied = [t for t in others if t.objective_value == best.objective_value]
    tie = (
        f"The same value was reached by batch size {_named(tied, names)}: of tied trials, the one "
        "with the smallest batch size is named. "
        if tied
        else ""
    )
    return Decision(
        headline=_headline(best, tied, names),
        speed=_speed(completed, best, names),
        limit=" ".join(limit.text for limit in limits_at_best_trial(study)) or None,
        compared=compared,
        certainty=tie + _certainty(others, best, names),
    )


def _headline(best: TrialRecord, tied: list[TrialRecord], names: TrialNames) -> str:
    words, value = metric_words(best.objective.name), best.objective_value
    number = format_number(value, 4) if value is not None else "n/a (not measured)"
    if best.objective.name in COST_NAMES and best.target is not None:
        words = f"{words} ({best.target.metric} {setting(best.target.value)})"
    unit = " samples/s" if best.objective.name == "samples_per_second" else ""
    others = f", tied with {pluralize(len(tied), 'other trial')}" if tied else ""
    return f"Batch size {names.name(best)} had the best {words}: {number}{unit}{others}."


def _speed(completed: list[TrialRecord], best: TrialRecord, names: TrialNames) -> str | None:
    rate = best.samples_per_second
    if rate is None:
        return None
    fastest = max(completed, key=lambda trial: trial.samples_per_second or 0.0)
    fastest_rate = fastest.samples_per_second or rate
    if fastest is best:
        if best.objective.name == "samples_per_second":
            return None
        return f"It was also the fastest, with {format_number(rate)} samples/s."
    named = ", ".join((f"batch size {fastest.batch_size:,}", *names.settings(fastest)))
    return (
        f"It trained at {format_number(rate)} samples/s, {percent(rate / fastest_rate)} of the "
        f"fastest trial ({named}, {format_number(fastest_rate)} samples/s)."
    )


def _compared(study: Study, names: TrialNames) -> str:
    conditions = study.conditions
    sizes = sorted({trial.batch_size for trial in study.trials})
    between = f" from {sizes[0]:,} to {sizes[-1]:,}" if len(sizes) > 1 else f" of {sizes[0]:,}"
    differ = (*names.hyperparameters, *(("dtype policy",) if names.several_policies else ()))
    also = f" that differ in {join_words(differ)} too" if differ else ""
    if conditions.epochs is None:
        budget = "none of them completed"
    else:
        # The end of a training to a target is worded "until ...".
        to_target = next((t.target for t in study.trials if t.status == "completed"), None)
        budget = f"trained {'' if to_target else 'for '}{budget_text(conditions)}"
    return (
        f"Compared: {pluralize(len(sizes), 'batch size')}{between} in "
        f"{pluralize(conditions.trials, 'trial')}{also}, {executions_text(conditions)}, "
        f"{budget}, on {conditions.device or 'a device that was not recorded'}"
        f"{conditions.clocks and f' ({conditions.clocks})'}."
    )


def _certainty(others: list[TrialRecord], best: TrialRecord, names: TrialNames) -> str:
    if not others:
        return "It is the only trial that completed, so nothing was compared."
    if len(best.executions) == 1:
        return (
            "It is a single execution without an interval: whether it would win again is not known."
        )
    own = best.objective_interval
    if own is None:
        return (
            f"It has {pluralize(len(best.executions), 'execution')}, too few for an interval: "
            "whether it would win again is not known."
        )
    intervals = [trial.objective_interval for trial in others]
    near = [
        t for t, i in zip(others, intervals, strict=True) if not (_above(own, i) or _above(i, own))
    ]
    if not near:
        return "Its 95 % interval overlaps that of no other trial."
    unknown = " or are not known" if None in intervals else ""
    return (
        f"It cannot be told apart from batch size {_named(near, names)}: their 95 % intervals "
        f"overlap{unknown}."
    )


def _above(first: Interval | None, second: Interval | None) -> bool:
    """Return whether an interval is known to lie above another."""
    return first is not None and second is not None and first.low > second.high


def _named(trials: Iterable[TrialRecord], names: TrialNames) -> str:
    ordered = sorted(trials, key=lambda trial: (trial.batch_size, names.order(trial)))
    return join_words(at_most(list(dict.fromkeys(names.name(trial) for trial in ordered))))


def missing_reason(study: Study) -> str:
    """Word why no trial is the best, as the end of a sentence."""
    words = [outcome(trial) for trial in study.trials]
    if "completed" in words:
        return f"no completed trial has the objective {study.trials[0].objective.name}"
    kinds = join_words(f"{words.count(word):,} {word}" for word in dict.fromkeys(words))
    return f"none of {pluralize(len(words), 'trial')} completed ({kinds})"


def what_to_do(study: Study) -> str:
    """Advise what to change before the next search."""
    outcomes = {outcome(trial) for trial in study.trials}
    if "completed" in outcomes:
        return _missing_objective(study)
    if outcomes == {"out of memory"}:
        return "Search again with a smaller `micro_batch_size`, which needs less memory."
    if outcomes == {"diverged"}:
        return "Search again with a smaller learning rate, or with a model that stays finite."
    if outcomes <= {"running", "interrupted"}:
        return "The search has not finished: run it again, and it goes on."
    memory = (
        " Those out of memory need a smaller `micro_batch_size`."
        if "out of memory" in outcomes
        else ""
    )
    return f"Read the failures below, fix their cause, then search again.{memory}"


def _missing_objective(study: Study) -> str:
    objective = study.trials[0].objective.name
    if objective == "samples_per_second":
        return "Training was too short for its speed to be measured: train longer."
    if objective in COST_NAMES:
        return "No trial met the target in its budget: train longer, or set an easier target."
    epochs = [p for t in study.trials for e in t.executions for p in e.epochs]
    names = list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))
    if objective in names:
        return f"The objective {objective} was not finite in any epoch: check the metric."
    among = f"The objective {objective} was not among the metrics: {', '.join(names) or 'none'}."
    validated = any(name.startswith("val_") for name in names)
    if objective.startswith("val_") and not validated:
        return f"{among} Give `validation_data`, or search for another objective."
    return f"{among} Compile the model with that metric, or search for another objective."


class BindingLimit(NamedTuple):
    """What stands in the way of a larger batch size."""

    name: str  # Such as `"input pipeline"`, `"gradient noise"` or `"number of updates"`.
    text: str  # The evidence in a sentence.


def limits_at_best_trial(study: Study) -> tuple[BindingLimit, ...]:
    """Find which limits bind at the best trial.

    A trial is compared with those of larger batch sizes whose other settings are its own. Where
    it waits for data its samples/s say nothing about the device, so nothing else is asked.
    """
    best = study.best_trial()
    if best is None:
        return ()
    names = trial_names(study.trials)
    if (best.data_wait_share or 0) > MUCH_DATA_WAIT:
        return (
            BindingLimit(
                "input pipeline",
                "The input pipeline binds: training waited for data "
                f"{percent(best.data_wait_share or 0)} of its time at batch size "
                f"{names.name(best)}.",
            ),
        )
    larger = [
        trial
        for trial in study.trials
        if trial.batch_size > best.batch_size and names.settings(trial) == names.settings(best)
    ]
    # Where the device gains nothing, no gain is given up for the number of updates.
    device = _saturation(best, larger) or _updates(study, best, larger)
    limits = (_gradient_noise(best), _memory(best, larger), device)
    return tuple(limit for limit in limits if limit is not None)


def _gradient_noise(best: TrialRecord) -> BindingLimit | None:
    """Noise binds where the batch is clearly larger than the noise scale."""
    scale = best.noise_scale
    if scale is None or scale.value is None or scale.interval is None:
        return None
    if best.batch_size <= scale.interval.high:
        return None
    return BindingLimit(
        "gradient noise",
        "The gradient noise binds: the batch size lies above the noise scale of "
        f"{noise_scale_text(scale)} examples, beyond which a larger batch saves ever fewer "
        "updates.",
    )


def _memory(best: TrialRecord, larger: Sequence[TrialRecord]) -> BindingLimit | None:
    """Memory binds where every larger size ran out of it, or no more of the batch fitted at once.

    A batch may be cut since less at once is faster, too.
    """
    if larger and all(trial.status == "out_of_memory" for trial in larger):
        smallest = min(trial.batch_size for trial in larger)
        return BindingLimit(
            "memory",
            f"Memory binds: the next larger batch size, {smallest:,}, ran out of it. A smaller "
            "`micro_batch_size` needs less.",
        )
    run = best.executions[-1]
    rows, most, size = run.replica_batch_size, run.most_in_memory, best.micro_batch_size
    if most is None or size is None or not size < rows or size != equal_parts(rows, most):
        return None
    return BindingLimit(
        "memory",
        f"Memory binds: at most {most:,} examples fit in it at once, so the batch was cut into "
        f"micro-batches of {size:,}.",
    )


def _saturation(best: TrialRecord, larger: Sequence[TrialRecord]) -> BindingLimit | None:
    """The device is saturated where no larger micro-batch is faster, spread taken into account.

    A larger batch of micro-batches as large gives the device nothing more to do at once.
    """
    own, rows = best.samples_per_second_interval, best.micro_batch_size
    timed = [
        (rates.high, trial.micro_batch_size)
        for trial in larger
        if trial.status == "completed"
        and rows
        and (trial.micro_batch_size or 0) >= 2 * rows
        and (rates := trial.samples_per_second_interval) is not None
    ]
    if own is None or not timed or max(high for high, _ in timed) / own.low - 1 >= _SMALL_GAIN:
        return None
    return BindingLimit(
        "hardware saturation",
        f"The hardware is saturated: up to {max(size or 0 for _, size in timed):,} examples at "
        f"once no larger micro-batch trained {percent(_SMALL_GAIN)} faster.",
    )


def _updates(study: Study, best: TrialRecord, larger: Sequence[TrialRecord]) -> BindingLimit | None:
    """Updates bind where every larger batch was faster and, in the same epochs, learnt less."""
    conditions = study.conditions
    epochs = conditions.epochs
    if conditions.ends or epochs is None or epochs[0] != epochs[1]:
        return None
    completed = [trial for trial in larger if trial.status == "completed"]
    if not completed or study.quality_metric != best.objective:
        return None
    own_rates, own = best.samples_per_second_interval, best.objective_interval
    for trial in completed:
        faster = _above(trial.samples_per_second_interval, own_rates)
        value = trial.objective_interval
        if not faster or not (_above(value, own) or _above(own, value)):
            return None
    fastest = max(trial.samples_per_second or 0.0 for trial in completed)
    gain = fastest / best.samples_per_second if best.samples_per_second else 1.0
    return BindingLimit(
        "number of updates",
        f"The number of updates binds, not the device: larger batches trained up to "
        f"{format_number(gain, 2)} times as fast, but made fewer updates in the same epochs and "
        f"reached a worse {metric_words(best.objective.name)}.",
    )


# Of the decisions of a search by goodput, by their kind.
_SIZE_DECISIONS = {
    "pilot": "Batch size {size} comes first: it suits most noise scales",
    "given": (
        "Batch size {size} comes first: it is the base batch size, whose noise scale the "
        "learning-rate rule uses"
    ),
    "no target yet": "Batch size {size} comes next: no trial has reached the target yet",
    "gain": (
        "Batch size {size} comes next: batch size {rival} is more than 5 % better than {best} with "
        "a probability of {chance}"
    ),
    "separated": (
        "Stopped: no other batch size is likely to be as good as {best}; {rival} is more than 5 % "
        "better with a probability of {chance}"
    ),
    "tie": (
        "Stopped: other batch sizes may be as good as {best}, and are hardly better: {rival} is "
        "more than 5 % better with a probability of {chance}"
    ),
}
_ALL_TRIED = "Stopped: each batch size was tried, or is larger than one that could not be trained"


def decision_text(found: SizeDecision) -> str:
    """Word a decision of a search by goodput in a sentence."""
    if found.kind in _SIZE_DECISIONS:
        text = _SIZE_DECISIONS[found.kind].format(
            size=found.batch_size,
            best=found.best,
            rival=found.rival,
            chance=percent(found.probability or 0.0),
        )
    else:
        text = _ALL_TRIED if found.best else f"{_ALL_TRIED}. None reached the target"
    others = [f"{name} {value}" for name, value in found.hyperparameters.items()]
    return f"{text} ({join_words(others)})." if others else f"{text}."


def refuse_empty(study: Study) -> None:
    """Raise when there is nothing to show."""
    if study.trials:
        return
    problems = " ".join(study.problems)
    raise ValueError(
        f"The study {study.name!r} has no trial: run `tuner.search(x, y)` with a "
        "`kbatch.BatchSizeHyperModel`, or `kbatch demo`, then load it again. "
        + (f"What is missing: {problems} " if problems else "")
        + "Received: study.trials=()."
    )
