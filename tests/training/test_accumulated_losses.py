"""Losses whose denominators differ: reductions, masks, several outputs, penalties."""

import itertools

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from equal_training import assert_equal_training

layers = keras.layers


def random(*shape):
    """The same numbers for the same shape, whichever tests run."""
    return np.random.default_rng(5).random(shape)


X, Y = models.rows(94)
REDUCTIONS = ["sum", "mean", "sum_over_batch_size", "mean_with_sample_weight"]
# The three denominators, with and without weights; the others are slow: "mean" is another
# name of "sum_over_batch_size".
FAST = [("sum", False), ("sum_over_batch_size", True), ("mean_with_sample_weight", True)]
CASES = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
    for case in itertools.product(REDUCTIONS, (False, True))
]
DENOMINATORS = [
    pytest.param(name, marks=() if name in ("sum", "mean_with_sample_weight") else pytest.mark.slow)
    for name in REDUCTIONS
]


def slow(value):
    """A case that widens a grid."""
    return pytest.param(value, marks=pytest.mark.slow)


def cross_entropy(reduction="sum_over_batch_size", **arguments):
    return keras.losses.SparseCategoricalCrossentropy(reduction=reduction, **arguments)


def sgd(rate=0.05):
    return keras.optimizers.SGD(rate, momentum=0.9)


@pytest.mark.parametrize(("reduction", "weighted"), CASES)
def test_every_reduction(reduction, weighted):
    fit = {"sample_weight": random(94)} if weighted else {}
    assert_equal_training(
        lambda: models.mlp(optimizer=sgd(0.001), loss=cross_entropy(reduction)), (X, Y), **fit
    )


def token_model(reduction="sum_over_batch_size"):
    """A tagger of (rows, 7) tokens, where 0 is padding."""
    inputs = keras.Input((7,), dtype="int32")
    vectors = layers.Embedding(20, 8, mask_zero=True)(inputs)
    states = layers.SimpleRNN(4, return_sequences=True)(vectors)
    outputs = layers.Dense(3, activation="softmax")(states)
    model = keras.Model(inputs, outputs)
    model.compile(sgd(0.002), cross_entropy(reduction), metrics=["accuracy"])
    return model


def tokens():
    """Rows of unequal length; all rows of the first micro-batch are padding only."""
    rng = np.random.default_rng(6)
    ids = rng.integers(1, 20, (94, 7))
    ids[np.arange(7) >= rng.integers(0, 8, (94, 1))] = 0
    ids[:8] = 0
    return ids


@pytest.mark.parametrize(("reduction", "weighted"), CASES)
def test_token_masks_with_unequal_counts(reduction, weighted):
    fit = {"sample_weight": random(94, 7)} if weighted else {}
    labels = np.random.default_rng(7).integers(0, 3, (94, 7))
    assert_equal_training(lambda: token_model(reduction), (tokens(), labels), **fit)


def test_a_loss_that_ignores_a_class():
    labels = np.random.default_rng(7).integers(-1, 3, 94)
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


TWO_TARGETS = {
    "tags": np.arange(94 * 7).reshape(94, 7) % 3,
    "value": np.cos(np.arange(94.0))[:, None],
}


@pytest.mark.parametrize(
    "second", ["sum", slow("sum_over_batch_size"), slow("mean_with_sample_weight")]
)
def test_outputs_with_denominators_of_their_own(second):
    def build():
        return two_outputs(cross_entropy(), keras.losses.MeanSquaredError(reduction=second))

    # Run eagerly, Keras weights the losses of outputs by the rows of a batch, traced it does not.
    assert_equal_training(build, (tokens(), TWO_TARGETS), eager=False)


def test_outputs_with_weights_of_their_own():
    def build():
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        return two_outputs(cross_entropy("mean_with_sample_weight"), loss)

    weights = {"tags": random(94, 7), "value": random(94)}
    assert_equal_training(build, (tokens(), TWO_TARGETS), eager=False, sample_weight=weights)


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


@pytest.mark.parametrize("reduction", DENOMINATORS)
def test_penalties_count_once(reduction):
    assert_equal_training(lambda: penalised(reduction), (X, Y))


def test_a_model_trained_on_added_losses_only():
    def build():
        inputs = keras.Input((8,))
        model = keras.Model(inputs, Penalty()(layers.Dense(4)(inputs)))
        model.compile(sgd())
        return model

    assert_equal_training(build, (X,))


@pytest.mark.parametrize("shape", [slow((94,)), (94, 1)])
def test_weights_of_any_rank_beside_a_mask(shape):
    labels = np.random.default_rng(7).integers(-1, 3, 94)
    loss = cross_entropy("mean_with_sample_weight", ignore_class=-1)
    assert_equal_training(
        lambda: models.mlp(optimizer=sgd(), loss=loss, metrics=[]),
        (X, labels),
        sample_weight=random(*shape),
    )


