"""The noise scale of a trial, from the moments in its epochs."""

import numpy as np
import pytest
from records_factory import make_epochs, make_execution, make_trial, with_moments

from kbatch.analysis.noise_scale import noise_scale_of_runs
from kbatch.records.training_run import noise_scale

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
    assert noise_scale([measured().epochs]).value == pytest.approx(expected)
    assert noise_scale([measured().epochs]) == noise_scale_of_runs([(VARIANCES, NORMS, 23.0)])


def test_a_trial_pools_the_late_halves_of_its_executions():
    trial = make_trial(64, measured(), make_execution(), measured(2 * VARIANCES))
    expected = 1.5 * VARIANCES[6:].mean() / NORMS[6:].mean()
    assert trial.noise_scale.value == pytest.approx(expected)
