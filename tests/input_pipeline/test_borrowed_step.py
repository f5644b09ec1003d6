import keras
import numpy as np
import small_models as models
import tensorflow as tf
from equal_training import built

from kbatch.input_pipeline.blocks import borrowed_step
from kbatch.training.data.forms import first_rows


def network(policy="float32", **changed):
    """Everything that keeps state: dropout, moving statistics, Adam, metrics, a loss scale."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(16),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(3, activation="softmax", dtype="float32"),
        ]
    )
    keras.config.set_dtype_policy(before)
    arguments = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    model.compile("adam", **(arguments | changed))
    return model


def variables_of(model):
    return [*model.variables, *model.optimizer.variables, *model.metrics_variables]


def state(model):
    return [keras.ops.convert_to_numpy(v) for v in variables_of(model)]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def measure(model, batch, steps=5):
    with borrowed_step(model, batch) as step:
        for _ in range(steps):
            step(batch)


def test_a_measured_model_trains_on_as_if_it_had_not_been_measured():
    x, y = models.rows(32)
    model, histories = built(network("mixed_float16"), x, y), []
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    before = state(model)
    for measured in (True, False):
        for variable, value in zip(variables_of(model), before, strict=True):
            variable.assign(value)
        if measured:
            measure(model, (tf.constant(x[:8]), tf.constant(y[:8])))
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        histories.append((history.history, state(model)))
    assert histories[0][0] == histories[1][0]
    assert_same(histories[0][1], histories[1][1])


def test_the_step_is_a_real_train_step_from_a_state_that_can_be_restored():
    """One step, also of a model that makes several an execution."""
    model, twin = network(steps_per_execution=4), network(run_eagerly=True)
    batch = tuple(map(tf.constant, models.rows(8)))
    twin.train_on_batch(*batch)
    with borrowed_step(model, batch) as step:
        assert not step.has_seen(batch)
        before = state(model)[: len(model.variables) + len(model.optimizer.variables)]
        step(batch)
        assert int(model.optimizer.iterations) == 1
        assert step.has_seen(batch)
        assert not step.has_seen(first_rows(batch, 3))
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(model.weights[0]),
            keras.ops.convert_to_numpy(twin.weights[0]),
            rtol=1e-6,
        )
        step.restore()
        assert_same(state(model)[: len(before)], before)
    assert model.train_function is None
    assert model.metrics_variables
    assert all(float(v.numpy()) == 0 for v in model.metrics_variables)


def test_a_model_without_weights_is_built_by_the_batch():
    model = keras.Sequential([keras.layers.Dense(3, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    batch = tuple(map(tf.constant, models.rows(8)))
    measure(model, batch)
    assert model.built
    assert int(model.optimizer.iterations) == 0
