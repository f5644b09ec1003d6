"""Searches of batch size and learning rate together."""

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models

from kbatch.analysis.joint_search import FACTORS

schedules = keras.optimizers.schedules


def built(optimizer, batch_size, factor, **arguments):
    hypermodel = searches.stock(
        lambda: models.stock(optimizer=optimizer()), learning_rate_scaling="joint", **arguments
    )
    hp = keras_tuner.HyperParameters()
    hp.values = {"batch_size": batch_size, "learning_rate_factor": factor}
    return hypermodel.build(hp).optimizer


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize(
    ("optimizer", "ratio"), [(keras.optimizers.SGD, 4.0), (keras.optimizers.Adam, 2.0)]
)
def test_a_rate_is_its_factor_times_the_one_by_the_optimizers_rule(optimizer, ratio, policy):
    for factor in (0.25, 1.0, 8.0):
        found = built(lambda: optimizer(0.01), 32, factor, dtype_policy=policy)
        np.testing.assert_allclose(float(found.learning_rate), 0.01 * ratio * factor, rtol=1e-6)
    at_base = built(lambda: optimizer(0.01), 8, 2.0, dtype_policy=policy)
    np.testing.assert_allclose(float(at_base.learning_rate), 0.02, rtol=1e-6)


def test_the_peak_of_a_schedule_is_scaled_and_its_examples_stay():
    found = built(lambda: keras.optimizers.SGD(schedules.CosineDecay(0.1, 80)), 32, 0.5)
    config = found._learning_rate.get_config()
    assert config["initial_learning_rate"] == pytest.approx(0.1 * 4 * 0.5)
    assert config["decay_steps"] == 20


def test_the_weight_decay_of_an_example_stays_whatever_the_rate():
    for factor in (0.5, 4.0):
        found = built(lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.01), 32, factor)
        decay = float(found.learning_rate) * found.weight_decay
        assert decay == pytest.approx(1e-3 * 0.01 * 4)


def test_a_rule_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ValueError, match=r"'joint' .*Received: learning_rate_scaling='both'"):
        searches.hypermodel(learning_rate_scaling="both")


def test_a_tuner_of_keras_tuner_takes_the_rate_as_a_hyperparameter(tmp_path):
    joint = searches.stock(batch_sizes=(8, 16), learning_rate_scaling="joint")
    tuner = searches.tuner(tmp_path, joint, keras_tuner.RandomSearch, max_trials=2)
    space = {p.name: tuple(p.values) for p in tuner.oracle.get_space().space}
    assert space == {"batch_size": (8, 16), "learning_rate_factor": FACTORS}
