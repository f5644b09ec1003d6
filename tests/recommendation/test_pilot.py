import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from fake_clock import FakeClock
from own_steps import vae

from kbatch.errors import InputError
from kbatch.recommendation.measure import run_pilot
from kbatch.recommendation.result import useful_stretches
from kbatch.training.data.training_data import TrainingData
from kbatch.training.state import seeded


def regression(learning_rate=0.05, **settings):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(learning_rate), "mse", **settings)
    return model


def eager(learning_rate=0.05):
    """The same, of which a few updates take less time than tracing one."""
    return regression(learning_rate, run_eagerly=True)


def noisy_line(count=800):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 4)).astype("float32")
    return x, (x @ [1, -2, 3, 0.5] + rng.normal(size=count)).astype("float32")[:, None]


def pilot(data=None, *, build=regression, **plan):
    plan = {"batch_size": 16, "budget_s": 600.0, "seed": 0} | plan
    with seeded(plan["seed"]):
        return run_pilot(build(), data or TrainingData(*noisy_line()), **plan)


@pytest.fixture(scope="module")
def found():
    return pilot()


def test_it_ends_when_its_later_half_brought_little(found):
    assert set(found.updates) == {10}
    assert len(found.losses) == 24 >= 2 * useful_stretches(found.losses)
    assert found.losses[0] > found.losses[-1]
    slow = pilot(build=lambda: regression(0.001))
    assert len(slow.losses) == 2 * useful_stretches(slow.losses) > 24


@pytest.mark.parametrize("at_once", [None, 5])
def test_its_moments_are_those_of_the_gradient(found, at_once):
    """In halves, or in as many parts as memory asks for."""
    found = found if at_once is None else pilot(at_once=at_once)
    # At the optimum of y = x w + e the mean gradient vanishes and tr(Sigma) = 4 E|x|^2 E e^2 = 16.
    assert np.mean(found.gradient_variances[-12:]) == pytest.approx(16, rel=0.3)
    assert found.gradient_squared_norms[0] > found.gradient_squared_norms[-1]


def test_no_part_is_larger_than_memory_holds():
    rows = []

    class Seen(keras.layers.Layer):
        def call(self, x):
            rows.append(x.shape[0])
            return x

    def build():
        model = keras.Sequential([keras.layers.Input((4,)), Seen(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    pilot(build=build, at_once=5, budget_s=1e-9)
    assert max(filter(None, rows)) == 5


def test_half_of_the_time_is_left_however_long_the_first_update_took(monkeypatch):
    clock = FakeClock(tick_s=1.0)
    monkeypatch.setattr("time.perf_counter", clock)

    class Slow(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            clock.now_s += 1000.0 if not int(self.optimizer.iterations) else 0.0
            return super().compute_loss(*args, **kwargs)

    def build():
        model = Slow([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    # A reading after each update, and one after each stretch of two or three.
    late = pilot(TrainingData(*noisy_line(120)), build=build, budget_s=40.0)
    assert 10 <= sum(late.updates) <= 20


def test_a_function_is_trained_on_until_the_budget_ends():
    dataset = tf.data.Dataset.from_tensor_slices(noisy_line(96))
    assert pilot(TrainingData(dataset.batch), build=eager, budget_s=1e-9).updates == (2,)


@pytest.mark.parametrize(
    ("build", "data", "size", "words"),
    [
        (lambda: eager(1e18), noisy_line(), 16, "became NaN within 10 updates"),
        (eager, noisy_line(16), 16, "two updates at least"),
        (eager, noisy_line(16), 1, "two examples at least"),
        (vae, models.rows(64), 16, "`train_step` of its own"),
    ],
)
def test_what_allows_no_pilot_is_told(build, data, size, words):
    with pytest.raises(InputError, match=words):
        pilot(TrainingData(*data), build=build, batch_size=size)
