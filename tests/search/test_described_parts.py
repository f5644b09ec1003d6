"""Descriptions of models: equal builds share a graph and a search, different builds do not."""

import dataclasses
import enum
import functools
import json
import sys
import types
from pathlib import Path
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
from own_process import printed

from kbatch.analysis.learning_rate import FOLLOWERS
from kbatch.search.identity import fit_facts, model_facts
from kbatch.training.data.training_data import FitCall
from kbatch.training.dtype_policy import dtype_policy_scope
from kbatch.training.fingerprint import Description, model_fingerprint
from kbatch.training.learning_rate import scale_model
from kbatch.training.shared_graph import SharedGraph

L, K = keras.layers, keras.losses


def model(*layers, optimizer="adam", loss="mse", units=2, **compiled):
    inputs = outputs = keras.Input((6,))
    for layer in layers:
        outputs = layer(outputs)
    found = keras.Model(inputs, L.Dense(units)(outputs))
    found.compile(optimizer() if callable(optimizer) else optimizer, loss, **compiled)
    return found


class OwnModel(keras.Model):
    """Has no configuration, so it is described by its weights."""

    def __init__(self, units):
        super().__init__()
        self.dense = L.Dense(units)

    def call(self, x):
        return self.dense(x)


def own_model(units):
    found = OwnModel(units)
    found.compile("sgd", "mse")
    found(np.zeros((1, 6), "float32"))
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


class Own:
    """Has a factor that is not in its configuration."""

    def __init__(self, factor, *arguments):
        super().__init__(*arguments)
        self.factor = factor


class Scaled(Own):
    def __call__(self, y, p):
        return self.factor * squared(y, p)


class OfClass(K.Loss):
    factors: ClassVar[list[float]] = []

    def call(self, y, p):
        return self.factors[0] * squared(y, p)


class OwnLoss(Own, K.Loss):
    def call(self, y, p):
        return self.factor * squared(y, p)


class OwnMetric(Own, keras.metrics.Mean):
    pass


class OwnRule(Own, keras.regularizers.Regularizer, keras.constraints.Constraint):
    def __call__(self, w):
        return self.factor * keras.ops.sum(w)


class OwnLayer(Own, L.Layer):
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


class OwnOptimizer(Own, keras.optimizers.SGD):
    pass


class OwnSchedule(Own, keras.optimizers.schedules.LearningRateSchedule):
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


def reading(settings):
    return lambda y, p: settings.factor * squared(y, p)


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


def of_class(value):
    OfClass.factors[:] = [value]
    return model(loss=OfClass())


def of_module(value):
    """A loss that reads a number of another module."""
    there = sys.modules.setdefault("settings_of_a_test", types.ModuleType("settings_of_a_test"))
    there.FACTOR, there.UNREAD = value, object()
    return model(loss=lambda y, p: there.FACTOR * squared(y, p))


def under(policy):
    with dtype_policy_scope(policy):
        return model(L.Dense(3))


def scaled_loss(value):
    scale = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=value)
    return model(optimizer=scale)


def adapted(factor):
    layer = L.Normalization()
    layer.adapt(factor * np.arange(12.0).reshape(2, 6))
    return model(layer)


def frozen_within(name):
    attention = L.MultiHeadAttention(2, 3)
    found = model(L.Reshape((2, 3)), lambda x: attention(x, x), L.Flatten())
    getattr(attention, name).trainable = False
    return found


def ruled(factor):
    found = model()
    found.layers[-1].kernel.regularizer = keras.regularizers.L2(factor)
    return found


def focal(alpha):
    return model(loss=K.CategoricalFocalCrossentropy(alpha=np.array(alpha)))


