"""Samples and batches of all forms of data."""

import pickle
import threading
from typing import ClassVar

import keras
import numpy as np
import pandas as pd
import pytest
import small_models as models
import tensorflow as tf
from batch_data import Rows

import kbatch
from kbatch.errors import DataEnded, InputError
from kbatch.search.timed_fit import SharedInput
from kbatch.training.data.batches import in_blocks
from kbatch.training.data.training_data import TrainingData

MODEL = models.mlp()
X, Y = models.rows(94)


def batches_of(data, batch_size=32, model=MODEL, seed=0):
    return data.batches(
        batch_size, model, seed=seed, largest_batch_size=batch_size, validation_batch_size=16
    )


def lengths(dataset):
    return [len(keras.tree.flatten(batch)[0]) for batch in dataset]


def sliced(*parts):
    return tf.data.Dataset.from_tensor_slices(parts)


def batched(size=7, **settings):
    return Rows((X.astype("float64"), Y), size, **settings)


FORMS = {
    "arrays": TrainingData(X, Y),
    "tensors": TrainingData(tf.constant(X), tf.constant(Y)),
    "pandas": TrainingData(pd.DataFrame(X.astype("float64")), pd.Series(Y)),
    "examples": TrainingData(sliced(X, Y)),
    "batches": TrainingData(sliced(X, Y).batch(7)),
    "PyDataset": TrainingData(batched()),
    "PyDataset of three workers": TrainingData(batched(workers=3)),
    "function of PyDatasets": TrainingData(batched, shuffle=False),
    "function": TrainingData(lambda batch_size: sliced(X, Y).batch(batch_size)),
}


@pytest.mark.parametrize("form", FORMS)
def test_batches_of_each_form_have_all_rows(form):
    dataset = batches_of(FORMS[form]).dataset
    assert lengths(dataset) == [32, 32, 30]
    seen = np.concatenate([x for x, _ in dataset.as_numpy_iterator()])
    np.testing.assert_allclose(np.sort(seen, axis=0), np.sort(X, axis=0))


@pytest.mark.parametrize("form", FORMS)
def test_sample_of_each_form_survives_pickling(form):
    data = FORMS[form]
    if data.is_function:
        x, y = data.sample(10, MODEL)
        np.testing.assert_allclose(x, X[:10])
        with pytest.raises(DataEnded) as ended:
            data.sample(95, MODEL)
        assert ended.value.rows == 94
        return
    known = data.some_rows(MODEL)
    count = len(keras.tree.flatten(known.rows)[0])
    of_batches = form == "batches" or "Py" in form
    assert count == (1 if form == "examples" else 7 if of_batches else 64)
    assert (known.examples, known.note) == (None if "Py" in form else 94, None)
    sent = pickle.loads(pickle.dumps(data))
    for size in (1, count, 100):
        wanted = np.arange(size) % count
        x, y = sent.sample(size, MODEL)
        np.testing.assert_allclose(x, X[wanted], rtol=1e-6)
        np.testing.assert_array_equal(np.ravel(y), Y[wanted])
    assert sent.repeated(5, MODEL).element_spec[0].shape.as_list() == [None, 8]


def test_dataset_is_sampled_once_per_search():
    read, search = [], SharedInput()

    def rows():
        read.append(None)
        yield from zip(X, Y, strict=True)

    signature = (tf.TensorSpec((8,)), tf.TensorSpec((), tf.int64))
    dataset = tf.data.Dataset.from_generator(rows, output_signature=signature).batch(10)
    found = [search.data(TrainingData(dataset)).some_rows(models.mlp()) for _ in range(3)]
    assert len(read) == 1
    assert found[0] is found[2]
    arrays = search.data(TrainingData(X, Y))
    assert search.data(TrainingData(X, Y)) is arrays
    assert search.data(TrainingData(X, Y, shuffle=False)) is not arrays


def test_batches_have_dtypes_and_ranks_of_keras():
    x, y = next(iter(batches_of(FORMS["pandas"]).dataset))
    assert (x.dtype, x.shape, y.shape) == (tf.float32, (32, 8), (32, 1))
    frame = pd.DataFrame({"age": Y, "fare": X[:, 0].astype("float64"), "alone": Y > 1})
    x, _ = next(iter(batches_of(TrainingData(frame, Y, shuffle=False)).dataset))
    np.testing.assert_allclose(x, np.stack([Y, X[:, 0], Y > 1], axis=1)[:32], rtol=1e-6)
    assert x.dtype == tf.float32


