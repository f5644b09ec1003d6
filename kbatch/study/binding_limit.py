"""Which limits bind at the best batch size of a study, as far as its records tell."""

from collections.abc import Sequence
from typing import NamedTuple

from kbatch.analysis.batch_sizes import equal_parts
from kbatch.document.number_text import percent, readable
from kbatch.study.conditions import conditions_of
from kbatch.study.metric_names import metric_words
from kbatch.study.noise_text import noise_scale_text
from kbatch.study.study_record import Study
from kbatch.study.timing_caveats import MUCH_DATA_WAIT
from kbatch.study.trial import TrialRecord
from kbatch.study.trial_names import TrialNames, trial_names

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
    """Finds which limits bind at the best trial.

    A trial is compared with those of larger batch sizes whose other settings are its own. Where
    it waits for data its samples/s say nothing about the device, so nothing else is asked.

    Args:
        study: A study.

    Returns:
        The limits with their evidence; none where the trials do not tell.
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
    """Updates bind where every larger batch was faster and, in the same epochs, learnt less."""
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
    """Gives the ends of the interval of a trial's samples/s, None where they are not known."""
    interval = trial.samples_per_second_interval
    return None if interval is None else (interval.low, interval.high)
