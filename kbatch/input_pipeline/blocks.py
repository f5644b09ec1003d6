"""Batches taken from a pipeline, alone or with a train step after each, and what counts of them.

Each block of a measurement starts the pipeline again, so that nothing runs behind the other blocks
and none begins with batches made before. What the start costs is left out, the first batch and what
follows until tf.data has tuned itself, unless whole epochs count or all that comes from the start:
which of them is decided once for a pipeline, so that its rounds count the same. Before the blocks
the pipeline is read once for long, and some of its batches are held for the train step alone. The
train step is that of the model, borrowed and returned as it was.
"""

import bisect
import contextlib
import itertools
import math
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from kbatch.device.failures import failure_text
from kbatch.errors import InputError
from kbatch.input_pipeline.result import LongRun, RateRecord, StepSpan, long_run
from kbatch.timing import FEWEST_ROUNDS
from kbatch.training.data.forms import as_dataset, each_part, rows_of
from kbatch.training.model import build_ahead, user_step
from kbatch.training.state import kept_state
from kbatch.training.step_call import StepCall, check_one_device


def epochs_of(pipeline: Iterable[Any]) -> Generator[tuple[int, Any], None, None]:
    """Read a pipeline batch by batch, epoch after epoch; with each comes how many had ended."""
    for epoch in itertools.count():
        batches = 0
        try:
            # The threads behind an iterator end with its last reference: nothing runs behind two.
            for batch in pipeline:
                yield epoch, batch
                batches += 1
        except Exception as error:  # Code of the user makes the batches, and may raise anything.
            raise _broken(error, batches) from error
        if batches == 0:
            raise InputError(
                "There are no batches to measure: give data with at least one, and let a data "
                "function make a new generator each time it is called, for one that was used up "
                f"gives none. Received: no batch in epoch {epoch} (the first is 0)."
            )


def _broken(error: Exception, batch: int) -> InputError:
    return InputError(
        f"The data raised an error at batch {batch} (the first is 0): fix them so that they can "
        f"be read from start to end. Received: {failure_text(error)}"
    )


def read_by_workers(data: keras.utils.PyDataset, workers: int) -> tf.data.Dataset:
    """Return the batches of a PyDataset, read by so many threads as Keras would."""
    try:
        batches = as_dataset(_ReadByWorkers(data, workers))
    except InputError:
        raise
    except Exception as error:  # The spec is read off the first batches.
        raise _broken(error, 0) from error
    options = tf.data.Options()
    # To free an iterator whose prefetch is tuned takes as long as it lived.
    options.autotune.enabled = False
    return batches.prefetch(max(1, data.max_queue_size)).with_options(options)


class _ReadByWorkers(keras.utils.PyDataset):
    """The batches of a PyDataset, which hears of no epochs: it stays as it is."""

    def __init__(self, given: keras.utils.PyDataset, workers: int):
        super().__init__(workers=workers)
        self._given = given

    @property
    def num_batches(self) -> int | None:
        return self._given.num_batches

    def __getitem__(self, index: int) -> Any:
        return self._given[index]


@contextlib.contextmanager
def borrowed_step(model: keras.Model, batch: Any) -> Iterator[StepCall]:
    """Lend the train step of a model, which keeps the weights that it gets from the batch."""
    check_one_device(model)
    if user_step(model) is not None:
        build_ahead(model, each_part(tf.type_spec_from_value, batch))
    elif not model.built:
        with fitting_data():
            model(keras.utils.unpack_x_y_sample_weight(batch)[0])
    with kept_state(model) as state:
        yield StepCall(model, state)


@contextlib.contextmanager
def fitting_data() -> Iterator[None]:
    """Turn what a model says of data that do not fit it into an error that names both."""
    try:
        yield
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        raise InputError(
            "The model cannot be trained on these data: give inputs and targets of the shapes and "
            f"dtypes that the model and its loss take. Received: {failure_text(error)}"
        ) from error


MOST_ROUNDS = 9
_FEWEST_BATCHES = 4
_SHORTEST_S = 0.05
_SETTLE_SHARE = 0.25
# Steps that are launched before the device is waited for: `fit` waits for none of them.
_LAUNCHED = 8


class Taken(NamedTuple):
    """A batch that was taken, with seconds since the pipeline was started."""

    epoch: int  # How many had ended before it.
    rows: int
    numbers: int
    asked_s: float
    arrived_s: float
    end_s: float  # When it was used up, by a train step if there is one.
    new: bool  # Whether the train step had not seen its shapes, and may have compiled.


