import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from fake_clock import FakeClock

import kbatch
from kbatch.errors import InputError, OutOfMemoryError
from kbatch.recommendation.result import INPUT, MEMORY, NOISE, SATURATION

STEPS = [MEMORY, NOISE, SATURATION, INPUT]


def learnable(count=400):
    """Rows whose label is the largest of their first three features."""
    x, _ = models.rows(count)
    return x, np.argmax(x[:, :3], axis=1)


def recommend(build=models.mlp, data=None, **arguments):
    x, y = data or learnable()
    return kbatch.recommend(build, x, y, **({"budget_s": 3.0, "seed": 0} | arguments))


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def found(told):
    # In this process: a worker takes seconds to start.
    return recommend(models.Locked(models.mlp), on_progress=told.append, memory_limit_bytes=2**30)


def test_every_limit_is_measured_at_powers_of_two_that_the_data_fill(found, told):
    assert set(found.unknown) <= {INPUT}
    assert [line.split(":")[0] for line in told] == STEPS
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


@pytest.mark.slow
def test_a_given_model_stays_as_it_is():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.9)
    model = models.mlp(optimizer=keras.optimizers.SGD(schedule))
    before = [np.array(v) for v in model.variables]
    dataset = tf.data.Dataset.from_tensor_slices(learnable(200)).batch(10)
    found = kbatch.recommend(model, dataset, budget_s=2.0, batch_sizes=(8, 32), base_batch_size=16)
    for kept, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(kept, np.array(variable))
    assert int(model.optimizer.iterations) == 0
    assert "train_step" not in vars(model)
    assert (found.learning_rate_rule, found.scheduled) == ("linear", True)


@pytest.mark.slow
def test_a_pilot_that_the_data_do_not_allow_is_a_reason():
    found = recommend(data=learnable(16), budget_s=1.0, base_batch_size=16)
    assert found.pilot is None
    assert "a pilot needs data for two updates" in found.unknown[NOISE]
    assert (found.noise_scale.value, found.batch_size) == (None, 16)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"budget_s": 0.0}, ValueError, "`budget_s` must be a positive number"),
        ({"batch_sizes": (32, 8)}, ValueError, "ascending"),
        ({"base_batch_size": 0}, ValueError, "`base_batch_size` must be a positive"),
        ({"seed": -1}, ValueError, "`seed` must be"),
        ({"build": 3}, TypeError, "must be a compiled"),
        ({"batch_sizes": (32, 512)}, InputError, "leave the sizes above 400 out"),
        ({"data": (learnable(9)[0], learnable(8)[1])}, InputError, "as many rows as each other"),
        ({"data": (iter([]), None)}, InputError, "Give arrays"),
        ({"data": (lambda size: None, np.zeros(3))}, InputError, "brings its own targets"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(arguments, error, words):
    told = []
    with pytest.raises(error, match=words):
        recommend(**arguments, on_progress=told.append)
    assert told == []


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


@pytest.mark.slow
def test_under_xla_it_is_told_what_limits(monkeypatch):
    # The seconds of the budget are counted in readings: a slow machine makes as many updates.
    monkeypatch.setattr("time.perf_counter", FakeClock(tick_s=6e-3))
    build = models.Locked(lambda: models.mlp(jit_compile=True))
    found = recommend(build, budget_s=6.0, batch_sizes=(16, 32))
    assert found.pilot.batch_size == 32
    assert 32 in found.times_s
