"""The first measurement of a recommendation, in this process: the build function cannot travel."""

import threading

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from task_factory import make_task

from kbatch.training.errors import InputError
from kbatch.tuning.memory_measurement import measure_memory

X, Y = models.rows(64)
ONE_HOT = keras.utils.to_categorical(Y, 3)


def measure(x=X, y=Y, *, build=models.mlp, budget_s=4.0, smallest=1, limit=2**30):
    lock = threading.Lock()

    def locked():
        with lock:
            return build()

    task = make_task(x, y, build=locked, memory_limit_bytes=limit, budget_s=budget_s)
    return measure_memory(task, smallest=smallest, largest=64)


def mostly_weights():
    """Of its memory one example says little of 64: they are come to in several probes."""
    wide = [keras.layers.Dense(1000, activation="relu") for _ in range(2)]
    head = keras.layers.Dense(3, activation="softmax")
    model = keras.Sequential([keras.layers.Input((8,)), *wide, head])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def test_a_search_that_takes_longer_than_the_budget_ends_with_what_fits():
    # The first of several probes traces, and does not count.
    short = measure(build=mostly_weights, limit=2**26, budget_s=1e-6)
    assert short.result is None
    assert 1 < short.fits < 64
    assert "did not end in" in short.reason


def test_a_search_whose_last_probe_took_the_time_has_its_result():
    found = measure(build=mostly_weights, limit=2**26, budget_s=1e-6, smallest=64)
    assert (found.fits, found.reason) == (64, None)
    assert found.result.probes[-1].batch_size == 64


def categorical():
    return models.mlp(loss="categorical_crossentropy")


def unbuilt():
    model = keras.Sequential([keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"y": ONE_HOT}, r"argmax\(axis=-1\)`, or compile with .* shape \(examples, 3\)"),
        ({"build": unbuilt, "y": ONE_HOT}, r"argmax\(axis=-1\)`"),
        ({"build": categorical}, r"to_categorical\(y\)`, .*y of shape \(examples\)"),
        ({"build": categorical, "y": Y[:, None]}, r"to_categorical.*y of shape \(examples, 1\)"),
        ({"y": np.array(["a", "b", "c"])[Y]}, r"np\.unique\(y, return_inverse=True\)\[1\]"),
        ({"x": X[:, :5]}, r"\(examples, 8\): reshape it.*x of shape \(examples, 5\)"),
        ({"x": X.reshape(64, 2, 4)}, r"\(examples, 8\): reshape.*\(examples, 2, 4\)"),
        (
            {"x": tf.data.Dataset.from_tensor_slices((X, ONE_HOT)).batch(8), "y": None},
            r"argmax\(axis=-1\)`",
        ),
        ({"y": Y + 7}, r"A train step must run on the data.*label value of"),
    ],
)
def test_data_that_do_not_suit_the_model_are_told_with_what_to_give(data, words):
    with pytest.raises(InputError, match=words):
        measure(**data)


@pytest.mark.parametrize("y", [Y, Y[:, None]])
def test_labels_that_the_loss_takes_are_no_mistake(y):
    assert measure(y=y).fits == 64


def test_an_error_of_the_models_own_stays():
    def broken():
        return models.mlp(loss=lambda y, p: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        measure(build=broken)

    def refused(y, probabilities):
        raise ValueError("not this")

    with pytest.raises(ValueError, match="not this") as caught:
        measure(build=lambda: models.mlp(loss=refused))
    assert not isinstance(caught.value, InputError)
