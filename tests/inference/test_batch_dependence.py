"""Planted dependences on the batch size are found, and correct models are not accused."""

import keras
import numpy as np
import pytest
from models.kinds import named_entities, token_ids, unet
from small_models import mlp

import kbatch
from kbatch.inference.batch_dependence import BatchDependence
from kbatch.inference.call_paths import inference_inputs, open_path, repeated, variant
from kbatch.timing import Setting

layers, ops = keras.layers, keras.ops
SIZES = (1, 2, 8, 64, 1024)
RNG = np.random.default_rng(0)
NUMBERS = RNG.normal(size=(64, 12)).astype("float32")
# Rows of zeros from some place on, as texts of several lengths are padded.
WORDS = RNG.integers(1, 50, (64, 12)) * (np.arange(12) < RNG.integers(3, 13, (64, 1)))
PICTURES = RNG.normal(size=(64, 8, 8, 3)).astype("float32")


def dependence(model, x, *, path="compiled", policy=None, sizes=SIZES):
    """Compare the outputs of each size once, like the warm-up of a profile."""
    if policy is not None:
        model = variant(model, policy)
    name = policy or "float32"
    rows = inference_inputs(model, x).rows
    compared = BatchDependence({name: model}, rows)
    with open_path(path, model, rows) as run:
        for size in sizes:
            examples = 64 if path == "predict" else size
            outputs = run(repeated(rows, examples), size)
            compared.see(Setting((path, name), size), outputs, examples=examples, run=run)
    return compared


def functional(call, shape=(12,), dtype=None):
    inputs = keras.Input(shape, dtype=dtype)
    return keras.Model(inputs, call(inputs))


