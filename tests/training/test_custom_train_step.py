"""A custom `train_step`: it is measured on whole batches and not changed."""

import keras
import numpy as np
import own_steps
import pytest
import small_models as models
import tensorflow as tf

import kbatch
from kbatch.errors import InputError
from kbatch.training.model import inner_optimizers, updates_made

X, Y = models.rows(64)


def values(model):
    return [np.array(tf.convert_to_tensor(v.value)) for v in model.variables]


def assert_untouched(model, before):
    assert all(map(np.array_equal, values(model), before))
    assert updates_made(model) == 0
    assert "train_step" not in vars(model)


def test_profile_input_pipeline_leaves_custom_train_step():
    model = own_steps.gan()
    before, data = values(model), tf.data.Dataset.from_tensor_slices(X).batch(16)
    found = kbatch.profile_input_pipeline(model, data, time_budget_s=0.3, remedies=False)
    assert found.batch_size == 16
    assert_untouched(model, before)


def test_profile_training_leaves_custom_train_step():
    model = own_steps.distiller()
    before = values(model)
    found = kbatch.profile_training(
        model, X, Y, batch_sizes=(8, 16), time_budget_s=0.5, measure_memory=False
    )
    assert found.updates[0].measured
    assert_untouched(model, before)


class ByHand(keras.Model):
    """Changes its weights without an optimizer."""

    def __init__(self):
        super().__init__()
        self.dense = own_steps.dense(8, 1)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.dense(data) ** 2)
        weights = self.dense.trainable_weights
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return {"loss": loss}


def test_updates_made_counts_batches_without_optimizer():
    model = ByHand()
    model.compile()
    assert updates_made(model, batches=5) == 5


def bound():
    model = models.mlp()
    model.train_step = lambda data: keras.Model.train_step(model, data)
    return model


@pytest.mark.parametrize("build", [own_steps.vae, own_steps.gan, bound])
def test_accumulate_gradients_refuses_custom_train_step(build):
    model = build()
    before = vars(model).get("train_step")
    with pytest.raises(InputError, match=r"in `compute_loss`.*exact=True.*Received: model of"):
        kbatch.accumulate_gradients(model, 8)
    assert vars(model).get("train_step") is before


def test_inner_optimizers_lists_training_optimizers_once():
    teacher = models.mlp(run_eagerly=True)
    teacher.train_on_batch(X, Y)
    inputs = keras.Input((8,))
    student = keras.Model(inputs, keras.layers.Dense(3)(teacher(inputs)))
    student.compile(keras.optimizers.SGD(0.25), "mse")
    assert inner_optimizers(student) == [student.optimizer]
    assert updates_made(student) == 0
    network = own_steps.gan()
    network.also = [network.d_optimizer]
    assert len(inner_optimizers(network)) == len(set(map(id, inner_optimizers(network))))
