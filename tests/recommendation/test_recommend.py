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
    return kbatch.recommend(build, x, y, **({"time_budget_s": 2.0, "seed": 0} | arguments))


def test_recommend_measures_every_limit(capsys):
    # Memory is measured in this process, because a worker takes seconds to start.
    result = recommend(models.Locked(models.mlp), learnable(100), memory_limit_bytes=2**30)
    assert set(result.unknown) <= {"input"}
    assert re.findall(": measuring (.*)", capsys.readouterr().out) == STEPS
    sizes = [record.batch_size for record in result.memory if record.peak_bytes]
    assert sizes[:2] == [1, 8]
    assert result.memory_limit_bytes == 2**30
    assert result.pilot.batch_size == 32
    # A slow machine has no time for some of the sizes.
    assert {32} <= set(result.times_s) <= {8, 16, 32, 64}
    assert (result.optimizer, result.learning_rate_rule) == ("Adam", "sqrt")
    assert result.base_learning_rate == pytest.approx(1e-3)
    assert (result.dtype_policy, result.scheduled) == ("float32", False)
    assert {32, result.batch_size} <= set(result.batch_sizes)


def long_rows():
    """A model that needs several megabytes for each example."""
    layers = keras.layers
    parts = [layers.RepeatVector(2**15), layers.Dense(8), layers.GlobalAveragePooling1D()]
    model = keras.Sequential([layers.Input((8,)), *parts, layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Lion(1e-3), loss, run_eagerly=True)
    return model


def test_recommend_uses_micro_batches_if_few_examples_fit():
    arguments = {"memory_limit_bytes": 24 * 2**20, "batch_sizes": (16, 64)}
    result = recommend(models.Locked(long_rows), learnable(64), **arguments)
    largest = max(update.batch_size for update in result.updates)
    assert 2 <= largest < 8
    assert {32, 64} <= set(result.cut)
    assert result.micro_batch_size <= largest
    assert result.batch_size in result.batch_sizes
    assert result.pilot.batch_size == 32
    assert result.learning_rate_rule is None  # There is no rule for Lion.
    assert result.learning_rate == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"time_budget_s": 0.0}, ValueError, "`time_budget_s` must be a positive number"),
        ({"batch_sizes": (32, 8)}, ValueError, "ascending"),
        ({"base_batch_size": 0}, ValueError, "`base_batch_size` must be a positive"),
        ({"seed": -1}, ValueError, "`seed` must be"),
        ({"build": 3}, TypeError, "must be a compiled"),
        ({"batch_sizes": (32, 512)}, InputError, "at most the number of examples, 400"),
        ({"data": (learnable(9)[0], learnable(8)[1])}, InputError, "same number of rows"),
        ({"data": (iter([]), None)}, InputError, "Give arrays"),
        ({"data": (lambda size: None, np.zeros(3))}, InputError, "contains its targets"),
    ],
)
def test_recommend_refuses_arguments_before_it_measures(arguments, error, words, capsys):
    with pytest.raises(error, match=words):
        recommend(**arguments)
    assert not capsys.readouterr().out


X, Y = models.rows(64)


def eager(**changed):
    """A model without tracing, which is faster for a few steps."""
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
        (eager, (X, Y + 7), InputError, "fails with this data.*label value of"),
        (eager, (X[:1], Y[:1]), InputError, "at least two examples"),
        (broken, (X, Y), ZeroDivisionError, "division"),
        (mostly_weights, (X, Y), OutOfMemoryError, "One example does not fit"),
    ],
)
def test_recommend_refuses_data_and_models(build, data, error, words):
    limit_bytes = 2**20 if build is mostly_weights else None
    with pytest.raises(error, match=words):
        recommend(models.Locked(build), data, memory_limit_bytes=limit_bytes)
