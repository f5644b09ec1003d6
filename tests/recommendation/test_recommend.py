import re

import keras
import numpy as np
import pytest
import small_models as models

import kbatch
from kbatch.errors import InputError, OutOfMemoryError

STEPS = ["memory", "gradient noise", "hardware saturation", "input pipeline"]


def learnable(count=400):
    """Rows whose label is the largest of their first three features."""
    x, _ = models.rows(count)
    return x, np.argmax(x[:, :3], axis=1)


def recommend(build=models.mlp, data=None, **arguments):
    x, y = data or learnable()
    return kbatch.recommend(build, x, y, **({"time_budget_s": 3.0, "seed": 0} | arguments))


def test_every_limit_is_measured_at_powers_of_two_that_the_data_fill(capsys):
    # In this process: a worker takes seconds to start.
    found = recommend(models.Locked(models.mlp), memory_limit_bytes=2**30)
    assert set(found.unknown) <= {"input"}
    assert re.findall("measuring (.*)", capsys.readouterr().out) == STEPS
    sizes = [one.batch_size for one in found.memory if one.peak_bytes]
    assert sizes[:2] == [1, 8]
    assert found.memory_limit_bytes == 2**30
    assert found.pilot.batch_size == 32
    assert (
        {32} <= set(found.times_s) <= {8, 16, 32, 64, 128, 256}
    )  # As many as there was time to build.
    assert (found.optimizer, found.learning_rate_rule) == ("Adam", "sqrt")
    assert found.base_learning_rate == pytest.approx(1e-3)
    assert (found.dtype_policy, found.scheduled) == ("float32", False)
    assert {32, found.batch_size} <= set(found.batch_sizes)


def long_rows():
    """A megabyte for each example, which grows by another few."""
    layers = keras.layers
    parts = [layers.RepeatVector(2**15), layers.Dense(8), layers.GlobalAveragePooling1D()]
    model = keras.Sequential([layers.Input((8,)), *parts, layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Lion(1e-3), loss, run_eagerly=True)
    return model


@pytest.mark.parametrize("batch_sizes", [None, (16, 64)])
def test_where_few_examples_fit_the_rest_goes_through_in_parts(batch_sizes):
    given = {"memory_limit_bytes": 24 * 2**20, "batch_sizes": batch_sizes}
    found = recommend(models.Locked(long_rows), learnable(64), **given)
    most = max(one.batch_size for one in found.updates)
    assert 2 <= most < 8
    assert {32, 64} <= set(found.cut)
    assert found.micro_batch_size <= most
    assert found.batch_size in found.batch_sizes
    assert found.pilot.batch_size == 32
    assert found.learning_rate_rule is None  # A search knows no rule for Lion.
    assert found.learning_rate == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"time_budget_s": 0.0}, ValueError, "`time_budget_s` must be a positive number"),
        ({"batch_sizes": (32, 8)}, ValueError, "ascending"),
        ({"base_batch_size": 0}, ValueError, "`base_batch_size` must be a positive"),
        ({"seed": -1}, ValueError, "`seed` must be"),
        ({"build": 3}, TypeError, "must be a compiled"),
        ({"batch_sizes": (32, 512)}, InputError, "leave the sizes above 400 out"),
        ({"data": (learnable(9)[0], learnable(8)[1])}, InputError, "same number of rows"),
        ({"data": (iter([]), None)}, InputError, "Give arrays"),
        ({"data": (lambda size: None, np.zeros(3))}, InputError, "contains its targets"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(arguments, error, words, capsys):
    with pytest.raises(error, match=words):
        recommend(**arguments)
    assert not capsys.readouterr().out


X, Y = models.rows(64)


def eager(**changed):
    """A model whose few steps take less time than tracing one."""
    return models.mlp(run_eagerly=True, **changed)


def broken():
    return eager(loss=lambda y, p: 1 / 0)


def mostly_weights():
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(2**16)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize(
    ("build", "data", "error", "words"),
    [
        (eager, (X, np.array(["a", "b", "c"])[Y]), InputError, "return_inverse"),
        (eager, (X[:, :5], Y), ValueError, "to have value 8"),
        (eager, (X, Y + 7), InputError, "fails on these data.*label value of"),
        (eager, (X[:1], Y[:1]), InputError, "one example"),
        (broken, (X, Y), ZeroDivisionError, "division"),
        (mostly_weights, (X, Y), OutOfMemoryError, "One example does not fit"),
    ],
)
def test_what_cannot_be_trained_is_told_by_the_first_measurement(build, data, error, words):
    with pytest.raises(error, match=words):
        recommend(
            models.Locked(build),
            data,
            memory_limit_bytes=2**20 if build is mostly_weights else None,
        )