def taken_batches(
    source: Iterable[Any], step: StepCall | None = None
) -> Generator[tuple[Taken, Any], None, None]:
    """Start a pipeline and take its batches, epoch after epoch, until the iterator is closed."""
    opened_s, asked_s = time.perf_counter(), 0.0
    with contextlib.closing(epochs_of(source)) as batches:
        for epoch, batch in batches:
            arrived_s = time.perf_counter() - opened_s
            new = step is not None and not step.has_seen(batch)
            if step is not None:
                step(batch)
            times_s = asked_s, arrived_s, time.perf_counter() - opened_s
            yield Taken(epoch, rows_of(batch), numbers_in(batch), *times_s, new), batch
            asked_s = time.perf_counter() - opened_s


class BlockLength(NamedTuple):
    settle_s: float  # Left out after the first batch, one batch at least.
    measure_s: float  # Measured after that, four batches at least.
    longest_s: float  # After so long one batch is enough.
    # What counts: what comes after `settle_s`, whole epochs with their starts, or all.
    counting: Literal["settled", "epochs", "start"] = "settled"

    def is_over(self, duration_s: float, batches: int) -> bool:
        enough = duration_s >= self.measure_s and batches >= _FEWEST_BATCHES
        return batches > 0 and (enough or duration_s >= self.longest_s)

    def counted(self, taken: Sequence[Taken]) -> tuple[float, Sequence[Taken]] | None:
        """Return when counting began and the batches that count, None while more are needed."""
        if not taken:
            return None
        last, began_s, left_out = taken[-1], 0.0, 0
        if self.counting == "epochs":
            over = last.epoch > 0 and last.end_s >= self.settle_s + self.measure_s
            return (0.0, [one for one in taken if one.epoch < last.epoch]) if over else None
        if self.counting == "settled":
            settled_s = taken[0].end_s + self.settle_s
            at = bisect.bisect_left(taken, settled_s, lo=1, key=lambda one: one.end_s)
            if at == len(taken):
                return None
            began_s, left_out = taken[at].end_s, at + 1
        if not self.is_over(last.end_s - began_s, len(taken) - left_out):
            return None
        return began_s, taken[left_out:]


class Block(NamedTuple):
    examples: int
    duration_s: float
    spans: tuple[StepSpan, ...] = ()  # Of training.
    batch_numbers: float = 0.0  # The mean of the numbers in a batch, with a pipeline.


def block_length(budget_s: float, *, contenders: float, starts_s: float) -> BlockLength:
    """Compute how long blocks may last so that nine rounds of them fit in a budget."""
    block_s = max(budget_s / 2, budget_s - MOST_ROUNDS * starts_s) / (MOST_ROUNDS * contenders)
    return BlockLength(
        settle_s=max(_SETTLE_SHARE * block_s, _SHORTEST_S / 2),
        measure_s=max((1 - _SETTLE_SHARE) * block_s, _SHORTEST_S),
        longest_s=max(budget_s / (FEWEST_ROUNDS * contenders), _SHORTEST_S),
    )


def reading_block(
    source: Iterable[Any], length: BlockLength, step: StepCall | None = None
) -> Block:
    """Measure the pipeline alone, or training: a step that may have compiled is left out."""
    if step is not None:
        step.restore()
    taken: list[Taken] = []
    with contextlib.closing(taken_batches(source, step)) as batches:
        while (found := length.counted(taken)) is None:
            taken.append(next(batches)[0])
    began_s, counted = found
    known = [one for one in counted if not one.new] or counted  # Unless no shape repeats.
    spans: tuple[StepSpan, ...] = ()
    # A pipeline works on between two batches, so that of it alone all the time counts.
    duration_s = counted[-1].end_s - began_s
    if step is not None:
        duration_s = sum(one.end_s - one.asked_s for one in known)
        spans = tuple(
            StepSpan(o.asked_s - known[0].asked_s, o.arrived_s - o.asked_s, o.end_s - o.arrived_s)
            for o in known
        )
    return Block(
        sum(one.rows for one in known), duration_s, spans, fmean(one.numbers for one in known)
    )


def step_block(step: StepCall, batches: Sequence[Any], length: BlockLength) -> Block:
    """Measure the train step alone, on batches that take turns, for they may differ in shape."""
    step.restore()
    began_s = time.perf_counter()
    step(batches[0])
    while time.perf_counter() - began_s < length.settle_s:
        step(batches[0])
    began_s, rows = time.perf_counter(), 0
    for steps, batch in enumerate(itertools.cycle(batches), start=1):
        step.launch(batch)
        rows += rows_of(batch)
        due = steps % _LAUNCHED == 0 or time.perf_counter() - began_s >= length.measure_s
        if due and steps % len(batches) == 0:
            step.wait()
            if length.is_over(time.perf_counter() - began_s, steps):
                break
    return Block(rows, time.perf_counter() - began_s)


