"""The settings besides the learning rate that follow the batch size of a trial."""

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models

import kbatch


class Later(keras.layers.Layer):
    """Creates a BatchNormalization when it is built."""

    def build(self, shape):
        self.norm = keras.layers.BatchNormalization()

    def call(self, x, training=False):
        return self.norm(x, training=training)


def build(known=True):
    model = keras.Sequential(
        [
            *([keras.layers.Input((8,))] if known else []),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization() if known else Later(),
            keras.layers.Dense(3, activation="softmax", dtype="float32"),
        ]
    )
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.01)
    model.compile(optimizer, models.own_loss, metrics=["accuracy"])
    return model


def settings(batch_size, **arguments):
    hypermodel = searches.hypermodel(build, (8, 128), micro_batch_size=None, **arguments)
    hp = keras_tuner.HyperParameters()
    hp.Choice("batch_size", [8, 128])
    hp.values["batch_size"] = batch_size
    model = hypermodel.build(hp)
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return inner.beta_2, inner.weight_decay, model.layers[1].momentum


@pytest.mark.parametrize(("rule", "ratio"), [("sqrt", 4.0), ("linear", 16.0), (None, 1.0)])
def test_a_trial_keeps_its_timescales_in_examples(rule, ratio):
    found = settings(128, learning_rate_scaling=rule)
    np.testing.assert_allclose(found, [0.999**16, 0.01 * 16 / ratio, 0.99**16])
    assert settings(8, learning_rate_scaling=rule) == (0.999, 0.01, 0.99)


def test_a_trial_keeps_its_settings_where_none_is_to_follow():
    assert settings(128, follow_batch_size=()) == (0.999, 0.01, 0.99)


def test_the_record_says_what_followed_and_to_which_values(tmp_path):
    hypermodel = searches.stock(build, (8, 32), follow_batch_size=("weight_decay",))
    searches.search(tmp_path, hypermodel, kbatch.BatchSizeTuner, fit={"epochs": 1})
    study = kbatch.load_study(tmp_path / "search")
    base, large = (trial.executions[0].scaling for trial in study.trials)
    assert large.follow_batch_size == ("weight_decay",)
    assert large.weight_decay == pytest.approx(0.01 * 4 / 2)
    assert (large.beta_2, large.batch_norm_momenta) == (0.999, (0.99,))
    assert (base.weight_decay, base.kappa) == (0.01, 1)
    assert study.search.settings["follow_batch_size"] == ["weight_decay"]


def test_a_layer_of_a_model_that_its_first_batch_builds_follows_too(tmp_path):
    hypermodel = searches.stock(lambda: build(known=False), (32,), base_batch_size=8)
    searches.quick(tmp_path, hypermodel)
    _, trial = kbatch.load_study(tmp_path / "search").trials
    assert trial.executions[0].scaling.batch_norm_momenta == (pytest.approx(0.99**4),)
