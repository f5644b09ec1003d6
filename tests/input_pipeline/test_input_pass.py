import contextlib

import numpy as np
import pytest
from fake_clock import FakeClock

from kbatch.input_pipeline.blocks import BlockLength, InputPass, read_pass
from kbatch.input_pipeline.rates import LongRun
from kbatch.input_pipeline.record import LongRunRecord
from kbatch.training.data.batch_source import BatchSource


def source(make):
    """A source of the batches that a generator function gives in an epoch."""
    return BatchSource("tf.data.Dataset", lambda: contextlib.nullcontext(make()), None, None)


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
    reading = read_pass(source(chunks), least_s=0.01, most_s=5.0)
    assert reading.record.counted.basis == "whole chunks"
    assert reading.record.counted.examples % 80 == 0
    # Six pauses, of which one is less than a fifth, and the seventh, which ends the last chunk.
    assert reading.duration_s == pytest.approx(0.3)
    low, high = reading.record.counted.bounds
    assert low == high == pytest.approx(80 / 0.05)
    assert reading.epoch is None


def test_a_pause_that_was_seen_once_leaves_two_bounds_and_the_time_ends(chunks):
    reading = read_pass(source(chunks), least_s=0.01, most_s=0.0)
    low, high = reading.record.counted.bounds
    assert reading.record.counted.basis == "part of the data"
    assert low < high


def test_an_epoch_and_its_start_are_known(clock):
    def shuffled():
        clock.sleep(0.02)
        yield from (np.zeros((rows, 2)) for rows in (8, 8, 4))

    reading = read_pass(source(shuffled), least_s=0.0, most_s=5.0)
    assert reading.epoch == (3, pytest.approx(0.02))
    assert reading.record.counted.basis == "whole epochs"
    assert [len(batch) for batch in reading.batches] == [8, 8, 4]


def lengths(*columns):
    return lambda: iter([np.zeros((8, n)) for n in columns])


def test_batches_that_grow_are_told():
    growing = read_pass(source(lengths(*range(1, 101))), least_s=0.0, most_s=5.0)
    assert "become larger" in growing.notes[0]
    even = read_pass(source(lengths(*[5] * 100)), least_s=0.0, most_s=5.0)
    assert (len(even.batches), even.notes) == (4, ())


LENGTH = BlockLength(0.1, 0.2, 0.8)


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
        ((5, 0.2), 0.0, 0.1, "epochs"),
    ],
)
def test_whole_epochs_count_where_one_fits_and_its_start_matters(epoch, first_s, step_s, counting):
    record = LongRunRecord(LongRun("whole epochs", 8, 1.0, 0, 0.0), first_s)
    reading = InputPass(record, (), epoch, 1.0, 64.0, ())
    assert reading.counted(LENGTH, step_s=step_s).counting == counting
