import keras
import numpy as np
import pytest
import small_models as models
import tensorflow as tf

from kbatch.training.model import TrainStep, build_ahead, waiting_for_data

X, Y = models.rows(64)


@pytest.mark.parametrize("rebatched", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_waiting_for_data_makes_no_update_without_data(rebatched):
    keras.utils.set_random_seed(1)
    model = models.stock(optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.1))
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    batches = batches.rebatch(8) if rebatched else batches.unbatch().batch(8)
    with waiting_for_data(model, batches):
        model.fit(batches, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 2 * 8
    assert "train_step" not in vars(model)


def test_build_ahead_avoids_second_trace():
    traced = []

    class Traced(TrainStep):
        def _update(self, data):
            traced.append(data)
            return super()._update(data)

    model = Traced(models.mlp()).install()
    data = tf.data.Dataset.from_tensor_slices(models.rows(16)).batch(8)
    build_ahead(model, data.element_spec)
    model.fit(data, verbose=0)
    assert len(traced) == 1


def test_build_ahead_skips_model_without_symbolic_build():
    class Fetching(keras.layers.Layer):
        def call(self, x):
            return x + float(np.asarray(x).mean())

    model = keras.Sequential([Fetching(), keras.layers.Dense(3)])
    model.compile("sgd", "mse", metrics=["mae"])
    spec = (tf.TensorSpec((None, 8)), tf.TensorSpec((None, 3)))
    build_ahead(model, spec)
    assert not model.optimizer.built
    model.run_eagerly = True
    model.train_on_batch(np.ones((4, 8)), np.ones((4, 3)))
    assert int(model.optimizer.iterations) == 1