def test_batches_keep_nested_structure_and_weights():
    texts = np.array([f"row {k}" for k in range(94)])
    data = TrainingData({"a": [X, X[:, :1]], "b": (texts, None)}, [Y, X], np.arange(94.0))
    for x, y, weight in (next(iter(batches_of(data).dataset)), data.sample(32, MODEL)):
        assert [part.shape for part in x["a"]] == [(32, 8), (32, 1)]
        assert x["b"][0].numpy().tolist() == [b"row %d" % k for k in weight]
        assert x["b"][1] is None
        assert [part.shape for part in y] == [(32,), (32, 8)]
        np.testing.assert_allclose(y[1], X[weight.numpy().astype(int)])
    x, y, weight = next(iter(batches_of(TrainingData(X, sample_weight=np.ones(94))).dataset))
    assert (x.shape, y, weight.shape) == ((32, 8), None, (32,))


def test_pydataset_is_shuffled_by_batches():
    sequence = batched(32)
    dataset = batches_of(TrainingData(sequence)).dataset
    orders = [
        [len(x) for x, _ in dataset] + [float(next(iter(dataset))[0][0, 0])] for _ in range(6)
    ]
    assert len({order[-1] for order in orders}) > 1
    assert sequence.epoch_ends == 12
    kept = batches_of(TrainingData(batched(32), shuffle=False)).dataset
    np.testing.assert_allclose(np.concatenate([x for x, _ in kept]), X)


@pytest.mark.parametrize("form", ["arrays", "batches"])
def test_class_weight_becomes_sample_weights(form):
    data = TrainingData(FORMS[form].x, FORMS[form].y, class_weight={1: 5.0, 2: 0.5})
    _, y, weight = next(iter(batches_of(data).dataset))
    np.testing.assert_allclose(weight, np.array([1.0, 5.0, 0.5])[y])


def test_validation_split_takes_last_rows():
    batches = batches_of(TrainingData(X, Y, validation_split=0.25), 10)
    parts = zip(*batches.validation_data.as_numpy_iterator(), strict=True)
    x, y = map(np.concatenate, parts)
    np.testing.assert_array_equal(x, X[-24:])
    np.testing.assert_array_equal(y, Y[-24:])
    assert sum(lengths(batches.dataset)) == batches.examples == 70


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("form", ["arrays", "examples", "batches", "function", "unknown"])
def test_in_blocks_makes_at_most_50_blocks(form, steps):
    data = {
        "arrays": (X, Y),
        "examples": sliced(X, Y),
        "batches": sliced(X, Y).batch(50),
        "function": lambda size: sliced(X, Y).batch(size),
        "unknown": sliced(X, Y).batch(50).filter(lambda *_: True),
    }[form]
    found, batch_size, batches = in_blocks(data, MODEL, batch_size=16, steps=steps)
    # 94 rows in blocks of two. If the length is unknown, batches have the given size.
    if form == "unknown":
        assert (batch_size, batches) == (16, None)
        assert lengths(found) == [16, 16, 16, 16, 16, 14]
        return
    # Two steps are two batches of a batched dataset, or 64 rows of other data.
    rows, size = (94, 2) if steps is None or form == "batches" else (64, 2)
    assert batch_size == size
    assert rows // size <= batches <= 50
    np.testing.assert_array_equal(np.concatenate([x for x, _ in found]), X[:rows])
    assert set(lengths(found)) == {size}


REPEATED = {
    "arrays": ((np.tile(X, (3, 1)), np.tile(Y, 3)), None),
    "steps of arrays": ((np.tile(X, (3, 1)), np.tile(Y, 3)), 5),
    "batches": (sliced(X, Y).batch(20).repeat(), 30),
    "batches across the end": (sliced(X, Y).repeat().batch(20), 8),
    "repeated in an earlier stage": (sliced(X, Y).repeat(3).batch(20).prefetch(1), None),
    "joined": (sliced(X, Y).batch(20).concatenate(sliced(X, Y).batch(20)), None),
    "examples": (sliced(X, Y).repeat(), 5),
    "function": (lambda size: sliced(X, Y).repeat().batch(size), 5),
    "inputs alone": (sliced(X).repeat().batch(20), 30),
}


