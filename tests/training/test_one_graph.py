"""One graph for all sizes: law: what is trained with it equals a fresh build's to the last bit."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from kbatch.training.learning_rate import scale_model
from kbatch.training.one_graph import GraphCount, GraphNumber, OneGraph, can_share

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


def built(optimizer, batch_size, *, seed=0, width=8, policy="float32", loss=None):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(seed)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(width),
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


@pytest.mark.parametrize(
    "name",
    [
        n
        if n in ("sgd", "adamw", "adam with averages", "adam of averages")
        else pytest.param(n, marks=[pytest.mark.slow])
        for n in OPTIMIZERS
    ],
)
def test_the_shared_graph_trains_as_fresh_builds_do(name, rows):
    graph, optimizer = OneGraph(), OPTIMIZERS[name]
    first = graph.model(built(optimizer, 8))
    trained(first, rows, 8, steps=3)
    for batch_size, seed, steps in ((32, 1, 1), (12, 0, 4)):
        shared = graph.model(built(optimizer, batch_size, seed=seed))
        assert shared is first
        function = shared.train_function
        found = trained(shared, rows, batch_size, steps=steps)
        assert shared.train_function is function
        assert_same(found, trained(built(optimizer, batch_size, seed=seed), rows, batch_size))


def test_a_loss_scale_is_set_back(rows):
    graph, optimizer = OneGraph(), OPTIMIZERS["adamw"]
    first = graph.model(built(optimizer, 8, policy="mixed_float16"))
    trained(first, rows, 8)
    shared = graph.model(built(optimizer, 32, policy="mixed_float16"))
    assert shared is first
    expected = trained(built(optimizer, 32, policy="mixed_float16"), rows, 32)
    assert_same(trained(shared, rows, 32), expected)


def test_the_step_is_traced_once(rows):
    # A list would be part of the loss, which then differs after each trace.
    calls = itertools.count()

    def loss(y_true, y_pred):
        next(calls)
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred)

    graph = OneGraph()
    trained(graph.model(built(OPTIMIZERS["adamw"], 8, loss=loss)), rows, 8, steps=2)
    traced = next(calls)
    for batch_size in (16, 32):
        shared = graph.model(built(OPTIMIZERS["adamw"], batch_size, loss=loss))
        trained(shared, rows, batch_size, steps=batch_size // 8)
    assert next(calls) == traced + 1


def test_another_model_has_a_graph_of_its_own(rows):
    graph = OneGraph()
    first = graph.model(built(OPTIMIZERS["adamw"], 8))
    wider = graph.model(built(OPTIMIZERS["adamw"], 8, width=9))
    other_loss = graph.model(built(OPTIMIZERS["adamw"], 8, width=9, loss="mse"))
    assert len({id(first), id(wider), id(other_loss)}) == 3
    assert graph.model(built(OPTIMIZERS["adamw"], 8, width=9, loss="mse")) is other_loss


def test_after_a_failure_the_next_model_is_a_fresh_one():
    graph = OneGraph()
    first = graph.model(built(OPTIMIZERS["sgd"], 8))
    graph.forget()
    assert graph.model(built(OPTIMIZERS["sgd"], 8)) is not first


class _Own(keras.layers.Layer):
    def call(self, x):
        return x


def _functional(*layers):
    inputs = keras.Input((6,))
    outputs = inputs
    for layer in layers:
        outputs = layer(outputs)
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")
    return model


def _with_schedule():
    model = _functional(keras.layers.Dense(1))
    model.compile(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10)), "mse")
    return model


class _OwnOptimizer(keras.optimizers.Adam):
    pass


def _with_own_optimizer():
    model = _functional(keras.layers.Dense(1))
    model.compile(_OwnOptimizer(), "mse")
    return model


class _OwnMetric(keras.metrics.Mean):
    pass


def _with_own_metric():
    model = _functional(keras.layers.Dense(1))
    model.compile("adam", "mse", metrics=[_OwnMetric()])
    return model


def _eager():
    model = _functional(keras.layers.Dense(1))
    model.compile("adam", "mse", run_eagerly=True)
    return model


@pytest.mark.parametrize(
    "build",
    [
        lambda: _functional(_Own(), keras.layers.Dense(1)),
        lambda: _functional(keras.layers.Lambda(lambda x: x), keras.layers.Dense(1)),
        _with_schedule,
        _with_own_optimizer,
        _with_own_metric,
        _eager,
    ],
    ids=["own layer", "lambda", "schedule", "own optimizer", "own metric", "eager"],
)
def test_a_model_that_may_keep_state_elsewhere_is_built_each_time(build):
    assert not can_share(build())
    graph = OneGraph()
    first = build()
    assert graph.model(first) is first
    second = build()
    assert graph.model(second) is second


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
