"""Batches halved for the moments, held against Keras's own step and a naive reference."""

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from equal_training import assert_same_training, batches_of_lengths, built, sgd_mlp, trained
from test_gradient_moments import X, Y, reference, still, tokens

import kbatch
from kbatch.training.accumulation import measure_moments
from kbatch.training.accumulation.parts_check import check_parts
from kbatch.training.accumulation.whole_batch import uncut_reason

layers = keras.layers
IDS = np.random.default_rng(3).integers(0, 10, (94, 6))


def assert_equal_to_stock(build, data, *, tolerance=1e-6, every=2, eager=False, **fit):
    def measured():
        return measure_moments(build(), every=every)

    whole = trained(build, data, micro_batch_size=None, eager=True, **fit)
    halved = trained(measured, data, micro_batch_size=None, eager=eager, **fit)
    assert_same_training(whole, halved, tolerance)
    assert np.isfinite(halved[1]["gradient_variance"]).all()


def test_updates_are_those_of_the_stock_step():
    """Of even and odd batches and of a single row; each second one whole, the others in halves."""
    data = batches_of_lengths([31, 1, 30, 9, 1, 8], X, Y)
    assert_equal_to_stock(sgd_mlp, data, every=2, epochs=2)


def test_compiled():
    def build():
        model = keras.Sequential([layers.Input((8,)), layers.Dense(3, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
        return model

    assert_equal_to_stock(build, (X[:93], Y[:93]), batch_size=31)


def test_lookups_stay_sparse():
    assert_equal_to_stock(lambda: tokens("adam"), (IDS, Y), every=1)


@pytest.mark.parametrize(
    "arguments",
    [{"run_eagerly": True}, {"steps_per_execution": 3}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_ways_to_run(arguments):
    assert_equal_to_stock(lambda: sgd_mlp(**arguments), models.rows(96))


def test_weights_penalties_and_weighted_metrics():
    def build():
        model = keras.Sequential(
            [
                layers.Input((8,)),
                layers.Dense(8, kernel_regularizer="l2"),
                layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile("sgd", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
        return model

    weights = np.random.default_rng(1).random(94)
    assert_equal_to_stock(build, (X, Y), sample_weight=weights, every=1, eager=True)


def test_mixed_precision():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        build, arguments = lambda: models.mlp(optimizer="sgd"), {"tolerance": 2e-3, "every": 1}
        assert_equal_to_stock(build, (X, Y), eager=True, **arguments)
    finally:
        keras.config.set_dtype_policy("float32")


def found(model, x, y, **fit):
    history = built(model, x, y).fit(x, y, shuffle=False, verbose=0, **fit).history
    return [history[name][-1] for name in ("gradient_variance", "gradient_squared_norm")]


@pytest.mark.parametrize("rows", [31, pytest.param(32, marks=pytest.mark.slow)])
def test_the_moments_are_those_of_two_halves_of_lookups(rows):
    model = still(tokens)
    expected = reference(model, IDS[:rows], Y[:rows], -(-rows // 2))
    result = found(measure_moments(model, every=1), IDS[:rows], Y[:rows], batch_size=rows)
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-6)


def test_every_nth_update_is_halved():
    model = still()
    x, y = X[:93], Y[:93]
    parts = [slice(0, 31), slice(62, 93)]
    expected = np.mean([reference(model, x[p], y[p], 16) for p in parts], axis=0)
    model = measure_moments(model, every=2)
    result = found(model, x, y, batch_size=31, epochs=2)
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-6)
    # Single examples tell nothing.
    assert np.isnan(found(model, x[:4], y[:4], batch_size=1)).all()


class Watched(layers.Layer):
    """Counts the rows of each pass that really runs, as a recurrent layer does."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True
        self.rows = []

    def call(self, x):
        def count(rows):
            self.rows.append(int(rows))
            return np.float32(0)

        counted = tf.numpy_function(count, [tf.shape(x)[0]], tf.float32)
        return x + tf.stop_gradient(tf.ensure_shape(counted, []))


def masked(watched=None):
    model = keras.Sequential(
        [
            layers.Input((6,), dtype="int32"),
            layers.Embedding(10, 4, mask_zero=True),
            watched or layers.SimpleRNN(4, return_sequences=True),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    return model


def test_masks_are_counted_on_the_halves():
    watched = Watched()
    model = measure_moments(masked(watched), every=1)
    built(model, IDS, IDS).fit(IDS[:31], IDS[:31] % 3, batch_size=31, verbose=0)
    assert watched.rows == [16, 15]


def test_a_masked_recurrent_net_trains_as_with_the_stock_step():
    ids = IDS * (np.arange(6) < np.arange(94)[:, None] % 32 // 4)  # The first rows are padding.
    data = (ids[:62], IDS[:62] % 3)
    assert_equal_to_stock(masked, data, batch_size=31, every=1, eager=True)


def test_the_loss_scale_is_divided_out():
    expected = reference(still(), X[:32], Y[:32], 16)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.0), initial_scale=2.0**15
    )
    keras.utils.set_random_seed(1)
    model = measure_moments(models.mlp(optimizer=optimizer), every=1)
    result = found(model, X[:32], Y[:32], batch_size=32)
    np.testing.assert_allclose(result, expected, rtol=2e-4)


class OwnLoss(keras.Sequential):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def test_what_is_a_users_own_is_halved_where_halves_add_up():
    def build():
        model = OwnLoss([layers.Input((8,)), layers.Dense(3, activation="softmax")])
        model.compile("sgd", models.own_loss)
        return model

    data = (X[:62], Y[:62])
    assert check_parts(build(), data).equal
    assert_equal_to_stock(build, data, batch_size=31, every=1, eager=True)


class OwnMetrics(keras.Sequential):
    def compute_metrics(self, *args, **kwargs):
        return super().compute_metrics(*args, **kwargs) | {"own": 1.0}


def test_metrics_of_the_models_own_would_be_lost():
    assert uncut_reason(sgd_mlp()) is None
    model = OwnMetrics([layers.Input((8,)), layers.Dense(3)])
    model.compile("sgd", "mse")
    assert "compute_metrics" in uncut_reason(model)


def test_accumulation_takes_the_place_of_halving():
    model = measure_moments(models.mlp(), every=1)
    kbatch.accumulate_gradients(model, 8)
    model.run_eagerly = True
    assert set(model.fit(X[:16], Y[:16], verbose=0).history) == {"accuracy", "loss"}
