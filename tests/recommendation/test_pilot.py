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
    parts = [keras.layers.Input((4,)), keras.layers.Dense(1, use_bias=False)]
    return models.compiled(parts, keras.optimizers.SGD(learning_rate), "mse", **settings)


def eager(learning_rate=0.05):
    """The same model without tracing, which is faster for a few updates."""
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
def record():
    return pilot()


def test_run_pilot_ends_when_the_later_half_hardly_reduced_the_loss(record):
    assert set(record.updates) == {10}
    assert len(record.losses) == 24 >= 2 * useful_stretches(record.losses)
    assert record.losses[0] > record.losses[-1]
    slow = pilot(build=lambda: regression(0.003))
    assert len(slow.losses) == 2 * useful_stretches(slow.losses) > 24


@pytest.mark.parametrize("at_once", [None, 5])
def test_run_pilot_measures_the_moments_of_the_gradient(record, at_once):
    record = record if at_once is None else pilot(at_once=at_once)
    # At the optimum of y = x w + e the mean gradient vanishes and tr(Sigma) = 4 E|x|^2 E e^2 = 16.
    assert np.mean(record.gradient_variances[-12:]) == pytest.approx(16, rel=0.3)
    assert record.gradient_squared_norms[0] > record.gradient_squared_norms[-1]


def test_run_pilot_micro_batches_fit_in_memory():
    rows = []

    class Seen(keras.layers.Layer):
        def call(self, x):
            rows.append(x.shape[0])
            return x

    def build():
        parts = [keras.layers.Input((4,)), Seen(), keras.layers.Dense(1)]
        return models.compiled(parts, "sgd", "mse", run_eagerly=True)

    pilot(build=build, at_once=5, budget_s=1e-9)
    assert max(filter(None, rows)) == 5


def test_run_pilot_leaves_half_of_the_time_after_the_first_update(monkeypatch):
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

    # The clock is read after each update, and after each stretch of two or three updates.
    late = pilot(TrainingData(*noisy_line(120)), build=build, budget_s=40.0)
    assert 10 <= sum(late.updates) <= 20


def test_run_pilot_on_a_data_function_until_the_budget_ends():
    dataset = tf.data.Dataset.from_tensor_slices(noisy_line(96))
    assert pilot(TrainingData(dataset.batch), build=eager, budget_s=1e-9).updates == (2,)


@pytest.mark.parametrize(
    ("build", "data", "size", "words"),
    [
        (lambda: eager(1e18), noisy_line(), 16, "became NaN within 10 updates"),
        (eager, noisy_line(16), 16, "at least two updates"),
        (eager, noisy_line(16), 1, "`base_batch_size` must be at least 2"),
        (vae, models.rows(64), 16, "its own `train_step`"),
    ],
)
def test_run_pilot_refuses(build, data, size, words):
    with pytest.raises(InputError, match=words):
        pilot(TrainingData(*data), build=build, batch_size=size)
