"""Rows of the data, repeated into batches of any size."""

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.training.data.forms import FitData
from kbatch.training.data.sample_rows import Samples, example_rows, sample_of

X, Y = models.rows(100)


def batch(rows, size):
    return next(iter(rows.batches(size)))


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_a_batch_of_any_size_repeats_the_first_rows(size):
    x, y = batch(sample_of(FitData(X, Y)), size)
    wanted = np.arange(size) % 64
    np.testing.assert_array_equal(x, X[wanted])
    np.testing.assert_array_equal(y, Y[wanted])


def test_all_batches_have_one_unknown_length():
    rows = sample_of(FitData(X, Y))
    specs = {rows.batches(size).element_spec for size in (1, 7)}
    assert len(specs) == 1
    assert specs.pop()[0].shape.as_list() == [None, 8]


def test_lists_of_parts_of_different_shape_stay_apart():
    x, targets = batch(sample_of(FitData([X, X[:, :2]], [Y, X])), 3)
    assert [part.shape[1:].as_list() for part in x] == [[8], [2]]
    assert [part.shape.as_list() for part in targets] == [[3], [3, 8]]
    (alone,), _ = batch(sample_of(FitData([X], Y)), 3)
    assert alone.shape == (3, 8)


def test_dicts_and_weights_are_kept():
    weights = np.arange(100.0)
    x, _, weight = batch(sample_of(FitData({"a": X, "b": Y}, Y, weights)), 2)
    assert sorted(x) == ["a", "b"]
    np.testing.assert_array_equal(weight, [0.0, 1.0])
    weight = batch(sample_of(FitData(X, Y, class_weight={0: 3.0, 1: 4.0, 2: 5.0})), 8)[2]
    np.testing.assert_array_equal(weight, Y[:8] + 3.0)


DATASETS = {
    "examples": (tf.data.Dataset.from_tensor_slices((X, Y)), 100),
    "batches": (tf.data.Dataset.from_tensor_slices((X, Y)).batch(10), 100),
    "endless": (tf.data.Dataset.from_tensor_slices((X, Y)).repeat(), None),
    "filtered": (tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: y > 0), None),
}


@pytest.mark.parametrize("data", DATASETS.values(), ids=DATASETS)
def test_a_dataset_tells_its_examples_where_it_knows(data):
    dataset, examples = data
    rows = sample_of(FitData(dataset)).rows(models.mlp())
    assert rows.examples == examples
    assert rows.note is None
    assert batch(rows, 5)[0].shape == (5, 8)


def test_of_large_batches_only_a_few_rows_are_kept():
    def batches():
        for rows in (100, 300, 100, 300):
            yield np.full((rows, 8), rows, "float32"), np.zeros(rows, "int32")

    dataset = tf.data.Dataset.from_generator(
        batches, output_signature=(tf.TensorSpec((None, 8)), tf.TensorSpec((None,), tf.int32))
    )
    found = Samples().source(FitData(dataset), models.mlp())
    assert [part.shape for part in found.rows] == [(64, 8), (64,)]
    assert all(part.base is None for part in found.rows)
    assert (found.examples, found.note) == (None, None)
    # Until a model tells, they may be examples: the largest is kept, not all.
    assert sample_of(FitData(dataset)).examples.rows[0].shape == (1, 300, 8)


def test_a_smaller_last_batch_counts_as_it_is_where_all_were_read_and_else_as_full():
    for rows, size, told in ((94, 10, 94), (94, 3, 96)):
        dataset = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(size)
        assert sample_of(FitData(dataset)).rows(models.mlp()).examples == told


def test_of_unbatched_rows_the_longest_is_used_and_said():
    def sequences():
        for length in (3, 50, 9):
            yield np.zeros((length, 8), "float32"), 0

    dataset = tf.data.Dataset.from_generator(
        sequences, output_signature=(tf.TensorSpec((None, 8)), tf.TensorSpec((), tf.int32))
    )
    model = keras.Sequential([keras.Input((None, 8)), keras.layers.Dense(3)])
    rows = sample_of(FitData(dataset)).rows(model)
    assert rows.rows[0].shape == (1, 50, 8)
    assert "longest of the first 3" in rows.note


def test_examples_of_a_python_function_are_no_batches_though_their_rank_is_unknown():
    targets = tf.data.Dataset.range(6).map(lambda k: tf.py_function(float, [k], tf.float32))
    found = sample_of(FitData(tf.data.Dataset.zip(tf.data.Dataset.from_tensor_slices(X), targets)))
    assert found.batches is None
    x, y = batch(found.examples, 4)
    assert (x.shape, y.shape, found.examples.examples) == ((4, 8), (4,), 6)


def test_one_example_gets_a_batch_axis():
    rows = example_rows((np.zeros((7, 8), "float32"), 2))
    assert [part.shape for part in batch(rows, 4)] == [(4, 7, 8), (4,)]
    assert rows.examples is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (FitData(X, Y[:50]), "as many rows"),
        (FitData(5), "Training data are arrays"),
        (FitData(None), "Training data are arrays"),
        (FitData(DATASETS["batches"][0], Y), "leave out `y`"),
        (FitData(DATASETS["batches"][0].take(0)), "empty"),
    ],
)
def test_what_cannot_be_batched_is_refused(data, message):
    with pytest.raises(InputError, match=message):
        sample_of(data)


def test_arrays_without_rows_are_refused():
    with pytest.raises(InputError, match="data are empty"):
        sample_of(FitData(np.zeros((0, 8), "float32"), np.zeros(0)))
