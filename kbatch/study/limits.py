"""Which limits bind at the batch size that a study names."""

from collections.abc import Iterator, Sequence

from kbatch.analysis.batch_sizes import equal_parts
from kbatch.analysis.intervals import Estimate
from kbatch.page.numbers import format_number, percent
from kbatch.records.notes import Note
from kbatch.study.comparison import is_time
from kbatch.study.names import Conditions, TrialNames, metric_words
from kbatch.study.trial import TrialRecord, device_kinds

# Above this share of the training time, waiting for data is what the samples/s show.
MUCH_DATA_WAIT = 0.2
# A gain in samples/s below this share is none: the device is saturated.
_SMALL_GAIN = 0.1


def binding_limits(
    best: TrialRecord,
    trials: Sequence[TrialRecord],
    names: TrialNames,
    conditions: Conditions | None,
) -> Iterator[Note]:
    """Compare the trial that is named with larger batch sizes of its settings."""
    # Where it waits for data its samples/s say nothing about the device: nothing else is asked.
    if (waited := best.data_wait_share or 0) > MUCH_DATA_WAIT:
        yield Note.of("input_binds", share=percent(waited), size=names.name(best))
        return
    larger = [
        trial
        for trial in trials
        if trial.batch_size > best.batch_size
        and names.settings(trial) == names.settings(best)
        and len(device_kinds([trial, best])) < 2
    ]
    scale = best.noise_scale
    if scale and scale.ends is not None and best.batch_size > scale.ends[1]:
        yield Note.of("noise_binds", scale=format_number(scale.value or 0.0, 2))
    yield from _memory(best, larger)
    # Where the device gains nothing, no gain is given up for the number of updates.
    if (gained := _no_faster_up_to(best, larger)) is not None:
        yield Note.of("saturated", size=f"{gained:,}", gain=percent(_SMALL_GAIN))
    elif (gain := _given_up_for_updates(best, larger, conditions)) is not None:
        words = metric_words(best.objective.name)
        yield Note.of("updates_bind", gain=format_number(gain, 2), words=words)


def _memory(best: TrialRecord, larger: Sequence[TrialRecord]) -> Iterator[Note]:
    """Memory binds where every larger size ran out, or no more of the batch fitted at once."""
    if larger and all(trial.status == "out_of_memory" for trial in larger):
        yield Note.of("memory_binds", size=f"{min(trial.batch_size for trial in larger):,}")
        return
    run = best.executions[-1]
    rows, most, size = run.replica_batch_size, run.most_in_memory, best.micro_batch_size
    # A batch may also be cut because less at once is faster.
    if most is not None and size is not None and size < rows and size == equal_parts(rows, most):
        yield Note.of("memory_cuts", most=f"{most:,}", size=f"{size:,}")


def _no_faster_up_to(best: TrialRecord, larger: Sequence[TrialRecord]) -> int | None:
    """Return the largest micro-batch where none is faster, spread taken into account; else None."""
    own, rows = best.samples_per_second_interval, best.micro_batch_size
    timed = [
        (rates.ends[1], trial.micro_batch_size or 0)
        for trial in larger
        if trial.status == "completed"
        and rows
        # A larger batch of equal micro-batches gives the device no more to do at once.
        and (trial.micro_batch_size or 0) >= 2 * rows
        and (rates := trial.samples_per_second_interval) is not None
        and rates.ends is not None
    ]
    low = own and own.low
    if low is None or not timed or max(timed)[0] / low - 1 >= _SMALL_GAIN:
        return None
    return max(size for _, size in timed)


def _given_up_for_updates(
    best: TrialRecord, larger: Sequence[TrialRecord], conditions: Conditions | None
) -> float | None:
    """Return the gain in speed where every larger batch was faster and learnt less, else None."""
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
    return fastest / best.samples_per_second if best.samples_per_second else 1.0


def _above(first: Estimate[float] | None, second: Estimate[float] | None) -> bool:
    """Return whether an interval is known to lie above another."""
    ends = first and first.ends, second and second.ends
    return ends[0] is not None and ends[1] is not None and ends[0][0] > ends[1][1]
