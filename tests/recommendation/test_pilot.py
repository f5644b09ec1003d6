import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from fake_clock import FakeClock

from kbatch.errors import InputError
from kbatch.recommendation.pilot import run_pilot
from kbatch.recommendation.result import useful_stretches
from kbatch.training.data.forms import FitData


def regression(learning_rate=0.05):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(learning_rate), "mse")
    return model


def eager(learning_rate=0.05):
    """The same, of which a few updates take less time than tracing one."""
    model = regression(learning_rate)
    model.run_eagerly = True
    return model


def classifier():
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, run_eagerly=True)
    return model


def noisy_line(count=800):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 4)).astype("float32")
    return x, (x @ [1, -2, 3, 0.5] + rng.normal(size=count)).astype("float32")[:, None]


def pilot(data=None, *, build=regression, **plan):
    plan = {"batch_size": 16, "budget_s": 600.0, "seed": 0} | plan
    return run_pilot(build, data or FitData(*noisy_line()), **plan)


@pytest.fixture(scope="module")
def found():
    return pilot()


def test_it_ends_when_its_later_half_brought_little(found):
    assert found.ended_by == "progress"
    assert set(found.updates) == {10}
    assert (found.batch_size, found.micro_batch_size, found.seed) == (16, 8, 0)
    assert len(found.losses) == 24 >= 2 * useful_stretches(found.losses)
    assert found.losses[0] > found.losses[-1]
    slow = pilot(build=lambda: regression(0.001))
    assert len(slow.losses) == 2 * useful_stretches(slow.losses) > 24


def test_several_updates_of_a_call_are_counted(found):
    def several():
        model = regression()
        model.steps_per_execution = 8
        return model

    assert set(pilot(build=several).updates) == {16}


def test_its_moments_are_those_of_the_gradient(found):
    # At the optimum of y = x w + e the mean gradient vanishes and tr(Sigma) = 4 E|x|^2 E e^2 = 16.
    assert np.mean(found.gradient_variances[-12:]) == pytest.approx(16, rel=0.3)
    assert found.gradient_squared_norms[0] > found.gradient_squared_norms[-1]
    assert found.noise_scale.value is None or found.noise_scale.value > 0


def test_a_seed_repeats_it(found):
    again, other = pilot(), pilot(seed=1)
    assert again == found
    assert other.losses[0] != found.losses[0]


def test_it_ends_with_its_budget_in_the_middle_of_a_stretch():
    short = pilot(build=eager, budget_s=1e-9)
    assert short.ended_by == "budget"
    assert short.updates == (2,)


def test_half_of_the_time_is_left_however_long_building_took(monkeypatch):
    clock = FakeClock(tick_s=1.0)
    monkeypatch.setattr("time.perf_counter", clock)

    def slow():
        clock.now_s += 1000.0
        return eager()

    # A reading after each update, and one after each stretch of two or three.
    late = pilot(FitData(*noisy_line(120)), build=slow, budget_s=40.0)
    assert late.ended_by == "budget"
    assert 10 <= sum(late.updates) <= 20


def test_a_loss_that_is_not_finite_says_what_to_look_at():
    with pytest.raises(InputError, match="became NaN within 10 updates: look for values"):
        pilot(build=lambda: eager(1e18))


@pytest.mark.parametrize("batched", [False, True])
def test_datasets_and_functions_are_trained_on(batched):
    dataset = tf.data.Dataset.from_tensor_slices(models.rows(96))
    given = dataset.batch(10) if batched else dataset
    found = pilot(FitData(given), build=classifier, budget_s=1e-9)
    assert found.updates == (2,)
    made = pilot(FitData(lambda size: dataset.batch(size)), build=classifier, budget_s=1e-9)
    assert made.updates == (2,)


def test_too_few_examples_are_told():
    with pytest.raises(InputError, match=r"two updates at least.*1 batches of 16"):
        pilot(FitData(*noisy_line(16)))