@pytest.mark.parametrize("form", REPEATED)
def test_in_blocks_validates_repeated_rows_once(form):
    data, steps = REPEATED[form]
    cuts = {}
    for _ in range(2):  # The second time `cuts` has the place.
        found, size, batches = in_blocks(data, MODEL, batch_size=16, steps=steps, cuts=cuts)
        x = [np.asarray(keras.tree.flatten(batch)[0]) for batch in found]
        np.testing.assert_array_equal(np.concatenate(x), X)
        assert size == 2
        assert 47 <= batches <= 50
    assert len(cuts) == 1


def test_in_blocks_counts_rows_equal_by_chance():
    bits = np.arange(94)[:, None] * 7 // 3 % 2 + np.zeros((1, 8))
    rows = np.arange(len(X))  # Repeat the first 7 at the end, or the first 8 in the middle.
    again = [np.r_[rows, rows[:7]], np.r_[rows[:20], rows[:8], rows[20:]]]
    for x, y in ((bits, bits[:, 0]), *((X[chosen], Y[chosen]) for chosen in again)):
        found, *_ = in_blocks((x, y), MODEL, batch_size=16, steps=None)
        assert sum(lengths(found)) == len(x)


def padded(size):
    rows = [(np.ones(n, "float32"), n % 2) for n in (3, 3, 4, 4, 5, 5)]
    spec = (tf.TensorSpec((None,)), tf.TensorSpec((), tf.int32))
    data = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec)
    return data.padded_batch(size)


def test_in_blocks_leaves_padded_batches():
    model = keras.Sequential([keras.Input((None,)), keras.layers.Lambda(lambda x: x[:, :1])])
    batches = batches_of(TrainingData(padded, validation_data=padded(2)), 6, model=model)
    assert [x.shape for x, _ in batches.validation_data] == [(2, 3), (2, 4), (2, 5)]


@pytest.mark.parametrize("batched", [False, True])
def test_dict_columns_match_named_inputs(batched):
    inputs = [keras.Input((3,), name="z"), keras.Input((1,), name="q")]
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Concatenate()(inputs)))
    data = sliced({"q": X[:, 0], "z": X[:, :3]}, Y)
    data = data.batch(10) if batched else data
    assert lengths(batches_of(TrainingData(data), model=model).dataset) == [32, 32, 30]


def test_unbuilt_model_accepts_batched_and_unbatched_dataset():
    model = keras.Sequential([keras.layers.Dense(3)])
    for form in ("examples", "batches"):
        assert lengths(batches_of(FORMS[form], model=model).dataset) == [32, 32, 30]


def generated(elements, *shapes):
    signature = tuple(tf.TensorSpec(shape) for shape in shapes)
    return tf.data.Dataset.from_generator(lambda: iter(elements), output_signature=signature)


def test_sample_of_differing_elements_is_the_largest():
    batches = [(np.full((rows, 8), rows), np.zeros(rows)) for rows in (100, 300, 100, 300)]
    data = TrainingData(generated(batches, (None, 8), (None,)))
    found = data.some_rows(models.mlp())
    assert [part.shape for part in found.rows] == [(64, 8), (64,)]
    assert all(part.base is None for part in found.rows)  # A view would keep the whole batch.
    assert (found.examples, found.note) == (None, None)
    model = keras.Sequential([keras.Input((None, 8)), keras.layers.Dense(3)])
    sequences = [(np.zeros((length, 8)), 0) for length in (3, 50, 9)]
    found = TrainingData(generated(sequences, (None, 8), ())).some_rows(model)
    assert found.rows[0].shape == (1, 50, 8)
    assert found.note.values["elements"] == 3


@pytest.mark.parametrize(
    ("dataset", "examples"),
    [
        (sliced(X, Y).batch(3), 96),  # Batches that are not sampled count as full.
        (sliced(X, Y).repeat(), None),
        (sliced(X, Y).filter(lambda x, y: y > 0), None),
    ],
)
def test_sample_counts_examples_of_dataset(dataset, examples):
    assert TrainingData(dataset).some_rows(models.mlp()).examples == examples


