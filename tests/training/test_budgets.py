import functools
import math

import keras
import numpy as np
import pytest
import searches
import small_models as models
from fake_clock import FakeClock

import kbatch
from kbatch.errors import InputError
from kbatch.records.training_run import Budget
from kbatch.search.timed_fit import TimedFit
from kbatch.training.callbacks import joint_budget

# 94 rows make three batches of 32.
X, Y = models.rows(94)


class Ticks(keras.callbacks.Callback):
    """Advances a clock by a second in each train step, and by a minute between epochs."""

    def __init__(self, time):
        super().__init__()
        self.time = time

    def on_train_batch_begin(self, batch, logs=None):
        self.time.now_s += 1

    def on_epoch_end(self, epoch, logs=None):
        self.time.now_s += 60


@functools.cache
def shared_model():
    """An eager model, because tracing takes longer than its few steps."""
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3, "softmax")])
    loss = "sparse_categorical_crossentropy"
    model.compile("sgd", loss, metrics=["accuracy"], run_eagerly=True)
    return model


def timed(*callbacks, epochs=5, model=None, now=None, to_target=False, validate=False, **arguments):
    """Train as a search does, and return the `TimedFit`."""
    validation = (X, Y) if validate else None
    plan = searches.plan(32, to_target=to_target)
    with TimedFit(model or shared_model(), plan, **arguments) as fit:
        if now is not None:
            fit.clock._now = now
        fit(X, Y, validation_data=validation, epochs=epochs, callbacks=list(callbacks), verbose=0)
    return fit


@pytest.mark.parametrize("seconds", [0.5, 3, 7.5])
def test_time_budget_counts_only_train_steps(seconds):
    clock = FakeClock()
    budget = kbatch.TimeBudget(seconds)
    budget._now = clock
    model = shared_model()
    before = int(model.optimizer.iterations)
    model.fit(X, Y, batch_size=32, epochs=9, callbacks=[budget, Ticks(clock)], verbose=0)
    assert int(model.optimizer.iterations) - before == math.ceil(seconds)


def test_time_budget_in_a_search_equals_recorded_seconds():
    fit = timed(kbatch.TimeBudget(0.05), epochs=10**6, validate=True)
    seconds = [epoch.train_s for epoch in fit.clock.epochs]
    assert fit.clock.train_s == pytest.approx(sum(seconds))
    assert fit.clock.train_s >= 0.05
    # The budget was spent in the last epoch.
    assert sum(seconds[:-1]) < 0.05
    assert {"val_accuracy"} <= fit.clock.epochs[-1].metrics.keys()
    assert fit.budget == Budget(train_s=0.05)


@pytest.mark.parametrize("updates", [1, 3, 4])
def test_update_budget_ends_at_exact_update(updates):
    fit = timed(kbatch.UpdateBudget(updates))
    assert fit.clock.updates == sum(epoch.updates for epoch in fit.clock.epochs) == updates
    model = shared_model()
    before = int(model.optimizer.iterations)
    for _ in range(2):  # Outside a search each `fit` has the whole budget.
        model.fit(X, Y, epochs=9, callbacks=[kbatch.UpdateBudget(updates)], verbose=0)
    assert int(model.optimizer.iterations) - before == 2 * updates


def test_update_budget_shortens_last_execution():
    model = models.linear()
    model.steps_per_execution = 4
    validated = []
    settings = {"batch_size": 8, "epochs": 9, "validation_data": (X, Y), "verbose": 0}
    for updates in (1, 6, 30):
        before = int(model.optimizer.iterations)
        history = model.fit(X, Y, callbacks=[kbatch.UpdateBudget(updates)], **settings)
        assert int(model.optimizer.iterations) - before == updates
        assert model.steps_per_execution == 4
        validated.append(history.history["val_loss"][-1])
    assert validated[-1] == pytest.approx(model.evaluate(X, Y, batch_size=94, verbose=0))


def test_joint_budget_takes_smallest_limits():
    fit = timed(kbatch.UpdateBudget(5), kbatch.TimeBudget(1e6))
    assert fit.clock.updates == 5
    assert fit.budget == Budget(train_s=1e6, updates=5)
    assert joint_budget([kbatch.UpdateBudget(6), kbatch.UpdateBudget(5)]) == Budget(updates=5)
    assert joint_budget([]) is None


@pytest.mark.parametrize("kind", [kbatch.TimeBudget, kbatch.UpdateBudget])
def test_budgets_refuse_values_that_are_not_positive(kind):
    for value in (0, -1, None, "5", True, math.nan):
        with pytest.raises((ValueError, TypeError), match=r"must be .*Received: \w+="):
            kind(value)


def test_budget_and_target_accept_numpy_numbers():
    assert kbatch.TimeBudget(np.float32(60)).budget == Budget(train_s=60.0)
    assert kbatch.StopAtTarget("loss", np.float32(0.5)).target.value == 0.5


def test_stop_at_target_ends_at_first_epoch_that_meets_it():
    fit = timed(kbatch.StopAtTarget("loss", 100.0))
    assert len(fit.clock.epochs) == 1
    weights = shared_model().get_weights()
    fit = timed(kbatch.StopAtTarget("accuracy", 1.1))
    losses = [epoch.metrics["loss"] for epoch in fit.clock.epochs]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    shared_model().set_weights(weights)
    fit = timed(kbatch.StopAtTarget("loss", (losses[1] + losses[2]) / 2))
    assert len(fit.clock.epochs) == 3


def test_stop_at_target_names_missing_metric():
    with pytest.raises(InputError, match="val_auc"):
        timed(kbatch.StopAtTarget("val_auc", 0.5))


def test_seconds_to_target_requires_one_target():
    with pytest.raises(InputError, match="Received: 0 such"):
        timed(to_target=True)
    target = kbatch.StopAtTarget("loss", 0.1)
    with pytest.raises(InputError, match="Received: 2 such"):
        timed(target, target)
