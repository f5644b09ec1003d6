"""The train step of a model outside `fit`: calls and restored state."""

import numpy as np
import pytest
import small_models as models
import tensorflow as tf

from kbatch.training.data.forms import first_rows
from kbatch.training.state import kept_state
from kbatch.training.step_call import StepCall, held_by_host
from kbatch.training.steps_per_execution import counted_steps

X, Y = models.rows(24)
BATCH = (tf.constant(X), tf.constant(Y))


def batches():
    return iter(tf.data.Dataset.from_tensors(held_by_host(BATCH)).repeat())


@pytest.mark.parametrize("counted", [False, True])
def test_kept_state_restores_steps_per_execution(counted):
    model = models.mlp(steps_per_execution=4)
    if counted:  # Then graphs read it from a variable, which the calls change.
        model.steps_per_execution = counted_steps(model, 4)
    with kept_state(model) as state:
        StepCall(model, state, several=True).execute(batches(), 2)
    assert model.steps_per_execution == 4
    assert isinstance(model.steps_per_execution, type(counted_steps(model, 4))) == counted
    model.fit(tf.data.Dataset.from_tensors(BATCH).repeat(8), verbose=0)
    assert int(model.optimizer.iterations) == 8
    assert int(tf.convert_to_tensor(model.steps_per_execution)) == 4


def test_step_call_makes_one_step_and_restore_keeps_compiled_step():
    """A call is one step also if the model runs several steps per execution."""
    model, twin = models.mlp(steps_per_execution=4), models.mlp(run_eagerly=True)
    twin.set_weights(model.get_weights())
    twin.train_on_batch(*BATCH)
    with kept_state(model) as state:
        step, before = StepCall(model, state), models.state_of(model)
        assert not step.has_seen(BATCH)
        step(BATCH)
        assert int(model.optimizer.iterations) == 1
        assert step.has_seen(BATCH) and not step.has_seen(first_rows(BATCH, 3))
        for one, other in zip(model.get_weights(), twin.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        function = model.train_function
        step.restore()
        for one, other in zip(before, models.state_of(model), strict=False):
            np.testing.assert_array_equal(one, other)
        assert model.metrics_variables and not any(map(float, model.metrics_variables))
        assert model.train_function is function
    assert model.train_function is None
