"""Updates of several sizes: whole where they fit."""

import keras
import pytest
import small_models as models
from fake_clock import FakeClock

from kbatch.throughput.updates import time_updates
from kbatch.training.data.training_data import TrainingData

SOURCE = TrainingData(*models.rows(64))
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


def timed(build, *, fits, budget_s=2.0):
    model = build()
    model.build((None, 8))
    return time_updates(
        model,
        SOURCE,
        batch_sizes=(8, 16, 32),
        largest_whole=fits,
        budget_s=budget_s,
        first=16,
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """An update takes a millisecond to it, so that none is too slow to be timed."""
    monkeypatch.setattr("time.perf_counter", FakeClock(tick_s=1e-3))


def ways(timings):
    return {(t.batch_size, t.micro_batch_size) for t in timings if t.measured}


@pytest.mark.parametrize("fits", [16, 32])
def test_only_memory_cuts_a_batch(fits):
    timings = timed(normalised, fits=fits)
    whole = {(size, size) for size in (8, 16, 32) if size <= fits}
    assert ways(timings) == whole | ({(32, 16)} if fits == 16 else set())
