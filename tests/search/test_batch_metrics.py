"""Metrics that are functions of all rows of a batch together."""

import keras
import keras_tuner
import pytest
import searches
import small_models as models

import kbatch


def spread(y, probabilities):
    """A value that a mean over parts does not give."""
    return keras.ops.max(probabilities) - keras.ops.min(probabilities)


def build():
    return models.mlp(metrics=[spread, "accuracy"])


def test_it_is_refused_as_the_objective_of_a_size_that_is_cut(tmp_path):
    with pytest.raises(keras_tuner.errors.FatalValueError, match="spread"):
        objective = keras_tuner.Objective("spread", "min")
        search = searches.hypermodel(build, (16,), dtype_policy="float32")
        searches.quick(tmp_path, search, objective=objective)


def test_a_trial_says_that_it_is_a_mean_over_micro_batches(tmp_path):
    hypermodel = searches.hypermodel(build, (8, 16), dtype_policy="float32")
    searches.quick(tmp_path, hypermodel)
    whole, cut = kbatch.load_study(tmp_path / "search").trials
    assert not any("spread" in note for note in whole.notes)
    assert any("mean over micro-batches, not over batches: spread," in note for note in cut.notes)
