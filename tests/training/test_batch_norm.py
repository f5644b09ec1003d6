"""BatchNormalization in accumulated batches: a warning, and its moving statistics."""

import warnings

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from equal_training import accumulating, assert_equal_weights, built

import kbatch

layers = keras.layers
X, Y = models.rows(96)


def normalised(*, momentum=0.9, **layer):
    parts = [
        layers.Input((8,)),
        layers.BatchNormalization(momentum=momentum, name="norm", **layer),
        layers.Dense(3, activation="softmax"),
    ]
    return models.compiled(parts, "sgd", "sparse_categorical_crossentropy")


def statistics(model):
    norm = model.get_layer("norm")
    return np.asarray(norm.moving_mean), np.asarray(norm.moving_variance)


def after_steps(model, *, rows=32):
    built(model, X, Y)
    for start in range(0, 96, 32):
        model.train_on_batch(X[start : start + rows], Y[start : start + rows])
    return statistics(model)


def test_moving_statistics_equal_whole_batch():
    whole, parts = normalised(), normalised()
    whole.run_eagerly = True
    kbatch.accumulate_gradients(parts, 8)
    expected = after_steps(whole, rows=30)
    with pytest.warns(UserWarning, match=r"norm \(BatchNormalization\); the loss"):
        found = after_steps(parts, rows=30)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert parts.get_layer("norm").momentum == 0.9


def test_moving_variance_is_accurate_far_from_zero():
    whole, parts = normalised(), accumulating(normalised(), 8)
    far = X + 1e4
    for model in (whole, parts):
        model.run_eagerly = True
        for start in range(0, 96, 32):
            model.train_on_batch(far[start : start + 32], Y[start : start + 32])
    np.testing.assert_allclose(statistics(parts)[1], statistics(whole)[1], rtol=1e-2)


def called_often():
    """Layers that are called twice, within a model, at every time step, and on masked entries."""

    def norm(name):
        return layers.BatchNormalization(momentum=0.9, name=f"norm_{name}")

    inputs = keras.Input((8,))
    twice, inner, masked = norm("twice"), norm("inner"), norm("masked")
    encoder = keras.Sequential([layers.Input((8,)), inner, layers.Dense(4)])
    steps = layers.Reshape((2, 4))(inputs)
    at_steps = layers.TimeDistributed(keras.Sequential([norm("steps"), layers.Dense(2)]))(steps)
    # Only negative entries are not masked. Their number differs between rows.
    kept = layers.Lambda(lambda x: keras.ops.where(x[..., :1] < 0, x, 0.0))(steps)
    found = [
        layers.Add()([twice(inputs), twice(2 * inputs)]),
        layers.Add()([encoder(inputs), encoder(2 * inputs)]),
        layers.Flatten()(at_steps),
        layers.Flatten()(masked(layers.Masking()(kept))),
    ]
    outputs = layers.Dense(3, activation="softmax")(layers.Concatenate()(found))
    return models.compiled(keras.Model(inputs, outputs), "sgd", "sparse_categorical_crossentropy")


class Twice(keras.Model):
    """Calls its normalisation twice, which no graph of layers shows."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization(momentum=0.9, name="norm")
        self.out = layers.Dense(3, activation="softmax")

    def call(self, x, training=False):
        return self.out(self.norm(x, training=training) + self.norm(2 * x, training=training))


class InLoop(Twice):
    """Calls its normalisation in a TensorFlow loop."""

    def call(self, x, training=False):
        norms = tf.map_fn(lambda part: self.norm(part, training=training), tf.stack([x, 2 * x]))
        return self.out(norms[0] + norms[1])


def subclassed(kind=Twice):
    return models.compiled(kind(), "sgd", "sparse_categorical_crossentropy")


def renormalised():
    return normalised(renorm=True)


def trained_both_ways(build, micro_batch_size, *, run_eagerly=False):
    """Train a model with Keras's step and with accumulation, from equal states."""
    found = []
    for size in (None, micro_batch_size):
        keras.utils.set_random_seed(1)
        model = build()
        # A few eager steps take less time than tracing one.
        model.run_eagerly = run_eagerly or size is None
        if size is not None:
            accumulating(model, size)
        built(model, X, Y).fit(X, Y, batch_size=32, shuffle=False, verbose=0)
        found.append(model)
    return found


def statistics_of_all(model):
    norms = [one for one in model._flatten_layers() if isinstance(one, layers.BatchNormalization)]
    return [np.asarray(s) for norm in norms for s in (norm.moving_mean, norm.moving_variance)]


def assert_equal_statistics(whole, parts):
    expected, found = statistics_of_all(whole), statistics_of_all(parts)
    assert expected
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [lambda: subclassed(InLoop), renormalised])
def test_moving_statistics_equal_keras_for_one_part(build):
    whole, parts = trained_both_ways(build, 32)
    assert_equal_statistics(whole, parts)
    assert_equal_weights(whole, parts, 1e-5)


def test_moving_statistics_of_layers_called_twice():
    assert_equal_statistics(*trained_both_ways(called_often, 5))


def test_moving_statistics_of_eager_model():
    assert_equal_statistics(*trained_both_ways(subclassed, 12, run_eagerly=True))


def test_moving_statistics_in_a_loop_are_averaged():
    trained_models = trained_both_ways(lambda: subclassed(InLoop), 8)
    expected, found = map(statistics_of_all, trained_models)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    # The variance between the parts is missing: eight rows have 7/8 of the variance on average.
    batch_share = (found[1] - 0.9**6) / (expected[1] - 0.9**6)  # It was 1 before six calls.
    assert 0.85 < batch_share.mean() < 0.9


def test_moving_statistics_of_frozen_layer_stay():
    model = normalised()
    model.get_layer("norm").trainable = False
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    before = statistics(model)
    kbatch.accumulate_gradients(model, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(after_steps(model), before)
