"""Rounds in which pipeline, train step and both together take turns."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import tensorflow as tf

from kbatch.analysis.intervals import Interval
from kbatch.device.gpu_monitor import GpuMonitor
from kbatch.document.numbers import readable
from kbatch.errors import InputError
from kbatch.input_pipeline.blocks import (
    MOST_ROUNDS,
    Block,
    BlockLength,
    Epoch,
    InputPass,
    block_length,
    pipeline_block,
    rate_of,
    read_pass,
    step_block,
    training_block,
)
from kbatch.input_pipeline.rates import agrees
from kbatch.input_pipeline.record import LongRunRecord, RateRecord, SmallerStepRecord, StepSpan
from kbatch.records.usage import GpuSample
from kbatch.timing.rounds import interleaved
from kbatch.training.data.batch_source import BatchSource
from kbatch.training.train_step import BorrowedStep, first_rows, fitting_data, rows_of

# NVML's utilization is that of its last sampling window, of a sixth to a whole second depending on
# the GPU (NVML API reference, nvmlUtilization_t): a block of a round is shorter.
WINDOW_S = 1.0
_READ_S = 0.5
LENGTH = BlockLength(settle_s=WINDOW_S, measure_s=_READ_S, longest_s=2 * _READ_S)


class GpuBusy(NamedTuple):
    """What the GPU did.

    Attributes:
        shares: Share of the time in which some kernel ran on the first GPU, from 0 to 1, by name
            of the contender; only of those for which it was read.
        unavailable: Why no GPU was read, None where one was.
    """

    shares: dict[str, float]
    unavailable: str | None


def gpu_busy(
    blocks: Mapping[str, Callable[[BlockLength], Block]],
    *,
    monitor: Callable[[], GpuMonitor] = GpuMonitor,
) -> GpuBusy:
    """Run a block of each contender, longer than NVML's sampling window, and read the GPU.

    Without a GPU that can be read no block is run.
    """
    shares: dict[str, float] = {}
    for name, block in blocks.items():
        with monitor() as watch:
            if watch.unavailable is not None:
                return GpuBusy({}, watch.unavailable)
            start_s = block(LENGTH).first_batch_s or 0.0
        if watch.gpus is None:  # A reading failed on the way.
            return GpuBusy({}, watch.unavailable)
        share = _busy_share(watch.gpus[0].samples, from_s=start_s + WINDOW_S)
        if share is not None:
            shares[name] = share
    return GpuBusy(shares, None)


def _busy_share(samples: tuple[GpuSample, ...], *, from_s: float) -> float | None:
    """Average the readings whose window lies within the block, past the pipeline's start."""
    read = [s.utilization for s in samples if s.time_s >= from_s and s.utilization is not None]
    return fmean(read) if read else None


_TIMELINE_S = 1.0
# Smaller batches of the train step: with the batch itself three sizes, so that a line can be
# seen not to fit.
_PARTS = (4, 16)
# A block of a smaller step lasts this share of the others: only the crossing rests on it.
_SMALLER_SHARE = 0.5
_CONTENDERS, _STARTED = 3, 2
# A pause of the machine in a second reading as short as the first would count as one of the data.
_MOST_AGAIN = 2
# Batches that the rounds train on and those that were read may differ by this factor.
_ALIKE = 1.1
# Epochs of so few batches, or whose start takes this share of them, count as a whole.
_FEW_BATCHES, _START_SHARE = 8, 0.05


class InputRounds(NamedTuple):
    """What the rounds gave.

    Attributes:
        pipeline: The pipeline alone.
        step: The train step alone.
        together: Training.
        smaller_steps: The train step alone on smaller batches.
        first_batch_s: Seconds from the start of the pipeline to its first batch, each time.
        timeline: Consecutive steps of training, a second of them, fewer on a smaller budget.
        notes: What a reader of the numbers must know.
        long_run: The long reading, with training as long where the rounds differ from it; None
            where they count whole epochs.
        together_comparable: Whether training had batches like those of pipeline and step alone,
            counted in the same way.
    """

    pipeline: RateRecord
    step: RateRecord
    together: RateRecord
    smaller_steps: tuple[SmallerStepRecord, ...]
    first_batch_s: tuple[float, ...]
    timeline: tuple[StepSpan, ...]
    notes: tuple[str, ...]
    long_run: LongRunRecord | None
    together_comparable: bool


