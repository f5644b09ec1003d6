"""Which limit stands in the way of a larger batch size: memory, saturation, noise or the input."""

from collections.abc import Sequence
from typing import NamedTuple

from kbatch.analysis.batch_sizes import equal_parts
from kbatch.analysis.intervals import Interval
from kbatch.document.numbers import format_number, percent
from kbatch.study.names import metric_words, noise_scale_text, trial_names
from kbatch.study.study import Study
from kbatch.study.trial import TrialRecord, device_kinds

# Above this share of the training time, waiting for data is what the samples/s show.
MUCH_DATA_WAIT = 0.2
# A gain in samples/s below this share is none: the device is saturated.
_SMALL_GAIN = 0.1


class BindingLimit(NamedTuple):
    """What stands in the way of a larger batch size."""

    name: str  # Such as `"input pipeline"`, `"gradient noise"` or `"number of updates"`.
    text: str  # The evidence in a sentence.


def binding_limits(study: Study) -> tuple[BindingLimit, ...]:
    """Find which limits bind at the trial that the study decides for."""
    # It is compared with those of larger batch sizes whose other settings are its own. Where it
    # waits for data its samples/s say nothing about the device, so nothing else is asked.
    best = study.decide().trial
    if best is None:
        return ()
    names = trial_names(study.trials)
    if (waited := best.data_wait_share or 0) > MUCH_DATA_WAIT:
        text = (
            f"The input pipeline binds: training waited for data {percent(waited)} of its time at "
            f"batch size {names.name(best)}."
        )
        return (BindingLimit("input pipeline", text),)
    larger = [
        trial
        for trial in study.trials
        if trial.batch_size > best.batch_size
        and names.settings(trial) == names.settings(best)
        and len(device_kinds([trial, best])) < 2
    ]
    # Where the device gains nothing, no gain is given up for the number of updates.
    device = _saturation(best, larger) or _updates(study, best, larger)
    limits = (_gradient_noise(best), _memory(best, larger), device)
    return tuple(limit for limit in limits if limit is not None)


def _gradient_noise(best: TrialRecord) -> BindingLimit | None:
    """Noise binds where the batch is clearly larger than the noise scale."""
    scale = best.noise_scale
    if scale is None or scale.interval is None or best.batch_size <= scale.interval.high:
        return None
    return BindingLimit(
        "gradient noise",
        "The gradient noise binds: the batch size lies above the noise scale of "
        f"{noise_scale_text(scale)} examples, beyond which a larger batch saves ever fewer "
        "updates.",
    )


def _memory(best: TrialRecord, larger: Sequence[TrialRecord]) -> BindingLimit | None:
    """Memory binds where every larger size ran out, or no more of the batch fitted at once."""
    if larger and all(trial.status == "out_of_memory" for trial in larger):
        smallest = min(trial.batch_size for trial in larger)
        return BindingLimit(
            "memory",
            f"Memory binds: the next larger batch size, {smallest:,}, ran out of it. A smaller "
            "`micro_batch_size` needs less.",
        )
    run = best.executions[-1]
    rows, most, size = run.replica_batch_size, run.most_in_memory, best.micro_batch_size
    # A batch may also be cut because less at once is faster.
    if most is None or size is None or not size < rows or size != equal_parts(rows, most):
        return None
    return BindingLimit(
        "memory",
        f"Memory binds: at most {most:,} examples fit in it at once, so the batch was cut into "
        f"micro-batches of {size:,}.",
    )


def _saturation(best: TrialRecord, larger: Sequence[TrialRecord]) -> BindingLimit | None:
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
    return BindingLimit(
        "hardware saturation",
        f"The hardware is saturated: up to {max(size or 0 for _, size in timed):,} examples at "
        f"once no larger micro-batch trained {percent(_SMALL_GAIN)} faster.",
    )


def _updates(study: Study, best: TrialRecord, larger: Sequence[TrialRecord]) -> BindingLimit | None:
    """Updates bind where every larger batch was faster and, in the same epochs, learnt less."""
    ends, epochs = study.conditions.ends, study.conditions.epochs
    completed = [trial for trial in larger if trial.status == "completed"]
    if ends or epochs is None or epochs[0] != epochs[1] or not completed:
        return None
    own_rates, own = best.samples_per_second_interval, best.objective_interval
    for trial in completed:
        faster = _above(trial.samples_per_second_interval, own_rates)
        value = trial.objective_interval
        if not faster or not (_above(value, own) or _above(own, value)):
            return None
    if study.quality_metric != best.objective:
        return None
    fastest = max(trial.samples_per_second or 0.0 for trial in completed)
    gain = fastest / best.samples_per_second if best.samples_per_second else 1.0
    return BindingLimit(
        "number of updates",
        f"The number of updates binds, not the device: larger batches trained up to "
        f"{format_number(gain, 2)} times as fast, but made fewer updates in the same epochs and "
        f"reached a worse {metric_words(best.objective.name)}.",
    )


def _above(first: Interval | None, second: Interval | None) -> bool:
    """Return whether an interval is known to lie above another."""
    return first is not None and second is not None and first.low > second.high
