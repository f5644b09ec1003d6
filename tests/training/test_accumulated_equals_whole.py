import keras
import models
import numpy as np
import pytest
from equal_training import assert_equal_training, built, trained

import kbatch

DATA = models.rows(94)
schedules = keras.optimizers.schedules


@pytest.mark.parametrize(
    ("count", "batch_size", "micro_batch_size"),
    # All the other tests have a ragged tail.
    [(96, 32, 8), (94, 32, 5), (65, 32, 8), (94, 32, 32), (94, 32, 200)],
    ids=["equal", "ragged cut", "tail of one", "one cut", "no cut"],
)
def test_for_every_way_to_cut(count, batch_size, micro_batch_size):
    assert_equal_training(
        models.mlp, models.rows(count), batch_size=batch_size, micro_batch_size=micro_batch_size
    )


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=4),
    "schedule": lambda: keras.optimizers.SGD(schedules.ExponentialDecay(0.5, 2, 0.5)),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("sgd", "adamw", "ema") else pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
def test_for_every_optimizer(name):
    model = assert_equal_training(lambda: models.mlp(optimizer=OPTIMIZERS[name]()), DATA)
    assert int(model.optimizer.iterations) == 2 * 3


def test_sample_weights():
    weights = np.random.default_rng(2).random(94)
    assert_equal_training(models.mlp, DATA, sample_weight=weights)


def test_class_weights():
    assert_equal_training(models.mlp, DATA, class_weight={0: 0.2, 1: 5.0, 2: 1.0})


def test_weighted_metrics():
    weights = np.random.default_rng(2).random(94)
    assert_equal_training(
        lambda: models.mlp(weighted_metrics=["accuracy"]), DATA, sample_weight=weights
    )


@pytest.mark.parametrize(
    "callback",
    [
        pytest.param(
            lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch)),
            id="LearningRateScheduler",
        ),
        pytest.param(
            lambda: keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=10.0),
            id="ReduceLROnPlateau",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_callbacks_that_set_the_learning_rate(callback):
    assert_equal_training(
        lambda: models.mlp(optimizer="sgd"), DATA, epochs=3, callbacks=[callback()]
    )


def test_frozen_layers_stay_and_the_others_train():
    def build():
        model = models.mlp()
        model.layers[0].trainable = False
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    assert_equal_training(build, DATA)


class Unconnected(keras.layers.Layer):
    """A layer with a weight that its output does not depend on."""

    def build(self, shape):
        self.used = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.unused = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.used


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adamw"])
def test_variables_that_the_loss_does_not_reach(optimizer):
    def build():
        model = keras.Sequential(
            [keras.layers.Input((8,)), Unconnected(), keras.layers.Dense(3, activation="softmax")]
        )
        model.compile(optimizer, "sparse_categorical_crossentropy")
        return model

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        assert_equal_training(build, DATA)


TOKENS = np.random.default_rng(3).integers(0, 20, (94, 6))


def embedding(optimizer, *, dense=False):
    """Mean of embeddings, looked up, or (dense) as a matrix product with one-hot rows."""
    inputs = keras.Input((6,), dtype="int32")
    if dense:
        one_hot = keras.layers.CategoryEncoding(20, output_mode="one_hot")(inputs[..., None])
        vectors = keras.layers.Dense(4, use_bias=False, kernel_initializer="uniform")(one_hot)
    else:
        vectors = keras.layers.Embedding(20, 4, embeddings_initializer="uniform")(inputs)
    outputs = keras.layers.Dense(3, activation="softmax")(
        keras.layers.GlobalAveragePooling1D()(vectors)
    )
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def test_an_embedding_under_sgd():
    assert_equal_training(lambda: embedding("sgd"), (TOKENS, DATA[1]))


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("adamw", marks=pytest.mark.slow)])
def test_an_embedding_under_adam_takes_the_step_of_the_dense_gradient(optimizer):
    assert_equal_training(
        lambda: embedding(optimizer),
        (TOKENS, DATA[1]),
        reference=lambda: embedding(optimizer, dense=True),
    )


def many_inputs():
    a, b = keras.Input((8,), name="a"), keras.Input((6,), dtype="int32", name="b")
    vectors = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 4)(b))
    joined = keras.layers.Concatenate()([keras.layers.Dense(4)(a), vectors])
    model = keras.Model({"a": a, "b": b}, keras.layers.Dense(3, activation="softmax")(joined))
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def test_several_inputs_in_a_dict():
    assert_equal_training(many_inputs, ({"a": DATA[0], "b": TOKENS}, DATA[1]))


class Subclass(keras.Model):
    """A model that is built by its first batch and takes nested inputs."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(4)
        self.last = keras.layers.Dense(3, activation="softmax")

    def call(self, inputs):
        x, (y,) = inputs
        return self.last(keras.ops.tanh(self.first(x)) + self.first(y))


def test_a_subclassed_model_with_nested_inputs():
    def build():
        model = Subclass()
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    assert_equal_training(build, ((DATA[0], (DATA[0][::-1].copy(),)), DATA[1]))


def with_dropout():
    model = keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def test_dropout_is_the_same_for_a_seed():
    runs = [
        trained(with_dropout, DATA, batch_size=32, micro_batch_size=8)[0].get_weights()
        for _ in range(2)
    ]
    for first, second in zip(*runs, strict=True):
        np.testing.assert_array_equal(first, second)


def test_dropout_is_drawn_anew_for_each_micro_batch():
    seen = []

    class Spy(keras.layers.Layer):
        def call(self, x):
            seen.append(np.asarray(x) == 0)  # So it runs eagerly only.
            return x

    model = keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(8),
            keras.layers.Dropout(0.5),
            Spy(),
            keras.layers.Dense(3),
        ]
    )
    model.compile("sgd", "mse", run_eagerly=True)
    kbatch.accumulate_gradients(model, 8)
    seen.clear()
    model.train_on_batch(np.ones((16, 8), "float32"), np.ones((16, 3), "float32"))
    first, second = [mask for mask in seen if len(mask) == 8][-2:]
    assert (first != second).any()


def test_no_state_crosses_steps():
    """Steps made by one train function equal steps made by a new one each."""
    first, _ = trained(models.mlp, DATA, batch_size=32, micro_batch_size=8, epochs=1)
    keras.utils.set_random_seed(1)
    second = built(models.mlp(), *DATA)
    for start in (0, 32, 64):
        kbatch.accumulate_gradients(second, 8)
        second.train_on_batch(DATA[0][start : start + 32], DATA[1][start : start + 32])
    for one, other in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