class TrainingNorm(layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization()

    def call(self, x):
        return self.norm(x, training=True)


def batch_norm_in_training():
    return functional(lambda x: layers.Dense(3)(TrainingNorm()(layers.Dense(8)(x))))


def softmax_over_examples():
    softmax = layers.Softmax(axis=0)
    return functional(lambda x: softmax(layers.Dense(3)(x)))


def mean_over_examples():
    centre = layers.Lambda(lambda x: x - ops.mean(x, axis=0, keepdims=True))
    return functional(lambda x: layers.Dense(3)(centre(layers.Dense(8)(x))))


class LongestRow(layers.Layer):
    """Cuts a batch after its longest row, so that a mean over the row counts other zeros."""

    def call(self, tokens):
        longest = ops.max(ops.sum(ops.cast(tokens != 0, "int32"), axis=1))
        return tokens[:, :longest]


def padded_to_the_longest():
    def call(tokens):
        embedded = layers.Embedding(50, 4)(LongestRow()(tokens))
        pooled = layers.GlobalAveragePooling1D()(embedded)
        return layers.Dense(3)(pooled)

    return functional(call, (None,), "int32")


def overflow_at_large_sizes():
    """A share of the sum over the batch, which is too large for float16 at large sizes."""
    share = layers.Lambda(lambda x: x / (1e-6 + ops.sum(ops.abs(x) * 0 + 100.0)))
    scaled = layers.Lambda(lambda x: x * ops.sum(ops.abs(x) * 0 + 100.0))
    return functional(lambda x: scaled(share(layers.Dense(1)(x))))


def scaled_by_the_batch():
    """An operation and the second output return one number for the whole batch."""

    def call(x):
        hidden = layers.Dense(3)(x)
        return [hidden / ops.max(hidden), ops.max(hidden)]

    return functional(call)


PLANTED = {
    "one number of the batch": (scaled_by_the_batch, NUMBERS, None),
    "batch norm in training": (batch_norm_in_training, NUMBERS, None),
    "softmax over axis 0": (softmax_over_examples, NUMBERS, None),
    "mean over rows": (mean_over_examples, NUMBERS, None),
    "padding": (padded_to_the_longest, WORDS, None),
    "overflow": (overflow_at_large_sizes, NUMBERS, "float16"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_batch_dependence_finds_a_planted_one(name):
    build, x, policy = PLANTED[name]
    compared = dependence(build(), x, policy=policy)
    differing = [size for (_, size), effect in compared.effects.items() if effect.depends]
    if name == "overflow":
        assert differing == [1024]
    (note,) = compared.notes()
    assert (note.code, note.values["size"]) == ("depends_on_size", differing[0])


def deep():
    def call(x):
        for _ in range(50):
            x = layers.Dense(32, activation="gelu", kernel_initializer="orthogonal")(x)
        return layers.Dense(3, activation="softmax")(x)

    return functional(call)


def attention():
    def call(tokens):
        x = layers.Embedding(50, 16)(tokens)
        for _ in range(3):
            x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 4)(x, x))
            x = layers.LayerNormalization()(x + layers.Dense(16, activation="gelu")(x))
        return layers.Dense(50)(x)

    return functional(call, (12,), "int32")


def recurrent():
    def call(tokens):
        x = layers.Embedding(50, 16, mask_zero=True)(tokens)
        return layers.Dense(1, activation="sigmoid")(layers.LSTM(16)(x))

    return functional(call, (12,), "int32")


def two_outputs():
    def call(x):
        hidden = layers.Dense(32, activation="relu")(x)
        return {"large": 1e4 * layers.Dense(2)(hidden), "small": 1e-4 * layers.Dense(2)(hidden)}

    return functional(call)


def drawing():
    """Draws a random number for each example, so that no two calls have the same outputs."""
    return functional(lambda x: layers.Lambda(lambda t: t + keras.random.normal(ops.shape(t)))(x))


CORRECT = {
    "mlp, saved": (mlp, NUMBERS[:, :8], {"path": "saved_model"}),
    "50 layers, mixed_float16": (deep, NUMBERS, {"policy": "mixed_float16"}),
    "U-Net": (unet, PICTURES, {"sizes": (1, 2, 8, 64)}),
    "U-Net, XLA": (unet, PICTURES, {"path": "xla", "sizes": (1, 64)}),
    "attention": (attention, WORDS, {}),
    "attention, bfloat16": (attention, WORDS, {"policy": "bfloat16", "sizes": (1, 8, 64)}),
    "mlp, int8": (mlp, NUMBERS[:, :8], {"policy": "int8"}),
    "recurrent": (recurrent, WORDS, {}),
    "two scales, predict": (two_outputs, NUMBERS, {"path": "predict", "sizes": (1, 64)}),
    "own class": (named_entities, token_ids(64), {}),
    "drawing": (drawing, NUMBERS, {}),
}


@pytest.mark.parametrize("name", CORRECT)
def test_batch_dependence_does_not_accuse_a_correct_model(name):
    build, x, arguments = CORRECT[name]
    keras.utils.set_random_seed(1)
    compared = dependence(build(), x, **arguments)
    assert compared.effects
    assert not {key: effect for key, effect in compared.effects.items() if effect.depends}
    assert compared.notes() == ()


def test_batch_dependence_counts_classes_that_change_beyond_rounding():
    """Centring over the batch moves the largest output. At size 1 all outputs would be zero."""
    keras.utils.set_random_seed(0)
    setting = Setting(("compiled", "float32"), 64)
    effect = dependence(mean_over_examples(), NUMBERS, sizes=(2, 64)).effects[setting]
    assert 0 < effect.changed_argmax <= 1
    effect = dependence(mlp(), NUMBERS[:, :8]).effects[setting]
    assert effect.changed_argmax == 0
    assert effect.difference < 1e-5


def test_profile_inference_notes_that_predictions_depend_on_the_batch_size():
    settings = {"batch_sizes": (1, 4), "measure_memory": False, "time_budget_s": 0.5}
    profile = kbatch.profile_inference(batch_norm_in_training(), NUMBERS, **settings)
    smallest, larger = profile.timings
    assert smallest.size_effect is None
    assert larger.size_effect.depends
    assert [note.code for note in profile.noted] == ["depends_on_size"]
    assert "depend" in profile.table()["outcome"][1]
