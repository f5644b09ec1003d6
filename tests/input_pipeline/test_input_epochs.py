import itertools

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from batch_data import Rows, examples, raising

from kbatch.errors import InputError
from kbatch.input_pipeline.blocks import epochs_of
from kbatch.input_pipeline.changes import worker_changes
from kbatch.input_pipeline.measure import pipeline_of
from kbatch.training.data.forms import rows_of

X, Y = models.rows(20)
FORMS = {
    "batches": (lambda: examples().batch(8), None),
    "other batches": (lambda: examples().batch(5), 8),
    "function": (lambda: lambda size: examples().batch(size), 8),
    "arrays": (lambda: (X, Y), 8),
    "x alone": (lambda: X, 8),
    "PyDataset": (Rows, None),
    "PyDataset with threads": (lambda: Rows(workers=2), None),
}


@pytest.fixture(scope="module")
def model():
    return models.mlp()


@pytest.mark.parametrize("form", FORMS)
def test_pipeline_of_gives_all_examples_in_every_epoch(form, model):
    make, batch_size = FORMS[form]
    data = make()
    pipeline = pipeline_of(data, model, batch_size=batch_size)
    for _ in range(2):  # Each reading starts at the beginning.
        read = itertools.islice(epochs_of(pipeline), 9)
        for epoch, batches in itertools.groupby(read, key=lambda pair: pair[0]):
            parts = [keras.tree.flatten(batch)[0] for _, batch in batches]
            assert ([len(part) for part in parts], epoch < 3) == ([8, 8, 4], True)
            np.testing.assert_allclose(np.sort(np.concatenate(parts), axis=0), np.sort(X, axis=0))
    assert getattr(data, "epoch_ends", 0) == 0


def test_pipeline_of_refuses_iterators(model):
    for iterator in (((X[:8], Y[:8]) for _ in range(3)), iter(examples().batch(8))):
        with pytest.raises(InputError, match=r"more than once.*from_generator.*Received: a"):
            pipeline_of(iterator, model, batch_size=None)
        assert next(iterator) is not None


def test_epochs_of_refuses_an_epoch_without_batches():
    with pytest.raises(InputError, match="no batch in epoch 0"):
        next(epochs_of(examples(0).batch(8)))
    used_up = ((X[:8], Y[:8]) for _ in range(2))
    specs = (tf.TensorSpec((8, 8), tf.float32), tf.TensorSpec((8,), tf.int64))
    dataset = tf.data.Dataset.from_generator(lambda: used_up, output_signature=specs)
    with pytest.raises(InputError, match="no batch in epoch 1"):
        list(epochs_of(dataset))


class Broken(Rows):
    """Raises an error at one of its batches."""

    def __init__(self, at, workers):
        super().__init__(32, workers=workers)
        self.at = at

    def __getitem__(self, index):
        if index == self.at:
            raise OSError("a broken image")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("data", "at"), [(raising, 2), (lambda at: Broken(at, 1), 0), (lambda at: Broken(at, 2), 3)]
)
def test_epochs_of_names_the_batch_of_an_error(data, at, model):
    rows = data(at)
    with pytest.raises(InputError, match=f"error at batch {at} .*a broken image") as caught:
        list(epochs_of(pipeline_of(rows, model, batch_size=None)))
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("make", "batch_size", "words"),
    [
        (examples, 0, "positive integer.*batch_size=0"),
        (examples, None, r"must give batches.*batch\(batch_size\)"),
        (lambda: lambda size: examples().batch(size), None, "give `batch_size`"),
        (lambda: lambda size: [size], 8, "must return a `tf.data.Dataset`.*a list"),
        (Rows, 8, "leave out `batch_size`"),
        (lambda: (X, Y, Y, Y), 8, "tuple of 4"),
        (lambda: (X, Y[:-1]), 8, "same number of rows"),
        (lambda: Rows(0), None, "num_batches=0"),
        (lambda: ([[1.0]], [2.0]), 8, "float"),
    ],
)
def test_pipeline_of_refuses(make, batch_size, words, model):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        pipeline_of(make(), model, batch_size=batch_size)


def test_pipeline_of_needs_a_complete_file_cache(tmp_path, model):
    dataset = examples().cache(str(tmp_path / "rows")).batch(8)
    for incomplete in (dataset, examples().batch(8).concatenate(dataset)):
        with pytest.raises(InputError, match="read the dataset once"):
            pipeline_of(incomplete, model, batch_size=None)
    assert list(tmp_path.iterdir()) == []
    for _ in dataset:
        pass
    assert rows_of(next(iter(pipeline_of(dataset, model, batch_size=None)))) == 8


def test_worker_changes_keep_the_order_of_the_batches():
    rows = Rows(workers=1, max_queue_size=3)
    ((change, source),) = worker_changes(rows)
    assert (change.reason, change.code) == (None, f"workers={change.code.split('=')[1]}")
    for batch, expected in zip(source, rows, strict=True):
        np.testing.assert_array_equal(batch[0], expected[0])
    assert (rows.workers, rows.max_queue_size, rows.epoch_ends) == (1, 3, 0)
    ((change, source),) = worker_changes(Rows(workers=1000))
    assert source is None
    assert "each core" in change.reason
