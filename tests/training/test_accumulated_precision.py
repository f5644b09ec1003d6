"""Mixed precision: equality, overflow, and what the loss scale counts."""

import keras
import models
import numpy as np
import pytest
from equal_training import assert_equal_training, built

import kbatch

X, Y = models.rows(94)


@pytest.fixture
def policy(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


# Rounding of one value: float16 2^-11, bfloat16 2^-8, eight times as much.
TOLERANCES = {"mixed_float16": 2e-3, "float16": 4e-3, "mixed_bfloat16": 1.6e-2, "bfloat16": 3e-2}


@pytest.mark.parametrize(
    ("policy", "micro_batch_size"),
    [(policy, 5) for policy in TOLERANCES],
    indirect=["policy"],
)
def test_equal_in_half_precision(policy, micro_batch_size):
    model = assert_equal_training(
        lambda: models.mlp(optimizer="sgd"),
        (X, Y),
        micro_batch_size=micro_batch_size,
        tolerance=TOLERANCES[policy],
    )
    assert model.layers[0].dtype_policy.name == policy


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
def test_penalties_and_statistics_in_half_precision(policy):
    def build():
        layers = keras.layers
        model = keras.Sequential(
            [
                layers.Input((8,)),
                layers.Dense(8, kernel_regularizer="l2"),
                layers.BatchNormalization(),
                layers.Dense(3, activation="softmax", dtype="float32"),
            ]
        )
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    with pytest.warns(UserWarning, match="BatchNormalization"):
        assert_equal_training(build, (X, Y), micro_batch_size=200, tolerance=4e-3)


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
def test_the_backward_pass_overflows_no_sooner_than_that_of_the_whole_batch(policy):
    """Each micro-batch's share is taken before the loss is scaled, not after."""

    def update(micro_batch_size):
        keras.utils.set_random_seed(1)
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**19
        )
        model = models.mlp(optimizer=optimizer)
        if micro_batch_size:
            kbatch.accumulate_gradients(model, micro_batch_size)
        built(model, X, Y).train_on_batch(X[:64], Y[:64])
        return int(optimizer.iterations)

    assert update(None) == update(1) == 1


def scaled(initial_scale=2.0**15, growth=2000):
    """A model in mixed_float16 whose loss scale is known."""
    keras.utils.set_random_seed(1)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=initial_scale, dynamic_growth_steps=growth
    )
    return built(kbatch.accumulate_gradients(models.mlp(optimizer=optimizer), 8), X, Y)


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
def test_one_overflowing_micro_batch_skips_the_update_and_the_next_recovers(policy):
    model = scaled()
    before = model.get_weights()
    x = X[:32].copy()
    x[9] = 6e4  # In the second of four micro-batches.
    weights = np.full(32, 1e4, "float32")
    model.train_on_batch(x, Y[:32], sample_weight=weights)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert int(model.optimizer.iterations) == 0
    assert float(model.optimizer.dynamic_scale) == 2.0**14
    model.train_on_batch(X[:32], Y[:32])
    assert int(model.optimizer.iterations) == 1
    assert any((o != n).any() for o, n in zip(before, model.get_weights(), strict=True))


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
def test_the_loss_scale_grows_by_updates(policy):
    model = scaled(initial_scale=256.0, growth=3)
    scales = []
    for _ in range(4):
        model.train_on_batch(X[:32], Y[:32])
        scales.append(float(model.optimizer.dynamic_scale))
    assert scales == [256.0, 256.0, 512.0, 512.0]


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
def test_the_reported_loss_is_not_scaled(policy):
    model = scaled()
    expected = model.evaluate(X[:32], Y[:32], verbose=0, return_dict=True)["loss"]
    found = model.train_on_batch(X[:32], Y[:32], return_dict=True)["loss"]
    assert float(found) == pytest.approx(expected, rel=1e-3)
