"""What cannot be cut: it is named, and its moving statistics advance as one update."""

import warnings

import keras
import models
import numpy as np
import pytest

import kbatch

layers = keras.layers
X, Y = models.rows(96)


def normalised(*, momentum=0.9, **layer):
    model = keras.Sequential(
        [
            layers.Input((8,)),
            layers.BatchNormalization(momentum=momentum, name="norm", **layer),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def statistics(model):
    norm = model.get_layer("norm")
    return np.asarray(norm.moving_mean), np.asarray(norm.moving_variance)


def after_steps(model, *, rows=32):
    for start in range(0, 96, 32):
        model.train_on_batch(X[start : start + rows], Y[start : start + rows])
    return statistics(model)


@pytest.mark.parametrize("rows", [32, 30])
@pytest.mark.parametrize("eager", [False, True])
def test_moving_statistics_advance_as_one_update_of_the_whole_batch(rows, eager):
    whole, parts = normalised(), normalised()
    parts.run_eagerly = eager
    with pytest.warns(UserWarning, match="norm"):
        kbatch.accumulate_gradients(parts, 8)
    expected, found = after_steps(whole, rows=rows), after_steps(parts, rows=rows)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert parts.get_layer("norm").momentum == 0.9


def test_the_variance_holds_far_from_zero():
    whole, parts = normalised(), normalised()
    with pytest.warns(UserWarning):
        kbatch.accumulate_gradients(parts, 8)
    far = X + 1e4
    for model in (whole, parts):
        for start in range(0, 96, 32):
            model.train_on_batch(far[start : start + 32], Y[start : start + 32])
    np.testing.assert_allclose(statistics(parts)[1], statistics(whole)[1], rtol=1e-2)


@pytest.mark.parametrize("renorm", [False, True])
def test_a_layer_that_cannot_advance_once_keeps_to_kerases_way(renorm):
    def build():
        inputs = keras.Input((8,))
        norm = layers.BatchNormalization(momentum=0.9, name="norm", renorm=renorm)
        outputs = norm(inputs) if renorm else layers.Add()([norm(inputs), norm(2 * inputs)])
        model = keras.Model(inputs, layers.Dense(3, activation="softmax")(outputs))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    whole, parts = build(), build()
    with pytest.warns(UserWarning):
        kbatch.accumulate_gradients(parts, 32)
    np.testing.assert_allclose(after_steps(parts), after_steps(whole), rtol=1e-5, atol=1e-6)


def test_they_advance_once_a_micro_batch_when_asked():
    whole, parts = normalised(), normalised()
    with pytest.warns(UserWarning):
        kbatch.accumulate_gradients(parts, 8, batch_norm_once=False)
    (expected, _), (found, _) = after_steps(whole), after_steps(parts)
    assert np.abs(found - expected).max() > 0.01
    reference = np.zeros(8)
    for start in range(0, 96, 8):
        reference = 0.9 * reference + 0.1 * X[start : start + 8].mean(axis=0)
    np.testing.assert_allclose(found, reference, rtol=1e-5, atol=1e-6)


def test_a_frozen_layer_keeps_its_statistics_and_needs_no_warning():
    model = normalised()
    model.get_layer("norm").trainable = False
    model.compile("sgd", "sparse_categorical_crossentropy")
    before = statistics(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kbatch.accumulate_gradients(model, 8)
    np.testing.assert_array_equal(after_steps(model), before)


class OwnDice(keras.losses.Dice):
    """A user's variation."""


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (normalised, r"norm \(BatchNormalization\)"),
        (lambda: models.mlp(loss=keras.losses.Dice()), r"Dice \(loss\)"),
        (lambda: models.mlp(loss=OwnDice()), r"OwnDice \(loss\)"),
        (lambda: models.mlp(loss="tversky"), r"tversky \(loss\)"),
    ],
)
def test_what_is_coupled_is_named(build, name):
    with pytest.warns(UserWarning, match=name):
        kbatch.accumulate_gradients(build(), 8)


def test_a_model_that_can_be_cut_needs_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kbatch.accumulate_gradients(models.mlp(), 8)
