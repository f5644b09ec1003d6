import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from fake_clock import FakeClock

from kbatch.errors import InputError
from kbatch.recommendation.pilot import run_pilot
from kbatch.recommendation.pilot_record import TARGET_SHARE
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
    plan = {"batch_size": 16, "budget_s": 600.0, "epochs": 3, "seed": 0} | plan
    return run_pilot(build, data or FitData(*noisy_line()), **plan)


@pytest.fixture(scope="module")
def found():
    return pilot()


def test_a_pilot_makes_the_updates_of_its_epochs(found):
    # 640 of 800 rows are trained on: 40 updates an epoch, 10 a stretch.
    assert [stretch.updates for stretch in found.stretches] == [10] * 12
    assert found.ended_by == "epochs"
    assert (found.batch_size, found.micro_batch_size) == (16, 8)
    assert found.learning_rate == pytest.approx(0.05)
    assert all(stretch.held_out_loss > 0 for stretch in found.stretches)
    assert found.stretches[0].loss > found.stretches[-1].loss


def test_its_epochs_are_counted_in_updates_where_several_are_made_at_once():
    def several():
        model = regression()
        model.steps_per_execution = 8
        return model

    # 40 updates an epoch: five calls of eight.
    found = pilot(build=several, epochs=1)
    assert (found.ended_by, found.updates) == ("epochs", 40)


def test_its_moments_are_those_of_the_gradient(found):
    # At the optimum of y = x w + e the mean gradient vanishes and tr(Sigma) = 4 E|x|^2 E e^2 = 16.
    late = found.stretches[-4:]
    assert np.mean([s.gradient_variance for s in late]) == pytest.approx(16, rel=0.5)
    assert found.stretches[0].gradient_squared_norm > late[-1].gradient_squared_norm


def test_a_seed_repeats_it(found):
    again, other = pilot(epochs=1), pilot(epochs=1, seed=1)
    assert again.stretches[0] == found.stretches[0]
    assert other.stretches[0] != found.stretches[0]


def test_it_ends_with_its_budget_in_the_middle_of_a_stretch():
    short = pilot(build=eager, budget_s=1e-9, epochs=None)
    assert short.ended_by == "budget"
    assert short.updates == 2


def test_slow_updates_make_short_stretches(monkeypatch):
    monkeypatch.setattr("time.perf_counter", FakeClock(tick_s=1.0))
    slow = pilot(FitData(*noisy_line(120)), build=eager, epochs=1, budget_s=100.0)
    assert [stretch.updates for stretch in slow.stretches] == [3, 2, 1]


def test_it_ends_when_its_later_half_brought_little():
    found = pilot(epochs=None)
    assert found.ended_by == "progress"
    assert len(found.stretches) >= 24
    assert 2 * len(found.useful) <= len(found.stretches)
    losses = [stretch.held_out_loss for stretch in found.stretches]
    reached = losses[len(found.useful) - 1] - min(losses)
    rest = (1 - TARGET_SHARE) * (losses[0] - min(losses))
    assert reached <= rest or len(found.useful) == 6
    assert found.target == pytest.approx(min(losses) + rest)


def test_a_loss_that_is_not_finite_ends_it():
    found = pilot(build=lambda: eager(1e18), epochs=None)
    assert found.ended_by == "diverged"
    assert found.stretches[-1].loss is None
    assert found.noise_scale.value is None


def test_a_loss_that_is_not_finite_in_the_last_stretch_is_the_reason():
    found = pilot(FitData(*noisy_line(120)), build=lambda: eager(1e18), epochs=1)
    assert [stretch.loss for stretch in found.stretches] == [None]
    assert found.ended_by == "diverged"


@pytest.mark.parametrize("batched", [False, True])
def test_datasets_are_trained_on_without_a_held_out_part(monkeypatch, batched):
    dataset = tf.data.Dataset.from_tensor_slices(models.rows(96))
    dataset = dataset.batch(10) if batched else dataset
    found = pilot(FitData(dataset), build=classifier, epochs=2)
    assert all(stretch.held_out_loss is None for stretch in found.stretches)
    assert (found.ended_by, found.updates) == ("epochs", 12)
    # A second at each reading. The first is the start of the call, each update makes one and a look
    # after it two: eight are more than an epoch has.
    monkeypatch.setattr("time.perf_counter", FakeClock(tick_s=1.0))
    given = pilot(
        FitData(lambda size: dataset.unbatch().batch(size) if batched else dataset.batch(size)),
        build=classifier,
        budget_s=18.5,
        epochs=None,
    )
    assert (given.ended_by, given.updates) == ("budget", 8)


def test_too_few_examples_are_told():
    with pytest.raises(InputError, match=r"two updates at least.*1 batches of 16"):
        pilot(FitData(*noisy_line(20)))
