"""Losses with different denominators: reductions, masks, several outputs, penalties.

Each output of a model tests one kind of loss, because it has its own weights and its loss is a
metric. Keras's step weights these metrics by rows if it runs eagerly, but not in a graph. So models
of several outputs are compared on batches of one length, and once in graphs.
"""

import warnings

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from equal_training import (
    Averaged,
    accumulating,
    assert_equal_training,
    assert_same_training,
    trained,
)

import kbatch
from kbatch.training.accumulation import sum_sparse_gradients
from kbatch.training.accumulation.parts_check import parts_note
from kbatch.training.model import installed_step

layers = keras.layers


def random(*shape):
    """Random numbers that depend only on the shape."""
    return np.random.default_rng(5).random(shape)


X, Y = models.rows(94)
REDUCTIONS = ("sum", "sum_over_batch_size", "mean_with_sample_weight")


def cross_entropy(reduction="sum_over_batch_size", **arguments):
    return keras.losses.SparseCategoricalCrossentropy(reduction=reduction, **arguments)


def sgd(rate=0.05):
    return keras.optimizers.SGD(rate, momentum=0.9)


def softmax(name):
    return layers.Dense(3, activation="softmax", name=name)


def mean_over_rows(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_pred - y_true))


def value_of_each(y_true, y_pred):
    return (y_true - y_pred) ** 2


def per_row(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_pred - y_true), axis=-1)


def known_only(y_true, y_pred):
    """The losses of the known labels, which are fewer than the rows."""
    known = tf.math.is_finite(y_true)
    return tf.boolean_mask(keras.ops.square(y_pred - tf.where(known, y_true, 0.0)), known)


def masked(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, ignore_class=0)


