import itertools

import numpy as np
import pytest
from batch_data import Step
from fake_clock import FakeClock

from kbatch.input_pipeline.blocks import (
    BlockLength,
    InputPass,
    TimedBatch,
    rate_of,
    read_pass,
    reading_block,
    step_block,
    typical_batches,
)
from kbatch.input_pipeline.result import LongRun

LENGTH = BlockLength(settle_s=0.001, measure_s=0.01, longest_s=10.0)


class Source:
    """Batches of these lengths in turn, without end. Counts iterators opened and closed."""

    def __init__(self, *rows):
        self.rows, self.opened, self.closed = rows, 0, 0

    def __iter__(self):
        self.opened += 1
        try:
            yield from (np.zeros(n) for n in itertools.cycle(self.rows))
        finally:
            self.closed += 1


def test_step_block_takes_turns_with_batches_of_several_shapes():
    step = Step()
    block = step_block(step, (np.zeros(2), np.zeros(22), np.zeros(24)), LENGTH)
    counted = step.rows[-block.examples // 16 :]
    assert block.examples % 48 == 0
    assert step.rows.count(22) == step.rows.count(24) == block.examples // 48
    assert counted[-3:] == [2, 22, 24]


def test_reading_block_counts_steps_and_waiting():
    step, source = Step(), Source(8)
    assert reading_block(source, BlockLength(0.0, 0.0, 10.0)).examples == 32  # Four batches.
    block = reading_block(source, LENGTH, step)
    assert (source.opened, source.closed, step.restored) == (2, 2, 1)
    assert block.examples == 8 * len(block.spans)
    assert block.duration_s == pytest.approx(sum(s.wait_s + s.compute_s for s in block.spans))
    assert block.spans[0].begin_s == 0
    begins = [span.begin_s for span in block.spans]
    assert begins == sorted(begins)
    rate = rate_of([block, block])
    assert rate.wait_s == pytest.approx((sum(s.wait_s for s in block.spans),) * 2)
    assert rate_of([step_block(step, (np.zeros(8),), LENGTH)]).wait_s == ()


def test_reading_block_does_not_count_steps_on_new_shapes():
    step = Step()
    source = Source(8, 8, 8, 1000, 8, 1001, 8, 8, 8, 8, 8, 8)
    block = reading_block(source, BlockLength(0.0, 0.0, 10.0), step)
    assert {1000, 1001} <= set(step.rows)
    assert block.examples == 16


def test_step_block_launches_several_steps_before_it_waits():
    step = Step()
    step_block(step, (np.zeros(8),), BlockLength(0.0, 0.05, 10.0))
    assert 0 < step.waited < len(step.rows)


def timed(*ends_s, epochs=None):
    """Batches of eight rows that ended at these seconds."""
    epochs = epochs or [0] * len(ends_s)
    return [TimedBatch(e, 8, 8, s, s, s, False) for s, e in zip(ends_s, epochs, strict=True)]


@pytest.mark.parametrize(
    ("length", "batches", "began_s", "counted"),
    [
        (BlockLength(0.5, 1.0, 9.0), timed(3, 3.25), None, None),
        (BlockLength(0.5, 1.0, 9.0), timed(3, 3.25, 3.5, 4, 4.25, 4.5), None, None),
        (BlockLength(0.5, 1.0, 9.0), timed(3, 3.25, 3.5, 4, 4.25, 4.375, 4.5), 3.5, 4),
        (BlockLength(0.5, 1.0, 2.0), timed(3, 3.5, 5.5), 3.5, 1),
        (BlockLength(0.5, 1.0, 9.0, "start"), timed(0.3, 0.6, 0.8, 1.1), 0.0, 4),
        (BlockLength(0.5, 1.0, 0.2, "start"), timed(0.3), 0.0, 1),
        (BlockLength(0.5, 1.0, 9.0, "epochs"), timed(1, 2, 3), None, None),
        (BlockLength(0.5, 1.0, 9.0, "epochs"), timed(1, 2, 3, epochs=[0, 0, 1]), 0.0, 2),
        (BlockLength(0.5, 4.0, 9.0, "epochs"), timed(1, 2, 3, epochs=[0, 0, 1]), None, None),
    ],
)
def test_block_length_counted(length, batches, began_s, counted):
    result = length.counted(batches)
    assert (result and (result[0], len(result[1]))) == (counted and (began_s, counted))


class RepeatedSource:
    """A source whose epochs are the batches of a generator function."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return self.make()


@pytest.fixture
def clock(monkeypatch):
    """A clock in place of the machine's, which only the data advance."""
    fake_clock = FakeClock()
    monkeypatch.setattr("time.perf_counter", fake_clock)
    return fake_clock


def test_read_pass_of_chunks_ends_when_a_pause_matters_little(clock):
    def chunks():
        while True:
            clock.sleep(0.05)
            yield from (np.zeros((8, 2)) for _ in range(10))

    reading = read_pass(RepeatedSource(chunks), least_s=0.01, most_s=5.0)
    assert reading.record.basis == "whole_chunks"
    assert reading.record.examples % 80 == 0
    # After six pauses, one of them is less than a fifth of the time.
    assert reading.duration_s == pytest.approx(0.3)
    low, high = reading.record.bounds
    assert low == high == pytest.approx(80 / 0.05)
    assert reading.epoch is None


def test_read_pass_knows_the_epoch_and_its_start(clock):
    def shuffled():
        clock.sleep(0.02)
        yield from (np.zeros((rows, 2)) for rows in (8, 8, 4))

    reading = read_pass(RepeatedSource(shuffled), least_s=0.0, most_s=5.0)
    assert reading.epoch == (3, pytest.approx(0.02))
    assert reading.record.basis == "whole_epochs"
    assert [len(batch) for batch in reading.batches] == [8, 8, 4]


EPOCHS_FIT = BlockLength(0.1, 0.2, 0.8)


@pytest.mark.parametrize(
    ("epoch", "first_s", "step_s", "counting"),
    [
        (None, 0.0, 0.0, "settled"),
        ((100, 0.2), 0.0, 0.0, "epochs"),  # A block has several epochs.
        ((100, 0.5), 0.01, 0.0, "settled"),
        ((100, 0.5), 0.4, 0.0, "epochs"),  # The start takes long.
        ((5, 0.5), 0.01, 0.0, "epochs"),  # An epoch has few batches.
        ((5, 2.0), 1.9, 0.0, "settled"),  # An epoch is too long for a block.
        ((100, 0.2), 0.0, 0.1, "settled"),
    ],
)
def test_input_pass_counts_whole_epochs(epoch, first_s, step_s, counting):
    record = LongRun("whole_epochs", 8, 1.0, 0, 0.0, first_s)
    reading = InputPass(None, record, (), epoch, 1.0, 64.0, step_s)
    assert reading.counted(EPOCHS_FIT, trains=True).counting == counting


def typical(shapes, *, ended=True):
    sizes = [rows * columns for rows, columns in shapes]
    return list(typical_batches(sizes, dict(zip(sizes, shapes, strict=True)), ended=ended))


def mean_elements(shapes):
    return np.mean([np.prod(shape) for shape in shapes])


LENGTHS = ((8, 24), (8, 16, 24), (24, 8, 16), (5, 10, 20, 40))


def test_typical_batches_keep_the_proportion_of_sizes():
    for lengths, count in itertools.product(LENGTHS, (7, 16, 31, 100, 240, 333)):
        shapes = [(4, n) for n in itertools.islice(itertools.cycle(lengths), count)]
        batches = typical(shapes)
        assert {n for _, n in batches} == set(lengths)
        assert mean_elements(batches) == pytest.approx(mean_elements(shapes), rel=0.12)


def test_typical_batches_leave_out_the_smaller_last_batch():
    assert typical([(8, 2)] * 15 + [(1, 2)]) == [(8, 2)]


def test_typical_batches_of_a_rare_size():
    assert (1, 2) not in typical([(8, 2)] * 30 + [(1, 2)] + [(8, 2)] * 30)
    assert typical([(8, 2)] * 4 + [(1, 2)], ended=False).count((1, 2)) == 1