# A build function of a value, and two values if these are not 1.0 and 2.0. Equal builds of the
# first table share a graph. Those of the second have custom code, so they are never shared.
SHARED = {
    "delta": (lambda v: model(loss=K.Huber(delta=v)), 0.1, 5.0),
    "axis": (lambda v: model(loss=K.CosineSimilarity(axis=v)), -1, 0),
    "array of a loss": (focal, (0.1, 0.9), (0.9, 0.1)),
    "smoothing": (lambda v: model(loss=K.BinaryCrossentropy(label_smoothing=v)), 0.0, 0.1),
    "reduction": (lambda v: model(loss=K.MeanSquaredError(v)), "sum", "sum_over_batch_size"),
    "type of a loss": (lambda v: model(loss=getattr(K, v)()), "Poisson", "LogCosh"),
    "weight of a loss": lambda v: model(loss_weights=[v]),
    "closure": lambda v: model(loss=closed(v)),
    "closure in a closure": lambda v: model(loss=closed_twice(v)),
    "function in a closure": lambda v: model(loss=calling(closed(v))),
    "library function": (lambda v: model(loss=calling(v)), K.mean_squared_error, K.poisson),
    "loss in a closure": lambda v: model(loss=calling(K.Huber(delta=v))),
    "array in a closure": lambda v: model(loss=closed(np.full(2, v, "float32"))),
    "tensor in a closure": lambda v: model(loss=closed(keras.ops.convert_to_tensor([v, v]))),
    "type of a number": (lambda v: model(loss=closed(v)), np.float32(1), np.float64(1)),
    "list in a closure": (lambda v: model(loss=closed(v)), [1.0, 2.0], [2.0, 1.0]),
    "default": lambda v: model(loss=lambda y, p, f=v: f * squared(y, p)),
    "keyword default": lambda v: model(loss=lambda y, p, *, f=v: f * squared(y, p)),
    "partial": lambda v: model(loss=functools.partial(with_keyword, factor=v)),
    "partial in a metric": lambda v: model(
        metrics=[keras.metrics.MeanMetricWrapper(with_keyword, "m", factor=v)]
    ),
    "wrapped": lambda v: model(loss=functools.wraps(squared)(closed(v))),
    "enumeration": (lambda v: model(loss=lambda y, p: v.value * squared(y, p)), *Colour),
    "body": (lambda v: model(loss=body(v)), 1, 2),
    "constant": (lambda v: model(loss=constants(v)), 1, 2),
    "global number": (with_globals, (1.0, 1.0), (2.0, 1.0)),
    "global array": (with_globals, (1.0, 1.0), (1.0, 2.0)),
    "global of a module": of_module,
    "namespace": lambda v: model(loss=reading(types.SimpleNamespace(factor=v, unread=object()))),
    "threshold": (lambda v: model(metrics=[keras.metrics.Precision(v, name="m")]), 0.3, 0.6),
    "function as a metric": lambda v: model(weighted_metrics=[closed(v)]),
    "regularizer": (lambda v: model(L.Dense(3, kernel_regularizer=keras.regularizers.L2(v))), 1, 2),
    "constraint": (lambda v: model(L.Dense(3, bias_constraint=keras.constraints.MaxNorm(v))), 1, 2),
    "activation": (lambda v: model(L.Dense(3, v)), "relu", "tanh"),
    "activation layer": (lambda v: model(L.Dense(3, L.LeakyReLU(v))), 0.1, 0.2),
    "initializer": (
        lambda v: model(L.Dense(3, kernel_initializer=keras.initializers.Constant(v))),
        np.full((6, 3), 1.0),
        np.full((6, 3), 2.0),
    ),
    "seed": (lambda v: model(L.Dense(3, kernel_initializer=keras.initializers.HeNormal(v))), 1, 2),
    "layer": lambda v: model(L.Rescaling(v)),
    "constant beside an operation": beside_an_operation,
    "argument of a call": (lambda v: model(lambda x: L.Dropout(0.5)(x, training=v)), True, False),
    "order of layers": (lambda v: model(*[L.ReLU(), L.Rescaling(2.0)][::v]), 1, -1),
    "frozen": (frozen, 0, 1),
    "frozen within": (frozen_within, "_query_dense", "_key_dense"),
    "adapted": adapted,
    "rule of a weight": ruled,
    "optimizer": (lambda v: model(optimizer=lambda: keras.optimizers.Adam(epsilon=v)), 0.1, 0.2),
    "loss scale": (scaled_loss, 2.0, 4.0),
    "clipping": (lambda v: model(optimizer=lambda: keras.optimizers.SGD(clipnorm=v)), 0.1, 0.2),
    "kind of optimizer": (lambda v: model(optimizer=v), "adam", "sgd"),
    "XLA": (lambda v: model(jit_compile=v), True, False),
    "policy": (under, "float32", "mixed_float16"),
}
UNSHARED = {
    "method": lambda v: model(loss=Settings(v).scaled),
    "attribute of a class": of_class,
    "traced function": lambda v: model(loss=tf.function(closed(v))),
    "variable": lambda v: model(loss=closed(tf.Variable([v, v]))),
    "generator of numbers": lambda v: model(loss=closed([v, keras.random.SeedGenerator()])),
    "callable object": lambda v: model(loss=Scaled(v)),
    "own loss": lambda v: model(loss=OwnLoss(v)),
    "own metric": lambda v: model(metrics=[OwnMetric(v)]),
    "own regularizer": lambda v: model(L.Dense(3, kernel_regularizer=OwnRule(v))),
    "own constraint": lambda v: model(L.Dense(3, kernel_constraint=OwnRule(v))),
    "function as a regularizer": lambda v: model(
        L.Dense(3, kernel_regularizer=lambda w: v * keras.ops.sum(w))
    ),
    "function as an activation": lambda v: model(L.Dense(3, lambda x: v * x)),
    "function as an initializer": lambda v: model(
        L.Dense(3, kernel_initializer=lambda s, dtype: v * keras.ops.ones(s))
    ),
    "lambda": lambda v: model(L.Lambda(lambda x: v * x)),
    "own layer": lambda v: model(OwnLayer(v)),
    "own model": (own_model, 3, 5),
    "no configuration": beside_an_operation_without_a_configuration,
    "own optimizer": lambda v: model(optimizer=lambda: OwnOptimizer(v)),
    "schedule": lambda v: model(optimizer=lambda: keras.optimizers.SGD(OwnSchedule(v))),
    "excluded from decay": (excluding, "bias", "kernel"),
}
PARTS = {
    name: part if isinstance(part, tuple) else (part, 1.0, 2.0)
    for name, part in (SHARED | UNSHARED).items()
}


