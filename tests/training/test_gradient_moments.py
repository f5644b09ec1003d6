"""The two moments of the gradient noise scale, compared with a naive reference."""

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from equal_training import accumulating, built

X, Y = models.rows(94)


def flat_gradient(model, x, y):
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_weights)
    return np.concatenate([np.ravel(tf.convert_to_tensor(g)) for g in gradients]).astype(float)


def reference(model, x, y, micro_batch_size):
    """S and G2 of one batch, from the definition."""
    cuts = [slice(i, i + micro_batch_size) for i in range(0, len(x), micro_batch_size)]
    micro = [flat_gradient(model, x[cut], y[cut]) for cut in cuts]
    shares = np.array([len(x[cut]) for cut in cuts]) / len(x)
    m = float(shares @ [g @ g for g in micro])
    whole = shares @ np.array(micro)
    big = float(whole @ whole)
    variance = (m - big) * len(x) / (len(cuts) - 1)
    return variance, big - variance / len(x)


def still(build=models.mlp, **arguments):
    """A model with a learning rate of 0, so that all batches have the same weights."""
    keras.utils.set_random_seed(1)
    return build(optimizer=keras.optimizers.SGD(0.0), **arguments)


def found(model, x, y, micro_batch_size, batch_size, epochs=1, every=1):
    accumulating(model, micro_batch_size, moments_every=every)
    return after(built(model, x, y), x, y, batch_size, epochs)


def after(model, x, y, batch_size, epochs=1):
    """Train, and return the moments of the last epoch."""
    history = model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    names = ("gradient_variance", "gradient_squared_norm")
    return [history.history[name][-1] for name in names]


def tokens(optimizer="sgd"):
    parts = [
        keras.layers.Input((6,), dtype="int32"),
        keras.layers.Embedding(10, 4),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(3, activation="softmax", dtype="float32"),
    ]
    return models.compiled(parts, optimizer, "sparse_categorical_crossentropy")


IDS = np.random.default_rng(3).integers(0, 10, (94, 6))


BUILDS = {"dense": (models.mlp, X), "lookup": (tokens, IDS)}
# These cuts leave a rest. Even cuts are below. XLA compiles the sparse gradient.
CASES = [
    ("dense", 1, False),
    ("lookup", 7, False),
    pytest.param("lookup", 8, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "micro_batch_size", "jit_compile"), CASES)
def test_moments_of_one_update(kind, micro_batch_size, jit_compile):
    build, x = BUILDS[kind]
    model = still(build)
    model.jit_compile = jit_compile
    expected = reference(model, x[:32], Y[:32], micro_batch_size)
    result = found(model, x[:32], Y[:32], micro_batch_size, batch_size=32)
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-6)


@pytest.fixture(scope="module")
def traced():
    """A model that measures every update, traced once."""
    return built(accumulating(still(), 8, moments_every=1), X, Y)


# An epoch has three updates. The last batch is smaller.
@pytest.mark.parametrize(("every", "measured"), [(1, [0, 1, 2]), (2, [0, 2])])
def test_moments_are_means_over_every_nth_update(traced, every, measured):
    model = traced
    parts = [slice(0, 32), slice(32, 64), slice(64, 94)]
    expected = np.mean([reference(model, X[parts[i]], Y[parts[i]], 8) for i in measured], axis=0)
    if every > 1:
        model = built(accumulating(still(), 8, moments_every=every), X, Y)
    result = after(model, X, Y, batch_size=32, epochs=2)
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-6)


def test_moments_are_free_of_growing_loss_scale():
    expected = reference(still(), X[:32], Y[:32], 8)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.0), initial_scale=4.0, dynamic_growth_steps=1
    )
    keras.utils.set_random_seed(1)
    result = found(models.mlp(optimizer=optimizer), X[:32], Y[:32], 8, batch_size=32, epochs=3)
    assert float(optimizer.dynamic_scale) > 4.0
    np.testing.assert_allclose(result, expected, rtol=2e-4)


def test_moments_exclude_updates_of_one_micro_batch(traced):
    model = traced
    expected = reference(model, X[:32], Y[:32], 8)
    result = after(model, X[:40], Y[:40], batch_size=32)
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-6)
    assert np.isnan(after(model, X[:24], Y[:24], batch_size=8)).all()
