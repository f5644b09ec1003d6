"""Train steps of every micro-batch size: what they do, and the model is left as it was."""

import contextlib

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.throughput.measure import update_sweep
from kbatch.timing import TimingPlan
from kbatch.training.model import accumulation_of
from kbatch.training.one_graph import execution_steps

layers = keras.layers
X, Y = models.rows(24)
BATCH = (tf.constant(X), tf.constant(Y))


@contextlib.contextmanager
def train_steps(model):
    with update_sweep(model, pytest.fail, TimingPlan(), chosen=True) as sweep:
        yield sweep.steps


def network(**changed):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([layers.Input((8,)), layers.Dropout(0.5), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], **changed)
    model.optimizer.build(model.trainable_variables)
    return model


def state(model):
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [keras.ops.convert_to_numpy(v) for v in variables]


def test_a_step_is_that_of_training_with_the_size_whatever_was_run_before():
    model = models.mlp(optimizer="sgd")
    before = model.get_weights()
    expected = models.mlp(optimizer="sgd", run_eagerly=True)
    expected.set_weights(before)
    expected.train_on_batch(*BATCH)
    with train_steps(model) as steps:
        runs = {size: steps.step(BATCH, size) for size in (24, 8, 5, 1)}
        for run in runs.values():
            run()
        for size, run in runs.items():
            model.set_weights(before)
            run()
            for one, other in zip(model.get_weights(), expected.get_weights(), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7, err_msg=str(size))


@pytest.mark.parametrize("before", ["trained", "accumulating"])
def test_the_model_is_given_back_as_it_was(before):
    model = network()
    if before == "trained":
        model.fit(X, Y, batch_size=8, verbose=0)
    if before == "accumulating":
        kbatch.accumulate_gradients(model, 6)
    values, function = state(model), model.train_function
    accumulation = accumulation_of(model)
    with train_steps(model) as steps:
        for size in (24, 8, 24):
            steps.step(BATCH, size)()
        assert not np.array_equal(values[0], state(model)[0])
    # Metrics are built by the first step, and come last.
    for one, other in zip(values, state(model), strict=False):
        np.testing.assert_array_equal(one, other)
    assert model.train_function is function
    assert accumulation_of(model) == accumulation


def counting():
    """A model that counts how often it is run."""

    class Counting(layers.Layer):
        def build(self, _):
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x):
            self.count.assign(self.count + 1)
            return x

    model = keras.Sequential([layers.Input((8,)), Counting(), layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


def test_a_step_has_as_many_micro_batches_as_its_size_gives():
    model = kbatch.accumulate_gradients(counting(), 6)
    batch = (BATCH[0], tf.zeros((24, 3)))
    with train_steps(model) as steps:
        runs = {size: steps.step(batch, size) for size in (24, 12, 8, 5)}
        counter = model.layers[0].count
        for run in runs.values():  # The first one also counts what is traced eagerly.
            run()
        for size, expected in ((8, 3), (24, 1), (5, 5), (12, 2)):
            counter.assign(0)
            runs[size]()
            assert int(counter) == expected


def test_all_sizes_of_a_batch_share_one_graph():
    traced = []

    class Tracing(layers.Layer):
        def call(self, x):
            traced.append(x.shape)
            return x

    model = keras.Sequential([layers.Input((8,)), Tracing(), layers.Dense(3)])
    model.compile("sgd", "mse")
    with train_steps(model) as steps:
        steps.step((BATCH[0], tf.zeros((24, 3))), 12)()
        once = len(traced)
        for size in (8, 6, 3, 2):
            steps.step((BATCH[0], tf.zeros((24, 3))), size)()
    assert len(traced) == once


def test_under_xla_each_size_has_a_graph():
    model = keras.Sequential([layers.Input((8,)), layers.Dense(3)])
    model.compile("sgd", "mse", jit_compile=True)
    with train_steps(model) as steps:
        for updates, size in enumerate((24, 12), 1):
            steps.step((BATCH[0], tf.zeros((24, 3))), size)()
            assert int(model.optimizer.iterations) == updates


@pytest.mark.parametrize("micro_batch_size", [24, 12])
def test_an_execution_makes_its_steps(micro_batch_size):
    model = models.linear()
    model.fit(X, Y, batch_size=24, verbose=0)
    made = int(model.optimizer.iterations)
    with train_steps(model) as steps:
        for asked in (None, 1, 5, 3, None):
            steps.step(BATCH, micro_batch_size, asked)()
            made += asked or 1
            assert int(model.optimizer.iterations) == made
    assert model.steps_per_execution == 1
    assert int(model.optimizer.iterations) == 1


def test_an_execution_takes_a_tenth_of_a_second_or_an_epoch():
    assert [execution_steps(s, None) for s in (1.0, 0.03, 0.001)] == [1, 3, 100]
    assert execution_steps(0.001, 7) == 7
