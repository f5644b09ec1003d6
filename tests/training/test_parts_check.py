"""The comparison of a batch in parts with the whole batch."""

import re
import warnings

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf
from equal_training import Averaged, Sampled

import kbatch
from kbatch.training.accumulation.parts_check import parts_note
from kbatch.training.dtype_policy import dtype_policy_scope

layers = keras.layers
X, Y = models.rows(32)
TARGETS = np.random.default_rng(1).normal(size=(32, 3)).astype("float32")


def through(*found, loss="mse", **compile_arguments):
    """A model from (rows, 8) to 3 values, with these layers in between."""
    parts = [layers.Input((8,)), layers.Dense(4), *found, layers.Dense(3)]
    return models.compiled(parts, "sgd", loss, **compile_arguments)


def recurrent():
    """Layers whose loop is compared in a graph."""
    return layers.Reshape((2, 2)), layers.SimpleRNN(4)


class Summed(layers.Layer):
    """Adds a sum over the batch, like the KL term of many autoencoders."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.sum(keras.ops.square(x)))
        return x


class Centred(layers.Layer):
    """Subtracts the mean over the batch."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


class LaterCentred(layers.Layer):
    """Depends on the whole batch after a weight has moved away from zero."""

    def build(self, shape):
        self.share = self.add_weight(shape=(), initializer="zeros")
        self.gate = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        centre = keras.ops.mean(x, axis=0, keepdims=True)
        return x * (1 + self.share) - self.gate * keras.ops.stop_gradient(self.share * centre)


