"""One block of a measurement: the pipeline alone, the train step alone, or both together.

Each block starts the pipeline again, so that nothing runs behind the other blocks and none begins
with batches made before. What the start costs is left out, the first batch and what follows until
tf.data has tuned itself, unless whole epochs count or all that comes from the start: which of them
is decided once for a pipeline, so that its rounds count the same.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from kbatch.input_pipeline.rates import long_run
from kbatch.input_pipeline.record import LongRunRecord, RateRecord, StepSpan
from kbatch.training.data.batch_source import BatchSource, BatchStream
from kbatch.training.train_step import BorrowedStep, rows_of

MOST_ROUNDS = 9
_FEWEST = 4
_FEWEST_ROUNDS = 3
_SHORTEST_S = 0.05
_SETTLE_SHARE = 0.25
# Steps that are launched before the device is waited for: `fit` waits for none of them.
_LAUNCHED = 8

Counting = Literal["settled", "epochs", "start"]


class BlockLength(NamedTuple):
    """How long a block lasts.

    Attributes:
        settle_s: Seconds after the first batch that are left out; at least one batch is.
        measure_s: Seconds that are measured; at least four batches are.
        longest_s: Seconds after which a block ends with a single batch too.
        counting: What counts of a pipeline: `"settled"` for what comes after `settle_s`,
            `"epochs"` for whole epochs with their starts, `"start"` for all from the start.
    """

    settle_s: float
    measure_s: float
    longest_s: float
    counting: Counting = "settled"


class Block(NamedTuple):
    """What was measured in a block.

    Attributes:
        examples: Examples in the batches.
        duration_s: Seconds they took.
        cpu_s: Processor seconds of this process in that time, over all cores.
        first_batch_s: Seconds from the start of the pipeline to its first batch, None without a
            pipeline.
        spans: The steps of training, empty if there were none.
        batch_numbers: Numbers in a batch of training on average, None if there was none.
    """

    examples: int
    duration_s: float
    cpu_s: float
    first_batch_s: float | None
    spans: tuple[StepSpan, ...]
    batch_numbers: float | None = None


def block_length(budget_s: float, *, contenders: float, starts_s: float) -> BlockLength:
    """Compute how long blocks may last so that nine rounds of them fit in a budget."""
    block_s = max(budget_s / 2, budget_s - MOST_ROUNDS * starts_s) / (MOST_ROUNDS * contenders)
    return BlockLength(
        settle_s=max(_SETTLE_SHARE * block_s, _SHORTEST_S / 2),
        measure_s=max((1 - _SETTLE_SHARE) * block_s, _SHORTEST_S),
        longest_s=max(budget_s / (_FEWEST_ROUNDS * contenders), _SHORTEST_S),
    )


def pipeline_block(source: BatchSource, length: BlockLength) -> Block:
    """Measure the pipeline alone: batches are taken and dropped."""
    with _Tally(source) as tally:
        taken = tally.read(lambda _: None, length)
    return Block(
        sum(one.rows for one in taken.counted),
        taken.counted[-1].end.time_s - taken.begin.time_s,
        sum(one.cpu_s for one in taken.counted),
        taken.first_batch_s,
        (),
    )


def step_block(step: BorrowedStep, batches: Sequence[Any], length: BlockLength) -> Block:
    """Measure the train step alone, on batches that take turns: they may differ in shape.

    Several steps are launched before the device is waited for, as in `fit`.
    """
    step.restore()
    began_s = time.perf_counter()
    step(batches[0])
    while time.perf_counter() - began_s < length.settle_s:
        step(batches[0])
    begin, steps, rows = _now(), 0, 0
    for batch in itertools.cycle(batches):
        step.launch(batch)
        steps, rows = steps + 1, rows + rows_of(batch)
        whole = steps % len(batches) == 0
        if whole and (steps % _LAUNCHED == 0 or _passed(begin) >= length.measure_s):
            step.wait()
            if _is_over(_passed(begin), steps, length):
                break
    end = _now()
    return Block(rows, end.time_s - begin.time_s, end.cpu_s - begin.cpu_s, None, ())


def training_block(source: BatchSource, step: BorrowedStep, length: BlockLength) -> Block:
    """Measure training: batches are taken and trained on.

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
        sum(one.cpu_s for one in known),
        taken.first_batch_s,
        tuple(span_from(span, spans[0].begin_s) for span in spans),
        fmean(one.numbers for one in known),
    )


def span_from(span: StepSpan, zero_s: float) -> StepSpan:
    """Count the time of a span from another moment on."""
    return StepSpan(span.begin_s - zero_s, span.wait_s, span.compute_s)


