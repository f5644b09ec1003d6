"""The answer of a study in sentences, why it has none, and which limits bind at it."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kbatch.analysis.batch_sizes import equal_parts
from kbatch.analysis.intervals import Interval
from kbatch.document.numbers import (
    count_range,
    format_number,
    in_brackets,
    join_words,
    percent,
    pluralize,
    setting,
)
from kbatch.records.training_run import COST_NAMES
from kbatch.study.decision import Decision, SizeChange, tolerance_text
from kbatch.study.names import (
    MOST_NAMED,
    TrialNames,
    at_most,
    budget_text,
    is_fraction,
    metric_words,
    missing_text,
    noise_scale_text,
    outcome,
    trial_names,
)
from kbatch.study.study import Study, as_compared
from kbatch.study.trial import TrialRecord, device_kinds


class Answer(NamedTuple):
    headline: str  # Which batch size to take.
    certainty: str  # Why, and how sure that is.
    change: str | None  # What it changes against the base size, None without one.
    # Its throughput against the fastest, None if it was not measured or stands in the headline.
    speed: str | None
    limit: str | None  # Which limit binds, None where the trials do not show it.
    compared: str  # Sizes, budget, executions and device.


def answer(study: Study) -> Answer:
    """Word the answer of a study with at least one trial."""
    found, names = study.decide(), trial_names(study.trials)
    missing = missing_text(study.missing)
    compared = _compared(study, names)
    if found.trial is None or found.best is None:
        headline = f"No batch size can be named: {missing_reason(study)}. {missing}".strip()
        return Answer(headline, what_to_do(study), None, None, None, compared)
    value, tie = found.best.objective_value, ""
    same = [one.trial for one in found.left_out if one.trial.objective_value == value]
    if same and found.trial is found.best:
        ordered = sorted(same, key=lambda trial: (trial.batch_size, names.order(trial)))
        tied = at_most(list(dict.fromkeys(map(names.name, ordered))))
        tie = (
            f"The same value was reached by batch size {join_words(tied)}: of tied trials, the one "
            "with the smallest batch size is named. "
        )
    counts = Counter(other.why for other in found.left_out)
    parts = (f"{pluralize(count, 'trial')} ({why})" for why, count in counts.items())
    left_out = f" Not compared: {join_words(parts)}." if counts else ""
    named = _headline(found, same, names)
    return Answer(
        headline=f"{named} {missing}".strip(),
        certainty=f"{tie}{found.reason}{left_out}",
        change=_change(study, found),
        speed=_speed(as_compared(study).trials, found, names),
        limit=" ".join(binding_limits(study)) or None,
        compared=compared,
    )


def _headline(found: Decision, same: list[TrialRecord], names: TrialNames) -> str:
    trial, best = found.trial, found.best
    assert trial is not None and best is not None
    words, value = metric_words(best.objective.name), best.objective_value
    number = format_number(value, 4) if value is not None else "n/a (not measured)"
    if best.objective.name in COST_NAMES and best.target is not None:
        words = f"{words} ({best.target.metric} {setting(best.target.value)})"
    number += " samples/s" * (best.objective.name == "samples_per_second")
    who = f"Batch size {names.name(trial)}"
    if trial is not best:
        near = f"within {tolerance_text(found)} of the best, {number} at {best.batch_size:,}"
        if found.certain:
            return f"{who} is the fastest whose {words} is {near}."
        if found.certified:
            return f"{who} has a {words} certified to lie {near}; a faster size may have one too."
        return f"{who} has a {words} {near}, on these validation examples."
    if others := [size for size in found.tied if size != found.batch_size and not found.certain]:
        named = join_words(at_most([f"{size:,}" for size in others]))
        if len(others) > MOST_NAMED and not found.worse and not found.left_out:
            named = "the others"
        return f"{who} had the best {words}, {number}, but is not told apart from {named}."
    tied = f", tied with {pluralize(len(same), 'other trial')}" if same else ""
    return f"{who} had the best {words}: {number}{tied}."


def _change(study: Study, found: Decision) -> str | None:
    """Word what the size that is named changes against the base size, or the best other size."""
    if found.base_batch_size is None or found.trial is None or found.best is None:
        return None
    # Where the base size is the answer: the fastest of the sizes that are as good.
    other = max(found.changes, key=lambda b: (b in found.tied, found.changes[b].speedup or 0.0))
    named = (found.trial.batch_size, found.best.batch_size)
    size = next((b for b in named if b in found.changes), other)
    change, target, parts = found.changes[size], found.trial.target, []
    speedup, bounds, compared = change.speedup, change.speedup_interval, "sooner"
    if speedup is not None:
        if speedup < 1:
            bounds = bounds and Interval(1 / bounds.high, 1 / bounds.low)
            speedup, compared = 1 / speedup, "longer"
        parts.append(f"{format_number(speedup, 2)} times {compared}{in_brackets(bounds, 2)}")
    if metric := difference_text(found, change):
        parts.append(f"{metric_words(found.best.objective.name)} {metric}")
    at = f"in {budget_text(study.conditions)} each"
    if target:
        at = f"to {target.metric} {setting(target.value)}"
    alone = metric and found.executions == 1
    of = "; the interval of the metric is that of the validation examples alone" if alone else ""
    return f"{found.base_batch_size:,} -> {size:,}: {', '.join(parts)}, {at}{of}."


def sooner_text(change: SizeChange) -> str:
    """Write how many times sooner training ends, empty where that is not known."""
    if change.speedup is None:
        return ""
    return f"{format_number(change.speedup, 2)}{in_brackets(change.speedup_interval, 2)}"


def difference_text(found: Decision, change: SizeChange) -> str:
    """Write the difference of the metric with its sign and interval, empty where there is none."""
    value, bounds = change.difference, change.difference_interval
    if value is None or found.best is None:
        return ""
    fraction = is_fraction(found.best.objective.name)

    def signed(number: float) -> str:
        text = f"{100 * number:.1f}" if fraction else format_number(number, 2)
        return text if float(text.replace(",", "")) <= 0 else f"+{text}"

    unit = " %" if fraction else ""
    between = f" ({signed(bounds.low)} to {signed(bounds.high)})" if bounds else ""
    return f"{signed(value)}{unit}{between}".replace("-0.0 ", "0.0 ")


def _speed(trials: Sequence[TrialRecord], found: Decision, names: TrialNames) -> str | None:
    """Compare the throughput with that of the fastest trial, of those as good where there are."""
    own, rate = found.trial, found.trial and found.trial.samples_per_second
    if own is None or rate is None:
        return None
    completed = [trial for trial in trials if trial.status == "completed"]
    near = [trial for trial in completed if len(device_kinds([trial, own])) < 2]
    if len(near) < min(2, len(completed)):
        return f"It trained at {format_number(rate)} samples/s."
    among = [trial for trial in near if trial.batch_size in found.tied] or near
    fastest = max(among, key=lambda trial: trial.samples_per_second or 0.0)
    fastest_rate = fastest.samples_per_second or rate
    if fastest.trial_id == own.trial_id:
        them = " of them" if found.tied else ""
        text = f"It was also the fastest{them}, with {format_number(rate)} samples/s."
        return None if own.objective.name == "samples_per_second" else text
    named = ", ".join((f"batch size {fastest.batch_size:,}", *names.settings(fastest)))
    return (
        f"It trained at {format_number(rate)} samples/s, {percent(rate / fastest_rate)} of the "
        f"fastest {'of them' if found.tied else 'trial'} ({named}, {format_number(fastest_rate)} "
        "samples/s)."
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
        f"{pluralize(conditions.trials, 'trial')}{also}, "
        f"{count_range(conditions.executions, 'execution')} each, {budget}, on "
        f"{conditions.device or 'a device that was not recorded'}."
    )


def missing_reason(study: Study) -> str:
    """Word why no trial is the best, as the end of a sentence."""
    words = [outcome(trial) for trial in study.trials]
    if "completed" in words:
        return f"no completed trial has the objective {study.trials[0].objective.name}"
    kinds = join_words(f"{words.count(word):,} {word}" for word in dict.fromkeys(words))
    return f"none of {pluralize(len(words), 'trial')} completed ({kinds})"


def what_to_do(study: Study) -> str:
    outcomes = {outcome(trial) for trial in study.trials}
    if "completed" in outcomes:
        objective = study.trials[0].objective.name
        if objective == "samples_per_second":
            return "Training was too short for its speed to be measured: train longer."
        if objective in COST_NAMES:
            return "No trial met the target in its budget: train longer, or set an easier target."
        epochs = [p for t in study.trials for e in t.executions for p in e.epochs]
        names = list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))
        if objective in names:
            return f"The objective {objective} was not finite in any epoch: check the metric."
        advice = "Compile the model with that metric"
        if objective.startswith("val_") and not any(name.startswith("val_") for name in names):
            advice = "Give `validation_data`"
        return (
            f"The objective {objective} was not among the metrics: {', '.join(names) or 'none'}. "
            f"{advice}, or search for another objective."
        )
    if outcomes == {"out of memory"}:
        return "Search again with a smaller `micro_batch_size`, which needs less memory."
    if outcomes == {"diverged"}:
        return "Search again with a smaller learning rate, or with a model that stays finite."
    if outcomes <= {"running", "interrupted"}:
        return "The search has not finished. If it no longer runs, start it again: it continues."
    advice = "Read the failures below, fix their cause, then search again."
    if "out of memory" in outcomes:
        advice += " Those out of memory need a smaller `micro_batch_size`."
    return advice


# Above this share of the training time, waiting for data is what the samples/s show.
MUCH_DATA_WAIT = 0.2
# A gain in samples/s below this share is none: the device is saturated.
_SMALL_GAIN = 0.1


def binding_limits(study: Study) -> tuple[str, ...]:
    # It is compared with those of larger batch sizes whose other settings are its own. Where it
    # waits for data its samples/s say nothing about the device, so nothing else is asked.
    best = study.decide().trial
    if best is None:
        return ()
    names = trial_names(study.trials)
    if (waited := best.data_wait_share or 0) > MUCH_DATA_WAIT:
        return (
            f"The input pipeline binds: training waited for data {percent(waited)} of its time at "
            f"batch size {names.name(best)}.",
        )
    larger = [
        trial
        for trial in study.trials
        if trial.batch_size > best.batch_size
        and names.settings(trial) == names.settings(best)
        and len(device_kinds([trial, best])) < 2
    ]
    noise, scale = None, best.noise_scale
    if scale is not None and scale.interval is not None and best.batch_size > scale.interval.high:
        noise = (
            "The gradient noise binds: the batch size lies above the noise scale of "
            f"{noise_scale_text(scale)} examples, beyond which a larger batch saves ever fewer "
            "updates."
        )
    # Where the device gains nothing, no gain is given up for the number of updates.
    device = _saturation(best, larger) or _updates(study, best, larger)
    return tuple(filter(None, (noise, _memory(best, larger), device)))


def _memory(best: TrialRecord, larger: Sequence[TrialRecord]) -> str | None:
    """Memory binds where every larger size ran out, or no more of the batch fitted at once."""
    if larger and all(trial.status == "out_of_memory" for trial in larger):
        smallest = min(trial.batch_size for trial in larger)
        return (
            f"Memory binds: the next larger batch size, {smallest:,}, ran out of it. A smaller "
            "`micro_batch_size` needs less."
        )
    run = best.executions[-1]
    rows, most, size = run.replica_batch_size, run.most_in_memory, best.micro_batch_size
    # A batch may also be cut because less at once is faster.
    if most is None or size is None or not size < rows or size != equal_parts(rows, most):
        return None
    return (
        f"Memory binds: at most {most:,} examples fit in it at once, so the batch was cut into "
        f"micro-batches of {size:,}."
    )


def _saturation(best: TrialRecord, larger: Sequence[TrialRecord]) -> str | None:
    """The device is saturated where no larger micro-batch is faster, spread taken into account."""
    own, rows = best.samples_per_second_interval, best.micro_batch_size
    timed = [
        (rates.high, trial.micro_batch_size)
        for trial in larger
        if trial.status == "completed"
        and rows
        # A larger batch of equal micro-batches gives the device no more to do at once.
        and (trial.micro_batch_size or 0) >= 2 * rows
        and (rates := trial.samples_per_second_interval) is not None
    ]
    if own is None or not timed or max(high for high, _ in timed) / own.low - 1 >= _SMALL_GAIN:
        return None
    return (
        f"The hardware is saturated: up to {max(size or 0 for _, size in timed):,} examples at "
        f"once no larger micro-batch trained {percent(_SMALL_GAIN)} faster."
    )


def _updates(study: Study, best: TrialRecord, larger: Sequence[TrialRecord]) -> str | None:
    """Updates bind where every larger batch was faster and, in the same epochs, learnt less."""
    ends, epochs = study.conditions.ends, study.conditions.epochs
    completed = [trial for trial in larger if trial.status == "completed"]
    if ends or epochs is None or epochs[0] != epochs[1] or not completed:
        return None
    own_rates, own = best.samples_per_second_interval, best.objective_interval
    made = best.mean(lambda e: e.updates)
    for trial in completed:
        updates = trial.mean(lambda e: e.updates)
        if made is None or updates is None or updates >= made:  # As with `steps_per_epoch`.
            return None
        faster = _above(trial.samples_per_second_interval, own_rates)
        value = trial.objective_interval
        if not faster or not (_above(value, own) or _above(own, value)):
            return None
    if study.quality_metric != best.objective:
        return None
    fastest = max(trial.samples_per_second or 0.0 for trial in completed)
    gain = fastest / best.samples_per_second if best.samples_per_second else 1.0
    return (
        f"The number of updates binds, not the device: larger batches trained up to "
        f"{format_number(gain, 2)} times as fast, but made fewer updates in the same epochs and "
        f"reached a worse {metric_words(best.objective.name)}."
    )


def _above(first: Interval | None, second: Interval | None) -> bool:
    """Return whether an interval is known to lie above another."""
    return first is not None and second is not None and first.low > second.high