class WarmStep(NamedTuple):
    """A train step that has seen the shapes it will be timed on.

    Attributes:
        step: The train step.
        batches: Batches to train on in turn, held on the device.
        smaller: Smaller batches by their size, the largest first.
        step_s: Seconds of a step.
        notes: What a reader of the numbers must know.
    """

    step: BorrowedStep
    batches: tuple[Any, ...]
    smaller: dict[int, Any]
    step_s: float
    notes: tuple[str, ...]


def warm_step(step: BorrowedStep, batches: Sequence[Any]) -> WarmStep:
    """Train on each shape twice; smaller batches that the model does not take are left out."""
    with fitting_data():
        for batch in batches:
            step(batch)
        began_s = time.perf_counter()
        for batch in batches:
            step(batch)
        step_s = (time.perf_counter() - began_s) / len(batches)
    smaller, notes = {}, []
    for rows, part in _smaller(batches[0]).items():
        try:
            with fitting_data():
                step(part)
                step(part)
        except InputError as error:
            cause = f"{type(error.__cause__).__name__}"
            notes.append(f"The train step was not measured on {rows:,} examples: {cause}.")
        else:
            smaller[rows] = part
    return WarmStep(step, tuple(batches), smaller, step_s, tuple(notes))


def measure_rounds(
    source: BatchSource, warm: WarmStep, *, reading: InputPass, budget_s: float
) -> InputRounds:
    """Make the rounds, then a block of training for the timeline, and read a GPU."""
    blocks = _blocks(source, warm)
    lengths = _lengths(warm, reading, budget_s=budget_s)
    end_s = time.perf_counter() + budget_s
    contenders = _contenders(blocks, warm, lengths=lengths)
    found = interleaved(contenders, until_s=end_s, most_rounds=MOST_ROUNDS)
    rates = {name: rate_of(results) for name, results in found.items()}
    # Where the rounds count whole epochs too, there is nothing that they could not see.
    whole = lengths["pipeline"].counting == "epochs"
    record = None if whole else _checked(source, pipeline=rates["pipeline"], reading=reading)
    timeline, long_run = _timeline(
        source, warm.step, pipeline=rates["pipeline"], record=record, budget_s=budget_s
    )
    busy = gpu_busy(blocks)
    size_ratio = _size_ratio(found["together"], reading)
    counted_alike = lengths["pipeline"].counting == lengths["together"].counting
    starts_s = [block.first_batch_s for block in found["pipeline"]]
    return InputRounds(
        *(dataclasses.replace(rates[n], gpu_busy_share=busy.shares.get(n)) for n in blocks),
        smaller_steps=tuple(SmallerStepRecord(n, rates[str(n)]) for n in warm.smaller),
        first_batch_s=tuple(s for s in starts_s if s is not None),
        timeline=timeline,
        notes=(
            *_rounds_note(len(starts_s)),
            *warm.notes,
            *reading.notes,
            *_sizes_note(size_ratio),
            *_gpu_note(busy),
        ),
        long_run=long_run,
        together_comparable=counted_alike and size_ratio > 1 / _ALIKE,
    )


def _blocks(source: BatchSource, warm: WarmStep) -> dict[str, Callable[[BlockLength], Block]]:
    return {
        "pipeline": functools.partial(pipeline_block, source),
        "step": functools.partial(step_block, warm.step, warm.batches),
        "together": functools.partial(training_block, source, warm.step),
    }


def _contenders(
    blocks: dict[str, Callable[[BlockLength], Block]],
    warm: WarmStep,
    *,
    lengths: dict[str, BlockLength],
) -> dict[str, Callable[[], Block]]:
    """Return every block its length, and add the steps on smaller batches, by their size."""
    return {name: functools.partial(block, lengths[name]) for name, block in blocks.items()} | {
        str(rows): functools.partial(step_block, warm.step, (part,), _shorter(lengths["step"]))
        for rows, part in warm.smaller.items()
    }


def counted(
    length: BlockLength, epoch: Epoch | None, *, first_batch_s: float, step_s: float = 0.0
) -> BlockLength:
    """Decide for all blocks of a pipeline whether whole epochs count.

    They do where an epoch fits in a block at its longest, and either several of them do, or its
    start is a part of it that must not be left out, such as a shuffle buffer that is filled.
    """
    if epoch is None:
        return length
    epoch_s = epoch.duration_s + epoch.batches * step_s
    several = epoch_s <= length.settle_s + length.measure_s or epoch.batches <= _FEW_BATCHES
    if epoch_s <= length.longest_s and (several or first_batch_s > _START_SHARE * epoch_s):
        return length._replace(counting="epochs")
    return length


