import itertools

import numpy as np
import pytest
from batch_data import Step
from fake_clock import FakeClock

from kbatch.input_pipeline.blocks import (
    BlockLength,
    InputPass,
    Taken,
    chosen_batches,
    rate_of,
    read_pass,
    reading_block,
    step_block,
)
from kbatch.input_pipeline.result import LongRun

LENGTH = BlockLength(settle_s=0.001, measure_s=0.01, longest_s=10.0)


class Source:
    """Batches of given lengths, over and over; counts what was opened and closed."""

    def __init__(self, *rows):
        self.rows, self.opened, self.closed = rows, 0, 0

    def __iter__(self):
        self.opened += 1
        try:
            yield from (np.zeros(n) for n in itertools.cycle(self.rows))
        finally:
            self.closed += 1


def test_a_step_alone_takes_turns_with_batches_of_several_shapes():
    step = Step()
    block = step_block(step, (np.zeros(2), np.zeros(22), np.zeros(24)), LENGTH)
    counted = step.rows[-block.examples // 16 :]
    assert block.examples % 48 == 0
    assert step.rows.count(22) == step.rows.count(24) == block.examples // 48
    assert counted[-3:] == [2, 22, 24]


def test_training_counts_its_steps_and_their_waiting():
    step, source = Step(), Source(8)
    assert reading_block(source, BlockLength(0.0, 0.0, 10.0)).examples == 32  # Four at least.
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


def test_a_step_on_new_shapes_is_made_and_not_counted():
    step = Step()
    source = Source(8, 8, 8, 1000, 8, 1001, 8, 8, 8, 8, 8, 8)
    block = reading_block(source, BlockLength(0.0, 0.0, 10.0), step)
    assert {1000, 1001} <= set(step.rows)
    assert block.examples == 16


def test_steps_are_launched_together_and_waited_for_before_time_is_read():
    step = Step()
    step_block(step, (np.zeros(8),), BlockLength(0.0, 0.05, 10.0))
    assert 0 < step.waited < len(step.rows)


def taken(*ends_s, epochs=None):
    """Batches of eight rows that were used up at these seconds."""
    epochs = epochs or [0] * len(ends_s)
    return [Taken(e, 8, 8, s, s, s, False) for s, e in zip(ends_s, epochs, strict=True)]


@pytest.mark.parametrize(
    ("length", "batches", "began_s", "counted"),
    [
        (BlockLength(0.5, 1.0, 9.0), taken(3, 3.25), None, None),
        (BlockLength(0.5, 1.0, 9.0), taken(3, 3.25, 3.5, 4, 4.25, 4.5), None, None),
        (BlockLength(0.5, 1.0, 9.0), taken(3, 3.25, 3.5, 4, 4.25, 4.375, 4.5), 3.5, 4),
        (BlockLength(0.5, 1.0, 2.0), taken(3, 3.5, 5.5), 3.5, 1),
        (BlockLength(0.5, 1.0, 9.0, "start"), taken(0.3, 0.6, 0.8, 1.1), 0.0, 4),
        (BlockLength(0.5, 1.0, 0.2, "start"), taken(0.3), 0.0, 1),
        (BlockLength(0.5, 1.0, 9.0, "epochs"), taken(1, 2, 3), None, None),
        (BlockLength(0.5, 1.0, 9.0, "epochs"), taken(1, 2, 3, epochs=[0, 0, 1]), 0.0, 2),
        (BlockLength(0.5, 4.0, 9.0, "epochs"), taken(1, 2, 3, epochs=[0, 0, 1]), None, None),
    ],
)
def test_what_counts_of_a_block_follows_from_what_was_taken(length, batches, began_s, counted):
    found = length.counted(batches)
    assert (found is None) == (counted is None)
    if found is not None:
        assert (found[0], len(found[1])) == (began_s, counted)


class made_by:
    """A source of the batches that a generator function gives in an epoch."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return self.make()


@pytest.fixture
def clock(monkeypatch):
    """The machine's clock, which only the data move on."""
    found = FakeClock()
    monkeypatch.setattr("time.perf_counter", found)
    return found


@pytest.fixture
def chunks(clock):
    def make():
        while True:
            clock.sleep(0.05)
            yield from (np.zeros((8, 2)) for _ in range(10))

    return make


def test_chunks_are_read_until_one_pause_more_matters_little(chunks):
    reading = read_pass(made_by(chunks), least_s=0.01, most_s=5.0)
    assert reading.record.basis == "whole_chunks"
    assert reading.record.examples % 80 == 0
    # Six pauses, of which one is less than a fifth, and the seventh, which ends the last chunk.
    assert reading.duration_s == pytest.approx(0.3)
    low, high = reading.record.bounds
    assert low == high == pytest.approx(80 / 0.05)
    assert reading.epoch is None


def test_an_epoch_and_its_start_are_known(clock):
    def shuffled():
        clock.sleep(0.02)
        yield from (np.zeros((rows, 2)) for rows in (8, 8, 4))

    reading = read_pass(made_by(shuffled), least_s=0.0, most_s=5.0)
    assert reading.epoch == (3, pytest.approx(0.02))
    assert reading.record.basis == "whole_epochs"
    assert [len(batch) for batch in reading.batches] == [8, 8, 4]


EPOCHS_FIT = BlockLength(0.1, 0.2, 0.8)


@pytest.mark.parametrize(
    ("epoch", "first_s", "step_s", "counting"),
    [
        (None, 0.0, 0.0, "settled"),
        ((100, 0.2), 0.0, 0.0, "epochs"),  # Several in a block.
        ((100, 0.5), 0.01, 0.0, "settled"),
        ((100, 0.5), 0.4, 0.0, "epochs"),  # Its start must not be left out.
        ((5, 0.5), 0.01, 0.0, "epochs"),  # A few batches.
        ((5, 2.0), 1.9, 0.0, "settled"),  # Too long for a block.
        ((100, 0.2), 0.0, 0.1, "settled"),
    ],
)
def test_whole_epochs_count_where_one_fits_and_its_start_matters(epoch, first_s, step_s, counting):
    record = LongRun("whole_epochs", 8, 1.0, 0, 0.0, first_s)
    reading = InputPass(None, record, (), epoch, 1.0, 64.0, step_s)
    assert reading.counted(EPOCHS_FIT, trains=True).counting == counting


def chosen(shapes, *, whole=True):
    sizes = [rows * columns for rows, columns in shapes]
    return list(chosen_batches(sizes, dict(zip(sizes, shapes, strict=True)), whole=whole))


def mean_elements(shapes):
    return np.mean([np.prod(shape) for shape in shapes])


LENGTHS = ((8, 24), (8, 16, 24), (24, 8, 16), (5, 10, 20, 40))


def test_lengths_that_alternate_are_all_there_in_their_proportion():
    for lengths, count in itertools.product(LENGTHS, (7, 16, 31, 100, 240, 333)):
        shapes = [(4, n) for n in itertools.islice(itertools.cycle(lengths), count)]
        found = chosen(shapes)
        assert {n for _, n in found} == set(lengths)
        assert mean_elements(found) == pytest.approx(mean_elements(shapes), rel=0.12)


def test_a_ragged_end_of_many_batches_does_not_weigh_as_much_as_they_do():
    assert chosen([(8, 2)] * 15 + [(1, 2)]) == [(8, 2)]


def test_a_rare_shape_that_was_not_the_end_stays_among_the_sizes():
    assert (1, 2) not in chosen([(8, 2)] * 30 + [(1, 2)] + [(8, 2)] * 30)
    assert chosen([(8, 2)] * 4 + [(1, 2)], whole=False).count((1, 2)) == 1
