import keras
import numpy as np
import pytest

from kbatch.training.data.model_inputs import row_mismatch

IMAGES = np.zeros((6, 4, 4), "float32")
LABELS = np.arange(6) % 3
ONE_HOT = keras.utils.to_categorical(LABELS, 3)


def images(loss="sparse_categorical_crossentropy"):
    layers = [keras.Input((4, 4, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile("sgd", loss)
    return model


def two_inputs():
    a, b = keras.Input((2,), name="a"), keras.Input((5,), name="b")
    model = keras.Model([b, a], keras.layers.Dense(1)(keras.layers.Concatenate()([a, b])))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("x", [IMAGES, IMAGES[..., None]])
def test_a_last_axis_that_keras_adds_is_no_mistake(x):
    assert row_mismatch(images(), (x, LABELS)) is None
    assert "argmax(axis=-1)" in row_mismatch(images(), (x, ONE_HOT))


def test_inputs_in_a_dict_go_by_their_names():
    x = {"a": np.zeros((6, 2)), "b": np.zeros((6, 5))}
    assert row_mismatch(two_inputs(), (x, np.zeros((6, 1)))) is None
    swapped = {"a": x["b"], "b": x["a"]}
    assert "x of shape (examples, 2)" in row_mismatch(two_inputs(), (swapped, np.zeros((6, 1))))


def test_an_input_that_is_missing_is_left_to_keras():
    assert row_mismatch(two_inputs(), ({"a": np.zeros((6, 2))}, np.zeros((6, 1)))) is None