def _lengths(warm: WarmStep, reading: InputPass, *, budget_s: float) -> dict[str, BlockLength]:
    """Return every contender the length of its blocks."""
    first_batch_s = reading.record.first_batch_s
    length = block_length(
        budget_s,
        contenders=_CONTENDERS + _SMALLER_SHARE * len(warm.smaller),
        starts_s=_STARTED * first_batch_s,
    )
    return {
        "pipeline": counted(length, reading.epoch, first_batch_s=first_batch_s),
        "step": length,
        "together": counted(length, reading.epoch, first_batch_s=first_batch_s, step_s=warm.step_s),
    }


def _checked(source: BatchSource, *, pipeline: RateRecord, reading: InputPass) -> LongRunRecord:
    """Read again what differs from the rounds: the first reading may have met cold files."""
    if _is_even(pipeline, reading.record):
        return reading.record
    most_s = _MOST_AGAIN * reading.duration_s
    return read_pass(source, least_s=reading.duration_s, most_s=most_s).record


def _timeline(
    source: BatchSource,
    step: BorrowedStep,
    *,
    pipeline: RateRecord,
    record: LongRunRecord | None,
    budget_s: float,
) -> tuple[tuple[StepSpan, ...], LongRunRecord | None]:
    """Train for a second, or as long as was read where the rounds saw another rate."""
    shown_s = min(_TIMELINE_S, budget_s)
    if record is None or _is_even(pipeline, record):
        return training_block(source, step, BlockLength(0.0, shown_s, shown_s)).spans, record
    whole_s = max(shown_s, record.counted.duration_s)
    block = training_block(source, step, BlockLength(0.0, whole_s, whole_s, "start"))
    waited_s = sum(span.wait_s for span in block.spans)
    shown = tuple(span for span in block.spans if span.begin_s < shown_s)
    return shown, dataclasses.replace(record, training_s=block.duration_s, training_wait_s=waited_s)


def _is_even(pipeline: RateRecord, record: LongRunRecord) -> bool:
    """Return whether the rounds of the pipeline gave about the rate of the long reading."""
    rate = pipeline.samples_per_second
    return rate is None or agrees(rate, Interval(*record.counted.bounds))


def _smaller(batch: Any) -> dict[int, Any]:
    """Cut smaller batches, by their size, the largest first."""
    whole = rows_of(batch)
    sizes = sorted({max(1, whole // part) for part in _PARTS} - {whole}, reverse=True)
    return {rows: first_rows(batch, rows) for rows in sizes}


def _shorter(length: BlockLength) -> BlockLength:
    settle_s, measure_s, longest_s = (_SMALLER_SHARE * seconds for seconds in length[:3])
    return BlockLength(settle_s, measure_s, longest_s)


def _rounds_note(rounds: int) -> tuple[str, ...]:
    if rounds == MOST_ROUNDS:
        return ()
    return (
        f"{rounds} of {MOST_ROUNDS} rounds were made: a larger `budget_s` gives narrower "
        "intervals.",
    )


def _size_ratio(trained: Sequence[Block], reading: InputPass) -> float:
    """Compute how much the batches of the rounds hold over the mean of those that were read."""
    sizes = [block.batch_numbers for block in trained if block.batch_numbers is not None]
    return fmean(sizes) / reading.batch_numbers if sizes and reading.batch_numbers else 1.0


def _sizes_note(ratio: float) -> tuple[str, ...]:
    """Say where the first batches of the data, which rounds train on, are unlike the others."""
    if 1 / _ALIKE <= ratio <= _ALIKE:
        return ()
    return (
        f"Batches differ in size: those that the rounds trained on hold {readable(ratio, 2)} times "
        "as much as the mean of those that were read. Both together, and the waiting, are those of "
        "these batches; the train step alone is that of all.",
    )


def _gpu_note(busy: GpuBusy) -> tuple[str, ...]:
    if busy.unavailable is None or not tf.config.list_logical_devices("GPU"):
        return ()
    return (f"How busy the GPU was is not known. {busy.unavailable}",)
