"""Batches halved for the moments, held against Keras's own step and a naive reference."""

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from equal_training import MOMENTS, assert_equal_weights, built, trained
from test_gradient_moments import X, Y, reference, still, tokens

import kbatch
from kbatch.training.accumulation import measure_moments
from kbatch.training.accumulation.whole_batch import uncut_part

layers = keras.layers
IDS = np.random.default_rng(3).integers(0, 10, (94, 6))


def assert_equal_to_stock(build, data, *, tolerance=1e-6, batch_size=32, every=2, **fit):
    def measured():
        model = build()
        assert uncut_part(model) is None
        return measure_moments(model, every=every)

    arguments = {"batch_size": batch_size, "micro_batch_size": None, **fit}
    whole, expected = trained(build, data, eager=True, **arguments)
    halved, found = trained(measured, data, **arguments)
    assert_equal_weights(whole, halved, tolerance)
    assert found.keys() - MOMENTS == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(
            found[name], values, rtol=max(10 * tolerance, 2e-5), err_msg=name
        )
    assert np.isfinite(found["gradient_variance"]).all()


EVERY, COUNTS = (1, 2, 8), {"equal": 96, "ragged tail": 94, "tail of one": 65}


@pytest.mark.parametrize(
    ("every", "count"),
    [
        # Each way to halve meets each way to end once; all of them meet among the slow tests.
        pytest.param(n, count, id=f"{name}-{n}", marks=() if i == j else pytest.mark.slow)
        for i, n in enumerate(EVERY)
        for j, (name, count) in enumerate(COUNTS.items())
    ],
)
def test_updates_are_those_of_the_stock_step(every, count):
    assert_equal_to_stock(models.mlp, models.rows(count), every=every)


@pytest.mark.parametrize(
    ("batch_size", "jit_compile"),
    # Without XLA is how all the others are trained.
    [(31, True), pytest.param(32, True, marks=pytest.mark.slow)],
)
def test_compiled(jit_compile, batch_size):
    assert_equal_to_stock(
        lambda: models.mlp(jit_compile=jit_compile), models.rows(93), batch_size=batch_size
    )


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=pytest.mark.slow)])
def test_lookups_stay_sparse(optimizer):
    assert_equal_to_stock(lambda: tokens(optimizer), (IDS, Y), every=1)


@pytest.mark.parametrize(
    "arguments",
    [{"run_eagerly": True}, {"steps_per_execution": 3}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_ways_to_run(arguments):
    assert_equal_to_stock(lambda: models.mlp(**arguments), models.rows(96))


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

    assert_equal_to_stock(build, (X, Y), sample_weight=np.random.default_rng(1).random(94), every=1)


def test_mixed_precision():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        assert_equal_to_stock(lambda: models.mlp(optimizer="sgd"), (X, Y), tolerance=2e-3, every=1)
    finally:
        keras.config.set_dtype_policy("float32")


def found(model, x, y, **fit):
    history = built(model, x, y).fit(x, y, shuffle=False, verbose=0, **fit).history
    return [history[name][-1] for name in ("gradient_variance", "gradient_squared_norm")]


@pytest.mark.parametrize(
    ("build", "x", "rows"),
    [
        pytest.param(models.mlp, X, 32, id="dense, equal", marks=pytest.mark.slow),
        pytest.param(models.mlp, X, 31, id="dense, one more"),
        pytest.param(tokens, IDS, 32, id="lookup, equal"),
        pytest.param(tokens, IDS, 31, id="lookup, one more", marks=pytest.mark.slow),
    ],
)
def test_the_moments_are_those_of_two_halves(build, x, rows):
    model = still(build)
    expected = reference(model, x[:rows], Y[:rows], -(-rows // 2))
    result = found(measure_moments(model, every=1), x[:rows], Y[:rows], batch_size=rows)
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-6)


def test_every_nth_update_is_halved():
    model = still()
    parts = [slice(0, 32), slice(64, 94)]
    expected = np.mean([reference(model, X[p], Y[p], len(X[p]) // 2) for p in parts], axis=0)
    result = found(measure_moments(model, every=2), X, Y, batch_size=32, epochs=2)
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-6)


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
    assert_equal_to_stock(masked, (ids, IDS % 3), every=1)


def test_the_loss_scale_is_divided_out():
    expected = reference(still(), X[:32], Y[:32], 16)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.0), initial_scale=2.0**15
    )
    keras.utils.set_random_seed(1)
    model = measure_moments(models.mlp(optimizer=optimizer), every=1)
    result = found(model, X[:32], Y[:32], batch_size=32)
    np.testing.assert_allclose(result, expected, rtol=2e-4)


def test_single_examples_tell_nothing():
    assert np.isnan(found(measure_moments(still(), every=1), X[:4], Y[:4], batch_size=1)).all()


class OwnLoss(keras.Sequential):
    def compute_loss(self, **arguments):
        return super().compute_loss(**arguments)


def normalized():
    model = keras.Sequential([layers.Input((8,)), layers.BatchNormalization(), layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


def own_method():
    model = OwnLoss([layers.Input((8,)), layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


def own_loss():
    return models.mlp(loss=lambda y, p: keras.losses.sparse_categorical_crossentropy(y, p))


@pytest.mark.parametrize(
    ("build", "part"),
    [
        (normalized, "BatchNormalization"),
        (own_method, "compute_loss"),
        (own_loss, "lambda"),
        (lambda: models.mlp(loss="dice"), "dice"),
    ],
    ids=["layer", "method", "loss", "coupled loss"],
)
def test_what_may_need_the_whole_batch_is_never_cut(build, part):
    model = measure_moments(build(), every=1)
    assert "train_step" not in vars(model)
    assert part in uncut_part(model)


def test_accumulation_takes_the_place_of_halving():
    model = measure_moments(models.mlp(), every=1)
    kbatch.accumulate_gradients(model, 8)
    assert set(model.fit(X, Y, verbose=0).history) == {"accuracy", "loss"}
