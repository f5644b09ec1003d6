"""Train steps of a sweep: their results, and the state of the model afterwards."""

import contextlib
import gc
import weakref

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.throughput.measure import update_sweep
from kbatch.timing import TimingPlan
from kbatch.training.model import accumulation_of

layers = keras.layers
X, Y = models.rows(24)
BATCH = (tf.constant(X), tf.constant(Y))


@contextlib.contextmanager
def train_steps(model):
    with update_sweep(model, pytest.fail, TimingPlan(), chosen=True) as sweep:
        yield sweep


def network(**changed):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([layers.Input((8,)), layers.Dropout(0.5), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], **changed)
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("before", ["plain", "accumulating"])
def test_update_sweep_executions_equal_train_on_batch(before, eager):
    model = models.mlp(optimizer="sgd", run_eagerly=eager)
    if before == "accumulating":
        kbatch.accumulate_gradients(model, 5)
    weights = model.get_weights()
    expected = models.mlp(optimizer="sgd", run_eagerly=True)
    with train_steps(model) as sweep:
        assert accumulation_of(model) is None  # A sweep times whole batches.
        asked = (1, 1) if eager else (1, 5, 3)
        for steps, run in [(steps, sweep.call(BATCH, steps)) for steps in asked]:
            model.set_weights(weights)
            expected.set_weights(weights)
            run()
            for _ in range(steps):
                expected.train_on_batch(*BATCH)
            for value, reference in zip(model.get_weights(), expected.get_weights(), strict=True):
                np.testing.assert_allclose(value, reference, rtol=1e-5, atol=1e-6)
    assert model.steps_per_execution == 1


@pytest.mark.parametrize("eager", [False, True])
def test_update_sweep_frees_batches(eager):
    """A copy is held in the host's memory, so that a step includes its transfer to the device."""
    batch = (tf.constant(X), tf.constant(Y))
    with train_steps(models.linear(run_eagerly=eager)) as sweep:
        run, held = sweep.call(batch, 1), weakref.ref(batch[0])
        del batch
        gc.collect()
        assert held() is None
        run()


@pytest.mark.parametrize("before", ["trained", "accumulating"])
def test_update_sweep_restores_the_model(before):
    model = network()
    if before == "trained":
        model.fit(X, Y, batch_size=8, verbose=0)
    if before == "accumulating":
        kbatch.accumulate_gradients(model, 6)
    values, function = models.state_of(model), model.train_function
    accumulation = accumulation_of(model)
    with train_steps(model) as sweep:
        sweep.call(BATCH, 3)()
        assert not np.array_equal(values[0], models.state_of(model)[0])
    # The first step builds the metrics, whose variables come last.
    for value, restored in zip(values, models.state_of(model), strict=False):
        np.testing.assert_array_equal(value, restored)
    assert model.train_function is function
    assert accumulation_of(model) == accumulation
