"""Updates of several sizes, in the ways that a recommendation chooses from."""

import contextlib
import itertools

import keras
import models
import pytest
from fake_clock import FakeClock

from kbatch.profiling.parts_checks import PartsChecks
from kbatch.profiling.timed_updates import time_updates
from kbatch.training.data import FitData
from kbatch.training.sample_rows import sample_of

SOURCE = sample_of(FitData(*models.rows(64)))
layers = keras.layers


def normalised():
    model = keras.Sequential(
        [
            layers.Input((8,)),
            layers.BatchNormalization(name="normal"),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def timed(build, *, fits, budget_s=6.0):
    model = build()
    model.build((None, 8))
    return time_updates(
        model,
        SOURCE,
        batch_sizes=(8, 16, 32),
        largest_whole=fits,
        budget_s=budget_s,
        checks=PartsChecks(),
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """An update takes a millisecond to it, so that none is too slow to be timed."""
    monkeypatch.setattr("time.perf_counter", FakeClock(tick_s=1e-3))


def ways(found):
    return {(t.batch_size, t.micro_batch_size) for t in found.timings}


def test_batches_are_timed_whole_in_halves_and_in_parts_where_they_do_not_fit():
    found = timed(models.stock, fits=16)
    assert {(8, 8), (16, 16), (16, 8)} <= ways(found)
    assert {(32, 8), (32, 16)} & ways(found)
    assert (32, 32) not in ways(found)
    assert found.reason is None


@pytest.mark.parametrize("fits", [16, 32])
def test_speed_does_not_cut_what_trains_differently_in_parts(fits):
    found = timed(normalised, fits=fits)
    whole = {(size, size) for size in (8, 16, 32) if size <= fits}
    assert ways(found) == whole | ({(32, 16)} if fits == 16 else set())
    assert ("normal (BatchNormalization)" in " ".join(found.notes)) == (fits == 16)


class RisingClock(contextlib.nullcontext):
    """A monitor of a GPU whose clock is 6 % faster at each turn."""

    def __init__(self, *, interval_s):
        super().__init__(self)
        self._turns = itertools.count()

    def sample_clock_mhz(self):
        return 1000 * 1.06 ** next(self._turns)


def test_clocks_that_differ_are_a_note(monkeypatch):
    assert not any("clocks" in note for note in timed(models.stock, fits=32).notes)
    monkeypatch.setattr("kbatch.profiling.timed_updates.GpuMonitor", RisingClock)
    (note,) = [n for n in timed(models.stock, fits=32).notes if "clocks" in n]
    assert "GPU clock from" in note
