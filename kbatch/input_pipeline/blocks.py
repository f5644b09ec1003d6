"""Timed blocks of an input pipeline, of a train step, and of both together.

Each block starts the pipeline again. So no pipeline runs in the background of another block, and no
block begins with batches that were read before. Usually a block does not count the first batch and
the batches until tf.data has tuned itself. For some pipelines, blocks count whole epochs or all
batches instead. This is decided once for each pipeline, so that all its rounds count the same.

Before the blocks, one long reading of the pipeline gives some batches for the train step alone. The
train step belongs to the user's model, whose state is restored afterwards.
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
    """Yield the batches of a pipeline, epoch after epoch, each with the number of its epoch."""
    for epoch in itertools.count():
        batches = 0
        try:
            # No variable holds the iterator, so its threads end before the next epoch begins.
            for batch in pipeline:
                yield epoch, batch
                batches += 1
        except Exception as error:  # The user's code makes the batches, and may raise anything.
            raise _data_error(error, batches) from error
        if batches == 0:
            raise InputError(
                "The data must have a batch in each epoch: a function that is given to "
                "`from_generator` must return a new generator at each call. "
                f"Received: no batch in epoch {epoch} (the first is 0)."
            )


def _data_error(error: Exception, batch: int) -> InputError:
    return InputError(
        f"The data raised an error at batch {batch} (the first is 0): fix the data so that all "
        f"batches can be read. Received: {failure_text(error)}"
    )


def read_by_workers(data: keras.utils.PyDataset, workers: int) -> tf.data.Dataset:
    """Return the batches of a PyDataset, read by threads as in Keras."""
    try:
        batches = as_dataset(_ReadByWorkers(data, workers))
    except InputError:
        raise
    except Exception as error:  # The first batches are read here, by the user's code.
        raise _data_error(error, 0) from error
    options = tf.data.Options()
    # With autotune, TensorFlow needs as long to free an iterator as the iterator was in use.
    options.autotune.enabled = False
    return batches.prefetch(max(1, data.max_queue_size)).with_options(options)


class _ReadByWorkers(keras.utils.PyDataset):
    """The batches of a PyDataset, without calls of its methods at the end of an epoch."""

    def __init__(self, source: keras.utils.PyDataset, workers: int):
        super().__init__(workers=workers)
        self._source = source

    @property
    def num_batches(self) -> int | None:
        return self._source.num_batches

    def __getitem__(self, index: int) -> Any:
        return self._source[index]


@contextlib.contextmanager
def borrowed_step(model: keras.Model, batch: Any) -> Iterator[StepCall]:
    """Build the model on a batch, lend its train step, and restore its state afterwards."""
    check_one_device(model)
    if user_step(model) is not None:
        build_ahead(model, each_part(tf.type_spec_from_value, batch))
    elif not model.built:
        with data_must_fit_model():
            model(keras.utils.unpack_x_y_sample_weight(batch)[0])
    with kept_state(model) as state:
        yield StepCall(model, state)


@contextlib.contextmanager
def data_must_fit_model() -> Iterator[None]:
    """Turn an error of the model about its data into one that says what to do."""
    try:
        yield
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        raise InputError(
            "The data must have inputs and targets with the shapes and dtypes that the model and "
            f"its loss take. Received: {failure_text(error)}"
        ) from error


MOST_ROUNDS = 9
_FEWEST_BATCHES = 4
_SHORTEST_S = 0.05
_SETTLE_SHARE = 0.25
# Steps that start before kbatch waits for the device, because `fit` does not wait at each step.
_LAUNCHED = 8


class TimedBatch(NamedTuple):
    """A batch that was read. Its times are seconds since the start of the pipeline."""

    epoch: int
    rows: int
    values: int  # Number of values in the batch.
    requested_s: float
    arrived_s: float
    end_s: float  # After the train step, if there is one.
    is_new: bool  # Whether the train step had not seen its shapes, and may have compiled.


def timed_batches(
    source: Iterable[Any], step: StepCall | None = None
) -> Generator[tuple[TimedBatch, Any], None, None]:
    """Start a pipeline and read its batches, epoch after epoch, until the iterator is closed."""
    opened_s, requested_s = time.perf_counter(), 0.0
    with contextlib.closing(epochs_of(source)) as batches:
        for epoch, batch in batches:
            arrived_s = time.perf_counter() - opened_s
            is_new = step is not None and not step.has_seen(batch)
            if step is not None:
                step(batch)
            times_s = requested_s, arrived_s, time.perf_counter() - opened_s
            yield TimedBatch(epoch, rows_of(batch), value_count(batch), *times_s, is_new), batch
            requested_s = time.perf_counter() - opened_s


class BlockLength(NamedTuple):
    """How long a block reads a pipeline, and which of its batches count."""

    settle_s: float  # Seconds after the first batch that do not count; at least one batch.
    measure_s: float  # Seconds after that, which count; at least four batches.
    longest_s: float  # After this many seconds, a block ends even with one batch.
    # Which batches count: those after `settle_s`, whole epochs, or all from the start.
    counting: Literal["settled", "epochs", "start"] = "settled"

    def is_over(self, duration_s: float, batches: int) -> bool:
        is_enough = duration_s >= self.measure_s and batches >= _FEWEST_BATCHES
        return batches > 0 and (is_enough or duration_s >= self.longest_s)

    def counted(self, batches: Sequence[TimedBatch]) -> tuple[float, Sequence[TimedBatch]] | None:
        """Return when counting began and the batches that count, or None if more are needed."""
        if not batches:
            return None
        last, began_s, first = batches[-1], 0.0, 0
        if self.counting == "epochs":
            if last.epoch == 0 or last.end_s < self.settle_s + self.measure_s:
                return None
            return 0.0, [batch for batch in batches if batch.epoch < last.epoch]
        if self.counting == "settled":
            settled_s = batches[0].end_s + self.settle_s
            settled = bisect.bisect_left(batches, settled_s, lo=1, key=lambda batch: batch.end_s)
            if settled == len(batches):
                return None
            began_s, first = batches[settled].end_s, settled + 1
        if not self.is_over(last.end_s - began_s, len(batches) - first):
            return None
        return began_s, batches[first:]


class Block(NamedTuple):
    """The measurement of one contender in one round."""

    examples: int
    duration_s: float
    spans: tuple[StepSpan, ...] = ()  # Training steps.
    batch_values: float = 0.0  # Mean number of values in a batch of the pipeline.


def block_length(budget_s: float, *, contenders: float, starts_s: float) -> BlockLength:
    """Compute the length of blocks so that nine rounds fit in a budget of seconds."""
    block_s = max(budget_s / 2, budget_s - MOST_ROUNDS * starts_s) / (MOST_ROUNDS * contenders)
    return BlockLength(
        settle_s=max(_SETTLE_SHARE * block_s, _SHORTEST_S / 2),
        measure_s=max((1 - _SETTLE_SHARE) * block_s, _SHORTEST_S),
        longest_s=max(budget_s / (FEWEST_ROUNDS * contenders), _SHORTEST_S),
    )


def reading_block(
    source: Iterable[Any], length: BlockLength, step: StepCall | None = None
) -> Block:
    """Time the pipeline alone, or training without the steps that may have compiled."""
    if step is not None:
        step.restore()
    read: list[TimedBatch] = []
    with contextlib.closing(timed_batches(source, step)) as batches:
        while (result := length.counted(read)) is None:
            read.append(next(batches)[0])
    began_s, counted = result
    # Steps on new shapes count only if all shapes are new.
    counted = [batch for batch in counted if not batch.is_new] or counted
    spans: tuple[StepSpan, ...] = ()
    # A pipeline also works between two batches, so all the time counts if it is alone.
    duration_s = counted[-1].end_s - began_s
    if step is not None:
        first_s, duration_s = counted[0].requested_s, sum(b.end_s - b.requested_s for b in counted)
        spans = tuple(
            StepSpan(b.requested_s - first_s, b.arrived_s - b.requested_s, b.end_s - b.arrived_s)
            for b in counted
        )
    examples, numbers = (batch.rows for batch in counted), (batch.values for batch in counted)
    return Block(sum(examples), duration_s, spans, fmean(numbers))


def step_block(step: StepCall, batches: Sequence[Any], length: BlockLength) -> Block:
    """Time the train step alone. The batches take turns, because their shapes may differ."""
    step.restore()
    began_s = time.perf_counter()
    step(batches[0])
    while time.perf_counter() - began_s < length.settle_s:
        step(batches[0])
    began_s, rows = time.perf_counter(), 0
    for steps, batch in enumerate(itertools.cycle(batches), start=1):
        step.launch(batch)
        rows += rows_of(batch)
        is_due = steps % _LAUNCHED == 0 or time.perf_counter() - began_s >= length.measure_s
        if is_due and steps % len(batches) == 0:
            step.wait()
            if length.is_over(time.perf_counter() - began_s, steps):
                break
    return Block(rows, time.perf_counter() - began_s)


def rate_of(blocks: Sequence[Block]) -> RateRecord:
    """Make the record of one contender from its blocks, one for each round."""
    waited = tuple(sum(span.wait_s for span in block.spans) for block in blocks)
    return RateRecord(
        examples=tuple(block.examples for block in blocks),
        durations_s=tuple(block.duration_s for block in blocks),
        wait_s=waited if any(block.spans for block in blocks) else (),
    )


# The long reading ends when another pause like the longest would change the rate by less than this.
_PAUSE_SHARE = 0.2
# Least length of the reading, as a multiple of the time of its first batch. A shuffle buffer gives
# batches much faster than it is filled.
_FIRST_BATCH_FACTOR = 1.5
# Whole epochs count if they have few batches, or if the start takes this share of the epoch.
_FEW_BATCHES, _START_SHARE = 8, 0.05


class InputPass(NamedTuple):
    """The result of one long reading of a pipeline, with typical batches."""

    source: Any  # A `tf.data.Dataset`.
    record: LongRun
    batches: tuple[Any, ...]
    epoch: tuple[int, float] | None  # Batches and seconds of an epoch, None if it did not end.
    duration_s: float
    batch_values: float  # Mean number of values in a batch.
    step_s: float = 0.0  # Seconds of a train step on one of the batches, once it is known.

    def counted(self, length: BlockLength, *, trains: bool = False) -> BlockLength:
        """Return the length of this pipeline's blocks, which may count whole epochs."""
        if self.epoch is None:
            return length
        batches, epoch_s = self.epoch
        epoch_s += trains * batches * self.step_s
        is_short = batches <= _FEW_BATCHES or epoch_s <= length.settle_s + length.measure_s
        # A slow start, such as filling a shuffle buffer, is a part of each epoch.
        has_slow_start = self.record.first_batch_s > _START_SHARE * epoch_s
        if epoch_s <= length.longest_s and (is_short or has_slow_start):
            return length._replace(counting="epochs")
        return length