def test_examples_are_not_counted_from_small_first_batch():
    data = TrainingData(sliced(X, Y).take(4).batch(4).concatenate(sliced(X, Y).skip(4).batch(45)))
    data.check()
    batches = batches_of(data)
    assert batches.examples == 94
    assert lengths(batches.dataset) == [32, 32, 30]


def test_py_function_examples_are_not_batches():
    targets = tf.data.Dataset.range(6).map(lambda k: tf.py_function(float, [k], tf.float32))
    data = TrainingData(tf.data.Dataset.zip(tf.data.Dataset.from_tensor_slices(X), targets))
    x, y = data.sample(4, MODEL)
    assert (x.shape, y.shape, data.some_rows(MODEL).examples) == ((4, 8), (4,), 6)


def test_of_example_adds_batch_axis():
    data = TrainingData.of_example((np.zeros((7, 8), "float32"), 2))
    assert [part.shape for part in data.sample(4, MODEL)] == [(4, 7, 8), (4,)]
    assert data.some_rows(MODEL).examples is None


REFUSED = {
    "both weights": (TrainingData(X, Y, np.ones(94), {1: 2.0}), "not both"),
    "nothing": (TrainingData(), "`x` are required"),
    "generator": (TrainingData(pair for pair in [(X, Y)]), "tf.data.Dataset"),
    "class weights of two outputs": (TrainingData(X, [Y, Y], class_weight={1: 2.0}), "single"),
    "columns of two types": (TrainingData(pd.DataFrame({"a": [1], "b": [True]})), r"b \(bool\)"),
    "list of numbers": (TrainingData([1.0, 2.0], Y), "Give arrays"),
    "sparse": (TrainingData(tf.sparse.from_dense(X), Y), "SparseTensor"),
    "dataset and targets": (TrainingData(sliced(X), Y), "leave out `y`"),
    "function and targets": (TrainingData(lambda size: sliced(X), Y), "leave out `y`"),
    "texts": (TrainingData(X, np.array(["a"] * 94)), "must be numbers"),
}
NOT_IN_BATCHES = {
    "different lengths": (TrainingData(X, Y[:-1]), "same number of rows"),
    "function of arrays": (TrainingData(lambda batch_size: X), "must return a `tf.data.Dataset`"),
    "function without batches": (TrainingData(lambda b: sliced(X, Y)), r"\.batch\(batch_size\)"),
    "dataset of images": (TrainingData(sliced(X[None, None, None], Y[:1])), "compare"),
    "split of a dataset": (TrainingData(sliced(X, Y), validation_split=0.2), "validation_data"),
    "batch above the arrays": (TrainingData(X[:20], Y[:20]), "batch_size=32 for 20"),
    "batch above the dataset": (TrainingData(sliced(X, Y).take(20)), "batch_size=32 for 20"),
    "iterator to validate on": (TrainingData(X, Y, validation_data=iter([(X, Y)])), "an iterator"),
}
NO_ROWS = {
    "no array": (TrainingData(5), "Give arrays"),
    "no elements": (TrainingData(sliced(X, Y).take(0)), "empty"),
    "no rows": (TrainingData(X[:0], Y[:0]), "empty"),
    "ragged": (TrainingData(sliced(tf.ragged.constant([[1], [2, 3]]))), "to_tensor"),
}


@pytest.mark.parametrize("case", REFUSED | NOT_IN_BATCHES)
def test_batches_refuses_data(case):
    data, message = (REFUSED | NOT_IN_BATCHES)[case]
    with pytest.raises(InputError, match=message):
        batches_of(data)


@pytest.mark.parametrize("case", REFUSED | NO_ROWS)
def test_check_refuses_data_without_rows(case):
    data, message = (REFUSED | NO_ROWS)[case]
    with pytest.raises(InputError, match=message):
        data.check()


def test_sequences_for_unbuilt_model_are_refused():
    sequences = sliced(np.zeros((94, 50, 4), "float32"), np.zeros((94, 50, 4), "float32"))
    with pytest.raises(InputError, match=r"begins with `keras.Input`"):
        batches_of(TrainingData(sequences), model=keras.Sequential([keras.layers.Dense(4)]))


