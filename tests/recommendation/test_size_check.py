import keras
import numpy as np
import pytest

from kbatch.analysis.learning_rate import FOLLOWERS
from kbatch.recommendation.choice import CheckPlan
from kbatch.recommendation.pilot import held_out_batches, run_size_check
from kbatch.training.data.forms import FitData


def line(learning_rate=0.05):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(learning_rate), "mse")
    return model


def eager(learning_rate=0.05):
    """The same, of which a few updates take less time than tracing one."""
    model = line(learning_rate)
    model.run_eagerly = True
    return model


def data(count=400):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 4)).astype("float32")
    return FitData(x, (x @ [1, -2, 3, 0.5] + 0.1 * rng.normal(size=count)).astype("float32"))


def check(build=line, **changed):
    fields = {
        "batch_size": 32,
        "micro_batch_size": 32,
        "base_batch_size": 16,
        "rule": None,
        "target": 0.5,
        "held_out": True,
        "stretch": 2,
        "most_updates": 500,
        "budget_s": 6000.0,  # Never what ends it, however busy the machine is.
        "seed": 0,
    }
    return run_size_check(build, data(), plan=CheckPlan(**(fields | changed)))


@pytest.fixture(scope="module")
def reached():
    return check()


def test_it_ends_at_the_target(reached):
    assert (reached.ended_by, reached.reached) == ("target", True)
    assert 0 < reached.loss <= 0.5
    assert 2 < reached.updates < 500
    assert reached.updates % 2 == 0
    assert reached.learning_rate == pytest.approx(0.05)
    assert (reached.scaling.kappa, reached.scaling.follow_batch_size) == (2, FOLLOWERS)


def test_a_larger_rate_needs_fewer_updates(reached):
    faster = check(rule="linear")
    assert faster.learning_rate == pytest.approx(0.1)
    assert faster.updates < reached.updates


def test_parts_of_a_batch_make_the_same_updates(reached):
    parts = check(micro_batch_size=8)
    assert parts.updates == reached.updates
    assert parts.loss == pytest.approx(reached.loss, rel=1e-3)


def several_at_once():
    model = line()
    model.steps_per_execution = 2
    return model


def test_several_updates_at_once_are_counted_one_by_one(reached):
    assert check(several_at_once).updates == reached.updates


@pytest.mark.parametrize(
    ("changed", "ended_by"),
    [
        ({"target": 0.0, "most_updates": 6}, "lost"),
        ({"target": 0.0, "budget_s": 0.0}, "budget"),
        ({"build": lambda: eager(1e20)}, "diverged"),
    ],
)
def test_it_ends_without_the_target(changed, ended_by):
    found = check(**({"build": eager} | changed))
    assert found.ended_by == ended_by
    assert not found.reached
    assert (found.loss is None) == (ended_by == "diverged")


def test_the_loss_of_training_counts_where_nothing_is_held_out():
    assert check(eager, held_out=False, target=2.0).reached


def test_the_optimizer_gets_its_settings_back():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 100, 0.9)
    for rate in (0.05, schedule):
        model = eager(rate)
        kept = model.optimizer._learning_rate
        check(lambda model=model: model, rule="linear", target=9.0)
        assert model.optimizer._learning_rate is kept
        if rate != schedule:
            assert float(keras.ops.convert_to_numpy(kept)) == pytest.approx(0.05)


def test_a_further_run_draws_weights_and_order_and_keeps_the_held_out_rows(reached):
    again, same = check(run=1), check(run=1)
    assert (again.updates, again.loss) == (same.updates, same.loss)
    assert again.loss != reached.loss
    one, other = (
        held_out_batches(data(), line(), batch_size=32, seed=0, order_seed=order)
        for order in (None, 5)
    )
    np.testing.assert_array_equal(one.validation_data[0][0], other.validation_data[0][0])
    first, second = (next(iter(batches.dataset))[0] for batches in (one, other))
    assert not np.array_equal(first, second)
