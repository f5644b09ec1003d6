"""Two builds that differ in a part share no graph, and are two searches; equal builds are one."""

import dataclasses
import enum
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from kbatch.search.identity import model_facts
from kbatch.training.fingerprint import Description, model_fingerprint
from kbatch.training.shared_graph import SharedGraph

L, K = keras.layers, keras.losses


def model(*layers, optimizer="adam", loss="mse", units=2, **compiled):
    inputs = outputs = keras.Input((6,))
    for layer in layers:
        outputs = layer(outputs)
    found = keras.Model(inputs, L.Dense(units)(outputs))
    found.compile(optimizer() if callable(optimizer) else optimizer, loss, **compiled)
    return found


def squared(y, p):
    return keras.ops.mean(keras.ops.square(y - p), axis=-1)


class Colour(enum.Enum):
    RED = 1.0
    BLUE = 2.0


@dataclasses.dataclass
class Settings:
    factor: float
    place: str = "anywhere"

    def scaled(self, y, p):
        return self.factor * squared(y, p)


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, y, p):
        return self.factor * squared(y, p)


class OwnLoss(K.Loss):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, y, p):
        return self.factor * squared(y, p)


class OwnMetric(keras.metrics.Mean):
    def __init__(self, factor):
        super().__init__(name="own")
        self.factor = factor


class OwnRule(keras.regularizers.Regularizer, keras.constraints.Constraint):
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, w):
        return self.factor * keras.ops.sum(w)