@pytest.mark.parametrize(
    ("loss", "one_hot", "advice"),
    [
        ("sparse_categorical_crossentropy", True, "argmax"),
        ("categorical_crossentropy", False, "to_categorical"),
        (keras.losses.SparseCategoricalCrossentropy(), True, "argmax"),
        ("sparse_categorical_crossentropy", False, None),
        ("categorical_crossentropy", True, None),
    ],
)
def test_labels_of_wrong_kind_are_refused(loss, one_hot, advice):
    labels = np.arange(12) % 3
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "softmax")])
    model.compile("sgd", loss)
    data = TrainingData(np.ones((12, 2)), np.eye(3)[labels] if one_hot else labels)
    if advice is None:
        data.build(model)
    else:
        with pytest.raises(InputError, match=advice):
            data.build(model)


class Hooked(Rows):
    """Logs its hooks and reads."""

    log: ClassVar[list] = []

    def __getitem__(self, index):
        self.log.append(index)
        return super().__getitem__(index)

    def on_epoch_begin(self):
        self.log.append(f"begin {self.epoch_ends}")

    def on_epoch_end(self):
        super().on_epoch_end()
        self.log.append("end")


def test_pydataset_hooks_are_called_in_order_of_keras():
    logs = []
    for given in (lambda x, **_: x, kbatch.training_dataset):
        Hooked.log.clear()
        data = given(Hooked(20), batch_size=8, shuffle=False)
        models.mlp(run_eagerly=True).fit(data, epochs=2, shuffle=False, verbose=0)
        logs.append([*Hooked.log])
    assert logs[0] == [0, 1, "end", "begin 1", 0, 1, 2, "end", "begin 2", 0, 1, 2, "end"]
    assert logs[1] == logs[0][:-1]  # A dataset does not know which epoch is the last.


@pytest.mark.parametrize("lock", [None, threading.Lock()])
def test_each_training_run_gets_fresh_pydataset(lock):
    rows = Hooked(20)
    rows.lock = lock
    data = TrainingData(rows, validation_data=Hooked(8))
    starts = []
    for fresh in (True, False, True):
        Hooked.log.clear()
        list(data.batches(8, seed=0, fresh=fresh).dataset)
        starts += [one for one in Hooked.log if "begin" in str(one)]
    assert starts == (["begin 1", "begin 2", "begin 1"] if lock is None else starts)
    assert rows.epoch_ends == (0 if lock is None else 3)
    assert ("lock" in (data.not_copied or "")) == (lock is not None)


SORTED = np.sort(np.arange(500) % 10)


@pytest.mark.parametrize(
    ("y", "split", "said"),
    [
        (SORTED, 0.2, "100 %"),
        (SORTED[:, None].astype("float32"), 0.25, "80 %"),
        (np.eye(10)[SORTED], 0.2, "100 %"),
        (SORTED // 5, 0.2, "1 of 2 classes"),
        (SORTED // 5, 0.1, "1 of 2 classes"),
        (SORTED[::-1] == 0, 0.1, "100 %"),
        (np.arange(500) % 10, 0.2, None),
        (np.arange(500) % 10, 0.01, None),
        (SORTED, 0.05, "1 of 10 classes"),
        (np.random.default_rng(0).integers(0, 10, 500), 0.2, None),
        (np.random.default_rng(0).integers(0, 100, 500), 0.2, None),
        (np.random.default_rng(0).integers(0, 1000, 500), 0.2, None),
        (np.arange(500) % 125 == 0, 0.1, None),
        (np.linspace(0.0, 1.0, 500), 0.2, None),
        (np.zeros((500, 3), int), 0.2, None),
        ({"a": SORTED, "b": SORTED}, 0.2, None),
        (None, 0.2, None),
    ],
)
def test_check_split_notes_labels_sorted_by_class(y, split, said):
    x = np.zeros((500, 2), "float32")
    note = TrainingData(x, y, validation_split=split).check_split()
    assert (note is None) if said is None else (said in note.values["what"])
    assert TrainingData(x, y, validation_data=(x, y), validation_split=split).check_split() is None
