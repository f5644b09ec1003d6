"""One block of a measurement: the pipeline alone, the train step alone, or both together.

Each block starts the pipeline anew, so that nothing runs behind the other blocks and none begins
with batches made before. What the start costs is left out: the first batch, and what follows
until tf.data has tuned itself.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from kbatch.records.input_pipeline import RateRecord, StepSpan
from kbatch.training.batch_source import BatchSource
from kbatch.training.batch_stream import BatchStream
from kbatch.training.borrowed_step import BorrowedStep, rows_of

MOST_ROUNDS = 9
_FEWEST = 4
_MOST_NEW_SHAPES = 4
_FEWEST_ROUNDS = 3
_SHORTEST_S = 0.05
_SETTLE_SHARE = 0.25


class BlockLength(NamedTuple):
    """How long a block lasts.

    Attributes:
        settle_s: Seconds after the first batch that are left out; at least one batch is.
        measure_s: Seconds that are measured; at least four batches are.
        longest_s: Seconds after which a block ends with a single batch too.
    """

    settle_s: float
    measure_s: float
    longest_s: float


class Block(NamedTuple):
    """What was measured in a block.

    Attributes:
        examples: Examples in the batches.
        duration_s: Seconds they took.
        cpu_s: Processor seconds of this process in that time, over all cores.
        first_batch_s: Seconds from the start of the pipeline to its first batch, None without a
            pipeline.
        spans: The steps of training, empty if there were none.
    """

    examples: int
    duration_s: float
    cpu_s: float
    first_batch_s: float | None
    spans: tuple[StepSpan, ...]


def block_length(budget_s: float, *, contenders: int, first_batch_s: float) -> BlockLength:
    """Computes how long blocks may last so that nine rounds of them fit in a budget.

    Args:
        budget_s: Seconds for all rounds.
        contenders: Blocks in a round.
        first_batch_s: Seconds that a pipeline takes to its first batch.
    """
    starts_s = MOST_ROUNDS * contenders * first_batch_s
    block_s = max(budget_s / 2, budget_s - starts_s) / (MOST_ROUNDS * contenders)
    return BlockLength(
        settle_s=max(_SETTLE_SHARE * block_s, _SHORTEST_S / 2),
        measure_s=max((1 - _SETTLE_SHARE) * block_s, _SHORTEST_S),
        longest_s=max(budget_s / (_FEWEST_ROUNDS * contenders), _SHORTEST_S),
    )


def pipeline_block(source: BatchSource, length: BlockLength) -> Block:
    """Measures the pipeline alone: batches are taken and dropped."""
    began_s = time.perf_counter()
    with BatchStream(source, read_before=True) as stream:
        stream.next()
        first_batch_s = time.perf_counter() - began_s
        _settle(stream.next, length)
        examples, duration_s, cpu_s = _measure(lambda: rows_of(stream.next()), length)
    return Block(examples, duration_s, cpu_s, first_batch_s, ())


def step_block(step: BorrowedStep, batch: Any, length: BlockLength) -> Block:
    """Measures the train step alone, on one batch."""
    rows = rows_of(batch)

    def run() -> int:
        step(batch)
        return rows

    step.restore()
    _settle(run, length)
    return Block(*_measure(run, length), None, ())


def training_block(source: BatchSource, step: BorrowedStep, length: BlockLength) -> Block:
    """Measures training: batches are taken and trained on.

    A step on a batch of new shapes may compile and is left out, unless hardly any shape repeats.
    """
    step.restore()
    began_s = time.perf_counter()
    spans: list[StepSpan] = []

    with BatchStream(source, read_before=True) as stream:
        step(stream.next())
        first_batch_s = time.perf_counter() - began_s

        def run() -> int:
            for _ in range(_MOST_NEW_SHAPES):
                rows, span, new = _trained(stream, step)
                if not new:
                    break
            else:
                rows, span, _ = _trained(stream, step)
            spans.append(span)
            return rows

        _settle(run, length)
        spans.clear()
        examples, _, cpu_s = _measure(run, length)
    duration_s = sum(span.wait_s + span.compute_s for span in spans)
    zero_s = spans[0].begin_s
    placed = tuple(span_from(span, zero_s) for span in spans)
    return Block(examples, duration_s, cpu_s, first_batch_s, placed)


def span_from(span: StepSpan, zero_s: float) -> StepSpan:
    """Counts the time of a span from another moment on."""
    return StepSpan(span.begin_s - zero_s, span.wait_s, span.compute_s)


def rate_of(blocks: list[Block]) -> RateRecord:
    """Joins the blocks of one contender, one a round.

    The share of time in which the GPU is busy belongs here beside `cpu_s` once a block reads it.
    """
    waited = [sum(span.wait_s for span in block.spans) for block in blocks]
    return RateRecord(
        examples=tuple(block.examples for block in blocks),
        durations_s=tuple(block.duration_s for block in blocks),
        wait_s=tuple(waited) if any(block.spans for block in blocks) else (),
        cpu_s=tuple(block.cpu_s for block in blocks),
    )


def _trained(stream: BatchStream, step: BorrowedStep) -> tuple[int, StepSpan, bool]:
    """Makes a step: its examples, its times, and whether its shapes were new."""
    asked_s = time.perf_counter()
    batch = stream.next()
    arrived_s = time.perf_counter()
    new = not step.has_seen(batch)
    step(batch)
    span = StepSpan(asked_s, arrived_s - asked_s, time.perf_counter() - arrived_s)
    return rows_of(batch), span, new


def _settle(run: Callable[[], object], length: BlockLength) -> None:
    began_s = time.perf_counter()
    run()
    while time.perf_counter() - began_s < length.settle_s:
        run()


def _measure(run: Callable[[], int], length: BlockLength) -> tuple[int, float, float]:
    examples, batches = 0, 0
    # Both clocks are read at once: what takes long here gives a prefetch a head start.
    cpu_s, began_s = time.process_time(), time.perf_counter()
    while True:
        examples += run()
        batches += 1
        duration_s = time.perf_counter() - began_s
        enough = duration_s >= length.measure_s and batches >= _FEWEST
        if enough or duration_s >= length.longest_s:
            return examples, duration_s, time.process_time() - cpu_s
