"""Models that differ at most in the settings of an optimizer have one fingerprint."""

import keras
import numpy as np
import pytest
import small_models as models

from kbatch.analysis.learning_rate import FOLLOWERS
from kbatch.training.dtype_policy import dtype_policy_scope
from kbatch.training.fingerprint import model_fingerprint
from kbatch.training.learning_rate import scale_model

layers = keras.layers


def of(policy="float32", build=models.mlp, **arguments):
    with dtype_policy_scope(policy):
        return model_fingerprint(build(**arguments))


def adam(rate=1e-3):
    return {"optimizer": keras.optimizers.Adam(rate)}


class Undescribed(keras.Model):
    def __init__(self, units=3):
        super().__init__()
        self.dense = layers.Dense(units, activation="softmax")

    def call(self, x):
        return self.dense(x)


def subclassed(units=3):
    model = Undescribed(units)
    model.compile("sgd", "sparse_categorical_crossentropy")
    model(np.zeros((1, 8), "float32"))
    return model


def my_loss(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p)


SAME = {
    "built twice": ({}, {}),
    "learning rate": (adam(1e-3), adam(0.5)),
    "schedule": (adam(), adam(keras.optimizers.schedules.CosineDecay(1e-3, 50))),
    "loss object": (
        {"loss": keras.losses.SparseCategoricalCrossentropy()},
        {"loss": keras.losses.SparseCategoricalCrossentropy()},
    ),
}

OTHER = {
    "optimizer": (adam(), {"optimizer": "sgd"}),
    "metrics": ({}, {"metrics": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy()]}),
    "loss": ({}, {"loss": my_loss}),
    "xla": ({"jit_compile": False}, {"jit_compile": True}),
}


# Under a policy whose loss scale wraps the optimizer; the other tests build in float32.
POLICY = "mixed_float16"


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_settings_of_an_optimizer_make_no_other_model(pair):
    assert of(POLICY, **pair[0]) == of(POLICY, **pair[1])


@pytest.mark.parametrize("pair", OTHER.values(), ids=OTHER)
def test_what_is_trained_otherwise_is_another(pair):
    assert of(POLICY, **pair[0]) != of(POLICY, **pair[1])


def test_the_policy_and_what_is_trained_matter():
    assert of("float32") != of("mixed_float16")

    def frozen():
        model = models.mlp()
        model.layers[0].trainable = False
        return model

    assert of() != of(build=frozen)


def test_what_follows_the_batch_size_is_no_other_model():
    def build(batch_size):
        parts = [layers.Input((8,)), layers.BatchNormalization(), layers.Dense(3)]
        model = keras.Sequential(parts)
        model.compile(keras.optimizers.AdamW(), "mse")
        scale_model(
            model,
            batch_size=batch_size,
            base_batch_size=8,
            rule="sqrt",
            follow_batch_size=FOLLOWERS,
        )
        return model

    assert len({of(build=build, batch_size=size) for size in (8, 16, 64)}) == 1


def test_a_subclass_that_does_not_describe_itself_is_told_by_its_weights():
    assert of(build=subclassed) == of(build=subclassed)
    assert of(build=subclassed) != of(build=subclassed, units=5)
