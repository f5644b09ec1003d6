"""The noise scale of a trial, from the moments in its epochs."""

import dataclasses

import numpy as np
import pytest
from records_factory import make_epochs, make_execution, make_study, make_trial, with_moments

from kbatch.analysis.noise_scale import noise_scale_of_runs
from kbatch.records.json_codec import read_record
from kbatch.study.study import Study

RNG = np.random.default_rng(0)
VARIANCES = 90.0 + RNG.normal(size=12)
NORMS = 3.0 + 0.1 * RNG.normal(size=12)


def measured(variances=VARIANCES, norms=NORMS, updates=23, batch_size=64):
    epochs = make_epochs([0.5] * len(variances), updates=updates)
    return make_execution(
        batch_size, epochs=with_moments(epochs, zip(variances, norms, strict=True))
    )


def test_it_is_that_of_the_late_half():
    expected = VARIANCES[6:].mean() / NORMS[6:].mean()
    assert measured().noise_scale.value == pytest.approx(expected)
    assert measured().noise_scale == noise_scale_of_runs([(VARIANCES, NORMS, 23.0)])


def test_the_curve_has_a_point_an_epoch():
    curve = measured([90.0, None, 60.0, -1.0], [3.0, 2.0, -0.1, 2.0]).noise_scale_curve
    assert curve == {0: 30.0, 2: None, 3: 0.0}


def test_a_short_epoch_weighs_less():
    epochs = measured([10.0, 20.0, 30.0], [1.0, 1.0, 1.0]).epochs
    short = dataclasses.replace(epochs[2], updates=0)
    run = make_execution(epochs=(*epochs[:2], short))
    assert run.noise_scale.value == pytest.approx((23 * 10 + 23 * 20 + 30) / 47)


def test_a_trial_pools_the_late_halves_of_its_executions():
    trial = make_trial(64, measured(), make_execution(), measured(2 * VARIANCES))
    expected = 1.5 * VARIANCES[6:].mean() / NORMS[6:].mean()
    assert trial.noise_scale.value == pytest.approx(expected)


def test_the_table_has_it_with_its_interval(tmp_path):
    resolved, noisy = measured(batch_size=16), measured(norms=0.3 * np.sin(np.arange(12)))
    study = make_study(make_trial(16, resolved), make_trial(64, noisy), make_trial(128))
    study.save(tmp_path / "study.json")
    scale = resolved.noise_scale
    for executions in (False, True):
        table = read_record(Study, tmp_path / "study.json").to_dataframe(executions=executions)
        columns = ["noise_scale", "noise_scale_low", "noise_scale_high"]
        first, second, third = table[columns].astype(float).to_numpy()
        np.testing.assert_allclose(first, [scale.value, scale.low, scale.high])
        np.testing.assert_allclose(second, [np.nan, noisy.noise_scale.low, np.nan])
        assert noisy.noise_scale.low > 0
        assert np.isnan(third).all()
