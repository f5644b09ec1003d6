"""Which limits bind at the batch size that a study names."""

from collections.abc import Sequence

from kbatch.analysis.batch_sizes import equal_parts
from kbatch.analysis.intervals import Estimate
from kbatch.page.numbers import format_number, percent
from kbatch.study.comparison import is_time
from kbatch.study.decision import Decision
from kbatch.study.names import Conditions, TrialNames, metric_words, noise_scale_text
from kbatch.study.trial import TrialRecord, device_kinds

# Above this share of the training time, waiting for data is what the samples/s show.
MUCH_DATA_WAIT = 0.2
# A gain in samples/s below this share is none: the device is saturated.
_SMALL_GAIN = 0.1


def binding_limits(
    found: Decision,
    trials: Sequence[TrialRecord],
    names: TrialNames,
    conditions: Conditions | None,
) -> tuple[str, ...]:
    # It is compared with those of larger batch sizes whose other settings are its own. Where it
    # waits for data its samples/s say nothing about the device, so nothing else is asked.
    best = found.trial
    if best is None:
        return ()
    if (waited := best.data_wait_share or 0) > MUCH_DATA_WAIT:
        return (
            f"The input pipeline binds: training waited for data {percent(waited)} of its time at "
            f"batch size {names.name(best)}.",
        )
    larger = [
        trial
        for trial in trials
        if trial.batch_size > best.batch_size
        and names.settings(trial) == names.settings(best)
        and len(device_kinds([trial, best])) < 2
    ]
    noise, scale = None, best.noise_scale
    if scale is not None and scale.ends is not None and best.batch_size > scale.ends[1]:
        noise = (
            "The gradient noise binds: the batch size lies above the noise scale of "
            f"{noise_scale_text(scale)} examples, beyond which a larger batch saves ever fewer "
            "updates."
        )
    # Where the device gains nothing, no gain is given up for the number of updates.
    device = _saturation(best, larger) or _updates(best, larger, conditions)
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
        (rates.ends[1], trial.micro_batch_size)
        for trial in larger
        if trial.status == "completed"
        and rows
        # A larger batch of equal micro-batches gives the device no more to do at once.
        and (trial.micro_batch_size or 0) >= 2 * rows
        and (rates := trial.samples_per_second_interval) is not None
        and rates.ends is not None
    ]
    low = own and own.low
    if low is None or not timed or max(high for high, _ in timed) / low - 1 >= _SMALL_GAIN:
        return None
    return (
        f"The hardware is saturated: up to {max(size or 0 for _, size in timed):,} examples at "
        f"once no larger micro-batch trained {percent(_SMALL_GAIN)} faster."
    )


def _updates(
    best: TrialRecord, larger: Sequence[TrialRecord], conditions: Conditions | None
) -> str | None:
    """Updates bind where every larger batch was faster and, in the same epochs, learnt less."""
    completed = [trial for trial in larger if trial.status == "completed"]
    epochs = conditions.epochs if conditions is not None and not conditions.ends else None
    if epochs is None or epochs[0] != epochs[1] or not completed:
        return None
    if is_time(best.objective) or best.objective.name not in best.metrics:
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
    fastest = max(trial.samples_per_second or 0.0 for trial in completed)
    gain = fastest / best.samples_per_second if best.samples_per_second else 1.0
    return (
        f"The number of updates binds, not the device: larger batches trained up to "
        f"{format_number(gain, 2)} times as fast, but made fewer updates in the same epochs and "
        f"reached a worse {metric_words(best.objective.name)}."
    )


def _above(first: Estimate[float] | None, second: Estimate[float] | None) -> bool:
    """Return whether an interval is known to lie above another."""
    ends = first and first.ends, second and second.ends
    return ends[0] is not None and ends[1] is not None and ends[0][0] > ends[1][1]
