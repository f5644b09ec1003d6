"""One block of a measurement: the pipeline alone, the train step alone, or both together.

Each block starts the pipeline anew, so that nothing runs behind the other blocks and none begins
with batches made before. What the start costs is left out, the first batch and what follows until
tf.data has tuned itself, unless the data end within the block: then whole epochs count.
"""

import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from kbatch.records.input_rates import RateRecord, StepSpan
from kbatch.training.batch_source import BatchSource
from kbatch.training.batch_stream import BatchStream
from kbatch.training.borrowed_step import BorrowedStep, rows_of

MOST_ROUNDS = 9
_FEWEST = 4
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


def block_length(budget_s: float, *, contenders: float, starts_s: float) -> BlockLength:
    """Computes how long blocks may last so that nine rounds of them fit in a budget.

    Args:
        budget_s: Seconds for all rounds.
        contenders: Blocks in a round; one that lasts half as long counts half.
        starts_s: Seconds that the pipelines of a round take to their first batches.
    """
    block_s = max(budget_s / 2, budget_s - MOST_ROUNDS * starts_s) / (MOST_ROUNDS * contenders)
    return BlockLength(
        settle_s=max(_SETTLE_SHARE * block_s, _SHORTEST_S / 2),
        measure_s=max((1 - _SETTLE_SHARE) * block_s, _SHORTEST_S),
        longest_s=max(budget_s / (_FEWEST_ROUNDS * contenders), _SHORTEST_S),
    )


def pipeline_block(source: BatchSource, length: BlockLength) -> Block:
    """Measures the pipeline alone: batches are taken and dropped."""
    with _Tally(source) as tally:
        taken = tally.read(lambda _: None, length)
    return Block(
        sum(one.rows for one in taken.counted),
        taken.counted[-1].end.time_s - taken.begin.time_s,
        taken.counted[-1].end.cpu_s - taken.begin.cpu_s,
        taken.first_batch_s,
        (),
    )


def step_block(step: BorrowedStep, batches: Sequence[Any], length: BlockLength) -> Block:
    """Measures the train step alone, on batches that take turns: they may differ in shape."""
    step.restore()
    began_s = time.perf_counter()
    step(batches[0])
    while time.perf_counter() - began_s < length.settle_s:
        step(batches[0])
    begin, steps, rows = _now(), 0, 0
    for batch in itertools.cycle(batches):
        step(batch)
        steps, rows, end = steps + 1, rows + rows_of(batch), _now()
        whole = steps % len(batches) == 0
        if whole and _is_over(end.time_s - begin.time_s, steps, length):
            break
    return Block(rows, end.time_s - begin.time_s, end.cpu_s - begin.cpu_s, None, ())


def training_block(source: BatchSource, step: BorrowedStep, length: BlockLength) -> Block:
    """Measures training: batches are taken and trained on.

    A step on a batch of new shapes may compile and is left out, unless no shape repeats.
    """
    step.restore()
    with _Tally(source) as tally:
        taken = tally.read(step, length)
    known = [one for one in taken.counted if not one.new] or taken.counted
    spans = [
        StepSpan(o.asked_s, o.arrived_s - o.asked_s, o.end.time_s - o.arrived_s) for o in known
    ]
    return Block(
        sum(one.rows for one in known),
        sum(span.wait_s + span.compute_s for span in spans),
        taken.counted[-1].end.cpu_s - taken.begin.cpu_s,
        taken.first_batch_s,
        tuple(span_from(span, spans[0].begin_s) for span in spans),
    )


def span_from(span: StepSpan, zero_s: float) -> StepSpan:
    """Counts the time of a span from another moment on."""
    return StepSpan(span.begin_s - zero_s, span.wait_s, span.compute_s)


def rate_of(blocks: list[Block], *, gpu_busy_share: float | None = None) -> RateRecord:
    """Joins the blocks of one contender, one a round.

    Args:
        blocks: The blocks.
        gpu_busy_share: What was read of the GPU besides.
    """
    waited = [sum(span.wait_s for span in block.spans) for block in blocks]
    return RateRecord(
        examples=tuple(block.examples for block in blocks),
        durations_s=tuple(block.duration_s for block in blocks),
        wait_s=tuple(waited) if any(block.spans for block in blocks) else (),
        cpu_s=tuple(block.cpu_s for block in blocks),
        gpu_busy_share=gpu_busy_share,
    )


class _Moment(NamedTuple):
    time_s: float
    cpu_s: float


class _Batch(NamedTuple):
    """A batch that was taken: when it was asked for, when it came and when it was used up."""

    epoch: int
    rows: int
    asked_s: float
    arrived_s: float
    end: _Moment
    new: bool


class _Taken(NamedTuple):
    begin: _Moment
    counted: list[_Batch]
    first_batch_s: float


class _Tally:
    """Takes batches, and decides which of them count.

    Where the data end within the block, whole epochs count from their start: a shuffle buffer is
    filled at the start of an epoch and drained at its end, and only both together are its rate.
    """

    def __init__(self, source: BatchSource):
        self._opened = _now()
        self._stream = BatchStream(source, read_before=True)

    def __enter__(self) -> "_Tally":
        self._stream.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)

    def read(self, use: Any, length: BlockLength) -> _Taken:
        has_seen = getattr(use, "has_seen", lambda _: True)
        batches: list[_Batch] = []

        def take() -> _Batch:
            asked_s = time.perf_counter()
            batch = self._stream.next()
            arrived_s, new = time.perf_counter(), not has_seen(batch)
            use(batch)
            epoch, rows = self._stream.epochs, rows_of(batch)
            batches.append(_Batch(epoch, rows, asked_s, arrived_s, _now(), new))
            return batches[-1]

        first = take()
        settled = take()
        while settled.end.time_s - first.end.time_s < length.settle_s:
            settled = take()
        left_out = len(batches)
        while True:
            last = take()
            measured = len(batches) - left_out
            if _is_over(last.end.time_s - settled.end.time_s, measured, length):
                break
        whole = [one for one in batches if one.epoch < self._stream.epochs]
        first_batch_s = first.arrived_s - self._opened.time_s
        if whole:
            return _Taken(self._opened, whole, first_batch_s)
        return _Taken(settled.end, batches[left_out:], first_batch_s)


def _is_over(duration_s: float, batches: int, length: BlockLength) -> bool:
    enough = duration_s >= length.measure_s and batches >= _FEWEST
    return enough or duration_s >= length.longest_s


def _now() -> _Moment:
    return _Moment(time.perf_counter(), time.process_time())
