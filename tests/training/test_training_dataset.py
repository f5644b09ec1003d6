"""`training_dataset`: its batches, orders and errors."""

import keras
import numpy as np
import pytest
import scipy.sparse
import searches
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.search.identity import fit_facts
from kbatch.search.timed_fit import TimedFit
from kbatch.training.data.training_data import FitCall, TrainingData

X, Y = np.arange(188.0).reshape(94, 2).astype("float32"), np.arange(94) % 3


def order(dataset):
    return np.concatenate([batch[0] for batch in dataset.as_numpy_iterator()])[:, 0] / 2


@pytest.mark.parametrize("batch_size", [1, 16, 32, 94])
def test_training_dataset_epoch_is_a_permutation(batch_size):
    dataset = kbatch.training_dataset(X, Y, batch_size, seed=0)
    batches = list(dataset.as_numpy_iterator())
    assert len(batches) == int(dataset.cardinality()) == -(-94 // batch_size)
    assert {len(x) for x, _ in batches[:-1]} <= {batch_size}
    rows = np.concatenate([x for x, _ in batches])
    numbers = (rows[:, 0] / 2).astype(int)
    assert sorted(numbers) == list(range(94))
    np.testing.assert_array_equal(rows, X[numbers])
    np.testing.assert_array_equal(np.concatenate([y for _, y in batches]), Y[numbers])
    # One graph accepts all sizes.
    assert [spec.shape[0] for spec in dataset.element_spec] == [None, None]


def test_training_dataset_order_depends_on_seed_and_epoch():
    def orders(seed, batch_size):
        dataset = kbatch.training_dataset(X, Y, batch_size, seed=seed)
        return [order(dataset).tolist() for _ in range(3)]

    first = orders(0, 16)
    assert first[0] != first[1] != first[2] != list(range(94))
    keras.utils.set_random_seed(5)
    assert orders(0, 32) == first
    # Iterators that are read partly or not at all, as in Keras, do not change the order.
    dataset = kbatch.training_dataset(X, Y, 16, seed=0)
    next(iter(dataset))
    iter(dataset)
    assert [order(dataset).tolist() for _ in range(3)] == first
    assert orders(1, 16) != first
    keras.utils.set_random_seed(5)
    assert len({tuple(one) for _ in range(2) for one in orders(None, 16)}) == 6


def test_training_dataset_leaves_global_random_state():
    tf.random.set_seed(3)
    expected = tf.random.uniform([3]).numpy()
    tf.random.set_seed(3)
    kbatch.training_dataset(X, Y, 16, seed=0)
    np.testing.assert_array_equal(tf.random.uniform([3]).numpy(), expected)


def test_training_dataset_equals_trial_with_same_seed():
    class Seen(keras.Model):
        def train_step(self, data):
            seen.append(data[0])
            return super().train_step(data)

    seen, model = [], Seen(given := keras.Input((2,)), keras.layers.Dense(3)(given))
    model.compile("sgd", "mse", run_eagerly=True)
    targets = np.eye(3)[Y]
    with TimedFit(model, searches.plan(16, seed=7)):
        model.fit(X, targets, epochs=2, verbose=0)
    trial, seen[:] = list(seen), []
    model.fit(kbatch.training_dataset(X, targets, 16, seed=7), epochs=2, verbose=0)
    assert len(trial) == 12
    np.testing.assert_array_equal(np.concatenate(seen), np.concatenate(trial))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"batch_size": 95}, "cannot be larger.*batch_size=95 for 94"),
        ({"y": Y[:-1]}, "94, 93 rows"),
        ({"x": tf.data.Dataset.range(94)}, "leave out `y`"),
        ({"x": tf.data.Dataset.from_tensor_slices((X, X)), "y": None}, "give a model"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_training_dataset_refuses_wrong_arguments(changed, words):
    with pytest.raises(ValueError, match=words):
        kbatch.training_dataset(**{"x": X, "y": Y, "batch_size": 16} | changed)


def test_training_dataset_of_sparse_matrix_equals_array():
    sparse = scipy.sparse.csr_matrix(X)
    for settings in ({"seed": 0}, {"shuffle": False}):
        orders = [order(kbatch.training_dataset(x, Y, 16, **settings)) for x in (sparse, X)]
        np.testing.assert_array_equal(*orders)
    np.testing.assert_array_equal(orders[0], np.arange(94))
    # `validation_split` works as in Keras, and the identity depends on the values.
    data = TrainingData(sparse, Y, validation_split=0.25)
    batches = data.batches(16, seed=0, validation_batch_size=8)
    assert (batches.examples, data.count_validated(models.mlp)) == (70, 24)
    rows = np.concatenate([x for x, _ in batches.validation_data.as_numpy_iterator()])
    np.testing.assert_array_equal(rows, X[70:])
    others = (fit_facts(FitCall((scipy.sparse.csr_matrix(x), Y), {}))["x"] for x in (X, X, X + 1))
    assert len({*others}) == 2


def test_training_dataset_of_grain_has_its_batches():
    grain = pytest.importorskip("grain")
    rows = grain.MapDataset.source(list(zip(X, Y, strict=True))).batch(10)
    for dataset in (rows, rows.to_iter_dataset()):
        data = TrainingData(dataset, validation_data=dataset)
        assert data.is_same(TrainingData(dataset, validation_data=dataset))
        found = data.batches(16, seed=0, validation_batch_size=8)
        assert [len(x) for x, _ in found.dataset.as_numpy_iterator()] == [16] * 5 + [14]
        for batches in (found.dataset, found.validation_data):
            x = np.concatenate([x for x, _ in batches.as_numpy_iterator()])
            np.testing.assert_array_equal(x, X)
    narrow = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    assert TrainingData(rows).count_examples(lambda: narrow, 16) == 100  # An upper bound.


@pytest.mark.parametrize("steps", [1, 5])
def test_training_run_traces_no_map_and_opens_one_iterator(monkeypatch, steps):
    traced, opened = [], []
    monkeypatch.setattr(tf.data.Dataset, "map", lambda *_, **__: traced.append("map"))
    begin = tf.data.Dataset.__iter__
    monkeypatch.setattr(
        tf.data.Dataset, "__iter__", lambda self: opened.append(self) or begin(self)
    )
    model = models.linear()
    with TimedFit(model, searches.plan(8, steps_per_execution=steps)) as fit:
        model.fit(*models.rows(94), epochs=4, verbose=0)
    assert [epoch.batches for epoch in fit.clock.epochs] == [12] * 4
    assert len(opened) <= 2  # One more may have built the model.
    assert not traced