class CallsItself(keras.losses.Loss):
    """A loss without `call`."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.mean(keras.ops.square(y_pred - y_true))


WITH_UNKNOWN = np.random.default_rng(7).integers(-1, 3, 94)
WITH_UNKNOWN[:8] = -1  # No label of the first micro-batch is known.
VALUES = (random(94, 3) * np.linspace(0, 1, 94)[:, None]).astype("float32")
MISSING = VALUES.copy()
MISSING[np.arange(94) % 32 < 8] = np.nan
MISSING[np.arange(94) % 5 == 1, 0] = np.nan
LOSSES_OF_ROWS = {
    **{reduction: (cross_entropy(reduction), Y) for reduction in REDUCTIONS},
    "ignored": (cross_entropy(ignore_class=-1), WITH_UNKNOWN),
    "masked": (masked, Y),
    "mean_over_rows": (mean_over_rows, VALUES),
    "value_of_each": (value_of_each, VALUES),
    "per_row": (per_row, VALUES),
    "known_only": (known_only, MISSING),
    "calls_itself": (CallsItself(), VALUES),
}


def assert_equal_outputs(build, data, *, sample_weight=None):
    """Assert equal training on two batches of 31 rows, each in four parts of unequal size."""
    data, sample_weight = first_rows((data, sample_weight))
    assert_equal_training(build, data, batch_size=31, sample_weight=sample_weight)


def first_rows(structure, count=62):
    return keras.tree.map_structure(lambda part: None if part is None else part[:count], structure)


def of_rows(losses):
    """A model of (rows, 8) with an output for each loss."""

    def build():
        inputs, found = keras.Input((8,)), {}
        for name, (_, y) in losses.items():
            labels = np.issubdtype(y.dtype, np.integer)
            found[name] = (softmax(name) if labels else layers.Dense(3, name=name))(inputs)
        return models.compiled(
            keras.Model(inputs, found),
            sgd(),
            {name: loss for name, (loss, _) in losses.items()},
            loss_weights={name: 0.02 if name == "sum" else 1.0 for name in losses},
        )

    return build


WITH_WEIGHTS = (*REDUCTIONS, "ignored", "per_row")


def test_loss_kinds_without_weights():
    """In batches of different length. The next test has the other losses, with weights."""
    kept = {*LOSSES_OF_ROWS} - {*WITH_WEIGHTS} | {"mean_with_sample_weight"}
    losses = {name: LOSSES_OF_ROWS[name] for name in LOSSES_OF_ROWS if name in kept}
    targets = {name: y for name, (_, y) in losses.items()}
    assert_equal_training(of_rows(losses), (X, targets), eager=False)


def test_reductions_with_weights_and_ignored_class():
    losses = {name: LOSSES_OF_ROWS[name] for name in WITH_WEIGHTS}
    losses["beside"] = (cross_entropy("mean_with_sample_weight", ignore_class=-1), WITH_UNKNOWN)
    assert_equal_outputs(
        of_rows(losses),
        (X, {name: y for name, (_, y) in losses.items()}),
        sample_weight={name: random(94) for name in losses},
    )


def test_custom_loss_of_known_labels_only():
    """Only this loss makes the step count denominators."""

    def build():
        parts = [layers.Input((8,)), layers.Dense(3)]
        return models.compiled(parts, sgd(0.01), known_only, run_eagerly=True)

    assert_equal_training(build, (X, MISSING))


def tokens():
    """Rows of unequal length. The rows of the first micro-batch contain only padding."""
    rng = np.random.default_rng(6)
    ids = rng.integers(1, 20, (94, 7))
    ids[np.arange(7) >= rng.integers(0, 8, (94, 1))] = 0
    ids[:8] = 0
    return ids


def taggers():
    """A tagger of (rows, 7) padded tokens for each reduction, and one output per row."""
    inputs = keras.Input((7,), dtype="int32")
    vectors = layers.Embedding(20, 8, mask_zero=True)(inputs)
    found = {name: softmax(name)(vectors) for name in REDUCTIONS}
    found["value"] = layers.Dense(1, name="value")(layers.Flatten()(vectors))
    model = keras.Model(inputs, found)
    value_loss = keras.losses.MeanSquaredError(reduction="sum")
    model.compile(
        sgd(),
        {name: cross_entropy(name) for name in REDUCTIONS} | {"value": value_loss},
        loss_weights=dict(zip((*REDUCTIONS, "value"), (0.02, 1.0, 2.0, 0.01), strict=True)),
        metrics={"sum_over_batch_size": ["accuracy"], "value": ["mae"]},
    )
    return model


TAGS = np.arange(94 * 7).reshape(94, 7) % 3
TARGETS = dict.fromkeys(REDUCTIONS, TAGS) | {"value": np.cos(np.arange(94.0))[:, None]}


def test_token_masks_with_unequal_counts_and_unmasked_output():
    weights = dict.fromkeys(REDUCTIONS, random(94, 7)) | {"value": random(94)}
    assert_equal_outputs(taggers, (tokens(), TARGETS), sample_weight=weights)


def penalised():
    parts = [
        layers.Input((8,)),
        layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l2"),
        Averaged(),
        layers.Dense(3, activation="softmax", bias_regularizer="l1"),
    ]
    return models.compiled(parts, sgd(0.001), cross_entropy("sum"), metrics=["accuracy"])


def test_penalties_count_once_per_update_or_row():
    assert_equal_training(penalised, (X, Y))


class OwnMask(layers.Layer):
    def compute_mask(self, inputs, mask=None):
        return inputs[..., 0] > 0.5

    def call(self, x):
        return x


def with_lambda_mask():
    return layers.Lambda(lambda x: x, mask=lambda x, mask: x[..., 0] > 0.5)


MASKING = {"of_keras": layers.Masking, "own": OwnMask, "of_lambda": with_lambda_mask}


def test_masks_of_keras_custom_and_lambda_layers():
    """Including the mask that a recurrent layer passes on."""

    def build():
        inputs = keras.Input((7, 2))
        found = {name: make()(inputs) for name, make in MASKING.items()}
        found["of_keras"] = layers.SimpleRNN(4, return_sequences=True)(found["of_keras"])
        model = keras.Model(inputs, {name: softmax(name)(x) for name, x in found.items()})
        model.compile(sgd(0.01), {name: cross_entropy() for name in MASKING})
        return model

    x = random(94, 7, 2).astype("float32") * (tokens() > 0)[..., None]
    assert_equal_outputs(build, (x, dict.fromkeys(MASKING, TAGS)))


class Wider(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * keras.ops.mean(keras.ops.square(y_pred))


def test_custom_compute_loss_that_extends_keras():
    def build():
        inputs = keras.Input((7,), dtype="int32")
        vectors = layers.Embedding(20, 8, mask_zero=True)(inputs)
        model = Wider(
            inputs, layers.Dense(3, activation="softmax", bias_initializer="ones")(vectors)
        )
        model.compile(sgd(0.002), cross_entropy("mean_with_sample_weight"))
        return model

    assert_equal_training(build, (tokens(), TAGS), sample_weight=random(94, 7))


def test_single_loss_with_weights_and_axes_of_length_one():
    def build():
        found = [layers.Dense(3), layers.Flatten(), layers.Dense(3, activation="softmax")]
        model = keras.Sequential([layers.Input((1, 1)), *found])
        model.compile(sgd(), cross_entropy("mean_with_sample_weight"), metrics=["accuracy"])
        return model

    assert_equal_training(build, (random(94, 1, 1), Y), sample_weight=random(94))


def token_count(y_true, y_pred):
    return keras.ops.sum(keras.ops.cast(y_true > 0, "float32"))


def own_masks(loss=None, **arguments):
    """A tagger whose loss computes its own mask, with a second output without masks."""
    inputs = keras.Input((7,), dtype="int32")
    vectors = layers.Embedding(20, 8)(inputs)
    vectors = layers.Dropout(0.0)(vectors)
    value = layers.Dense(1, name="value")(layers.Flatten()(vectors))
    model = keras.Model(inputs, {"tags": softmax("tags")(vectors), "value": value})
    optimizer = arguments.pop("optimizer", None) or sgd()
    model.compile(optimizer, {"tags": loss or models.TokenLoss(), "value": "mse"}, **arguments)
    return model


IDS = tokens()
MASKED = {"tags": np.where(IDS > 0, TAGS % 2 + 1, 0), "value": TARGETS["value"]}


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_loss_denominator_makes_scalar_loss_exact(jit):
    def cut():
        model = own_masks(jit_compile=jit)
        return kbatch.accumulate_gradients(model, 8, loss_denominator={"tags": token_count})

    fit = {"batch_size": 31, "micro_batch_size": None}
    data = first_rows((IDS, MASKED))
    whole = trained(own_masks, data, eager=True, **fit)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # The parts add up, as was checked.
        parts = trained(cut, data, **fit)
    assert_same_training(whole, parts, 1e-6)


def test_loss_denominator_survives_later_steps():
    model = own_masks(optimizer="adam")
    kbatch.accumulate_gradients(model, 8, loss_denominator={"tags": token_count})
    for change in (sum_sparse_gradients, lambda one: kbatch.accumulate_gradients(one, 4)):
        assert installed_step(change(model)).loss_denominator == {"tags": token_count}
    rows = first_rows((IDS, MASKED), 32)
    assert parts_note(model, rows) is None
    del model.train_step
    assert parts_note(model, rows) is not None


def test_batch_metric_warns_once_if_batches_are_cut(recwarn):
    def spread(y, probabilities):
        return keras.ops.max(probabilities) - keras.ops.min(probabilities)

    def warned():
        told = [
            str(one.message) for one in recwarn if "averages over micro-batches" in str(one.message)
        ]
        recwarn.clear()
        return told

    model = kbatch.accumulate_gradients(models.mlp(metrics=[spread, "accuracy"]), 16)
    model.fit(X, Y, batch_size=16, verbose=0)
    assert warned() == []
    model.fit(X, Y, batch_size=32, epochs=2, verbose=0)
    (text,) = warned()
    assert "functions: spread." in text
    model.fit(X, Y, batch_size=32, verbose=0)
    assert warned() == []


def test_scalar_loss_warns_of_division_by_zero_on_a_part():
    model = keras.Sequential([layers.Input((7,)), layers.Embedding(20, 4), softmax("tags")])
    model.compile("sgd", models.TokenLoss(), run_eagerly=True)
    kbatch.accumulate_gradients(model, 8)
    with pytest.warns(UserWarning, match=r"is not finite for a micro-batch.*`loss_denominator`"):
        model.fit(*first_rows((IDS, MASKED["tags"]), 32), verbose=0)


def test_loss_denominator_is_ignored_for_sum():
    def build():
        return models.mlp(optimizer=sgd(1e-3), loss=cross_entropy("sum"))

    def cut():
        return accumulating(build(), 8, loss_denominator=token_count)

    whole = trained(build, (X, Y), micro_batch_size=None, eager=True)
    assert_same_training(whole, trained(cut, (X, Y), micro_batch_size=None, eager=True), 1e-6)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (3.0, ValueError, r"must be a function.*Received: loss_denominator=3.0"),
        ({"tags": "tokens"}, ValueError, "must be a function"),
        ({"tag": token_count}, ValueError, r"\['tags', 'value'\].*Received: .*\['tag'\]"),
        ({"tags": lambda y, p: y}, ValueError, r"one number.*Received: a value of shape"),
        ({"tags": lambda y, p: -token_count(y, p)}, tf.errors.InvalidArgumentError, "positive"),
    ],
    ids=["number", "text", "name", "vector", "negative"],
)
@pytest.mark.filterwarnings("ignore:Not known to be equal")
def test_loss_denominator_refuses_wrong_values(given, error, match):
    with pytest.raises(error, match=match):
        model = kbatch.accumulate_gradients(own_masks(), 8, loss_denominator=given)
        model.run_eagerly = True
        model.fit(IDS, MASKED, verbose=0)
