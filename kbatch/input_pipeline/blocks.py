"""One block of a measurement: the pipeline alone, the train step alone, or both together.

Each block starts the pipeline again, so that nothing runs behind the other blocks and none begins
with batches made before. What the start costs is left out, the first batch and what follows until
tf.data has tuned itself, unless whole epochs count or all that comes from the start: which of them
is decided once for a pipeline, so that its rounds count the same. Before the blocks the pipeline is
read once for long, and some of its batches are held for the train step alone.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from kbatch.input_pipeline.rates import long_run
from kbatch.input_pipeline.record import LongRunRecord, RateRecord, StepSpan
from kbatch.timing.rounds import FEWEST_ROUNDS
from kbatch.training.data.batch_source import BatchSource, BatchStream
from kbatch.training.data.forms import rows_of
from kbatch.training.train_step import BorrowedStep

MOST_ROUNDS = 9
_FEWEST_BATCHES = 4
_SHORTEST_S = 0.05
_SETTLE_SHARE = 0.25
# Steps that are launched before the device is waited for: `fit` waits for none of them.
_LAUNCHED = 8


class BlockLength(NamedTuple):
    settle_s: float  # Left out after the first batch, one batch at least.
    measure_s: float  # Measured after that, four batches at least.
    longest_s: float  # After so long one batch is enough.
    # What counts: what comes after `settle_s`, whole epochs with their starts, or all.
    counting: Literal["settled", "epochs", "start"] = "settled"

    def is_over(self, duration_s: float, batches: int) -> bool:
        enough = duration_s >= self.measure_s and batches >= _FEWEST_BATCHES
        return batches > 0 and (enough or duration_s >= self.longest_s)


class Block(NamedTuple):
    examples: int
    duration_s: float
    cpu_s: float  # Of this process, over all cores.
    first_batch_s: float | None  # None without a pipeline.
    spans: tuple[StepSpan, ...] = ()  # Of training.
    batch_numbers: float | None = None  # The mean of the numbers in a batch, of training.


def block_length(budget_s: float, *, contenders: float, starts_s: float) -> BlockLength:
    """Compute how long blocks may last so that nine rounds of them fit in a budget."""
    block_s = max(budget_s / 2, budget_s - MOST_ROUNDS * starts_s) / (MOST_ROUNDS * contenders)
    return BlockLength(
        settle_s=max(_SETTLE_SHARE * block_s, _SHORTEST_S / 2),
        measure_s=max((1 - _SETTLE_SHARE) * block_s, _SHORTEST_S),
        longest_s=max(budget_s / (FEWEST_ROUNDS * contenders), _SHORTEST_S),
    )


def pipeline_block(source: BatchSource, length: BlockLength) -> Block:
    """Measure the pipeline alone: batches are taken and dropped."""
    began_s, counted, first_batch_s = _read(source, length)
    return Block(
        sum(one.rows for one in counted),
        counted[-1].end_s - began_s,
        sum(one.cpu_s for one in counted),
        first_batch_s,
    )


def step_block(step: BorrowedStep, batches: Sequence[Any], length: BlockLength) -> Block:
    """Measure the train step alone, on batches that take turns, for they may differ in shape."""
    step.restore()
    began_s = time.perf_counter()
    step(batches[0])
    while time.perf_counter() - began_s < length.settle_s:
        step(batches[0])
    began_s, began_cpu_s, rows = time.perf_counter(), time.process_time(), 0
    for steps, batch in enumerate(itertools.cycle(batches), start=1):
        step.launch(batch)
        rows += rows_of(batch)
        due = steps % _LAUNCHED == 0 or time.perf_counter() - began_s >= length.measure_s
        if due and steps % len(batches) == 0:
            step.wait()
            if length.is_over(time.perf_counter() - began_s, steps):
                break
    return Block(rows, time.perf_counter() - began_s, time.process_time() - began_cpu_s, None)


def training_block(source: BatchSource, step: BorrowedStep, length: BlockLength) -> Block:
    """Measure training; a step on new shapes may compile and is left out, unless none repeats."""
    step.restore()
    _, counted, first_batch_s = _read(source, length, step)
    known = [one for one in counted if not one.new] or counted
    return Block(
        sum(one.rows for one in known),
        sum(one.end_s - one.asked_s for one in known),
        sum(one.cpu_s for one in known),
        first_batch_s,
        tuple(
            StepSpan(o.asked_s - known[0].asked_s, o.arrived_s - o.asked_s, o.end_s - o.arrived_s)
            for o in known
        ),
        fmean(one.numbers for one in known),
    )


def rate_of(blocks: Sequence[Block]) -> RateRecord:
    """Join the blocks of one contender, one a round."""
    waited = tuple(sum(span.wait_s for span in block.spans) for block in blocks)
    return RateRecord(
        examples=tuple(block.examples for block in blocks),
        durations_s=tuple(block.duration_s for block in blocks),
        wait_s=waited if any(block.spans for block in blocks) else (),
        cpu_s=tuple(block.cpu_s for block in blocks),
    )


class _Batch(NamedTuple):
    """A batch that was taken: when it was asked for, when it came and when it was used up."""

    epoch: int
    rows: int
    numbers: int
    asked_s: float
    arrived_s: float
    end_s: float
    cpu_s: float
    new: bool


def _read(
    source: BatchSource, length: BlockLength, step: BorrowedStep | None = None
) -> tuple[float, list[_Batch], float]:
    """Return when counting began, the batches that count, and the seconds to the first of all."""
    opened_s, cpu_s = time.perf_counter(), time.process_time()
    batches: list[_Batch] = []
    with BatchStream(source, read_before=True) as stream:

        def take() -> float:
            nonlocal cpu_s
            asked_s = time.perf_counter() if batches else opened_s
            batch = stream.next()
            arrived_s, new = time.perf_counter(), step is not None and not step.has_seen(batch)
            if step is not None:
                step(batch)
            end_s, before_s, cpu_s = time.perf_counter(), cpu_s, time.process_time()
            times = (asked_s, arrived_s, end_s, cpu_s - before_s)
            numbers = _numbers(_shapes_of(batch))
            batches.append(_Batch(stream.epochs, rows_of(batch), numbers, *times, new))
            return end_s

        now_s = first_s = take()
        first_batch_s = batches[0].arrived_s - opened_s
        if length.counting == "epochs":
            until_s = opened_s + length.settle_s + length.measure_s
            while stream.epochs == 0 or time.perf_counter() < until_s:
                take()
            whole = [one for one in batches if one.epoch < stream.epochs]
            return opened_s, whole, first_batch_s
        began_s, left_out = opened_s, 0
        if length.counting == "settled":
            began_s = take()
            while began_s - first_s < length.settle_s:
                began_s = take()
            left_out = len(batches)
        while not length.is_over(now_s - began_s, len(batches) - left_out):
            now_s = take()
    return began_s, batches[left_out:], first_batch_s


# A pause as long as the longest so far would change the rate by less than this share.
_PAUSE_SHARE = 0.2
# So long it goes on after a late first batch: a shuffle buffer is drained much faster than filled.
_BEYOND_FIRST = 1.5
# Epochs of so few batches, or whose start takes this share of them, count as a whole.
_FEW_BATCHES, _START_SHARE = 8, 0.05
# Whether batches grow is seen in so many of them.
_MANY = 16
_GROWN = 1.3


class InputPass(NamedTuple):
    """What a long reading of a pipeline found, with batches that stand for all of them."""

    record: LongRunRecord
    batches: tuple[Any, ...]
    epoch: tuple[int, float] | None  # Batches and seconds of one; None where its end was not met.
    duration_s: float
    batch_numbers: float  # The mean of the numbers in a batch.
    notes: tuple[str, ...]

    def counted(self, length: BlockLength, *, step_s: float = 0.0) -> BlockLength:
        """Decide for all blocks of a pipeline whether whole epochs count."""
        # They do where an epoch fits in a block, and several do or its start must not be left out,
        # such as a shuffle buffer that is filled.
        if self.epoch is None:
            return length
        batches, alone_s = self.epoch
        epoch_s = alone_s + batches * step_s
        several = epoch_s <= length.settle_s + length.measure_s
        few, slow_start = _FEW_BATCHES, self.record.first_batch_s > _START_SHARE * epoch_s
        if epoch_s <= length.longest_s and (several or batches <= few or slow_start):
            return length._replace(counting="epochs")
        return length


def read_pass(source: BatchSource, *, least_s: float, most_s: float) -> InputPass:
    """Read a pipeline from its start, until pauses as long as the longest matter little."""
    rows: list[int] = []
    arrivals_s: list[float] = []
    epochs: list[int] = []
    held = RepresentativeBatches()
    longest_s, began_s = 0.0, time.perf_counter()
    with BatchStream(source) as stream:
        while True:
            batch = stream.next()
            arrived_s = time.perf_counter() - began_s
            longest_s = max(longest_s, arrived_s - (arrivals_s[-1] if arrivals_s else 0.0))
            rows.append(rows_of(batch))
            arrivals_s.append(arrived_s)
            epochs.append(stream.epochs)
            if stream.epochs == 0:
                held.add(batch)
            even = stream.epochs > 0 or longest_s <= _PAUSE_SHARE * arrived_s
            over = arrived_s >= max(most_s, _BEYOND_FIRST * arrivals_s[0])
            if len(rows) > 1 and (over or (even and arrived_s >= least_s)):
                break
    first, numbers = epochs.count(0), [_numbers(shapes) for shapes in held.shapes]
    ended, half = first < len(rows), len(numbers) // 2
    ratio = sum(numbers[-half:]) / max(1, sum(numbers[:half])) if len(numbers) >= _MANY else 1.0
    notes = ()
    if not 1 / _GROWN < ratio < _GROWN:
        notes = (
            f"Batches become {'larger' if ratio > 1 else 'smaller'}: of {len(numbers)} that were "
            f"read, the second half holds {ratio:.2g} times as much as the first. The verdict is "
            "that of these batches, not of what comes later in the data.",
        )
    return InputPass(
        LongRunRecord(long_run(rows, arrivals_s, epochs=epochs), arrivals_s[0]),
        held.chosen(whole=ended),
        (first, arrivals_s[first] - arrivals_s[0]) if ended else None,
        arrivals_s[-1],
        fmean(numbers),
        notes,
    )


# Batches that the train step alone takes turns with: more where their shapes vary.
_HELD, _HELD_OF_ONE_SHAPE = 8, 4
_MOST_SHAPES = 2 * _HELD

Shapes = tuple[tuple[int, ...], ...]


class RepresentativeBatches:
    """Keeps a few batches of many: their shapes are quantiles of all shapes, in order of size."""

    def __init__(self):
        self.shapes: list[Shapes] = []  # Of all batches.
        self._first: list[Any] = []
        self._by_shapes: dict[Shapes, Any] = {}

    def add(self, batch: Any) -> None:
        """Count a batch, and keep it where its shapes are new and not much like kept ones."""
        shapes = _shapes_of(batch)
        self.shapes.append(shapes)
        if len(self._first) < _HELD_OF_ONE_SHAPE:
            self._first.append(batch)
        self._by_shapes.setdefault(shapes, batch)
        if len(self._by_shapes) > _MOST_SHAPES:
            # Drop the shapes whose neighbours in size are nearest to each other; never an end.
            in_order = sorted(self._by_shapes, key=_size)
            gaps = [
                _numbers(after) - _numbers(before)
                for before, after in zip(in_order, in_order[2:], strict=False)
            ]
            del self._by_shapes[in_order[1 + gaps.index(min(gaps))]]

    def chosen(self, *, whole: bool) -> tuple[Any, ...]:
        """Return up to eight batches, the one in the middle of the sizes first."""
        shapes, kept = self.shapes, self._by_shapes
        # The ragged end of an epoch, one of many batches, does not stand for an eighth of them.
        if whole and len(shapes) > _HELD and shapes[-1] not in shapes[:-1]:
            shapes = shapes[:-1]
        if len(set(shapes)) == 1:
            return tuple(self._first)
        in_order = sorted(shapes, key=_size)
        count = min(_HELD, len(in_order))

        def nearest(wanted: Shapes) -> Any:
            if wanted in kept:
                return kept[wanted]
            numbers = _numbers(wanted)
            return kept[min(kept, key=lambda one: abs(_numbers(one) - numbers))]

        found = [
            nearest(in_order[(2 * i + 1) * len(in_order) // (2 * count)]) for i in range(count)
        ]
        return tuple(found[count // 2 :] + found[: count // 2])


def _shapes_of(batch: Any) -> Shapes:
    # A ragged or sparse part has no length of its own: those of its values tell how long it is.
    parts = tf.nest.flatten(batch, expand_composites=True)
    return tuple(tuple(part.shape) for part in parts if part is not None)


def _size(shapes: Shapes) -> tuple[int, str]:
    return _numbers(shapes), repr(shapes)


def _numbers(shapes: Shapes) -> int:
    """Count the numbers in a batch, its own and those that tell where its ragged rows end."""
    return sum(math.prod(shape) for shape in shapes)


class PreparedInput(NamedTuple):
    """A pipeline that was read, and a train step that has seen the shapes it will be timed on."""

    source: BatchSource
    reading: InputPass
    step: BorrowedStep
    batches: tuple[Any, ...]  # To train on in turn, held on the device.
    smaller: dict[int, Any]  # Parts of a batch by their size, the largest first.
    step_s: float
    notes: tuple[str, ...]

    @property
    def batch_size(self) -> int:
        return rows_of(self.batches[0])

    @property
    def blocks(self) -> dict[str, Callable[[BlockLength], Block]]:
        """Pipeline alone, train step alone and both together, each a block of a given length."""
        return {
            "pipeline": lambda length: pipeline_block(self.source, length),
            "step": lambda length: step_block(self.step, self.batches, length),
            "together": lambda length: training_block(self.source, self.step, length),
        }
