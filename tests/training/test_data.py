import keras
import numpy as np
import pandas as pd
import pytest
import small_models as models
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.training.data.batches import in_batches
from kbatch.training.data.forms import FitData
from kbatch.training.data.validation import in_blocks

MODEL = models.mlp()
X, Y = models.rows(94)


def batches_of(data, *, batch_size=32, model=MODEL, seed=0):
    return in_batches(
        data,
        model,
        batch_size=batch_size,
        largest_batch_size=batch_size,
        validation_batch_size=16,
        seed=seed,
    )


def lengths(dataset):
    return [len(keras.tree.flatten(batch)[0]) for batch in dataset]


def sliced(*parts):
    return tf.data.Dataset.from_tensor_slices(parts)


class Sequence(keras.utils.PyDataset):
    def __init__(self, size, workers=1):
        super().__init__(workers=workers)
        self.size = size
        self.epochs = []

    def __len__(self):
        return -(-len(X) // self.size)

    def __getitem__(self, index):
        rows = slice(index * self.size, (index + 1) * self.size)
        return X[rows].astype("float64"), Y[rows]

    def on_epoch_end(self):
        self.epochs.append("ended")


FORMS = {
    "arrays": FitData(X, Y),
    "tensors": FitData(tf.constant(X), tf.constant(Y)),
    "pandas": FitData(pd.DataFrame(X), pd.Series(Y)),
    "unbatched dataset": FitData(sliced(X, Y)),
    "batched dataset": FitData(sliced(X, Y).batch(7)),
    "PyDataset": FitData(Sequence(7)),
    "PyDataset of three workers": FitData(Sequence(7, workers=3)),
    "function of PyDatasets": FitData(Sequence, shuffle=False),
    "function": FitData(lambda batch_size: sliced(X, Y).batch(batch_size)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_all_rows_in_batches_of_the_size(form):
    dataset = batches_of(FORMS[form]).dataset
    assert lengths(dataset) == [32, 32, 30]
    seen = np.concatenate([x for x, _ in dataset.as_numpy_iterator()])
    np.testing.assert_allclose(np.sort(seen, axis=0), np.sort(X, axis=0))


@pytest.mark.parametrize("form", ["arrays", "pandas"])
def test_arrays_have_the_dtypes_and_ranks_that_keras_gives_them(form):
    data = FORMS[form]._replace(x=FORMS[form].x.astype("float64"))
    x, y = next(iter(batches_of(data).dataset))
    expected_y = (32, 1) if form == "pandas" else (32,)
    assert (x.dtype, x.shape, y.shape) == (tf.float32, (32, 8), expected_y)


def test_nested_inputs_keep_their_structure():
    data = FitData({"a": X, "b": (X[:, :1], None)}, Y)
    x, _ = next(iter(batches_of(data).dataset))
    assert x["a"].shape == (32, 8)
    assert x["b"][0].shape == (32, 1)


def orders(seed):
    dataset = batches_of(FitData(np.arange(94.0)[:, None], Y), batch_size=94, seed=seed).dataset
    return [next(dataset.as_numpy_iterator())[0].ravel().astype(int).tolist() for _ in range(3)]


def test_arrays_are_shuffled_anew_in_each_epoch_and_alike_for_a_seed():
    first = orders(seed=0)
    assert first[0] != first[1] != first[2]
    assert sorted(first[0]) == list(range(94))
    assert orders(seed=0) == first
    assert orders(seed=1) != first


def test_a_sequence_is_shuffled_by_batches_and_told_where_an_epoch_ends():
    sequence = Sequence(32)
    dataset = batches_of(FitData(sequence)).dataset
    orders = [
        [len(x) for x, _ in dataset] + [float(next(iter(dataset))[0][0, 0])] for _ in range(6)
    ]
    assert len({order[-1] for order in orders}) > 1
    assert len(sequence.epochs) == 11
    kept = batches_of(FitData(Sequence(32), shuffle=False)).dataset
    np.testing.assert_allclose(np.concatenate([x for x, _ in kept]), X)


def test_shuffle_false_keeps_the_order():
    dataset = batches_of(FitData(X, Y, shuffle=False)).dataset
    np.testing.assert_array_equal(np.concatenate([x for x, _ in dataset]), X)


def test_class_weights_become_sample_weights():
    data = FitData(X, Y, class_weight={0: 1.0, 1: 5.0, 2: 0.5})
    _, y, weight = next(iter(batches_of(data).dataset))
    np.testing.assert_allclose(weight, np.array([1.0, 5.0, 0.5])[y])


def test_validation_split_takes_the_last_rows_before_shuffling():
    batches = batches_of(FitData(X, Y, validation_split=0.25), batch_size=10)
    x, y = batches.validation_data[:2]
    np.testing.assert_array_equal(x, X[-24:])
    np.testing.assert_array_equal(y, Y[-24:])
    assert sum(lengths(batches.dataset)) == 70


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("form", ["arrays", "examples", "batches", "function", "unknown"])
def test_validation_data_are_cut_into_at_most_50_blocks(form, steps):
    data = {
        "arrays": (X, Y),
        "examples": sliced(X, Y),
        "batches": sliced(X, Y).batch(50),
        "function": lambda size: sliced(X, Y).batch(size),
        "unknown": sliced(X, Y).batch(50).filter(lambda *_: True),
    }[form]
    found, batch_size, batches = in_blocks(data, MODEL, batch_size=16, steps=steps)
    # 94 rows in blocks of two; of a length that is not known, batches of the size given.
    if steps is None and form == "unknown":
        assert (batch_size, batches) == (16, None)
        assert lengths(found) == [16, 16, 16, 16, 16, 14]
        return
    rows, size = (94, 2) if steps is None else (32, 1)
    assert batch_size == size
    assert rows // size <= batches <= 50
    x = found[0] if form == "arrays" else np.concatenate([x for x, _ in found])
    np.testing.assert_array_equal(x, X[:rows])
    assert form == "arrays" or set(lengths(found)) == {size}


def padded(size):
    rows = [(np.ones(n, "float32"), n % 2) for n in (3, 3, 4, 4, 5, 5)]
    spec = (tf.TensorSpec((None,)), tf.TensorSpec((), tf.int32))
    data = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec)
    return data.padded_batch(size)


def test_validation_batches_of_lengths_of_their_own_stay_as_they_are():
    model = keras.Sequential([keras.Input((None,)), keras.layers.Lambda(lambda x: x[:, :1])])
    batches = batches_of(FitData(padded, validation_data=padded(2)), batch_size=6, model=model)
    assert [x.shape for x, _ in batches.validation_data] == [(2, 3), (2, 4), (2, 5)]


@pytest.mark.parametrize("batched", [False, True])
def test_a_list_of_named_inputs_takes_a_dict_by_their_names(batched):
    inputs = [keras.Input((3,), name="z"), keras.Input((2,), name="q")]
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Concatenate()(inputs)))
    data = sliced({"q": X[:, :2], "z": X[:, :3]}, Y)
    data = data.batch(10) if batched else data
    assert lengths(batches_of(FitData(data), model=model).dataset) == [32, 32, 30]


