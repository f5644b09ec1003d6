import keras
import numpy as np
import small_models as models
import tensorflow as tf

from kbatch.input_pipeline.blocks import borrowed_step
from kbatch.training.data.forms import first_rows


def state(model):
    return [keras.ops.convert_to_numpy(v) for v in (*model.variables, *model.optimizer.variables)]


def test_the_step_is_a_real_train_step_from_a_state_that_can_be_restored():
    """One step, also of a model that makes several an execution."""
    model, twin = models.mlp(steps_per_execution=4), models.mlp(run_eagerly=True)
    twin.set_weights(model.get_weights())
    batch = tuple(map(tf.constant, models.rows(8)))
    twin.train_on_batch(*batch)
    with borrowed_step(model, batch) as step:
        assert not step.has_seen(batch)
        before = state(model)
        step(batch)
        assert int(model.optimizer.iterations) == 1
        assert step.has_seen(batch)
        assert not step.has_seen(first_rows(batch, 3))
        for one, other in zip(model.get_weights(), twin.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        step.restore()
        for one, other in zip(state(model), before, strict=True):
            np.testing.assert_array_equal(one, other)
    assert model.train_function is None
    assert model.metrics_variables
    assert all(float(v.numpy()) == 0 for v in model.metrics_variables)