def rate_of(blocks: list[Block]) -> RateRecord:
    """Join the blocks of one contender, one a round."""
    waited = [sum(span.wait_s for span in block.spans) for block in blocks]
    return RateRecord(
        examples=tuple(block.examples for block in blocks),
        durations_s=tuple(block.duration_s for block in blocks),
        wait_s=tuple(waited) if any(block.spans for block in blocks) else (),
        cpu_s=tuple(block.cpu_s for block in blocks),
    )


class _Moment(NamedTuple):
    time_s: float
    cpu_s: float


class _Batch(NamedTuple):
    """A batch that was taken: when it was asked for, when it came and when it was used up."""

    epoch: int
    rows: int
    numbers: int
    asked_s: float
    arrived_s: float
    end: _Moment
    cpu_s: float
    new: bool


class _Taken(NamedTuple):
    begin: _Moment
    counted: list[_Batch]
    first_batch_s: float


class _Tally:
    """Takes batches, and picks those that count."""

    def __init__(self, source: BatchSource):
        self._opened = _now()
        self._stream = BatchStream(source, read_before=True)

    def __enter__(self) -> "_Tally":
        self._stream.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)

    def read(self, use: Any, length: BlockLength) -> _Taken:
        batches: list[_Batch] = []
        take = functools.partial(self._take, use, batches, has_seen=_has_seen(use))
        first = take()
        first_batch_s = first.arrived_s - self._opened.time_s
        if length.counting == "epochs":
            return self._whole_epochs(take, batches, length)._replace(first_batch_s=first_batch_s)
        begin, left_out = self._opened, 0
        if length.counting == "settled":
            begin = take().end
            while begin.time_s - first.end.time_s < length.settle_s:
                begin = take().end
            left_out = len(batches)
        last_s = first.end.time_s
        while not _is_over(last_s - begin.time_s, len(batches) - left_out, length):
            last_s = take().end.time_s
        return _Taken(begin, batches[left_out:], first_batch_s)

    def _whole_epochs(
        self, take: Callable[[], _Batch], batches: list[_Batch], length: BlockLength
    ) -> _Taken:
        """Take batches until an epoch has ended, and then until the time is over."""
        wanted_s = length.settle_s + length.measure_s
        while self._stream.epochs == 0 or _passed(self._opened) < wanted_s:
            take()
        whole = [one for one in batches if one.epoch < self._stream.epochs]
        return _Taken(self._opened, whole, 0.0)

    def _take(self, use: Any, batches: list[_Batch], *, has_seen: Any) -> _Batch:
        before = batches[-1].end if batches else self._opened
        asked_s = time.perf_counter()
        batch = self._stream.next()
        arrived_s, new = time.perf_counter(), not has_seen(batch)
        use(batch)
        end = _now()
        batches.append(
            _Batch(
                self._stream.epochs,
                rows_of(batch),
                numbers_in(batch),
                asked_s if batches else self._opened.time_s,
                arrived_s,
                end,
                end.cpu_s - before.cpu_s,
                new,
            )
        )
        return batches[-1]


def _has_seen(use: Any) -> Callable[[Any], bool]:
    return getattr(use, "has_seen", lambda _: True)


def _is_over(duration_s: float, batches: int, length: BlockLength) -> bool:
    enough = duration_s >= length.measure_s and batches >= _FEWEST
    return batches > 0 and (enough or duration_s >= length.longest_s)


def _passed(since: _Moment) -> float:
    return time.perf_counter() - since.time_s


def _now() -> _Moment:
    return _Moment(time.perf_counter(), time.process_time())


# A pause as long as the longest so far would change the rate by less than this share.
_PAUSE_SHARE = 0.2
# So long it goes on after a late first batch: a shuffle buffer is drained much faster than filled.
_BEYOND_FIRST = 1.5
# So many batches tell whether they grow.
_MANY = 16
_GROWN = 1.3


class Epoch(NamedTuple):
    """How long the data are.

    Attributes:
        batches: Batches in an epoch.
        duration_s: Seconds that the pipeline alone takes for them, with its start.
    """

    batches: int
    duration_s: float


class InputPass(NamedTuple):
    """What a long reading gave.

    Attributes:
        record: What was counted.
        batches: Some batches of the first epoch that stand for those that were read, see
            `HeldBatches`.
        epoch: How long the data are, None where no end was reached.
        duration_s: Seconds that it took.
        batch_numbers: Numbers in a batch on average.
        notes: What a reader of the numbers must know.
    """

    record: LongRunRecord
    batches: tuple[Any, ...]
    epoch: Epoch | None
    duration_s: float
    batch_numbers: float
    notes: tuple[str, ...]


