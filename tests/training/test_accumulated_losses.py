"""Losses whose denominators differ: reductions, masks, several outputs, penalties."""

import keras
import models
import numpy as np
import pytest
from equal_training import assert_equal_training

layers = keras.layers
RNG = np.random.default_rng(5)
X, Y = models.rows(94)
REDUCTIONS = ["sum", "mean", "sum_over_batch_size", "mean_with_sample_weight"]


def cross_entropy(reduction="sum_over_batch_size", **arguments):
    return keras.losses.SparseCategoricalCrossentropy(reduction=reduction, **arguments)


def sgd(rate=0.05):
    return keras.optimizers.SGD(rate, momentum=0.9)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_every_reduction(reduction, weighted):
    fit = {"sample_weight": RNG.random(94)} if weighted else {}
    assert_equal_training(
        lambda: models.mlp(optimizer=sgd(0.001), loss=cross_entropy(reduction)), (X, Y), **fit
    )


def token_model(reduction="sum_over_batch_size"):
    """A tagger of (rows, 7) tokens, where 0 is padding."""
    inputs = keras.Input((7,), dtype="int32")
    vectors = layers.Embedding(20, 8, mask_zero=True)(inputs)
    states = layers.LSTM(8, return_sequences=True)(vectors)
    outputs = layers.Dense(3, activation="softmax")(states)
    model = keras.Model(inputs, outputs)
    model.compile(sgd(0.002), cross_entropy(reduction), metrics=["accuracy"])
    return model


def tokens():
    """Rows of unequal length; all rows of the first micro-batch are padding only."""
    ids = RNG.integers(1, 20, (94, 7))
    ids[np.arange(7) >= RNG.integers(0, 8, (94, 1))] = 0
    ids[:8] = 0
    return ids


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_token_masks_with_unequal_counts(reduction, weighted):
    fit = {"sample_weight": RNG.random((94, 7))} if weighted else {}
    labels = RNG.integers(0, 3, (94, 7))
    assert_equal_training(lambda: token_model(reduction), (tokens(), labels), **fit)


def test_a_loss_that_ignores_a_class():
    labels = RNG.integers(-1, 3, 94)
    labels[:8] = -1
    assert_equal_training(
        lambda: models.mlp(optimizer=sgd(), loss=cross_entropy(ignore_class=-1), metrics=[]),
        (X, labels),
    )


def two_outputs(first_loss, second_loss, **compile_arguments):
    """A tagger with a mask, and a regression on the whole row without one."""
    inputs = keras.Input((7,), dtype="int32")
    vectors = layers.Embedding(20, 8, mask_zero=True)(inputs)
    tags = layers.Dense(3, activation="softmax", name="tags")(vectors)
    value = layers.Dense(1, name="value")(layers.Flatten()(vectors))
    model = keras.Model(inputs, {"tags": tags, "value": value})
    model.compile(
        sgd(0.002),
        {"tags": first_loss, "value": second_loss},
        loss_weights={"tags": 2.0, "value": 0.5},
        metrics={"tags": ["accuracy"], "value": ["mae"]},
        **compile_arguments,
    )
    return model


TWO_TARGETS = {"tags": RNG.integers(0, 3, (94, 7)), "value": RNG.normal(size=(94, 1))}


@pytest.mark.parametrize("second", ["sum", "sum_over_batch_size", "mean_with_sample_weight"])
def test_outputs_with_denominators_of_their_own(second):
    def build():
        return two_outputs(cross_entropy(), keras.losses.MeanSquaredError(reduction=second))

    assert_equal_training(build, (tokens(), TWO_TARGETS))


def test_outputs_with_weights_of_their_own():
    def build():
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        return two_outputs(cross_entropy("mean_with_sample_weight"), loss)

    weights = {"tags": RNG.random((94, 7)), "value": RNG.random(94)}
    assert_equal_training(build, (tokens(), TWO_TARGETS), sample_weight=weights)


class Penalty(layers.Layer):
    """Adds a loss that is a mean over the rows."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def penalised(reduction):
    model = keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l2"),
            Penalty(),
            layers.Dense(3, activation="softmax", bias_regularizer="l1"),
        ]
    )
    model.compile(sgd(0.001), cross_entropy(reduction), metrics=["accuracy"])
    return model


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_penalties_count_once(reduction):
    assert_equal_training(lambda: penalised(reduction), (X, Y))


def test_a_model_trained_on_added_losses_only():
    def build():
        inputs = keras.Input((8,))
        model = keras.Model(inputs, Penalty()(layers.Dense(4)(inputs)))
        model.compile(sgd())
        return model

    assert_equal_training(build, (X,))


class WithTraining(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * keras.ops.mean(keras.ops.square(y_pred))


class WithoutTraining(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred))


@pytest.mark.parametrize("kind", [WithTraining, WithoutTraining])
def test_a_compute_loss_of_the_users(kind):
    def build():
        model = kind([layers.Input((8,)), layers.Dense(3, activation="softmax")])
        model.compile(sgd(), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    assert_equal_training(build, (X, Y))


def mean_over_rows(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_pred - y_true))


def per_row(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_pred - y_true), axis=-1)


@pytest.mark.parametrize("function", [mean_over_rows, per_row, lambda y, p: (y - p) ** 2])
def test_loss_functions_of_the_users(function):
    def build():
        model = keras.Sequential([layers.Input((8,)), layers.Dense(3)])
        model.compile(sgd(), function, metrics=["mae"])
        return model

    assert_equal_training(build, (X, RNG.normal(size=(94, 3))))