def facts_and_fingerprint(built):
    return model_facts(built), model_fingerprint(built)


@functools.cache
def described_part(name):
    build, first, _ = PARTS[name]
    return facts_and_fingerprint(build(first))


# Settings of an optimizer are not in the fingerprint, because they change neither memory nor steps.
SETTINGS = ("optimizer", "loss scale", "clipping", "own optimizer", "schedule")
SETTINGS += ("excluded from decay",)


@pytest.mark.parametrize("name", PARTS)
def test_model_facts_and_shared_graph_distinguish_builds(name):
    build, first, other = PARTS[name]
    graph, described, trained = SharedGraph(), [described_part(name)], []
    for value in (first, first, other):
        built = build(value)
        described.append(facts_and_fingerprint(built))
        trained.append((built, graph.model_for(built)))
    assert described[0] == described[1] == described[2]
    assert described[0][0] != described[3][0]
    assert (described[0][1] == described[3][1]) == (name in SETTINGS)
    (first_built, shared), (same_built, same), (other_built, different) = trained
    assert shared is first_built and different is other_built
    assert same is (first_built if name in SHARED else same_built)


def noisy(y, p):
    return squared(y, p + keras.random.normal(keras.ops.shape(p)))


def noisy_by_an_operation(y, p):
    return squared(y, p + tf.raw_ops.RandomStandardNormal(shape=tf.shape(p), dtype=tf.float32))


def with_an_own_loss():
    found = model()
    plain = found.compute_loss
    found.compute_loss = lambda *args, **kwargs: 2.0 * plain(*args, **kwargs)
    return found


def with_a_counter():
    layer = L.ReLU()
    layer.counter = tf.Variable(0.0)  # Keras lists only variables of its own.
    return model(layer)


def with_a_vocabulary():
    layer = L.IntegerLookup(output_mode="multi_hot")
    layer.adapt(np.arange(6))
    return model(layer)


def stateful():
    inputs = keras.Input(batch_shape=(8, 2, 3))
    found = keras.Model(inputs, L.LSTM(1, stateful=True)(inputs))
    found.compile("adam", "mse")
    return found


FLOAT64 = {"scale": False, "center": False, "dtype": "float64"}
# Models that may have state or random numbers outside of Keras's variables.
ALONE = {
    "variable of a layer": with_a_counter,
    "own loss of the model": with_an_own_loss,
    "vocabulary": with_a_vocabulary,
    "stateful": stateful,
    "float64 statistics": lambda: model(L.BatchNormalization(**FLOAT64)),
    "draws in a loss": lambda: model(loss=noisy),
    "draws by an operation": lambda: model(loss=noisy_by_an_operation),
    "eager": lambda: model(run_eagerly=True),
}


@pytest.mark.parametrize("name", ALONE)
def test_shared_graph_refuses_models_with_state_elsewhere(name):
    graph = SharedGraph()
    for _ in range(2):
        built = ALONE[name]()
        assert graph.model_for(built) is built


def test_shared_graph_refuses_models_with_a_common_layer():
    layer, graph = L.BatchNormalization(), SharedGraph()
    first, second = graph.model_for(model(layer)), model(layer)
    assert graph.model_for(second) is second is not first


CHANGES = {
    "decay": lambda m: setattr(m.optimizer, "weight_decay", 0.5),
    "schedule": lambda m: setattr(m.optimizer, "learning_rate", OwnSchedule(2.0)),
    "momentum": lambda m: setattr(m.layers[2], "momentum", 0.5),
    "frozen": lambda m: setattr(m.layers[1], "trainable", False),
    "of a layer": lambda m: setattr(m.layers[1], "seen", True),
    "loss": lambda m: setattr(m, "loss", noisy),
    "steps": lambda m: setattr(m, "steps_per_execution", 2),
    "recompiled": lambda m: m.compile(keras.optimizers.AdamW(1e-2), m.loss),
}