def read_pass(source: BatchSource, *, least_s: float, most_s: float) -> InputPass:
    """Read a pipeline from its start, until pauses as long as the longest matter little."""
    rows: list[int] = []
    arrivals_s: list[float] = []
    epochs: list[int] = []
    held = HeldBatches()
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
    counted = long_run(rows, arrivals_s, epochs=epochs)
    first = epochs.count(0)
    return InputPass(
        LongRunRecord(counted, arrivals_s[0]),
        held.chosen(whole=first < len(rows)),
        Epoch(first, arrivals_s[first] - arrivals_s[0]) if first < len(rows) else None,
        arrivals_s[-1],
        fmean(held.elements),
        _growth_note(held.elements),
    )


def _growth_note(elements: list[int]) -> tuple[str, ...]:
    """Describe where batches grow or shrink on the way: what follows may go on so."""
    if len(elements) < _MANY:
        return ()
    half = len(elements) // 2
    ratio = sum(elements[-half:]) / max(1, sum(elements[:half]))
    if 1 / _GROWN < ratio < _GROWN:
        return ()
    word = "larger" if ratio > 1 else "smaller"
    return (
        f"Batches become {word}: of {len(elements)} that were read, the second half holds "
        f"{ratio:.2g} times as much as the first. The verdict is that of these batches, not of "
        "what comes later in the data.",
    )


# Batches that the train step alone takes turns with: more where their shapes vary.
_HELD, _HELD_OF_ONE_SHAPE = 8, 4
_MOST_SHAPES = 2 * _HELD

Shapes = tuple[Any, ...]


class HeldBatches:
    """Keeps a few batches of many, and the shapes of them all.

    Every second or fourth batch would not stand for the others where lengths alternate. So the
    shapes of what is chosen are quantiles of all shapes, in the order of their size.
    """

    def __init__(self):
        self._shapes: list[Shapes] = []
        self._first: list[Any] = []
        self._by_shapes: dict[Shapes, Any] = {}

    @property
    def elements(self) -> list[int]:
        """Numbers in each batch that was added, in order."""
        return [_elements(shapes) for shapes in self._shapes]

    def add(self, batch: Any) -> None:
        """Count a batch, and keep it where its shapes are new and not much like kept ones."""
        shapes = _shapes_of(batch)
        self._shapes.append(shapes)
        if len(self._first) < _HELD_OF_ONE_SHAPE:
            self._first.append(batch)
        self._by_shapes.setdefault(shapes, batch)
        if len(self._by_shapes) > _MOST_SHAPES:
            del self._by_shapes[_most_like_neighbours(list(self._by_shapes))]

    def chosen(self, *, whole: bool) -> tuple[Any, ...]:
        """Return up to eight batches, the one in the middle of the sizes first."""
        shapes = self._shapes
        if whole and len(shapes) > _HELD and shapes[-1] not in shapes[:-1]:
            shapes = shapes[:-1]
        if len(set(shapes)) == 1:
            return tuple(self._first)
        in_order = sorted(shapes, key=_size)
        count = min(_HELD, len(in_order))
        places = [(2 * i + 1) * len(in_order) // (2 * count) for i in range(count)]
        found = [self._nearest(in_order[place]) for place in places]
        return tuple(found[count // 2 :] + found[: count // 2])

    def _nearest(self, shapes: Shapes) -> Any:
        if shapes in self._by_shapes:
            return self._by_shapes[shapes]
        size = _elements(shapes)
        return self._by_shapes[min(self._by_shapes, key=lambda kept: abs(_elements(kept) - size))]


def numbers_in(batch: Any) -> int:
    """Count the numbers in a batch, its own and those that tell where its ragged rows end."""
    return _elements(_shapes_of(batch))


def _shapes_of(batch: Any) -> Shapes:
    # A ragged or sparse part has no length of its own: those of its values tell how long it is.
    parts = tf.nest.flatten(batch, expand_composites=True)
    return tuple(tuple(part.shape) for part in parts if part is not None)


def _most_like_neighbours(shapes: list[Shapes]) -> Shapes:
    """Find the shapes whose neighbours in size are nearest to each other; never an end."""
    in_order = sorted(shapes, key=_size)
    gaps = [
        _elements(after) - _elements(before)
        for before, after in zip(in_order, in_order[2:], strict=False)
    ]
    return in_order[1 + gaps.index(min(gaps))]


def _size(shapes: Shapes) -> tuple[int, str]:
    return _elements(shapes), repr(shapes)


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)
