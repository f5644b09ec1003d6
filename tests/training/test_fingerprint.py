"""Models that need the same memory have the same fingerprint, in any process."""

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


def adam(rate=1e-3, **arguments):
    return {"optimizer": keras.optimizers.Adam(rate, **arguments)}


def cosine(steps):
    return adam(keras.optimizers.schedules.CosineDecay(1e-3, steps))


def branched(names=("a", "b"), width=4):
    inputs = {name: keras.Input((8,), name=name) for name in names}
    parts = [layers.Dense(width)(each) for each in inputs.values()]
    model = keras.Model(inputs, layers.Dense(3)(layers.Concatenate()(parts)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


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
    "schedule": (cosine(100), cosine(50)),
    "loss object": (
        {"loss": keras.losses.SparseCategoricalCrossentropy()},
        {"loss": keras.losses.SparseCategoricalCrossentropy()},
    ),
    "lambda": ({"loss": lambda y, p: my_loss(y, p)}, {"loss": lambda y, p: my_loss(y, p)}),
}

OTHER = {
    "optimizer": (adam(), {"optimizer": "sgd"}),
    "slots of momentum": (
        {"optimizer": keras.optimizers.SGD()},
        {"optimizer": keras.optimizers.SGD(momentum=0.9)},
    ),
    "slots of ema": (adam(), adam(use_ema=True)),
    "slots of amsgrad": (adam(), adam(amsgrad=True)),
    "metrics": ({}, {"metrics": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy()]}),
    "loss": ({}, {"loss": my_loss}),
    "xla": ({"jit_compile": False}, {"jit_compile": True}),
}


# Under a policy whose loss scale wraps the optimizer; the other tests build in float32.
POLICY = "mixed_float16"


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_what_needs_the_same_memory_is_the_same(pair):
    assert of(POLICY, **pair[0]) == of(POLICY, **pair[1])


@pytest.mark.parametrize("pair", OTHER.values(), ids=OTHER)
def test_what_may_need_more_is_another(pair):
    assert of(POLICY, **pair[0]) != of(POLICY, **pair[1])


def test_the_policy_and_what_is_trained_matter():
    assert of("float32") != of("mixed_float16")

    def frozen():
        model = models.mlp()
        model.layers[0].trainable = False
        return model

    assert of() != of(build=frozen)


class OwnBatchNormalization(layers.BatchNormalization):
    """A class of the user's own, whose attributes are in the fingerprint."""


@pytest.mark.parametrize("kind", [layers.BatchNormalization, OwnBatchNormalization])
def test_what_follows_the_batch_size_is_no_other_model(kind):
    def build(batch_size):
        model = keras.Sequential([layers.Input((8,)), kind(), layers.Dense(3)])
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


def test_names_that_keras_counts_up_do_not_matter_in_a_graph_of_layers():
    assert of(build=branched) == of(build=branched)
    assert of(build=branched) != of(build=branched, width=5)


def test_a_subclass_that_does_not_describe_itself_is_told_by_its_weights():
    assert of(build=subclassed) == of(build=subclassed)
    assert of(build=subclassed) != of(build=subclassed, units=5)


TIMES = 2


def applied(times, how):
    """A model that applies one layer as often as `times` says, wherever that is told."""

    class Applied(keras.Model):
        turns = times if how == "class" else 1

        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(8)
            if how == "attribute":
                self.rounds = times

        if how == "code" and times == 1:

            def call(self, x):
                return self.dense(x)

        elif how == "code":

            def call(self, x):
                return self.dense(self.dense(x))

        elif how == "constant" and times == 1:

            def call(self, x):
                return self.apply(x, 1)

        elif how == "constant":

            def call(self, x):
                return self.apply(x, 3)

        elif how == "closure":

            def call(self, x):
                return self.apply(x, times)

        elif how == "global":

            def call(self, x):
                return self.apply(x, TIMES)

        else:

            def call(self, x):
                return self.apply(x, self.turns * getattr(self, "rounds", 1))

        def apply(self, x, times):
            for _ in range(times):
                x = self.dense(x)
            return x

    model = Applied()
    model.compile("sgd", "mse")
    model(np.zeros((1, 8), "float32"))
    return model


@pytest.mark.parametrize("how", ["code", "constant", "attribute", "class", "closure"])
def test_how_often_a_layer_is_applied_matters_although_the_weights_are_the_same(how):
    assert of(build=applied, times=1, how=how) == of(build=applied, times=1, how=how)
    assert of(build=applied, times=1, how=how) != of(build=applied, times=3, how=how)


def of_a_lambda():
    scaled = layers.Lambda(lambda x: TIMES * x)
    model = keras.Sequential([keras.Input((8,)), scaled, layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("build", [lambda: applied(1, "global"), of_a_lambda])
def test_what_a_function_reads_of_its_module_matters(monkeypatch, build):
    before = of(build=build)
    assert of(build=build) == before
    monkeypatch.setitem(globals(), "TIMES", 3)
    assert of(build=build) != before


def test_the_code_of_a_layer_inside_a_graph_matters():
    def nested(times):
        model = keras.Sequential([keras.Input((8,)), applied(times, "closure")])
        model.compile("sgd", "mse")
        return model

    assert of(build=nested, times=1) == of(build=nested, times=1)
    assert of(build=nested, times=1) != of(build=nested, times=3)


@pytest.mark.parametrize("build", [models.mlp, subclassed])
def test_training_does_not_change_it(build):
    model = build()
    before = model_fingerprint(model)
    model.run_eagerly = True
    model.fit(*models.rows(16), verbose=0)
    model.optimizer.learning_rate = 0.5
    assert model_fingerprint(model) == before


def fingerprints():
    builds = ({"loss": keras.losses.SparseCategoricalCrossentropy()}, {"loss": my_loss})
    found = [of("mixed_float16", **each) for each in builds] + [of(build=branched)]
    return [*found, of(build=subclassed), of(build=applied, times=3, how="closure")]