def rate_of(blocks: Sequence[Block]) -> RateRecord:
    """Join the blocks of one contender, one a round."""
    waited = tuple(sum(span.wait_s for span in block.spans) for block in blocks)
    return RateRecord(
        examples=tuple(block.examples for block in blocks),
        durations_s=tuple(block.duration_s for block in blocks),
        wait_s=waited if any(block.spans for block in blocks) else (),
    )


# A pause as long as the longest so far would change the rate by less than this share.
_PAUSE_SHARE = 0.2
# So long it goes on after a late first batch: a shuffle buffer is drained much faster than filled.
_BEYOND_FIRST = 1.5
# Epochs of so few batches, or whose start takes this share of them, count as a whole.
_FEW_BATCHES, _START_SHARE = 8, 0.05


class InputPass(NamedTuple):
    """What a long reading of a pipeline found, with batches that stand for all of them."""

    source: Any  # A `tf.data.Dataset`.
    record: LongRun
    batches: tuple[Any, ...]
    epoch: tuple[int, float] | None  # Batches and seconds of one; None where its end was not met.
    duration_s: float
    batch_numbers: float  # The mean of the numbers in a batch.
    step_s: float = 0.0  # Of a train step on one of the batches, once it is known.

    def counted(self, length: BlockLength, *, trains: bool = False) -> BlockLength:
        """Decide for all blocks of a pipeline whether whole epochs count."""
        # They do where an epoch fits in a block, and several do or its start must not be left out,
        # such as a shuffle buffer that is filled.
        if self.epoch is None:
            return length
        batches, epoch_s = self.epoch
        epoch_s += trains * batches * self.step_s
        several = epoch_s <= length.settle_s + length.measure_s
        few, slow_start = _FEW_BATCHES, self.record.first_batch_s > _START_SHARE * epoch_s
        if epoch_s <= length.longest_s and (several or batches <= few or slow_start):
            return length._replace(counting="epochs")
        return length


def read_pass(source: Iterable[Any], *, least_s: float, most_s: float) -> InputPass:
    """Read a pipeline from its start, until pauses as long as the longest matter little."""
    taken: list[Taken] = []
    by_size: dict[int, Any] = {}  # The first batch of each size, those within 10 % of it too.
    longest_s = 0.0
    with contextlib.closing(taken_batches(source)) as batches:
        for one, batch in batches:
            longest_s = max(longest_s, one.arrived_s - (taken[-1].arrived_s if taken else 0.0))
            taken.append(one)
            if one.epoch == 0 and all(abs(one.numbers - n) > 0.1 * n for n in by_size):
                by_size[one.numbers] = batch
            even = one.epoch > 0 or longest_s <= _PAUSE_SHARE * one.arrived_s
            over = one.arrived_s >= max(most_s, _BEYOND_FIRST * taken[0].arrived_s)
            if len(taken) > 1 and (over or (even and one.arrived_s >= least_s)):
                break
    first = [one for one in taken if one.epoch == 0]
    ended, arrivals_s = len(first) < len(taken), [one.arrived_s for one in taken]
    return InputPass(
        source,
        long_run([one.rows for one in taken], arrivals_s, epochs=[one.epoch for one in taken]),
        chosen_batches([one.numbers for one in first], by_size, whole=ended),
        (len(first), arrivals_s[len(first)] - arrivals_s[0]) if ended else None,
        arrivals_s[-1],
        fmean(one.numbers for one in first),
    )


# Batches that the train step alone takes turns with where their sizes vary.
_HELD = 8


def chosen_batches(
    sizes: Sequence[int], by_size: Mapping[int, Any], *, whole: bool
) -> tuple[Any, ...]:
    """Return up to eight batches whose sizes are quantiles of all sizes, the middle one first."""
    # The ragged end of an epoch, one of many batches, does not stand for an eighth of them.
    if whole and len(sizes) > _HELD and sizes[-1] not in sizes[:-1]:
        sizes = sizes[:-1]
    ordered = sorted(sizes)
    count = 1 if ordered[0] == ordered[-1] else min(_HELD, len(sizes))
    wanted = [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]
    found = [by_size[min(by_size, key=lambda size: abs(size - one))] for one in wanted]
    return tuple(found[count // 2 :] + found[: count // 2])


def numbers_in(batch: Any) -> int:
    """Count the numbers in a batch, and those that say where its ragged rows end."""
    parts = tf.nest.flatten(batch, expand_composites=True)
    return sum(math.prod(part.shape) for part in parts if part is not None)
