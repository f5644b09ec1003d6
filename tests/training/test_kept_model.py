"""One graph for all sizes: law: what is trained with it equals a fresh build's to the last bit."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from kbatch.training.learning_rate import scale_model
from kbatch.training.shared_graph import GraphNumber, SharedGraph, description
from kbatch.training.steps_per_execution import GraphCount

ROWS = 50  # The last batch is a rest at each of the sizes.
FOLLOW = ("beta_2", "weight_decay", "batch_norm_momentum", "ema_momentum")
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(
        0.05, momentum=0.9, nesterov=True, weight_decay=1e-3, clipnorm=1.0
    ),
    "adamw": lambda: keras.optimizers.AdamW(1e-2),
    "adam with averages": lambda: keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9),
    "adam of averages": lambda: keras.optimizers.Adam(
        1e-2, amsgrad=True, use_ema=True, ema_overwrite_frequency=3
    ),
    "nadam": lambda: keras.optimizers.Nadam(1e-2),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-2, momentum=0.9, centered=True),
    "adamax": lambda: keras.optimizers.Adamax(1e-2),
    "adagrad": lambda: keras.optimizers.Adagrad(1e-2),
    "adadelta": lambda: keras.optimizers.Adadelta(1e-1),
    "lion": lambda: keras.optimizers.Lion(1e-3, weight_decay=1e-2),
    "lamb": lambda: keras.optimizers.Lamb(1e-2),
}


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, 6)).astype("float32"), rng.integers(0, 3, ROWS)


def built(optimizer, batch_size, *, seed=0, policy="float32", loss=None):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(seed)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(3, activation="softmax", dtype="float32"),
            ]
        )
        metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
        model.compile(optimizer(), loss or "sparse_categorical_crossentropy", metrics=metrics)
    finally:
        keras.config.set_dtype_policy(before)
    # How often averages take the place of weights is a part of the graph: it is not to follow.
    overwrites = model.optimizer.ema_overwrite_frequency
    follow = tuple(one for one in FOLLOW if not (overwrites and one == "ema_momentum"))
    scale_model(
        model, batch_size=batch_size, base_batch_size=16, rule="sqrt", follow_batch_size=follow
    )
    return model


def trained(model, rows, batch_size, *, steps=1):
    changed = getattr(model.steps_per_execution, "changed", int)
    model.steps_per_execution = changed(steps)
    data = tf.data.Dataset.from_tensor_slices(rows).batch(batch_size)
    history = model.fit(data, epochs=2, validation_data=rows, shuffle=False, verbose=0)
    return history.history, [np.array(one.value) for one in model.weights]


def assert_same(found, expected):
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(one, other)


FAST = ("sgd", "adamw", "adam with averages", "adam of averages")


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, "float32") for name in FAST),
        ("adamw", "mixed_float16"),
        *(pytest.param(n, "float32", marks=pytest.mark.slow) for n in OPTIMIZERS if n not in FAST),
    ],
)
def test_the_shared_graph_trains_as_fresh_builds_do(name, policy, rows):
    graph, optimizer = SharedGraph(), OPTIMIZERS[name]
    first = graph.model_for(built(optimizer, 8, policy=policy))
    trained(first, rows, 8, steps=3)
    for batch_size, seed, steps in ((32, 1, 1), (12, 0, 4)):
        fresh = functools.partial(built, optimizer, batch_size, seed=seed, policy=policy)
        shared = graph.model_for(fresh())
        assert shared is first
        function = shared.train_function
        found = trained(shared, rows, batch_size, steps=steps)
        assert shared.train_function is function
        assert_same(found, trained(fresh(), rows, batch_size))


def test_the_step_is_traced_once(rows, monkeypatch):
    calls, plain = [], keras.Model.compute_loss

    def counted(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    monkeypatch.setattr(keras.Model, "compute_loss", counted)
    graph = SharedGraph()
    trained(graph.model_for(built(OPTIMIZERS["adamw"], 8, loss=_loss)), rows, 8, steps=2)
    traced = len(calls)
    assert traced
    for batch_size in (16, 32):
        shared = graph.model_for(built(OPTIMIZERS["adamw"], batch_size, loss=_loss))
        trained(shared, rows, batch_size, steps=batch_size // 8)
    assert len(calls) == traced


def _loss(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred)


def test_after_a_failure_the_next_model_is_a_fresh_one():
    graph = SharedGraph()
    first = graph.model_for(built(OPTIMIZERS["sgd"], 8))
    graph.release()
    assert graph.model_for(built(OPTIMIZERS["sgd"], 8)) is not first


def _functional(*layers, optimizer="adam", loss="mse", **compiled):
    inputs = keras.Input((6,))
    outputs = inputs
    for layer in layers:
        outputs = layer(outputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(outputs))
    model.compile(optimizer, loss, **compiled)
    return model


def _noisy(y_true, y_pred):
    noise = keras.random.normal(keras.ops.shape(y_pred))
    return keras.losses.mean_squared_error(y_true, y_pred + noise)


def _noisy_by_an_operation(y_true, y_pred):
    noise = tf.raw_ops.RandomStandardNormal(shape=tf.shape(y_pred), dtype=tf.float32)
    return keras.losses.mean_squared_error(y_true, y_pred + noise)


def _with_an_own_loss_of_the_model():
    model = _functional()
    plain = model.compute_loss
    model.compute_loss = lambda *args, **kwargs: 2.0 * plain(*args, **kwargs)
    return model


def _with_a_counter():
    layer = keras.layers.ReLU()
    layer.counter = tf.Variable(0.0)  # Keras lists only variables of its own.
    return layer


def _with_a_vocabulary():
    layer = keras.layers.IntegerLookup(output_mode="multi_hot")
    layer.adapt(np.arange(6))
    return _functional(layer)


def _stateful():
    inputs = keras.Input(batch_shape=(8, 2, 3))
    model = keras.Model(inputs, keras.layers.LSTM(1, stateful=True)(inputs))
    model.compile("adam", "mse")
    return model


_OF_ITS_OWN = {
    "variable of a layer": lambda: _functional(_with_a_counter()),
    "own loss of the model": _with_an_own_loss_of_the_model,
    "vocabulary": _with_a_vocabulary,
    "stateful": _stateful,
    "float64 statistics": lambda: _functional(
        keras.layers.BatchNormalization(scale=False, center=False, dtype="float64")
    ),
    "draws in a loss": lambda: _functional(loss=_noisy),
    "draws by an operation": lambda: _functional(loss=_noisy_by_an_operation),
    "eager": lambda: _functional(run_eagerly=True),
}


@pytest.mark.parametrize("build", _OF_ITS_OWN.values(), ids=_OF_ITS_OWN)
def test_a_model_that_may_keep_state_elsewhere_is_built_each_time(build):
    assert description(build()) is None
    graph = SharedGraph()
    first = build()
    assert graph.model_for(first) is first
    second = build()
    assert graph.model_for(second) is second


def test_models_that_have_a_layer_in_common_share_no_graph():
    layer, graph = keras.layers.BatchNormalization(), SharedGraph()
    first = graph.model_for(_functional(layer))
    second = _functional(layer)
    assert graph.model_for(second) is second is not first


def _recompiled(model):
    model.compile(keras.optimizers.AdamW(1e-2), model.loss)


def _set(name, value, of=lambda model: model):
    return lambda model: setattr(of(model), name, value)


@pytest.mark.parametrize(
    "change",
    [
        _set("weight_decay", 0.5, of=lambda model: model.optimizer),
        _set(
            "learning_rate",
            keras.optimizers.schedules.CosineDecay(0.1, 9),
            of=lambda model: model.optimizer,
        ),
        _set("momentum", 0.5, of=lambda model: model.layers[2]),
        _set("trainable", False, of=lambda model: model.layers[1]),
        _set("seen", True, of=lambda model: model.layers[1]),
        _set("loss", _noisy),
        _set("steps_per_execution", 2),
        _recompiled,
    ],
    ids=[
        *("decay", "schedule", "momentum", "frozen", "of a layer"),
        *("loss", "steps", "recompiled"),
    ],
)
def test_a_model_that_a_callback_changed_is_not_used_again(change):
    def build():
        layers = (keras.layers.Dense(4), keras.layers.BatchNormalization())
        return _functional(*layers, optimizer=keras.optimizers.AdamW(1e-2))

    graph = SharedGraph()
    first = graph.model_for(build())
    assert graph.model_for(build()) is first
    change(first)
    second = build()
    assert graph.model_for(second) is second


def test_predictions_follow_the_number_of_steps(rows):
    graph = SharedGraph()

    def build(steps):
        model = _functional()
        model.steps_per_execution = steps
        return model

    shared = graph.model_for(build(1))
    shared.predict(rows[0], batch_size=5, verbose=0)
    assert graph.model_for(build(4)) is shared
    assert len(shared.predict(rows[0], batch_size=5, verbose=0)) == ROWS


def test_a_graph_reads_a_number_each_time_it_runs():
    decay, steps = GraphNumber(0.9), GraphCount(3)

    @tf.function
    def read():
        return 1 - decay, tf.constant(2.0) * decay, tf.less(tf.constant(4), steps)

    assert [float(one) for one in read()] == [
        np.float32(1 - 0.9),
        np.float32(2) * np.float32(0.9),
        0,
    ]
    assert decay.changed(0.99) == 0.99
    assert steps.changed(5) == 5
    assert [float(one) for one in read()] == [
        np.float32(1 - 0.99),
        np.float32(2) * np.float32(0.99),
        1,
    ]
