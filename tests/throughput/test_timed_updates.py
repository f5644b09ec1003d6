"""Updates of several sizes: whole where they fit."""

import pytest
import small_models as models
from fake_clock import FakeClock

from kbatch.throughput.updates import time_updates
from kbatch.training.data.training_data import TrainingData

SOURCE = TrainingData(*models.rows(64))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """An update takes a millisecond to it, so that none is too slow to be timed."""
    monkeypatch.setattr("time.perf_counter", FakeClock(tick_s=1e-3))


@pytest.mark.parametrize("fits", [16, 32])
def test_only_memory_cuts_a_batch(fits):
    model, sizes = models.linear(), (8, 16, 32)
    model.build((None, 8))
    found = time_updates(
        model, SOURCE, batch_sizes=sizes, largest_whole=fits, budget_s=2.0, first=16
    )
    whole = {(size, size) for size in sizes if size <= fits}
    timed = {(update.batch_size, update.micro_batch_size) for update in found if update.measured}
    assert timed == whole | ({(32, 16)} if fits == 16 else set())
