"""The train step of a model outside of `fit`: what a call does, and what is put back."""

import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf

from kbatch.training.state import kept_state
from kbatch.training.step_call import StepCall, held_by_host
from kbatch.training.steps_per_execution import counted_steps

X, Y = models.rows(24)
BATCH = (tf.constant(X), tf.constant(Y))


def batches():
    return iter(tf.data.Dataset.from_tensors(held_by_host(BATCH)).repeat())


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_execute_makes_as_many_updates_as_it_is_asked_for(several, eager):
    model = models.mlp(run_eagerly=eager)
    with kept_state(model) as state:
        step = StepCall(model, state, several=several)
        assert step.several == (several and not eager)
        for steps in (1, 5, 3, 3):
            before = int(model.optimizer.iterations)
            step.execute(batches(), steps)
            assert int(model.optimizer.iterations) - before == steps
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("counted", [False, True])
def test_kept_state_puts_the_steps_of_an_execution_back(counted):
    model = models.mlp(steps_per_execution=4)
    if counted:  # Graphs read it from a variable, which the calls change.
        model.steps_per_execution = counted_steps(model, 4)
    with kept_state(model) as state:
        StepCall(model, state, several=True).execute(batches(), 2)
    assert model.steps_per_execution == 4
    assert isinstance(model.steps_per_execution, type(counted_steps(model, 4))) == counted
    model.fit(tf.data.Dataset.from_tensors(BATCH).repeat(8), verbose=0)
    assert int(model.optimizer.iterations) == 8
    assert int(tf.convert_to_tensor(model.steps_per_execution)) == 4


def test_restore_puts_the_weights_back_and_keeps_what_was_compiled():
    model = models.mlp()
    weights = model.get_weights()
    with kept_state(model) as state:
        step = StepCall(model, state)
        step(BATCH)
        assert not all(map(np.array_equal, model.get_weights(), weights))
        function = model.train_function
        step.restore()
        assert all(map(np.array_equal, model.get_weights(), weights))
        assert model.train_function is function
        assert step.has_seen(BATCH)
    assert model.train_function is None
    assert keras.ops.convert_to_numpy(model.optimizer.iterations) == 0
