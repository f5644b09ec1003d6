"""The state of a model and random states are restored after a measurement."""

import random

import keras
import numpy as np
import own_steps
import pytest
import small_models as models
import tensorflow as tf
from equal_training import accumulating

from kbatch.training.dtype_policy import dtype_policy_scope
from kbatch.training.state import KeptState, kept_seeds, kept_state, seed_of, seeded

layers = keras.layers


def eager(model):
    """Make a model eager, because tracing takes longer than a few steps."""
    model.run_eagerly = True
    return model


def train(model, epochs=1):
    return model.fit(*models.rows(24), batch_size=8, epochs=epochs, verbose=0, shuffle=False)


OPTIMIZERS = {
    "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.1, 30), momentum=0.9
    ),
    "lion": lambda: keras.optimizers.Lion(0.01),
}


@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        ("float32", "ema"),
        ("mixed_float16", "schedule"),
        pytest.param("mixed_float16", "lion", marks=pytest.mark.slow),
    ],
)
def test_kept_state_restores_variables_and_later_training(policy, optimizer):
    with dtype_policy_scope(policy):
        keras.utils.set_random_seed(0)
        model = models.normalised(optimizer=OPTIMIZERS[optimizer]())
    train(model)
    state = KeptState(model)
    before = models.state_of(model)
    first = train(model).history["loss"]
    state.restore()
    assert all(map(np.array_equal, models.state_of(model), before))
    assert train(model).history["loss"] == first


def test_kept_state_of_untrained_model_restores_first_update_also_after_error():
    keras.utils.set_random_seed(0)
    model = eager(models.normalised())
    with pytest.raises(KeyboardInterrupt), kept_state(model):
        train(model)
        raise KeyboardInterrupt
    assert int(model.optimizer.iterations) == 0
    once = train(model).history["loss"]
    keras.utils.set_random_seed(0)
    assert train(eager(models.normalised())).history["loss"] == once


def test_kept_state_restores_train_step_history_and_stop():
    model = accumulating(models.mlp(), 4)
    step, history = model.train_step, train(model)
    function = model.train_function
    with kept_state(model):
        accumulating(eager(model), 2)
        train(model)
        model.stop_training = True
    assert model.train_step is step
    assert model.train_function is function  # It is not traced again.
    assert model.history is history
    assert not model.stop_training
    plain = eager(models.mlp())
    with kept_state(plain):
        train(accumulating(plain, 2))
    assert "train_step" not in vars(plain)
    assert "history" not in vars(plain)


def test_kept_state_of_model_without_optimizer():
    model = keras.Sequential([layers.Input((8,)), layers.Dense(3)])
    with kept_state(model):
        model.set_weights([np.ones_like(w) for w in model.get_weights()])
    assert not np.all(model.get_weights()[0] == 1)


@pytest.mark.parametrize("trained", [False, True])
def test_kept_state_restores_optimizers_of_custom_train_step(trained):
    model = own_steps.gan()
    model.compile(keras.optimizers.Adam(0.1), keras.optimizers.Ftrl(0.1))
    optimizers = [model.d_optimizer, model.g_optimizer]
    if trained:
        train(model)
    state = KeptState(model)
    train(model)
    state.restore()
    first = [np.array(v.value) for one in optimizers for v in one.variables]
    assert [int(one.iterations) for one in optimizers] == [3 * trained] * 2
    train(model)
    state.restore()
    again = [np.array(v.value) for one in optimizers for v in one.variables]
    assert all(map(np.array_equal, first, again))


def test_seeded_gives_same_weights():
    weights = []
    for _ in range(2):
        with seeded(7):
            weights.append(models.linear().get_weights()[0])
    np.testing.assert_array_equal(*weights)


def test_seed_of_differs_by_every_part():
    seeds = [seed_of(seed, *parts) for seed in (0, 1) for parts in ((0, 0), (0, 1), (1, 0))]
    assert len(set(seeds)) == 6
    assert seed_of(0, 1, 0) == seeds[2]
    assert seed_of(None, 1) is None


@pytest.mark.parametrize("seed", [None, 5])
def test_kept_seeds_restores_all_random_states(seed):
    def drawn():
        return (
            random.random(),
            np.random.random(),
            float(keras.random.uniform(())),
            float(tf.random.uniform(())) if seed is not None else 0.0,
        )

    if seed is not None:
        keras.utils.set_random_seed(seed)
        drawn()
    with kept_seeds():
        first = drawn()
        keras.utils.set_random_seed(9)
        drawn()
    assert drawn() == first
