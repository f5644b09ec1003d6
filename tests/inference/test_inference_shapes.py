import keras
import numpy as np
import pytest
from small_models import mlp

from kbatch.errors import InputError
from kbatch.inference.call_paths import call_paths_of
from kbatch.inference.inputs import InferenceInputs, check_inputs


def pair(structure):
    a, b = keras.Input((3,), name="a"), keras.Input((1,), name="b")
    return keras.Model(structure(a, b), keras.layers.Concatenate()([a, b]))


def named(a, b):
    return {"b": b, "a": a}


def listed(a, b):
    return [b, a]


A, B = np.arange(6.0, dtype="float32").reshape(2, 3), np.ones((2, 1), "float32")


def check(model, rows):
    check_inputs(model, InferenceInputs(rows, None))


@pytest.mark.parametrize(
    ("structure", "rows"),
    [
        (named, {"a": A, "b": B}),
        (named, {"a": A, "b": B[:, 0]}),
        (listed, [B, A]),
        (listed, {"a": A, "b": B}),
    ],
)
def test_what_passes_is_taken_by_every_path(structure, rows):
    model = pair(structure)
    check(model, rows)
    inputs = InferenceInputs(rows, None)
    for path in call_paths_of(("compiled", "predict_on_batch", "call", "saved_model", "predict")):
        with path.open(model, inputs) as run:
            expected = np.concatenate([A, B], axis=1)
            np.testing.assert_array_equal(run(rows, 2), expected, err_msg=path.name)


@pytest.mark.parametrize(
    ("model", "rows", "received"),
    [
        (mlp(), np.zeros(8, "float32"), r"x\[None\].*rows of shape \(\), input"),
        (mlp(), np.zeros((4, 8, 3), "float32"), r"rows of shape \(8, 3\), input .* \(8,\)"),
        (mlp(), np.zeros((4, 7), "float32"), r"rows of shape \(7,\), input .* \(8,\)"),
        (mlp(), [np.zeros((4, 8), "float32")] * 2, "each of the model's inputs.*x with 2 arrays"),
        (pair(named), A, r"nested as the model takes them: a, b\. Received: x with 1 arrays"),
        (pair(named), {"a": A, "c": B}, r"a, b\. Received: x with \['a', 'c'\]"),
        (pair(listed), {"a": A, "c": B}, r"a, b\. Received: x with \['a', 'c'\]"),
        (pair(named), {"a": A[:, :2], "b": B}, r"rows of shape \(2,\), input 'a'"),
    ],
)
def test_what_keras_would_refuse_is_told_with_what_to_give(model, rows, received):
    with pytest.raises(InputError, match=received):
        check(model, rows)


def test_a_model_that_declares_no_inputs_is_not_looked_at():
    check(keras.Sequential([keras.layers.Dense(1)]), A)
