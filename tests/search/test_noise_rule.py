"""Searches whose learning rate follows the noise scale of the trial of the base batch size."""

import keras
import keras_tuner
import numpy as np
import pytest
import searches
import small_models as models

import kbatch
from kbatch.analysis.learning_rate import learning_rate_ratio

# Labels that follow the inputs: |G|^2 stays above the noise.
X, _ = models.rows(256)
DATA = (X, np.argmax(X[:, :3], axis=1))


def search(directory, kind=keras_tuner.GridSearch, *, epochs=6, batch_sizes=(8, 32), **arguments):
    hypermodel = searches.hypermodel(
        lambda: models.mlp(optimizer=keras.optimizers.Adam(1e-3)),
        batch_sizes,
        learning_rate_scaling="noise",
        micro_batch_size=None,
        dtype_policy="float32",
        **arguments,
    )
    return searches.quick(directory, hypermodel, kind, data=DATA, fit={"epochs": epochs})


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    directory = tmp_path_factory.mktemp("noise-rule")
    search(directory, kbatch.BatchSizeTuner)
    return kbatch.load_study(directory / "search")


def test_whole_batches_have_a_noise_scale(study):
    for trial in study.trials:
        assert trial.accumulation_steps == 1
        assert trial.noise_scale.measurements == 3
        assert len(trial.executions[0].noise_scale_curve) == 6


def test_the_learning_rate_follows_it(study):
    base, large = study.trials
    found = large.executions[0].scaling
    scale = base.noise_scale
    assert found.noise_scale == (scale.value or scale.at_least)
    expected = learning_rate_ratio(
        batch_size=32,
        base_batch_size=8,
        rule="noise",
        noise_scale=found.noise_scale,
        adaptive=True,
    )
    assert large.learning_rate == pytest.approx(1e-3 * expected, rel=1e-5)
    assert (found.rule, found.kappa) == ("noise", 4)
    assert found.beta_2 == pytest.approx(0.999**4)
    assert any("trial 0000, batch size 8" in note for note in large.notes)
    assert searches.noted_columns(study) == {"learning rate": "learning_rate"}


def test_the_base_size_keeps_what_it_was_built_with(study):
    scaling = study.trials[0].executions[0].scaling
    assert (scaling.kappa, scaling.noise_scale, scaling.beta_2) == (1, None, 0.999)
    assert study.trials[0].learning_rate == pytest.approx(1e-3)


def test_a_noise_scale_that_is_not_known_fails_the_trial(tmp_path):
    search(tmp_path, kbatch.BatchSizeTuner, epochs=1)
    first, second = kbatch.load_study(tmp_path / "search").trials
    assert first.status == "completed"
    assert second.status == "failed"
    assert "train it for more epochs" in second.failure


def test_the_base_size_is_one_of_the_sizes():
    with pytest.raises(ValueError, match="base_batch_size=4"):
        searches.hypermodel(learning_rate_scaling="noise", base_batch_size=4)
