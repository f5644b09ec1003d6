"""Rounds in which pipeline, train step and both together take turns."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kbatch.profiling.gpu_busy import GpuBusy, gpu_busy
from kbatch.profiling.input_blocks import (
    MOST_ROUNDS,
    Block,
    BlockLength,
    block_length,
    pipeline_block,
    rate_of,
    step_block,
    training_block,
)
from kbatch.profiling.interleaved import interleaved
from kbatch.records.input_rates import RateRecord, SmallerStepRecord, StepSpan
from kbatch.training.batch_source import BatchSource
from kbatch.training.borrowed_step import BorrowedStep, first_rows, rows_of

_TIMELINE_S = 1.0
# Smaller batches of the train step: with the batch itself three sizes, so that a line can be
# seen not to fit.
_PARTS = (4, 16)
# A block of a smaller step lasts this share of the others: only the crossing rests on it.
_SMALLER_SHARE = 0.5
_STARTED = 2


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
    """

    pipeline: RateRecord
    step: RateRecord
    together: RateRecord
    smaller_steps: tuple[SmallerStepRecord, ...]
    first_batch_s: tuple[float, ...]
    timeline: tuple[StepSpan, ...]
    notes: tuple[str, ...]


def measure_rounds(
    source: BatchSource,
    step: BorrowedStep,
    batches: Sequence[Any],
    *,
    budget_s: float,
    first_batch_s: float,
) -> InputRounds:
    """Makes the rounds, then a block of training for the timeline, and reads a GPU.

    Args:
        source: Where the batches come from.
        step: The train step.
        batches: Batches for the train step alone; smaller ones are cut from the first.
        budget_s: Seconds for the rounds; three are made in any case.
        first_batch_s: Seconds that the pipeline takes to its first batch.
    """
    smaller = _smaller(batches[0])
    for warm in (*batches, *smaller.values()):
        step(warm)
        step(warm)
    blocks: dict[str, Callable[[BlockLength], Block]] = {
        "pipeline": functools.partial(pipeline_block, source),
        "step": functools.partial(step_block, step, batches),
        "together": functools.partial(training_block, source, step),
    }
    length = block_length(
        budget_s,
        contenders=len(blocks) + _SMALLER_SHARE * len(smaller),
        starts_s=_STARTED * first_batch_s,
    )
    contenders = {name: functools.partial(block, length) for name, block in blocks.items()}
    for rows, part in smaller.items():
        contenders[str(rows)] = functools.partial(step_block, step, (part,), _shorter(length))
    end_s = time.perf_counter() + budget_s
    found = interleaved(contenders, until_s=end_s, most_rounds=MOST_ROUNDS)
    shown_s = min(_TIMELINE_S, budget_s)
    timeline = training_block(source, step, BlockLength(0.0, shown_s, shown_s))
    busy = gpu_busy(blocks)
    pipeline, alone, together = (
        rate_of(found[name], gpu_busy_share=busy.shares.get(name)) for name in blocks
    )
    starts_s = [block.first_batch_s for block in found["pipeline"]]
    return InputRounds(
        pipeline,
        alone,
        together,
        smaller_steps=tuple(SmallerStepRecord(n, rate_of(found[str(n)])) for n in smaller),
        first_batch_s=tuple(s for s in starts_s if s is not None),
        timeline=timeline.spans,
        notes=(
            *_rounds_note(len(starts_s)),
            *_start_note(first_batch_s, length),
            *_gpu_note(busy),
        ),
    )


def _smaller(batch: Any) -> dict[int, Any]:
    """Cuts smaller batches, by their size, the largest first."""
    whole = rows_of(batch)
    sizes = sorted({max(1, whole // part) for part in _PARTS} - {whole}, reverse=True)
    return {rows: first_rows(batch, rows) for rows in sizes}


def _shorter(length: BlockLength) -> BlockLength:
    return BlockLength(*(_SMALLER_SHARE * seconds for seconds in length))


def _start_note(first_batch_s: float, length: BlockLength) -> tuple[str, ...]:
    """Says what is not seen of a pipeline that works ahead of its first batch."""
    if first_batch_s <= length.measure_s:
        return ()
    return (
        f"The first batch took {first_batch_s:.2g} s, and each round then read "
        f"{length.measure_s:.2g} s of batches: where data come in chunks, such as files, the time "
        "to load the next chunk is not in the rates.",
    )


def _rounds_note(rounds: int) -> tuple[str, ...]:
    if rounds == MOST_ROUNDS:
        return ()
    return (
        f"{rounds} of {MOST_ROUNDS} rounds were made: a larger `budget_s` gives narrower "
        "intervals.",
    )


def _gpu_note(busy: GpuBusy) -> tuple[str, ...]:
    if busy.unavailable is None or not tf.config.list_logical_devices("GPU"):
        return ()
    return (f"How busy the GPU was is not known. {busy.unavailable}",)