class DrawnElsewhere(layers.Layer):
    """Draws with TensorFlow, which kbatch cannot repeat."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


def tagger():
    parts = [layers.Input((6,), dtype="int32"), layers.Embedding(10, 4), layers.Dense(3, "softmax")]
    return models.compiled(parts, "sgd", models.TokenLoss())


IDS = np.random.default_rng(3).integers(0, 10, (32, 6))
# The number of tokens differs between rows.
TAGS = (IDS % 2 + 1) * (np.arange(6) <= np.arange(32)[:, None] % 6)


def two_outputs():
    inputs = keras.Input((8,))
    first = layers.Dense(3, name="first", kernel_regularizer="l2")(inputs)
    model = keras.Model(inputs, [first, layers.Dense(1, name="second")(inputs)])
    model.compile("sgd", ["mse", "mae"], loss_weights=[1.0, 0.3])
    return model


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        (lambda: through(Averaged(), layers.Dropout(0.5), Sampled()), (X, TARGETS)),
        (two_outputs, (X, [TARGETS, TARGETS[:, :1]])),
        (lambda: through(*recurrent(), layers.Dropout(0.5)), (X, TARGETS)),
    ],
    ids=["mean and draws", "outputs", "recurrent"],
)
def test_parts_note_is_none_if_parts_add_up(model, rows):
    assert parts_note(model(), rows) is None


@pytest.mark.parametrize(
    ("model", "rows", "source", "named"),
    [
        (lambda: through(Summed()), (X, TARGETS), "added", r"that summed\w* \(Summed\) adds"),
        (lambda: through(Centred()), (X, TARGETS), "layer", ""),
        (lambda: through(LaterCentred()), (X, TARGETS), "layer", ""),
        (lambda: through(*recurrent(), Centred()), (X, TARGETS), "layer", ""),
        (tagger, (IDS, TAGS), "loss", "token_loss"),
    ],
    ids=["sum", "batch", "later", "recurrent", "tokens"],
)
def test_parts_note_names_difference(model, rows, source, named):
    keras.utils.set_random_seed(0)  # With some weights only gradients show it.
    note = parts_note(model(), rows)
    assert note.code == "parts_differ"
    assert note.values["source"] == source
    assert re.search(named, note), note


@pytest.mark.parametrize(
    ("model", "rows", "reason"),
    [
        (lambda: through(DrawnElsewhere()), (X, TARGETS), "cannot be repeated"),
        (lambda: through(), (X, np.full((32, 3), np.nan, "float32")), "not finite"),
        (lambda: through(), (X[:1], TARGETS[:1]), "one example"),
        (lambda: through(layers.Reshape((2, 2))), (X, TARGETS), "Error"),
    ],
    ids=["draws", "nan", "one", "error"],
)
def test_parts_note_says_what_cannot_be_compared(model, rows, reason):
    note = parts_note(model(), rows)
    assert note.code == "parts_not_compared"
    assert reason in note


def test_parts_note_compares_half_precision_in_float32():
    with dtype_policy_scope("mixed_float16"):
        model = models.mlp()
        assert parts_note(model, (X, Y)) is None
        assert parts_note(through(Summed()), (X, TARGETS)).code == "parts_differ"
        assert [layer.compute_dtype for layer in model.layers] == ["float16", "float32"]


class TensorCores(layers.Layer):
    """Rounds like a GPU: by 1e-3 in TensorFloat-32, and by 1e-5 depending on the batch size."""

    def call(self, x):
        coarse = tf.config.experimental.tensor_float_32_execution_enabled()
        return x * (1 + (1e-3 if coarse else 1e-5) / tf.cast(tf.shape(x)[0], x.dtype))


def test_parts_note_does_not_use_tensor_float_32():
    assert tf.config.experimental.tensor_float_32_execution_enabled()
    assert parts_note(through(TensorCores()), (X, TARGETS)) is None
    assert tf.config.experimental.tensor_float_32_execution_enabled()


def test_parts_note_restores_model():
    def build():
        keras.utils.set_random_seed(1)
        return through(layers.BatchNormalization(), Sampled(), layers.Dropout(0.5), metrics=["mae"])

    def trained(model):
        model.run_eagerly = True
        history = model.fit(X, TARGETS, batch_size=8, shuffle=False, verbose=0).history
        return [*map(np.asarray, model.weights), *history.values()]

    expected, model = trained(build()), build()
    parts_note(model, (X, TARGETS))
    for one, other in zip(trained(model), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_parts_note_keeps_draws_of_traced_function():
    class Traced(Sampled):
        @tf.function
        def call(self, x):
            return super().call(x)

    model = through(Traced())
    parts_note(model, (X, TARGETS))
    noise = model.layers[1](tf.zeros((4, 4)), training=True)
    assert np.unique(np.asarray(noise), axis=0).shape == (4, 4)  # All rows have different draws.


class Counting(layers.Layer):
    """Counts its calls in training."""

    def build(self, shape):
        self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False, name="kept")

    def call(self, x, training=False):
        if training:
            self.kept.assign(self.kept + 1.0)
        return x


def test_parts_check_warns_of_state_changed_in_call():
    model = kbatch.accumulate_gradients(through(Counting()), 8)
    message = "kept, which a layer changes .* once for each micro-batch, not"
    with pytest.warns(UserWarning, match=message):
        model.fit(X, TARGETS, batch_size=32, verbose=0)


def test_parts_note_ignores_state_of_keras_layers():
    normalised = [layers.BatchNormalization(momentum=0.5), layers.Dropout(0.5)]
    for model in (through(*normalised), through(layers.Normalization(mean=0.0, variance=2.0))):
        assert "changes in its" not in str(parts_note(model, (X, TARGETS)))


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X, TARGETS


@pytest.mark.parametrize(
    "data",
    [
        lambda: tf.data.Dataset.from_tensors((X, TARGETS)).repeat(3),
        Batches,
        lambda: ((X, TARGETS) for _ in range(3)),
    ],
    ids=["dataset", "PyDataset", "generator"],
)
def test_parts_check_reads_all_data_forms_without_losing_batches(data):
    model = kbatch.accumulate_gradients(through(DrawnElsewhere(), run_eagerly=True), 16)
    with pytest.warns(UserWarning, match="cannot be repeated"):
        model.fit(data(), verbose=0)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 3


def test_parts_check_skips_batches_that_are_not_cut():
    model = kbatch.accumulate_gradients(through(DrawnElsewhere(), run_eagerly=True), 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X, TARGETS, batch_size=16, verbose=0)
    with pytest.warns(UserWarning, match="cannot be repeated"):
        model.train_on_batch(X, TARGETS)


class OwnSignature(keras.Sequential):
    """A model whose `fit` has other arguments than Keras's."""

    def fit(self, data, rounds=1):
        return super().fit(*data, epochs=rounds, batch_size=16, verbose=0)


def test_parts_check_passes_arguments_of_custom_fit():
    model = OwnSignature([layers.Input((8,)), layers.Dense(3)])
    model.compile("sgd", "mse", run_eagerly=True)
    kbatch.accumulate_gradients(model, 8)
    assert len(model.fit((X, TARGETS), 2).epoch) == 2
