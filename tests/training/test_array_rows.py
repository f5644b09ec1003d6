"""Rows of arrays: the orders of their epochs, and how few functions and iterators they take."""

import numpy as np
import pytest
import searches
import small_models as models
import tensorflow as tf

from kbatch.search.plan import SearchPlan
from kbatch.search.timed_fit import SearchFeed, TimedFit
from kbatch.training.data import array_rows
from kbatch.training.data.array_rows import ArrayRows, held_batches

NUMBERS = np.arange(94)[:, None]


def epochs(dataset, count):
    """The rows of so many epochs, read by one iterator."""
    batches = dataset.as_numpy_iterator()
    found = []
    for _ in range(count):
        rows = []
        while len(rows) < len(NUMBERS):
            rows += next(batches)[0].ravel().tolist()
        found.append(rows)
    return found


@pytest.mark.parametrize("piece", [7, 40, 4096])
def test_orders_depend_on_the_epoch_alone(monkeypatch, piece):
    expected = epochs(ArrayRows((NUMBERS,), shuffle=True).endless(16, seed=3), 3)
    assert all(sorted(rows) == NUMBERS.ravel().tolist() for rows in expected)
    assert expected[0] != expected[1] != expected[2]
    monkeypatch.setattr(array_rows, "_MOST_ROWS", piece)
    rows = ArrayRows((NUMBERS, None), shuffle=True)
    assert epochs(rows.endless(32, seed=3), 3) == expected
    # Iterators that are not read, or begun only, as Keras makes them, take no order away.
    once = rows.epoch(16, seed=3)
    next(iter(once))
    iter(once)
    assert [epochs(once, 1)[0] for _ in range(3)] == expected


def test_batches_of_an_epoch_end_with_its_rest():
    batches = ArrayRows((NUMBERS,), shuffle=False).endless(32, seed=0).as_numpy_iterator()
    found = [next(batches)[0].ravel().tolist() for _ in range(6)]
    assert [len(batch) for batch in found] == [32, 32, 30] * 2
    held = list(held_batches((NUMBERS,), 32).as_numpy_iterator())
    assert [batch.ravel().tolist() for (batch,) in held] == found[:3] == found[3:]


@pytest.mark.parametrize("steps", [1, 5])
def test_an_execution_traces_nothing_and_reads_its_epochs_by_one_iterator(monkeypatch, steps):
    traced, opened = [], []
    monkeypatch.setattr(tf.data.Dataset, "map", lambda *_, **__: traced.append("map"))
    begin = tf.data.Dataset.__iter__
    monkeypatch.setattr(
        tf.data.Dataset, "__iter__", lambda self: opened.append(self) or begin(self)
    )
    feed = SearchFeed()
    data = models.rows(94)
    for _ in range(2):
        opened.clear()
        model = models.mlp()
        asked = SearchPlan((8,), steps_per_execution=steps)
        with TimedFit(model, searches.plan(8, search=asked, feed=feed)) as fit:
            model.fit(*data, epochs=4, verbose=0)
        assert [epoch.batches for epoch in fit.clock.epochs] == [12] * 4
        assert len(opened) <= 2  # Another one may have built the model.
    assert not traced
