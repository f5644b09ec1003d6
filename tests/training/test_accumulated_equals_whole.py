import keras
import numpy as np
import pytest
import small_models as models
from equal_training import accumulating, assert_equal_training, batches_of_lengths, built, sgd_mlp

from kbatch.training.state import KeptState

X, Y = DATA = models.rows(94)
schedules = keras.optimizers.schedules


def test_accumulation_equals_whole_batch_for_even_cuts_rests_and_single_rows():
    """Even cuts, a rest, one cut, none, and a single row."""
    assert_equal_training(sgd_mlp, batches_of_lengths([32, 30, 8, 5, 1], X, Y), micro_batch_size=8)


def every_setting_at_once():
    return keras.optimizers.AdamW(
        schedules.ExponentialDecay(0.05, 2, 0.5),
        weight_decay=0.1,
        global_clipnorm=0.05,
        use_ema=True,
        ema_overwrite_frequency=4,
    )


def test_accumulation_equals_whole_batch_for_optimizer_settings():
    model = assert_equal_training(
        lambda: models.mlp(optimizer=every_setting_at_once()), DATA, batch_size=16
    )
    assert int(model.optimizer.iterations) == 6


class Unconnected(keras.layers.Layer):
    """A layer with a weight that does not affect its output."""

    def build(self, shape):
        self.used = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.unused = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.used


TOKENS = np.random.default_rng(3).integers(0, 20, (94, 6))


def many_inputs():
    a, b = keras.Input((8,), name="a"), keras.Input((6,), dtype="int32", name="b")
    vectors = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 4)(b))
    joined = keras.layers.Concatenate()([keras.layers.Dense(4)(a), vectors])
    model = keras.Model({"a": a, "b": b}, keras.layers.Dense(3, activation="softmax")(joined))
    metrics = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", **metrics)
    return model


def test_accumulation_equals_whole_batch_for_dict_inputs_and_sample_weights():
    """The model has an embedding, whose gradient is sparse."""
    assert_equal_training(
        many_inputs,
        ({"a": X, "b": TOKENS}, Y),
        sample_weight=np.random.default_rng(2).random(94),
        epochs=2,
        callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch))],
    )


class Subclass(keras.Model):
    """A model that is built by its first batch and takes nested inputs."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(4)
        self.frozen = keras.layers.Dense(4, trainable=False)
        self.unconnected = Unconnected()
        self.last = keras.layers.Dense(3, activation="softmax")

    def call(self, inputs):
        x, (y,) = inputs
        x = keras.ops.tanh(self.first(x)) + self.first(y) + self.frozen(y)
        return self.last(self.unconnected(x))


def test_accumulation_equals_whole_batch_for_subclass_with_unconnected_variables():
    def build():
        model = Subclass()
        model.compile("adamw", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        assert_equal_training(build, ((X, (X[::-1].copy(),)), Y))


def test_accumulation_repeats_dropout_for_a_seed():
    dropping = models.mlp(inner=[keras.layers.Dropout(0.5)], optimizer="sgd")
    model, runs = built(accumulating(dropping, 8), *DATA), []
    model.fit(*DATA, verbose=0)
    state = KeptState(model)  # It includes the traced step.
    for _ in range(2):
        state.restore()
        model.fit(*DATA, shuffle=False, verbose=0)
        runs.append(model.get_weights())
    for first, second in zip(*runs, strict=True):
        np.testing.assert_array_equal(first, second)
