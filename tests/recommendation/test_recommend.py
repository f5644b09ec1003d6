import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from fake_clock import FakeClock
from own_steps import Here

import kbatch
from kbatch.errors import InputError, OutOfMemoryError

STEPS = ["memory", "gradient noise", "hardware saturation", "input pipeline"]


def learnable(count=400):
    """Rows whose label is the largest of their first three features."""
    x, _ = models.rows(count)
    return x, np.argmax(x[:, :3], axis=1)


def recommend(build=models.mlp, data=None, **arguments):
    x, y = data or learnable()
    return kbatch.recommend(build, x, y, **({"budget_s": 4.0, "seed": 0} | arguments))


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def found(told):
    return recommend(on_progress=told.append, memory_limit_bytes=2**30)


def test_every_limit_is_measured(found, told):
    assert set(found.unknown) <= {"memory", "input pipeline"}
    assert list(found.durations_s) == STEPS
    assert [line.split(":")[0] for line in told] == STEPS
    if found.memory is not None:  # Where there was time for it.
        assert found.memory.max_batch_size == 400
        assert found.memory.limit_bytes == 2**30
    assert (found.pilot.batch_size, found.pilot.micro_batch_size) == (32, 16)
    if found.pipeline is not None:
        assert found.pipeline.source == "tf.data.Dataset"
    assert found.environment.cpu_count >= 1


def test_sizes_are_powers_of_two_that_the_data_fill(found):
    sizes = {timed.batch_size for timed in found.timings}
    assert {32} <= sizes <= {8, 16, 32, 64, 128, 256}  # As many as there was time to build.
    for timed in found.timings:
        assert len(timed.rounds) == len(timed.durations_s)


def test_the_answer_follows_from_the_record(found, tmp_path):
    found.save(tmp_path / "found.json")
    read = kbatch.Recommendation.load(tmp_path / "found.json")
    assert (read.batch_sizes, read.binding) == (found.batch_sizes, found.binding)
    assert {32, found.batch_size} <= set(found.batch_sizes)
    assert str(read).startswith(f"Start with batch size {found.batch_size}")
    assert kbatch.plot_limits(read).get_title(loc="left").startswith("Start with batch size")


def test_the_model_is_told(found):
    assert (found.optimizer, found.learning_rate_rule) == ("Adam", "sqrt")
    assert found.base_learning_rate == pytest.approx(1e-3)
    assert (found.dtype_policy, found.scheduled) == ("float32", False)
    assert found.examples == 400


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
    assert found.examples == 200
    if found.pipeline is not None:  # Where there was time for it.
        assert found.pipeline.source == "tf.data.Dataset"


@pytest.mark.slow
def test_a_pilot_that_the_data_do_not_allow_is_a_reason():
    found = recommend(data=learnable(16), budget_s=1.0, base_batch_size=16)
    assert found.pilot is None
    assert "a pilot needs data for two updates" in found.unknown["gradient noise"]
    assert (found.noise_scale.value, found.batch_size) == (None, 16)
    assert "because a pilot needs data" in " ".join(str(found).split())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"budget_s": 0.0}, ValueError, "`budget_s` must be a positive number"),
        ({"budget_s": float("nan")}, ValueError, "`budget_s` must be a positive number"),
        ({"batch_sizes": (32, 8)}, ValueError, "ascending"),
        ({"base_batch_size": 0}, ValueError, "`base_batch_size` must be a positive"),
        ({"seed": -1}, ValueError, "`seed` must be"),
        ({"build": 3}, TypeError, "must be a compiled"),
        ({"batch_sizes": (32, 512)}, InputError, "leave the sizes above 400 out"),
        ({"data": (learnable(9)[0], learnable(8)[1])}, InputError, "as many rows as each other"),
        ({"data": (iter([]), None)}, InputError, "Training data are arrays"),
        ({"data": (lambda size: None, np.zeros(3))}, InputError, "brings its own targets"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(arguments, error, words):
    told = []
    with pytest.raises(error, match=words):
        recommend(**arguments, on_progress=told.append)
    assert told == []


class Begun(Exception):
    """Measuring has begun."""


@pytest.mark.parametrize("examples", [2, 3, 5, 7, 9])
def test_few_examples_are_no_mistake(examples):
    def begin(line):
        raise Begun

    with pytest.raises(Begun):
        recommend(data=learnable(examples), on_progress=begin, memory_limit_bytes=2**30)


def large():
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(2**16)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def long():
    inputs = keras.Input((8,))
    x = keras.layers.RepeatVector(2**20)(keras.layers.Dense(8)(inputs))
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Activation("tanh")(x))
    model = keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(x))
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def uncompiled():
    return keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "arguments", "error", "words"),
    [
        (uncompiled, {}, ValueError, "must be compiled"),
        (large, {"memory_limit_bytes": 2**20}, OutOfMemoryError, "below the weights"),
        (long, {"memory_limit_bytes": 2**24}, OutOfMemoryError, "One example does not fit"),
        (models.mlp, {"data": learnable(1)}, InputError, "one example"),
    ],
)
def test_what_cannot_be_trained_is_told(build, arguments, error, words):
    with pytest.raises(error, match=words):
        recommend(Here(build), **arguments)


@pytest.mark.slow
def test_under_xla_it_is_told_what_limits(monkeypatch):
    # The seconds of the budget are counted in readings: a slow machine makes as many updates.
    monkeypatch.setattr("time.perf_counter", FakeClock(tick_s=6e-3))
    build = Here(lambda: models.mlp(jit_compile=True))
    found = recommend(build, budget_s=6.0, batch_sizes=(16, 32))
    assert found.pilot.batch_size == 32
    assert {32} <= {timed.batch_size for timed in found.timings}
