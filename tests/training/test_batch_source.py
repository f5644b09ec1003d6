import gc
import weakref

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from batch_data import Rows, examples, raising

from kbatch.errors import InputError
from kbatch.training.data.batch_source import (
    BatchStream,
    batch_source,
    first_batch,
    source_of_py_dataset,
)
from kbatch.training.data.forms import rows_of

X, Y = models.rows(20)
FORMS = {
    "batches": (lambda: examples().batch(8), None),
    "examples": (examples, 8),
    "other batches": (lambda: examples().batch(5), 8),
    "function": (lambda: lambda size: examples().batch(size), 8),
    "x and y": (lambda: (X, Y), 8),
    "x alone": (lambda: X, 8),
    "PyDataset": (Rows, None),
    "PyDataset with threads": (lambda: Rows(workers=2), None),
}


@pytest.fixture(scope="module")
def model():
    return models.mlp()


def source(data, model, batch_size=None):
    return batch_source(data, model, batch_size=batch_size)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_all_examples_in_every_epoch(form, model):
    make, batch_size = FORMS[form]
    with BatchStream(source(make(), model, batch_size)) as stream:
        for epoch in range(3):
            batches = [stream.next() for _ in range(3)]
            assert [rows_of(batch) for batch in batches] == [8, 8, 4]
            rows = np.concatenate([np.asarray(keras.tree.flatten(b)[0]) for b in batches])
            np.testing.assert_allclose(np.sort(rows, axis=0), np.sort(X, axis=0))
            assert stream.epochs == epoch
    assert stream.batches == 9


@pytest.mark.parametrize("form", FORMS)
def test_every_stream_starts_at_the_beginning(form, model):
    make, batch_size = FORMS[form]
    given = source(make(), model, batch_size)
    if given.kind == "arrays":
        return  # Their order is drawn again.
    firsts = [np.asarray(keras.tree.flatten(first_batch(given)[0])[0]) for _ in range(2)]
    np.testing.assert_array_equal(*firsts)


@pytest.mark.parametrize(
    "make",
    [lambda: examples().batch(8).repeat(), lambda: Rows(endless=True)],
    ids=["dataset", "PyDataset"],
)
def test_data_without_end_never_end_an_epoch(make, model):
    with BatchStream(source(make(), model)) as stream:
        for _ in range(30):
            stream.next()
        assert (stream.batches, stream.epochs) == (30, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ((X[:8], Y[:8]) for _ in range(3)),
        lambda: iter(examples().batch(8)),
    ],
)
def test_what_can_be_read_once_only_is_refused_and_left_alone(make, model):
    given = make()
    with pytest.raises(InputError, match=r"used up by reading.*from_generator.*Received: a"):
        source(given, model)
    assert next(given) is not None


def test_an_empty_dataset_and_a_generator_that_is_used_up_behind_one_are_named(model):
    with pytest.raises(InputError, match=r"no batches to measure.*no batch"):
        first_batch(source(examples(0).batch(8), model))
    used_up = ((X[:8], Y[:8]) for _ in range(2))
    specs = (tf.TensorSpec((8, 8), tf.float32), tf.TensorSpec((8,), tf.int64))
    dataset = tf.data.Dataset.from_generator(lambda: used_up, output_signature=specs)
    with (
        BatchStream(source(dataset, model)) as stream,
        pytest.raises(InputError, match=r"none in the second.*new generator each time"),
    ):
        for _ in range(3):
            stream.next()
    with (
        BatchStream(source(dataset, model), read_before=True) as stream,
        pytest.raises(InputError, match="none in the second"),
    ):
        stream.next()


def test_an_error_in_the_data_names_the_batch_and_the_cause(model):
    at = 2
    with BatchStream(source(raising(at), model)) as stream:
        for _ in range(at):
            stream.next()
        with pytest.raises(InputError, match=f"error at batch {at} .*a broken image") as caught:
            stream.next()
    assert isinstance(caught.value.__cause__, tf.errors.OpError)


@pytest.mark.parametrize(
    ("make", "batch_size", "words"),
    [
        (examples, 0, "at least 1.*batch_size=0"),
        (examples, None, r"single examples.*batch\(batch_size\)"),
        (lambda: lambda size: examples().batch(size), None, "give `batch_size`"),
        (lambda: lambda size: [size], 8, "must return a `tf.data.Dataset`.*a list"),
        (Rows, 8, "leave out `batch_size`"),
        (lambda: "train.csv", None, r"Give a `tf\.data\.Dataset`.*builtins\.str"),
        (lambda: (X, Y, Y, Y), 8, "tuple"),
        (lambda: (X, Y[:-1]), 8, "cardinality|same"),
        (lambda: None, None, "NoneType"),
        (lambda: Rows(0), None, "num_batches=0"),
        (lambda: ([[1.0]], [2.0]), 8, "tuple of 2: list, list"),
    ],
)
def test_data_of_another_form_say_what_to_give(make, batch_size, words, model):
    with pytest.raises(InputError, match=f"(?s){words}"):
        source(make(), model, batch_size)


def test_a_file_cache_that_is_not_full_is_refused_and_a_full_one_read(tmp_path, model):
    dataset = examples().cache(str(tmp_path / "rows")).batch(8)
    for one in (dataset, dataset.concatenate(dataset), examples().batch(8).concatenate(dataset)):
        with pytest.raises(InputError, match="read the dataset once"):
            source(one, model)
    assert list(tmp_path.iterdir()) == []
    for _ in dataset:
        pass
    assert rows_of(first_batch(source(dataset, model))[0]) == 8


def test_a_py_dataset_keeps_its_settings_and_its_epochs():
    rows = Rows(workers=3, max_queue_size=7)
    changed = source_of_py_dataset(rows, {"workers": 2, "max_queue_size": 3})
    with BatchStream(changed) as stream:
        for _ in range(7):
            stream.next()
        assert (rows.workers, rows.use_multiprocessing, rows.max_queue_size) == (3, False, 7)
    assert rows.epoch_ends == 0


@pytest.mark.parametrize(("workers", "batches"), [(1, 0), (2, 4)])
def test_a_py_dataset_can_be_freed_after_it_was_opened(workers, batches, model):
    rows = Rows(workers=workers)
    with BatchStream(source(rows, model)) as stream:
        for _ in range(batches):
            stream.next()
    freed = weakref.ref(rows)
    del rows, stream
    gc.collect()
    assert freed() is None