@pytest.mark.parametrize("name", CHANGES)
def test_shared_graph_drops_a_changed_model(name):
    def build():
        return model(L.Dense(4), L.BatchNormalization(), optimizer=keras.optimizers.AdamW(1e-2))

    graph = SharedGraph()
    first = graph.model_for(build())
    assert graph.model_for(build()) is first
    CHANGES[name](first)
    second = build()
    assert graph.model_for(second) is second


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


@pytest.mark.slow
def test_model_facts_are_equal_in_another_process():
    folder = str(Path(__file__).parent)
    code = f"import json, sys; sys.path.insert(0, {folder!r}); import test_described_parts as t;"
    assert printed("-c", f"{code} print(json.dumps(t.all_facts()))") == all_facts()


def all_facts():
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=3)
    call = {"x": np.eye(6), "y": {"b": np.ones(6), "a": np.zeros(6)}, "callbacks": [stop]}
    parts = {name: described_part(name) for name in PARTS}
    return json.loads(json.dumps(parts | {"fit": fit_facts(FitCall((), call))}))


def test_description_ignores_comments_and_names():
    def first(y, p):
        """Compute a loss."""
        return squared(y, p) + {"a": 1, "b": 2}["a"]

    def second(y, p):
        """Compute a loss, as before."""
        # A comment.
        return squared(y, p) + {"a": 1, "b": 2}["a"]

    one, other = (Description().of(each) for each in (first, second))
    assert one["code"] == other["code"]


def test_description_of_method_has_attributes_that_it_reads():
    first, moved, other = Settings(1.0, "here"), Settings(1.0, "there"), Settings(2.0, "here")
    of = [Description().of(one.scaled) for one in (first, moved, other)]
    assert of[0] == of[1] != of[2]


def test_model_fingerprint_ignores_settings_that_follow_the_batch_size():
    def scaled(batch_size):
        found = model(L.BatchNormalization(), optimizer="adamw")
        sizes = {"batch_size": batch_size, "base_batch_size": 8}
        scale_model(found, **sizes, rule="sqrt", follow_batch_size=FOLLOWERS)
        return model_fingerprint(found)

    assert scaled(8) == scaled(16) == scaled(64)


def attending(x):
    return L.MultiHeadAttention(2, 3, dropout=0.1)(x, x)


def with_operations(x):
    return keras.ops.concatenate([x * 2 + 1, keras.ops.clip(x, 0, 1), x[:, ::2]], axis=1)


# Layers of common models, by the shape of a row. Other parts are tried with the smallest model.
ORDINARY = {
    (4, 6): [
        attending,
        lambda x: L.PReLU()(L.Conv1D(3, 2)(L.LayerNormalization()(x))),
        lambda x: L.Bidirectional(L.SimpleRNN(2, return_sequences=True))(x),
        lambda x: L.TimeDistributed(L.Dense(2, "gelu"))(x),
        lambda x: L.LSTM(3, dropout=0.1)(L.SpatialDropout1D(0.1)(x)),
    ],
    (6, 6, 3): [
        lambda x: L.RandomRotation(0.1)(L.RandomFlip("horizontal")(L.Rescaling(2.0)(x))),
        lambda x: L.Add()([x, L.Conv2D(3, 1)(x)]),
        lambda x: L.BatchNormalization()(L.SeparableConv2D(4, 2)(x)),
        lambda x: L.GroupNormalization(2)(L.MaxPooling2D()(x)),
        lambda x: L.Activation("relu")(L.GlobalAveragePooling2D()(x)),
    ],
    (6,): [
        with_operations,
        lambda x: L.GaussianNoise(0.1)(L.Dropout(0.1)(x)),
        # Keras sets `jit_compile` of a nested model in training.
        lambda x: keras.Sequential([keras.Input(x.shape[1:]), L.Dense(3)])(x),
    ],
}


@pytest.mark.parametrize("shape", ORDINARY)
def test_training_common_layers_changes_neither_facts_nor_shared_graph(shape):
    def build():
        keras.backend.clear_session()
        inputs = outputs = keras.Input(shape)
        for layer in ORDINARY[shape]:
            outputs = layer(outputs)
        found = keras.Model(inputs, L.Dense(2, "softmax")(outputs))
        metrics = [keras.metrics.AUC(), keras.metrics.F1Score()] if shape == (6,) else ["mae"]
        found.compile("adamw", "categorical_crossentropy", metrics=metrics)
        return found

    graph = SharedGraph()
    shared = graph.model_for(build())
    before = facts_and_fingerprint(shared)
    x, y = np.ones((8, *shape), "float32"), np.tile([0.0, 1.0], (8, 1))
    shared.fit(x, y, verbose=0)
    if shape == (6,):
        shared.evaluate(x, y, verbose=0)
        shared.predict(x, verbose=0)
    assert facts_and_fingerprint(shared) == before
    assert graph.model_for(build()) is shared