def test_a_mask_of_a_masking_layer():
    def build():
        inputs = keras.Input((7, 2))
        states = layers.SimpleRNN(4, return_sequences=True)(layers.Masking()(inputs))
        model = keras.Model(inputs, layers.Dense(3, activation="softmax")(states))
        model.compile(sgd(0.01), cross_entropy())
        return model

    x = random(94, 7, 2).astype("float32") * (tokens() > 0)[..., None]
    assert_equal_training(build, (x, TWO_TARGETS["tags"]))


class OwnMask(layers.Layer):
    def compute_mask(self, inputs, mask=None):
        return inputs[..., 0] > 0.5

    def call(self, x):
        return x


def with_lambda_mask():
    return layers.Lambda(lambda x: x, mask=lambda x, mask: x[..., 0] > 0.5)


@pytest.mark.parametrize("masking", [OwnMask, with_lambda_mask])
def test_a_mask_of_a_layer_of_the_users(masking):
    def build():
        inputs = keras.Input((7, 2))
        outputs = layers.Dense(3, activation="softmax")(masking()(inputs))
        model = keras.Model(inputs, outputs)
        model.compile(sgd(0.01), cross_entropy())
        return model

    assert_equal_training(build, (random(94, 7, 2).astype("float32"), TWO_TARGETS["tags"]))


def test_a_loss_function_of_the_users_that_masks():
    def masked(y_true, y_pred):
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, ignore_class=0)

    labels = np.random.default_rng(7).integers(0, 3, 94)
    assert_equal_training(lambda: models.mlp(optimizer=sgd(), loss=masked, metrics=[]), (X, labels))


class CallsItself(keras.losses.Loss):
    """A loss without `call`."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.mean(keras.ops.square(y_pred - y_true))


def test_a_loss_that_is_not_made_of_values_and_a_reduction():
    def build():
        model = keras.Sequential([layers.Input((8,)), layers.Dense(3)])
        model.compile(sgd(), CallsItself())
        return model

    assert_equal_training(build, (X, random(94, 3)))


class RowPenalty(layers.Layer):
    """Adds a loss with a value a row."""

    def call(self, x):
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(x), axis=-1))
        return x


def test_an_added_loss_with_a_value_a_row():
    def build():
        model = keras.Sequential(
            [layers.Input((8,)), layers.Dense(4), RowPenalty(), layers.Dense(3)]
        )
        model.compile(sgd(0.001), "mse")
        return model

    assert_equal_training(build, (X, random(94, 3)))


class Wider(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * keras.ops.mean(keras.ops.square(y_pred))


@pytest.mark.parametrize("reduction", DENOMINATORS)
def test_a_compute_loss_that_widens_kerases(reduction):
    def build():
        inputs = keras.Input((7,), dtype="int32")
        vectors = layers.Embedding(20, 8, mask_zero=True)(inputs)
        model = Wider(
            inputs, layers.Dense(3, activation="softmax", bias_initializer="ones")(vectors)
        )
        model.compile(sgd(0.002), cross_entropy(reduction))
        return model

    assert_equal_training(build, (tokens(), TWO_TARGETS["tags"]), sample_weight=random(94, 7))


@pytest.mark.parametrize("length", [1, slow(7)])
def test_variables_with_an_axis_of_one(length):
    def build():
        model = keras.Sequential(
            [layers.Input((length, 1)), layers.Dense(3), layers.Flatten(), layers.Dense(3)]
        )
        model.compile(sgd(), "mse")
        return model

    assert_equal_training(build, (random(94, length, 1), random(94, 3)))


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


@pytest.mark.parametrize("function", [mean_over_rows, slow(per_row), lambda y, p: (y - p) ** 2])
def test_loss_functions_of_the_users(function):
    def build():
        model = keras.Sequential([layers.Input((8,)), layers.Dense(3)])
        model.compile(sgd(), function, metrics=["mae"])
        return model

    assert_equal_training(build, (X, random(94, 3)))


def known_only(y_true, y_pred):
    """The losses of the labels that are known, which are fewer than the rows."""
    known = tf.math.is_finite(y_true)
    return tf.boolean_mask(keras.ops.square(y_pred - tf.where(known, y_true, 0.0)), known)


@pytest.mark.parametrize("eager", [False, slow(True)])
def test_a_loss_that_returns_fewer_values_than_rows(eager):
    def build():
        model = keras.Sequential([layers.Input((8,)), layers.Dense(3)])
        model.compile(sgd(0.01), known_only, run_eagerly=eager)
        return model

    labels = random(94, 3).astype("float32") * np.arange(94)[:, None]
    labels[np.arange(94) % 32 < 8] = np.nan  # No label of the first micro-batch is known.
    labels[np.arange(94) % 5 == 1, 0] = np.nan
    assert_equal_training(build, (X, labels))
