import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import mlp, rows

from kbatch.errors import InputError
from kbatch.inference.call_paths import CALL_PATHS, inference_inputs, open_path, repeated

NAMES = tuple(name for name in CALL_PATHS if name != "predict")  # Which has other batches.


def two_inputs():
    left, right = keras.Input((3,), name="left"), keras.Input((2,), dtype="int32", name="right")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(5, 4)(right))
    joined = keras.layers.Concatenate()([left, embedded])
    outputs = {"a": keras.layers.Dense(2)(joined), "b": keras.layers.Dense(1)(joined)}
    return keras.Model({"left": left, "right": right}, outputs)


@pytest.mark.parametrize("name", NAMES)
def test_open_path_returns_the_outputs_of_the_model_as_numpy_arrays(name):
    model = two_inputs()
    inputs = inference_inputs(model)
    with open_path(name, model, inputs.rows) as run:
        for batch_size in (1, 7, 100):
            batch = repeated(inputs.rows, batch_size)
            run(batch, batch_size)
            outputs, expected = run(batch, batch_size), model(batch, training=False)
            keras.tree.assert_same_structure(outputs, expected)
            leaves = zip(keras.tree.flatten(outputs), keras.tree.flatten(expected), strict=True)
            for output, reference in leaves:
                assert isinstance(output, np.ndarray)
                np.testing.assert_allclose(output, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", (*NAMES, "predict"))
def test_open_path_copies_the_array_in_each_call_and_does_not_train(name):
    """A copy to a device before the clock starts would hold the values of the first call."""
    inputs = keras.Input((50,))
    doubled = keras.layers.Rescaling(2.0)(keras.layers.Dropout(0.5)(inputs))
    batch = np.ones((8, 50), "uint8")  # Integers for inputs of floats.
    with open_path(name, keras.Model(inputs, doubled), batch) as run:
        np.testing.assert_array_equal(run(batch, 8), 2.0)
        batch[:] = 5
        np.testing.assert_array_equal(run(batch, 8), 10.0)


TEXT = [np.array([["a", "b"], ["c", "d"]], dtype=object), np.ones((2, 2), "float32")]


def hashed_words():
    words, numbers = keras.Input((2,), dtype="string"), keras.Input((2,))
    hashed = keras.layers.Hashing(11)(words)
    return keras.Model([words, numbers], keras.ops.cast(hashed, "float32") + numbers)


@pytest.mark.parametrize("name", sorted({*CALL_PATHS} - {"xla"}))
def test_open_path_takes_text(name):
    model = hashed_words()
    with open_path(name, model, TEXT) as run:
        expected = model([tf.constant(part) for part in TEXT])
        np.testing.assert_array_equal(run(TEXT, 2), expected)


def test_open_path_xla_cannot_compile():
    words = r'leave "xla" out of `call_paths`.*Received: model='
    leave_out = pytest.raises(InputError, match=words)
    with open_path("xla", hashed_words(), TEXT) as run, leave_out:
        run(TEXT, 2)


@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
def test_open_path_saved_model_raises_the_log_level_while_it_saves(level, monkeypatch):
    log, save, levels = logging.getLogger("tensorflow"), tf.saved_model.save, []
    monkeypatch.setattr(log, "level", level)

    def watched(*arguments, **options):
        levels.append(log.level)
        save(*arguments, **options)

    monkeypatch.setattr(tf.saved_model, "save", watched)
    with open_path("saved_model", mlp(), inference_inputs(mlp()).rows):
        assert (log.level, levels) == (level, [max(level, logging.WARNING)])


def test_open_path_compiled_is_traced_once_for_all_batch_sizes():
    traced = []

    class Counting(keras.layers.Layer):
        def call(self, x):
            traced.append(x.shape)
            return x

    inputs = keras.Input((3,))
    model = keras.Model(inputs, Counting()(inputs))
    rows = inference_inputs(model).rows
    traced.clear()
    with open_path("compiled", model, rows) as run:
        for batch_size in (1, 2, 5):
            run(repeated(rows, batch_size), batch_size)
    assert [shape[0] for shape in traced] == [None]


def test_repeated_starts_again_at_the_first_row():
    x, _ = rows(5)
    inputs = inference_inputs(mlp(), x)
    np.testing.assert_array_equal(repeated(inputs.rows, 12), x[[0, 1, 2, 3, 4] * 2 + [0, 1]])
    np.testing.assert_array_equal(repeated(inputs.rows, 2), x[:2])
    assert inputs.note is None


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("targets", [False, True])
def test_inference_inputs_of_a_dataset_without_targets(batched, targets):
    x, y = rows(6)
    data = tf.data.Dataset.from_tensor_slices((x, y) if targets else x)
    inputs = inference_inputs(mlp(), data.batch(6) if batched else data)
    np.testing.assert_array_equal(repeated(inputs.rows, 1), x[:1])


def test_random_inputs_have_the_structure_shape_and_dtype_of_the_model():
    tensors = {
        "a": keras.Input((3, 2), name="a"),
        "b": keras.Input((4,), dtype="int32", name="b"),
        "c": keras.Input((1,), dtype="bool", name="c"),
    }
    inputs = inference_inputs(keras.Model(tensors, keras.layers.Embedding(7, 3)(tensors["b"])))
    batch = repeated(inputs.rows, 200)
    assert {name: (leaf.shape, leaf.dtype.name) for name, leaf in batch.items()} == {
        "a": ((200, 3, 2), "float32"),
        "b": ((200, 4), "int32"),
        "c": ((200, 1), "bool"),
    }
    assert set(np.unique(batch["b"])) == set(range(7))
    assert "random" in inputs.note


@pytest.mark.parametrize("x", [[[1.0], [2.0, 3.0]], len, tf.ragged.constant([[1], [2, 3]]), 3.0])
def test_inference_inputs_refuses_other_than_arrays(x):
    with pytest.raises(InputError, match="Received: ") as caught:
        inference_inputs(mlp(), x)
    assert " at 0x" not in str(caught.value)


def pair(structure):
    a, b = keras.Input((3,), name="a"), keras.Input((1,), name="b")
    return keras.Model(structure(a, b), keras.layers.Concatenate()([a, b]))


A, B = np.arange(6.0, dtype="float32").reshape(2, 3), np.ones((2, 1), "float32")


@pytest.mark.parametrize("rows", [{"a": A, "b": B}, {"a": A, "b": B[:, 0]}])
def test_inference_inputs_by_name_in_any_order(rows):
    for structure in (lambda a, b: {"b": b, "a": a}, lambda a, b: [b, a]):
        inputs = inference_inputs(pair(structure), rows)
        assert repeated(inputs.rows, 5)["a"].shape == (5, 3)


@pytest.mark.parametrize(
    ("x", "received"),
    [
        (A[:, :2], r"an array for each.*shape float32 \(2,\)"),
        ({"a": A, "c": B}, "an array for each"),
        ({"a": A[:, :2], "b": B}, r"x\[None\].*shape float32 \(2,\), float32 \(1,\)"),
        ({"a": A.astype(str), "b": B}, r"shape <U32 \(3,\),.*Cast string to float is not"),
    ],
)
def test_inference_inputs_refuses_other_shapes_dtypes_and_names(x, received):
    with pytest.raises(InputError, match=received):
        inference_inputs(pair(lambda a, b: {"b": b, "a": a}), x)