def test_columns_of_a_frame_become_floats_where_one_is():
    frame = pd.DataFrame({"age": Y, "fare": X[:, 0].astype("float64"), "alone": Y > 1})
    x, _ = next(iter(batches_of(FitData(frame, Y, shuffle=False)).dataset))
    np.testing.assert_allclose(x, np.stack([Y, X[:, 0], Y > 1], axis=1)[:32], rtol=1e-6)
    assert x.dtype == tf.float32


def test_lists_of_inputs_stay_apart():
    x, y = next(iter(batches_of(FitData([X, X[:, :1]], [Y, Y])).dataset))
    assert [part.shape for part in x] == [(32, 8), (32, 1)]
    assert len(y) == 2


def test_sample_weights_without_targets_stay_weights():
    x, y, weight = next(iter(batches_of(FitData(X, sample_weight=np.ones(94))).dataset))
    assert (x.shape, y, weight.shape) == ((32, 8), None, (32,))


def test_a_class_that_has_no_weight_weighs_one():
    _, y, weight = next(iter(batches_of(FitData(X, Y, class_weight={1: 5.0})).dataset))
    np.testing.assert_allclose(weight, np.where(y == 1, 5.0, 1.0))


def column(name):
    return keras.Input((1,), name=name)


@pytest.mark.parametrize("batched", [False, True])
def test_columns_of_a_table_fit_inputs_of_one_feature(batched):
    inputs = {"b": column("b"), "a": column("a")}
    joined = keras.layers.Concatenate()(list(inputs.values()))
    model = keras.Model(inputs, keras.layers.Dense(3)(joined))
    data = sliced({"a": X[:, 0], "b": X[:, 1]}, Y)
    data = data.batch(10) if batched else data
    assert lengths(batches_of(FitData(data), model=model).dataset) == [32, 32, 30]


def test_an_unbuilt_model_takes_batched_and_unbatched_datasets():
    model = keras.Sequential([keras.layers.Dense(3)])
    for data in (FORMS["unbatched dataset"], FORMS["batched dataset"]):
        assert lengths(batches_of(data, model=model).dataset) == [32, 32, 30]


def batch_generator():
    yield X, Y


REFUSED = {
    "both weights": (FitData(X, Y, np.ones(94), {1: 2.0}), "not both"),
    "nothing": (FitData(), "`x` is missing"),
    "generator": (FitData(batch_generator()), "tf.data.Dataset"),
    "weights of the classes of two outputs": (FitData(X, [Y, Y], class_weight={1: 2.0}), "single"),
    "columns of two types": (
        FitData(pd.DataFrame({"a": [1, 2], "b": [True, False]})),
        r"b \(bool\)",
    ),
    "list of numbers": (FitData([1.0, 2.0], Y), "Give arrays"),
    "sparse": (FitData(tf.sparse.from_dense(X), Y), "SparseTensor"),
    "dataset and targets": (FitData(sliced(X), Y), "leave out `y`"),
    "function of arrays": (FitData(lambda batch_size: X), "must return a `tf.data.Dataset`"),
    "function without batches": (FitData(lambda b: sliced(X, Y)), r"\.batch\(batch_size\)"),
    "dataset of images": (FitData(sliced(X[None, None, None], Y[:1])), "compare"),
    "split of a dataset": (FitData(sliced(X, Y), validation_split=0.2), "validation_data"),
    "different lengths": (FitData(X, Y[:-1]), r"\[93, 94\] rows"),
    "batch above the arrays": (FitData(X[:20], Y[:20]), "batch_size=32 for 20"),
    "batch above the dataset": (FitData(sliced(X, Y).take(20)), "batch_size=32 for 20"),
}


def test_a_dataset_of_sequences_for_an_unbuilt_model_is_refused():
    sequences = sliced(np.zeros((94, 50, 4), "float32"), np.zeros((94, 50, 4), "float32"))
    with pytest.raises(InputError, match=r"begin it with `keras.Input`"):
        batches_of(FitData(sequences), model=keras.Sequential([keras.layers.Dense(4)]))


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_cannot_be_batched_is_refused_with_what_to_give(case):
    data, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        batches_of(data)


def test_validation_data_that_the_first_trial_would_use_up_are_refused():
    data = FitData(X, Y, validation_data=iter([(X, Y)]))
    with pytest.raises(InputError, match=r"used up by the first trial.*Received: a list_iterator"):
        batches_of(data)
