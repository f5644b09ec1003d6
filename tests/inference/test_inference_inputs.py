import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import mlp, rows

from kbatch.errors import InputError
from kbatch.inference.inputs import inference_inputs


def test_rows_of_the_data_are_repeated_into_batches():
    x, _ = rows(5)
    inputs = inference_inputs(mlp(), x)
    np.testing.assert_array_equal(inputs.batch(12), x[[0, 1, 2, 3, 4] * 2 + [0, 1]])
    np.testing.assert_array_equal(inputs.batch(2), x[:2])
    assert inputs.note is None


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("targets", [False, True])
def test_a_dataset_gives_its_inputs_without_its_targets(batched, targets):
    x, y = rows(6)
    data = tf.data.Dataset.from_tensor_slices((x, y) if targets else x)
    inputs = inference_inputs(mlp(), data.batch(6) if batched else data)
    np.testing.assert_array_equal(inputs.batch(1), x[:1])


def test_random_rows_have_the_structure_shape_and_dtype_of_the_inputs():
    given = {
        "a": keras.Input((3, 2), name="a"),
        "b": keras.Input((4,), dtype="int32", name="b"),
        "c": keras.Input((1,), dtype="bool", name="c"),
    }
    embedded = keras.layers.Embedding(7, 3)(given["b"])
    model = keras.Model(given, embedded)
    inputs = inference_inputs(model)
    batch = inputs.batch(200)
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in batch.items()} == {
        "a": ((200, 3, 2), "float32"),
        "b": ((200, 4), "int32"),
        "c": ((200, 1), "bool"),
    }
    assert set(np.unique(batch["b"])) == set(range(7))
    assert "random" in inputs.note


def test_an_embedding_of_float_inputs_gets_numbers_that_it_knows():
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Embedding(4, 2)])
    batch = inference_inputs(model).batch(64)
    assert set(np.unique(batch)) == {0.0, 1.0, 2.0, 3.0}


@pytest.mark.parametrize("shape", [(None,), (None, 3)])
def test_unknown_shapes_need_data(shape):
    inputs = keras.Input(shape)
    model = keras.Model(inputs, keras.layers.Activation("relu")(inputs))
    with pytest.raises(InputError, match="fixed shape: give `x`"):
        inference_inputs(model)


@pytest.mark.parametrize(
    "x",
    [
        3,
        [[1.0, 2.0], [3.0]],
        len,
        np.array([[1, 2], [3]], dtype=object),
        tf.ragged.constant([[1, 2], [3]]),
        np.float32(3.0),
    ],
)
def test_what_are_no_arrays_is_refused(x):
    with pytest.raises(InputError, match="Received: ") as caught:
        inference_inputs(mlp(), x)
    assert " at 0x" not in str(caught.value)


def test_a_dataset_of_ragged_rows_is_refused_and_one_of_ragged_targets_is_not():
    ragged = tf.data.Dataset.from_tensors(tf.ragged.constant([[1.0], [1.0, 2.0]]))
    with pytest.raises(InputError, match=r"RaggedTensor: convert.*Received"):
        inference_inputs(mlp(), ragged)
    x, _ = rows(2)
    both = tf.data.Dataset.zip(tf.data.Dataset.from_tensors(x), ragged)
    np.testing.assert_array_equal(inference_inputs(mlp(), both).batch(2), x)


def test_of_arrays_in_a_file_only_the_first_rows_are_read():
    class Stored:
        """As h5py has it: rows are read by slices, and all of them by `np.asarray`."""

        shape, ndim, dtype = (1000, 8), 2, np.dtype("float32")

        def __len__(self):
            return 1000

        def __getitem__(self, rows):
            return np.ones((1000, 8), "float32")[rows]

        def __array__(self, *settings, **more):
            raise AssertionError("all of it was read")

    assert inference_inputs(mlp(), Stored()).rows.shape == (64, 8)


def pair(structure):
    a, b = keras.Input((3,), name="a"), keras.Input((1,), name="b")
    return keras.Model(structure(a, b), keras.layers.Concatenate()([a, b]))


A, B = np.arange(6.0, dtype="float32").reshape(2, 3), np.ones((2, 1), "float32")


@pytest.mark.parametrize("rows", [{"a": A, "b": B}, {"a": A, "b": B[:, 0]}])
def test_named_inputs_pass_in_the_order_of_the_model(rows):
    for structure in (lambda a, b: {"b": b, "a": a}, lambda a, b: [b, a]):
        assert inference_inputs(pair(structure), rows).batch(5)["a"].shape == (5, 3)


@pytest.mark.parametrize(
    ("x", "received"),
    [
        (A[:, :2], "each of the model's inputs"),
        ({"a": A, "c": B}, r"a, b\. Received: x with \['a', 'c'\]"),
        ({"a": A[:, :2], "b": B}, r"x\[None\].*rows of shape \(2,\), input 'a'"),
    ],
)
def test_rows_of_other_shapes_or_names_are_told_with_what_to_give(x, received):
    with pytest.raises(InputError, match=received):
        inference_inputs(pair(lambda a, b: {"b": b, "a": a}), x)
