import keras
import models
import pytest
import tensorflow as tf

from kbatch.training.accumulation import measure_moments
from kbatch.training.model import waiting_for_data

X, Y = models.rows(64)


@pytest.mark.parametrize("rebatched", [False, True])
def test_a_stock_step_makes_no_update_without_data(rebatched):
    keras.utils.set_random_seed(1)
    model = models.stock(optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.1))
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    batches = batches.rebatch(8) if rebatched else batches.unbatch().batch(8)
    with waiting_for_data(model, batches):
        model.fit(batches, epochs=5, verbose=0)
    assert int(model.optimizer.iterations) == 5 * 8
    assert "train_step" not in vars(model)


def test_a_halving_step_makes_no_update_without_data_whose_rows_are_known():
    model = measure_moments(models.mlp(), every=3)
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).unbatch()
    batches = rows.batch(8, drop_remainder=True)
    with waiting_for_data(model, batches):
        model.fit(batches, epochs=5, verbose=0)
    assert int(model.optimizer.iterations) == 5 * 8


def test_data_of_known_length_need_no_other_step():
    model = models.stock()
    with waiting_for_data(model, tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)):
        assert "train_step" not in vars(model)
