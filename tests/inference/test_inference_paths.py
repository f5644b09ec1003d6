import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import mlp

from kbatch.errors import InputError
from kbatch.inference.call_paths import call_paths_of
from kbatch.inference.inputs import InferenceInputs, inference_inputs

NAMES = ("compiled", "xla", "predict_on_batch", "call", "saved_model")


def two_inputs():
    left, right = keras.Input((3,), name="left"), keras.Input((2,), dtype="int32", name="right")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(5, 4)(right))
    joined = keras.layers.Concatenate()([left, embedded])
    outputs = {"a": keras.layers.Dense(2)(joined), "b": keras.layers.Dense(1)(joined)}
    return keras.Model({"left": left, "right": right}, outputs)


def outputs_by_path(model, inputs, path, batch_size, bulk_examples=10):
    with path.open(model, inputs) as run:
        batch = inputs.batch(bulk_examples if path.bulk else batch_size)
        run(batch, batch_size)
        return run(batch, batch_size)


@pytest.mark.parametrize("make", [mlp, two_inputs])
@pytest.mark.parametrize("name", NAMES)
def test_every_path_gives_the_outputs_of_the_model_in_the_hosts_memory(make, name):
    model = make()
    inputs = inference_inputs(model)
    (path,) = call_paths_of(name)
    with path.open(model, inputs) as run:
        for batch_size in (1, 7, 100):
            batch = inputs.batch(batch_size)
            run(batch, batch_size)
            found, expected = run(batch, batch_size), model(batch, training=False)
            keras.tree.assert_same_structure(found, expected)
            leaves = zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True)
            for one, other in leaves:
                assert isinstance(one, np.ndarray)
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", (*NAMES, "predict"))
def test_every_call_begins_with_the_array_of_the_caller(name):
    """A copy to a device before the clock starts would hold the values of the first call."""
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Rescaling(2.0)(inputs))
    held = np.ones((8, 3), "float32")
    (path,) = call_paths_of(name)
    with path.open(model, InferenceInputs(held, None)) as run:
        np.testing.assert_array_equal(run(held, 8), 2.0)
        held[:] = 5.0
        np.testing.assert_array_equal(run(held, 8), 10.0)


@pytest.mark.parametrize("name", (*NAMES, "predict"))
def test_every_path_takes_whole_numbers_for_inputs_of_floats(name):
    model = mlp()
    whole = np.arange(4 * model.inputs[0].shape[1], dtype="uint8").reshape(4, -1) % 5
    (path,) = call_paths_of(name)
    found = outputs_by_path(model, InferenceInputs(whole, None), path, 4, 4)
    expected = model(whole.astype("float32"), training=False)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


TEXT = [np.array([["a", "b"], ["c", "d"]], dtype=object), np.ones((2, 2), "float32")]


def hashed_words():
    words, numbers = keras.Input((2,), dtype="string"), keras.Input((2,))
    hashed = keras.layers.Hashing(11)(words)
    return keras.Model([words, numbers], keras.ops.cast(hashed, "float32") + numbers)


@pytest.mark.parametrize("name", ("compiled", "predict_on_batch", "call", "saved_model", "predict"))
def test_every_path_but_one_takes_text(name):
    model = hashed_words()
    (path,) = call_paths_of(name)
    found = outputs_by_path(model, InferenceInputs(TEXT, None), path, 2, 2)
    np.testing.assert_array_equal(found, model([tf.constant(part) for part in TEXT]))


def test_a_model_that_xla_cannot_compile_is_told_what_to_leave_out():
    (path,) = call_paths_of("xla")
    with pytest.raises(InputError, match=r'leave "xla" out of `call_paths`.*Received: model='):
        outputs_by_path(hashed_words(), InferenceInputs(TEXT, None), path, 2)


def test_a_compiled_function_is_traced_once_for_all_batch_sizes():
    traced = []

    class Counting(keras.layers.Layer):
        def call(self, x):
            traced.append(x.shape)
            return x

    inputs = keras.Input((3,))
    model = keras.Model(inputs, Counting()(inputs))
    rows = inference_inputs(model)
    traced.clear()
    (path,) = call_paths_of("compiled")
    with path.open(model, rows) as run:
        for batch_size in (1, 2, 5):
            run(rows.batch(batch_size), batch_size)
    assert [shape[0] for shape in traced] == [None]


def test_training_behaviour_is_off_on_every_path():
    inputs = keras.Input((50,))
    model = keras.Model(inputs, keras.layers.Dropout(0.5)(inputs))
    rows = InferenceInputs(np.ones((4, 50), "float32"), None)
    for path in call_paths_of((*NAMES, "predict")):
        np.testing.assert_array_equal(outputs_by_path(model, rows, path, 4, 4), 1.0)


def test_a_function_is_a_path_that_gets_arrays():
    def doubled(batch):
        assert isinstance(batch, np.ndarray)
        return 2 * batch

    path = call_paths_of(doubled)[0]
    assert path.name == "doubled"
    rows = InferenceInputs(np.arange(6.0).reshape(3, 2), None)
    np.testing.assert_array_equal(outputs_by_path(None, rows, path, 5)[3:], [[0, 2], [4, 6]])


def test_a_function_of_the_name_of_a_path_is_refused():
    """By the name it would be taken for a bulk call of all examples."""

    def predict(batch):
        return batch

    for given in (predict, mlp().predict_on_batch, ("compiled", predict)):
        with pytest.raises(InputError, match=r"of other and different names.*Received"):
            call_paths_of(given)
