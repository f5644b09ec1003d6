"""The first measurement of a recommendation, in this process: the build function cannot travel."""

import threading

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from task_factory import make_task

from kbatch.errors import InputError
from kbatch.memory.probe import Reading, WorkloadFacts
from kbatch.recommendation.measure import (
    Budget,
    TimeLimitedProbes,
    TimeSpentError,
    measure_memory,
)

X, Y = models.rows(64)
ONE_HOT = keras.utils.to_categorical(Y, 3)


def eager():
    """A model whose few steps take less time than tracing one."""
    return models.mlp(run_eagerly=True)


def measure(x=X, y=Y, *, build=eager, budget_s=6000.0, limit=2**30):
    lock = threading.Lock()

    def locked():
        with lock:
            return build()

    task = make_task(x, y, build=locked, memory_limit_bytes=limit, budget_s=budget_s)
    return task, *measure_memory(task, largest=64)


def mostly_weights():
    """Of its memory one example says little of 64: they are come to in several probes."""
    wide = [keras.layers.Dense(1000, activation="relu") for _ in range(2)]
    head = keras.layers.Dense(3, activation="softmax")
    model = keras.Sequential([keras.layers.Input((8,)), *wide, head])
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    return model


class Probes:
    """Probes whose batches take the seconds that they are told, on a clock of their own."""

    isolated = True
    facts = WorkloadFacts("CPU", 2**30, True, "float32", 1000, 0, 2048, ())

    def __init__(self, example_s, start_s):
        self.example_s = example_s
        self.now_s = 0.0
        self.start_s = start_s
        self.sizes = []

    def read(self, batch_size):
        self.sizes.append(batch_size)
        seconds = self.example_s * batch_size
        self.now_s += seconds + (self.start_s if len(self.sizes) == 1 else 0.0)
        return Reading(1000 * batch_size, batch_size, seconds)

    def renew(self):
        return False


@pytest.mark.parametrize(
    ("example_s", "start_s", "read", "fits"),
    [
        # A BiLSTM at 15 ms an example: 512 of them would take 8 s of 6.
        (0.015, 0.0, [1, 8, 64], 64),
        (1e-5, 0.0, [1, 8, 64, 512, 2048], 2048),
        # Starting the process took most of the budget: the probes that it is worth are made.
        (1e-5, 15.0, [1, 8, 64, 512, 2048], 2048),
        (1e-3, 30.0, [1, 8, 64, 512], 512),
    ],
)
def test_no_probe_is_begun_that_would_not_end_in_its_part(
    monkeypatch, example_s, start_s, read, fits
):
    probes = Probes(example_s, start_s)
    monkeypatch.setattr("time.perf_counter", lambda: probes.now_s)
    limited = TimeLimitedProbes(probes, make_task(X, Y)._replace(budget=Budget(20.0)))
    limited.read(1)
    if read[-1] == 2048:
        limited.read(2048)
    else:
        with pytest.raises(TimeSpentError):
            limited.read(2048)
    assert (probes.sizes, limited.fits) == (read, fits)


def test_a_search_without_time_takes_the_base_size_to_fit():
    task, result, fits, _ = measure(build=mostly_weights, limit=2**26, budget_s=1e-6)
    assert (result, fits) == (None, 32)
    assert "did not end in its part of `budget_s`" in task.budget.unknown["memory"]


def test_what_a_reader_of_the_memory_must_know_is_kept_however_its_search_ended():
    for changed in ({}, {"build": mostly_weights, "budget_s": 1e-6}):
        *_, (note,) = measure(limit=2**26, **changed)
        assert "Measured in this process, since the model or the data" in note


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


def test_labels_that_the_loss_takes_are_no_mistake():
    _, result, fits, _ = measure(y=Y[:, None])
    assert (result.max_batch_size, fits) == (64, 64)


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
