"""Accumulation in mixed precision: equality, overflow and loss scale."""

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from equal_training import accumulating, assert_equal_training, built

from kbatch.training.accumulation import gradient_sum
from kbatch.training.dtype_policy import dtype_policy_scope

X, Y = models.rows(94)


@pytest.fixture
def policy(request):
    with dtype_policy_scope(request.param):
        yield request.param


# float16 rounds a value by 2^-11, bfloat16 by 2^-8.
TOLERANCES = {"mixed_float16": 2e-3, "float16": 4e-3, "mixed_bfloat16": 1.6e-2, "bfloat16": 3e-2}


@pytest.mark.parametrize(
    "policy",
    [pytest.param(name, marks=pytest.mark.slow if "b" in name else ()) for name in TOLERANCES],
    indirect=True,
)
def test_accumulation_equals_whole_batch_in_half_precision(policy):
    model = assert_equal_training(
        lambda: models.mlp(optimizer="sgd"),
        (X, Y),
        micro_batch_size=5,
        tolerance=TOLERANCES[policy],
    )
    assert model.layers[0].dtype_policy.name == policy


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradient_sum_keeps_small_gradients_in_half_precision(dtype):
    """In half precision, adding 1 to 2048 changes nothing."""
    variables = [keras.Variable([0.0], dtype=dtype)]
    sums = gradient_sum.init(variables)
    for gradient in [2048.0] + 64 * [1.0]:
        sums = gradient_sum.add(sums, [tf.constant([gradient], dtype)])
    (total,) = gradient_sum.finalize(sums, variables, [True])
    assert (total.dtype, float(total[0])) == (dtype, 2112.0)


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
def test_accumulation_scales_loss_after_weighting(policy):
    """If the loss were scaled first, it would overflow earlier than for the whole batch."""

    def update(micro_batch_size):
        keras.utils.set_random_seed(1)
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**19
        )
        model = models.mlp(optimizer=optimizer, run_eagerly=micro_batch_size is None)
        if micro_batch_size:
            accumulating(model, micro_batch_size)
        built(model, X, Y).train_on_batch(X[:64], Y[:64])
        return int(optimizer.iterations)

    assert update(None) == update(1) == 1


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
def test_loss_scale_counts_updates_and_skips_overflow(policy):
    keras.utils.set_random_seed(1)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**14, dynamic_growth_steps=3
    )
    model = built(accumulating(models.mlp(optimizer=optimizer), 8), X, Y, X[:, 0])
    x, y, ones = X[:32], Y[:32], np.ones(32, "float32")
    expected = np.mean(keras.losses.sparse_categorical_crossentropy(y, model(x)))

    def step(x, weights=ones):
        """The reported loss, the updates and the scale after a step."""
        loss = model.train_on_batch(x, y, sample_weight=weights, return_dict=True)["loss"]
        return float(loss), int(optimizer.iterations), float(optimizer.dynamic_scale)

    loss, *counts = step(x)
    assert loss == pytest.approx(expected, rel=1e-3)  # The logs have the unscaled loss.
    assert counts == [1, 2.0**14]
    assert [step(x)[1:] for _ in range(2)] == [(2, 2.0**14), (3, 2.0**15)]
    before, far = model.get_weights(), x.copy()
    far[9] = 6e4  # In the second of four micro-batches.
    assert step(far, 1e4 * ones)[1:] == (3, 2.0**14)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert step(x)[1:] == (4, 2.0**14)
    assert any((o != n).any() for o, n in zip(before, model.get_weights(), strict=True))