def read_pass(source: Iterable[Any], *, least_s: float, most_s: float) -> InputPass:
    """Read a pipeline from its start, until another pause would hardly change the rate."""
    read: list[TimedBatch] = []
    by_size: dict[int, Any] = {}  # The first batch of each size. Sizes within 10 % count as one.
    longest_s = 0.0
    with contextlib.closing(timed_batches(source)) as batches:
        for timed, batch in batches:
            longest_s = max(longest_s, timed.arrived_s - (read[-1].arrived_s if read else 0.0))
            read.append(timed)
            if timed.epoch == 0 and all(abs(timed.values - n) > 0.1 * n for n in by_size):
                by_size[timed.values] = batch
            is_even = timed.epoch > 0 or longest_s <= _PAUSE_SHARE * timed.arrived_s
            is_over = timed.arrived_s >= max(most_s, _FIRST_BATCH_FACTOR * read[0].arrived_s)
            if len(read) > 1 and (is_over or (is_even and timed.arrived_s >= least_s)):
                break
    first_epoch = [timed for timed in read if timed.epoch == 0]
    count, arrivals_s = len(first_epoch), [timed.arrived_s for timed in read]
    ended, sizes = count < len(read), [timed.values for timed in first_epoch]
    rows, epochs = [timed.rows for timed in read], [timed.epoch for timed in read]
    return InputPass(
        source,
        long_run(rows, arrivals_s, epochs=epochs),
        typical_batches(sizes, by_size, ended=ended),
        (count, arrivals_s[count] - arrivals_s[0]) if ended else None,
        arrivals_s[-1],
        fmean(sizes),
    )


# Most batches for the train step alone, if their sizes differ.
_TYPICAL = 8


def typical_batches(
    sizes: Sequence[int], by_size: Mapping[int, Any], *, ended: bool
) -> tuple[Any, ...]:
    """Return up to eight batches whose sizes are quantiles of all sizes, the median first."""
    # The smaller last batch of an epoch is too rare to be one of eight.
    if ended and len(sizes) > _TYPICAL and sizes[-1] not in sizes[:-1]:
        sizes = sizes[:-1]
    ordered = sorted(sizes)
    count = 1 if ordered[0] == ordered[-1] else min(_TYPICAL, len(sizes))
    quantiles = [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]
    nearest = [min(by_size, key=lambda size: abs(size - quantile)) for quantile in quantiles]
    batches = [by_size[size] for size in nearest]
    return tuple(batches[count // 2 :] + batches[: count // 2])


def value_count(batch: Any) -> int:
    """Count the values in a batch, including the row ends of ragged tensors."""
    parts = tf.nest.flatten(batch, expand_composites=True)
    return sum(math.prod(part.shape) for part in parts if part is not None)
