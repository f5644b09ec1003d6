"""The shared graph: training with it gives exactly the same results as with a new model."""

import functools

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf

from kbatch.training.dtype_policy import dtype_policy_scope
from kbatch.training.learning_rate import scale_model
from kbatch.training.shared_graph import GraphNumber, SharedGraph
from kbatch.training.steps_per_execution import GraphCount

ROWS = 50  # No batch size of the test divides it.
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
    return models.rows(ROWS)


def built(optimizer, batch_size, *, seed=0, policy="float32"):
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
    with dtype_policy_scope(policy):
        keras.utils.set_random_seed(seed)
        model = models.normalised(optimizer=optimizer(), metrics=metrics)
    # `ema_overwrite_frequency` is a constant of the graph, so it must not follow the batch size.
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


# Batch size, seed and steps per execution after the first fit. All optimizers have the first one.
FITS = [(12, 1, 4), (32, 0, 1)]
FAST = ("sgd", "adam with averages")  # They have all kinds of settings that follow.


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, "float32") for name in FAST),
        ("adamw", "mixed_float16"),
        *(pytest.param(n, "float32", marks=pytest.mark.slow) for n in OPTIMIZERS if n not in FAST),
    ],
)
def test_shared_graph_trains_like_fresh_model_with_one_trace(name, policy, rows, monkeypatch):
    calls, plain = [], keras.Model.compute_loss
    monkeypatch.setattr(
        keras.Model, "compute_loss", lambda *args, **given: calls.append(1) or plain(*args, **given)
    )
    graph, optimizer = SharedGraph(), OPTIMIZERS[name]
    first = graph.model_for(built(optimizer, 8, policy=policy))
    trained(first, rows, 8, steps=3)
    for batch_size, seed, steps in FITS if name == "sgd" else FITS[:1]:
        fresh = functools.partial(built, optimizer, batch_size, seed=seed, policy=policy)
        shared = graph.model_for(fresh())
        assert shared is first
        traced = len(calls)
        found = trained(shared, rows, batch_size, steps=steps)
        assert len(calls) == traced > 0
        assert_same(found, trained(fresh(), rows, batch_size))


def test_shared_graph_release_gives_fresh_model():
    graph = SharedGraph()
    first = graph.model_for(built(OPTIMIZERS["sgd"], 8))
    graph.release()
    assert graph.model_for(built(OPTIMIZERS["sgd"], 8)) is not first


def test_shared_graph_predicts_with_other_steps_per_execution(rows):
    graph, other = SharedGraph(), models.mlp()
    shared = graph.model_for(models.mlp())
    shared.predict(rows[0], batch_size=5, verbose=0)
    other.steps_per_execution = 4  # `compile` would keep it as an argument.
    assert graph.model_for(other) is shared
    assert len(shared.predict(rows[0], batch_size=5, verbose=0)) == ROWS


def test_graph_number_is_read_at_each_run():
    decay, steps = GraphNumber(0.9), GraphCount(3)

    @tf.function
    def read():
        return 1 - decay, tf.constant(2.0) * decay, tf.less(tf.constant(4), steps)

    for value, count in ((0.9, 3), (0.99, 5)):
        assert (decay.changed(value), steps.changed(count)) == (value, count)
        expected = [np.float32(1 - value), np.float32(2) * np.float32(value), count > 4]
        assert [float(one) for one in read()] == expected