class OwnLayer(L.Layer):
    """Its configuration leaves the factor out."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, x):
        return self.factor * x

    def get_config(self):
        return {}


class OwnOperation(keras.Operation):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


class OwnOptimizer(keras.optimizers.SGD):
    def __init__(self, factor):
        super().__init__(0.1)
        self.factor = factor


class OwnSchedule(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, step):
        return self.factor * 0.1


def beside_an_operation_without_a_configuration(constant):
    inputs = keras.Input((6,))
    outputs = OwnOperation(lambda x: x)(inputs) * np.float32(constant)
    found = keras.Model(inputs, L.Dense(1)(outputs))
    found.compile("adam", "mse")
    return found


def beside_an_operation(constant):
    return model(lambda x: keras.ops.clip(x * np.full(6, constant, "float32"), 0, 1))


def closed(factor):
    return lambda y, p: factor * squared(y, p)


def closed_twice(factor):
    def outer(y, p):
        def inner():
            return factor * squared(y, p)

        return inner()

    return outer


def calling(function):
    return lambda y, p: 2 * function(y, p)


def with_keyword(y, p, *, factor):
    return factor * squared(y, p)


def body(number):
    if number == 1:
        return lambda y, p: squared(y, p) + 1
    return lambda y, p: squared(y, p) - 1


def constants(number):
    return (lambda y, p: squared(y, p) + 1.0) if number == 1 else lambda y, p: squared(y, p) + 2.0


def frozen(which):
    layers = [L.Dense(6), L.Dense(6)]
    layers[which].trainable = False
    return model(*layers)


def excluding(name):
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_names=[name])
    return model(optimizer=optimizer)


FACTOR = 1.0
VALUES = np.ones(2, "float32")


def by_globals(y, p):
    return FACTOR * VALUES * squared(y, p)


def with_globals(values):
    globals().update(FACTOR=values[0], VALUES=np.full(2, values[1], "float32"))
    return model(loss=by_globals)


def focal(alpha):
    return model(loss=K.CategoricalFocalCrossentropy(alpha=np.array(alpha)))


# A build from a value, and two values. Those of the first table share a graph if they are equal.
SHARED = {
    "delta": (lambda v: model(loss=K.Huber(delta=v)), 0.1, 5.0),
    "axis": (lambda v: model(loss=K.CosineSimilarity(axis=v)), -1, 0),
    "array of a loss": (focal, (0.1, 0.9), (0.9, 0.1)),
    "smoothing": (lambda v: model(loss=K.BinaryCrossentropy(label_smoothing=v)), 0.0, 0.1),
    "reduction": (lambda v: model(loss=K.MeanSquaredError(v)), "sum", "sum_over_batch_size"),
    "type of a loss": (lambda v: model(loss=getattr(K, v)()), "Poisson", "LogCosh"),
    "weight of a loss": (lambda v: model(loss_weights=[v]), 1.0, 2.0),
    "closure": (lambda v: model(loss=closed(v)), 1.0, 2.0),
    "closure in a closure": (lambda v: model(loss=closed_twice(v)), 1.0, 2.0),
    "function in a closure": (lambda v: model(loss=calling(closed(v))), 1.0, 2.0),
    "library function": (
        lambda v: model(loss=calling(v)),
        K.mean_squared_error,
        K.mean_absolute_error,
    ),
    "loss in a closure": (lambda v: model(loss=calling(K.Huber(delta=v))), 1.0, 2.0),
    "array in a closure": (lambda v: model(loss=closed(np.full(2, v, "float32"))), 1.0, 2.0),
    "tensor in a closure": (
        lambda v: model(loss=closed(keras.ops.convert_to_tensor([v, v]))),
        1.0,
        2.0,
    ),
    "type of a number": (lambda v: model(loss=closed(v)), np.float32(1), np.float64(1)),
    "list in a closure": (lambda v: model(loss=closed(v)), [1.0, 2.0], [2.0, 1.0]),
    "default": (lambda v: model(loss=lambda y, p, f=v: f * squared(y, p)), 1.0, 2.0),
    "keyword default": (lambda v: model(loss=lambda y, p, *, f=v: f * squared(y, p)), 1.0, 2.0),
    "partial": (lambda v: model(loss=functools.partial(with_keyword, factor=v)), 1.0, 2.0),
    "partial in a metric": (
        lambda v: model(metrics=[keras.metrics.MeanMetricWrapper(with_keyword, "m", factor=v)]),
        1.0,
        2.0,
    ),
    "wrapped": (lambda v: model(loss=functools.wraps(squared)(closed(v))), 1.0, 2.0),
    "enumeration": (
        lambda v: model(loss=lambda y, p: v.value * squared(y, p)),
        Colour.RED,
        Colour.BLUE,
    ),
    "body": (lambda v: model(loss=body(v)), 1, 2),
    "constant": (lambda v: model(loss=constants(v)), 1, 2),
    "global number": (with_globals, (1.0, 1.0), (2.0, 1.0)),
    "global array": (with_globals, (1.0, 1.0), (1.0, 2.0)),
    "threshold": (lambda v: model(metrics=[keras.metrics.Precision(v, name="m")]), 0.3, 0.6),
    "function as a metric": (lambda v: model(weighted_metrics=[closed(v)]), 1.0, 2.0),
    "regularizer": (lambda v: model(L.Dense(3, kernel_regularizer=keras.regularizers.L2(v))), 1, 2),
    "constraint": (lambda v: model(L.Dense(3, bias_constraint=keras.constraints.MaxNorm(v))), 1, 2),
    "activation": (lambda v: model(L.Dense(3, v)), "relu", "tanh"),
    "activation layer": (lambda v: model(L.Dense(3, L.LeakyReLU(v))), 0.1, 0.2),
    "initializer": (
        lambda v: model(L.Dense(3, kernel_initializer=keras.initializers.Constant(v))),
        np.full((6, 3), 1.0),
        np.full((6, 3), 2.0),
    ),
    "layer": (lambda v: model(L.Rescaling(v)), 1.0, 2.0),
    "constant beside an operation": (beside_an_operation, 1.0, 2.0),
    "argument of a call": (lambda v: model(lambda x: L.Dropout(0.5)(x, training=v)), True, False),
    "order of layers": (lambda v: model(*[L.ReLU(), L.Rescaling(2.0)][::v]), 1, -1),
    "frozen": (frozen, 0, 1),
    "optimizer": (lambda v: model(optimizer=lambda: keras.optimizers.Adam(epsilon=v)), 0.1, 0.2),
    "clipping": (lambda v: model(optimizer=lambda: keras.optimizers.SGD(clipnorm=v)), 0.1, 0.2),
}
UNSHARED = {
    "method": (lambda v: model(loss=Settings(v).scaled), 1.0, 2.0),
    "callable object": (lambda v: model(loss=Scaled(v)), 1.0, 2.0),
    "own loss": (lambda v: model(loss=OwnLoss(v)), 1.0, 2.0),
    "own metric": (lambda v: model(metrics=[OwnMetric(v)]), 1.0, 2.0),
    "own regularizer": (lambda v: model(L.Dense(3, kernel_regularizer=OwnRule(v))), 1.0, 2.0),
    "own constraint": (lambda v: model(L.Dense(3, kernel_constraint=OwnRule(v))), 1.0, 2.0),
    "function as a regularizer": (
        lambda v: model(L.Dense(3, kernel_regularizer=lambda w: v * keras.ops.sum(w))),
        1.0,
        2.0,
    ),
    "function as an activation": (lambda v: model(L.Dense(3, lambda x: v * x)), 1.0, 2.0),
    "function as an initializer": (
        lambda v: model(L.Dense(3, kernel_initializer=lambda s, dtype: v * keras.ops.ones(s))),
        1.0,
        2.0,
    ),
    "lambda": (lambda v: model(L.Lambda(lambda x: v * x)), 1.0, 2.0),
    "own layer": (lambda v: model(OwnLayer(v)), 1.0, 2.0),
    "no configuration": (beside_an_operation_without_a_configuration, 1.0, 2.0),
    "own optimizer": (lambda v: model(optimizer=lambda: OwnOptimizer(v)), 1.0, 2.0),
    "schedule": (lambda v: model(optimizer=lambda: keras.optimizers.SGD(OwnSchedule(v))), 1.0, 2.0),
    "excluded from decay": (excluding, "bias", "kernel"),
}
PARTS = SHARED | UNSHARED


@pytest.mark.parametrize("name", PARTS)
def test_builds_that_differ_in_a_part_are_two_searches_and_share_nothing(name):
    build, first, other = PARTS[name]
    here, same, there = (model_facts(build(value)) for value in (first, first, other))
    assert here == same
    assert here != there
    graph = SharedGraph()
    kept = graph.model_for(build(first))
    assert graph.model_for(build(other)) is not kept


@pytest.mark.parametrize("name", SHARED)
def test_equal_builds_share_a_graph(name):
    build, value, _ = SHARED[name]
    graph = SharedGraph()
    kept = graph.model_for(build(value))
    assert graph.model_for(build(value)) is kept


@pytest.mark.parametrize("name", UNSHARED)
def test_builds_with_a_part_of_the_users_own_never_share(name):
    build, value, _ = UNSHARED[name]
    graph = SharedGraph()
    kept = graph.model_for(build(value))
    assert graph.model_for(build(value)) is not kept


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("delta", {"compile(loss).fn_kwargs.delta"}),
        ("closure", {"compile(loss).reads.factor"}),
        ("body", {"compile(loss).code"}),
        ("regularizer", {"model.layer 2", "model.rules of weights"}),
        ("own layer", {"model.layer 2"}),
        ("clipping", {"optimizer.clipnorm"}),
    ],
)
def test_model_facts_name_the_part_that_differs(name, parts):
    build, *values = PARTS[name]
    first, other = (model_facts(build(value)) for value in values)
    assert {key for key in first if first[key] != other.get(key)} == parts


def test_descriptions_are_equal_in_any_process():
    code = "import json, test_described_parts as t; print(json.dumps(t.all_facts()))"
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "7"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert json.loads(out.splitlines()[-1]) == all_facts()


def all_facts():
    return {name: model_facts(build(value)) for name, (build, value, _) in PARTS.items()}


def test_a_description_leaves_out_comments_names_and_places():
    def first(y, p):
        """Compute a loss."""
        return squared(y, p) + {"a": 1, "b": 2}["a"]

    def second(y, p):
        """Compute a loss, as before."""
        # A comment.
        return squared(y, p) + {"a": 1, "b": 2}["a"]

    one, other = (Description().of(each) for each in (first, second))
    assert one["code"] == other["code"]


def test_a_method_is_described_by_the_attributes_that_it_reads():
    first, moved, other = Settings(1.0, "here"), Settings(1.0, "there"), Settings(2.0, "here")
    of = [Description().of(one.scaled) for one in (first, moved, other)]
    assert of[0] == of[1] != of[2]


def test_training_does_not_change_what_a_model_is():
    metrics = ["mae", keras.metrics.AUC(), keras.metrics.F1Score()]
    trained = model(L.BatchNormalization(), L.Dropout(0.1), optimizer="adamw", metrics=metrics)
    before = model_fingerprint(trained), model_facts(trained)
    x, y = np.ones((8, 6)), np.tile([0.0, 1.0], (8, 1))
    trained.fit(x, y, validation_data=(x, y), verbose=0)
    trained.predict(x, verbose=0)
    assert (model_fingerprint(trained), model_facts(trained)) == before
