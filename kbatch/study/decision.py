"""The decision that a study supports, in sentences, or why it supports none."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kbatch.analysis.batch_sizes import equal_parts
from kbatch.analysis.intervals import FEWEST_VALUES, Interval
from kbatch.document.numbers import counted, listed, percent, readable, setting
from kbatch.records.training_run import COST_NAMES
from kbatch.study.caveats import MUCH_DATA_WAIT
from kbatch.study.conditions import Conditions, budget_text, conditions_of, executions_text
from kbatch.study.names import TrialNames, metric_words, outcome, trial_names
from kbatch.study.notes import noise_scale_text
from kbatch.study.study import Study
from kbatch.study.trial import TrialRecord

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
    """Word the decision of a study with at least one trial."""
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
    """Return the interval of the objective over executions, None for too few of them."""
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


def missing_reason(study: Study) -> str:
    """Word why no trial is the best, as the end of a sentence."""
    words = [outcome(trial) for trial in study.trials]
    if "completed" in words:
        return f"no completed trial has the objective {study.trials[0].objective.name}"
    kinds = listed(f"{words.count(word):,} {word}" for word in dict.fromkeys(words))
    return f"none of {counted(len(words), 'trial')} completed ({kinds})"


def what_to_do(study: Study) -> str:
    """Advises what to change before the next search."""
    outcomes = {outcome(trial) for trial in study.trials}
    if "completed" in outcomes:
        return _missing_objective(study)
    if outcomes == {"out of memory"}:
        return "Search again with a smaller `micro_batch_size`, which needs less memory."
    if outcomes == {"diverged"}:
        return "Search again with a smaller learning rate, or with a model that stays finite."
    if outcomes <= {"running", "interrupted"}:
        return "Let the search come to its end: run it again."
    memory = (
        " Those out of memory need a smaller `micro_batch_size`."
        if "out of memory" in outcomes
        else ""
    )
    return f"Read the failures below, mend their cause, then search again.{memory}"


def _missing_objective(study: Study) -> str:
    objective = study.trials[0].objective.name
    if objective == "samples_per_second":
        return "Training was too short for its speed to be measured: train longer."
    if objective in COST_NAMES:
        return "No trial met the target in its budget: train longer, or for a target nearer by."
    epochs = [p for t in study.trials for e in t.executions for p in e.epochs]
    names = list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))
    if objective in names:
        return f"The objective {objective} was not finite in any epoch: mend the metric."
    among = f"The objective {objective} was not among the metrics: {', '.join(names) or 'none'}."
    validated = any(name.startswith("val_") for name in names)
    if objective.startswith("val_") and not validated:
        return f"{among} Give `validation_data`, or search for another objective."
    return f"{among} Compile the model with that metric, or search for another objective."


# A gain in samples/s below this share is none: the device is saturated.
_SMALL_GAIN = 0.1


class BindingLimit(NamedTuple):
    """What stands in the way of a larger batch size.

    Attributes:
        name: `"input pipeline"`, `"gradient noise"`, `"memory"`, `"hardware saturation"` or
            `"number of updates"`.
        text: The evidence in a sentence.
    """

    name: str
    text: str


def binding_limits(study: Study) -> tuple[BindingLimit, ...]:
    """Find which limits bind at the best trial.

    A trial is compared with those of larger batch sizes whose other settings are its own. Where
    it waits for data its samples/s say nothing about the device, so nothing else is asked.
    """
    best = study.best_trial()
    if best is None:
        return ()
    names = trial_names(study.trials)
    waiting = _input_pipeline(best, names)
    if waiting is not None:
        return (waiting,)
    larger = [
        trial
        for trial in study.trials
        if trial.batch_size > best.batch_size and names.settings(trial) == names.settings(best)
    ]
    # Where the device gains nothing, no gain is given up for the number of updates.
    device = _saturation(best, larger) or _updates(study, best, larger)
    limits = (_gradient_noise(best), _memory(larger) or _cut_by_memory(best), device)
    return tuple(limit for limit in limits if limit is not None)


def _input_pipeline(best: TrialRecord, names: TrialNames) -> BindingLimit | None:
    share = best.mean(lambda e: e.data_wait_share)
    if share is None or share <= MUCH_DATA_WAIT:
        return None
    return BindingLimit(
        "input pipeline",
        f"The input pipeline binds: training waited for data {percent(share)} of its time at batch "
        f"size {names.name(best)}.",
    )


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


def _memory(larger: Sequence[TrialRecord]) -> BindingLimit | None:
    """Memory binds where the next larger size, and so every one, ran out of it."""
    if not larger or any(trial.status != "out_of_memory" for trial in larger):
        return None
    smallest = min(trial.batch_size for trial in larger)
    return BindingLimit(
        "memory",
        f"Memory binds: the next larger batch size, {smallest:,}, ran out of it. A smaller "
        "`micro_batch_size` needs less.",
    )


def _cut_by_memory(best: TrialRecord) -> BindingLimit | None:
    """Memory binds where a batch was cut since no more of it fitted, not since less is faster."""
    execution = best.executions[-1]
    rows, most, size = execution.replica_batch_size, execution.most_in_memory, best.micro_batch_size
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
    rate, rows = _spread(best), best.micro_batch_size
    if rows is None:
        return None
    rates = [
        (spread[1], trial)
        for trial in larger
        if trial.status == "completed"
        and (trial.micro_batch_size or 0) >= 2 * rows
        and (spread := _spread(trial)) is not None
    ]
    if rate is None or not rates:
        return None
    most = max(high for high, _ in rates) / rate[0] - 1
    if most >= _SMALL_GAIN:
        return None
    largest = max(trial.micro_batch_size or 0 for _, trial in rates)
    return BindingLimit(
        "hardware saturation",
        f"The hardware is saturated: up to {largest:,} examples at once no larger micro-batch "
        f"trained {percent(_SMALL_GAIN)} faster.",
    )


def _updates(study: Study, best: TrialRecord, larger: Sequence[TrialRecord]) -> BindingLimit | None:
    """Update bind where every larger batch was faster and, in the same epochs, learnt less."""
    conditions = conditions_of(study)
    epochs = conditions.epochs
    if conditions.ends or epochs is None or epochs[0] != epochs[1]:
        return None
    completed = [trial for trial in larger if trial.status == "completed"]
    if not completed or study.quality_metric != best.objective:
        return None
    if not all(_clearly_faster(trial, best) and _clearly_worse(trial, best) for trial in completed):
        return None
    fastest = max(trial.samples_per_second or 0.0 for trial in completed)
    gain = fastest / best.samples_per_second if best.samples_per_second else 1.0
    return BindingLimit(
        "number of updates",
        f"The number of updates binds, not the device: larger batches trained up to "
        f"{readable(gain, 2)} times as fast, but made fewer updates in the same epochs and came to "
        f"a worse {metric_words(best.objective.name)}.",
    )


def _clearly_faster(trial: TrialRecord, other: TrialRecord) -> bool:
    first, second = _spread(trial), _spread(other)
    return first is not None and second is not None and first[0] > second[1]


def _clearly_worse(trial: TrialRecord, best: TrialRecord) -> bool:
    first, second = trial.objective_interval, best.objective_interval
    if first is None or second is None:
        return False
    return first.high < second.low or first.low > second.high


def _spread(trial: TrialRecord) -> tuple[float, float] | None:
    """Return the ends of the interval of a trial's samples/s, None where they are not known."""
    interval = trial.samples_per_second_interval
    return None if interval is None else (interval.low, interval.high)


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
