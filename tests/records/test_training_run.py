"""Values derived from the record of a run: target, GPU usage and noise scale."""

import math

import numpy as np
import pytest
from records_factory import (
    make_epochs,
    make_execution,
    make_gpu,
    make_trial,
    make_usage,
    with_moments,
)

from kbatch.analysis.noise_scale import noise_scale_of_runs
from kbatch.records.machine import USAGE_METRICS
from kbatch.records.training_run import Target, epochs_to_target, noise_scale, seconds_to_target
from kbatch.study.trial import Objective

RISING = (0.2, 0.5, 0.4, 0.9)


def epochs(values=RISING):
    return make_epochs(values, examples=100, updates=7, train_s=0.5)


def naive(target, values):
    """Count the epochs up to the first one that meets the target."""
    for number, value in enumerate(values, start=1):
        if (target.direction == "max" and value >= target.value) or (
            target.direction == "min" and value <= target.value
        ):
            return number
    return None


@pytest.mark.parametrize("direction", ["max", "min"])
@pytest.mark.parametrize("value", [0.1, 0.2, 0.45, 0.5, 0.9, 0.95])
def test_seconds_to_target_of_first_epoch_that_meets_it(direction, value):
    target = Target("val_accuracy", value, direction)
    count, seconds = naive(target, RISING), seconds_to_target(target, epochs())
    if count is None:
        assert seconds is None
    else:
        assert seconds == pytest.approx(0.5 * count)
        assert epochs_to_target(target, epochs()) == epochs()[:count]


def test_target_not_met_by_missing_value():
    target = Target("val_auc", 0.0, "max")
    assert seconds_to_target(target, epochs()) is None
    assert not target.is_met(None)
    assert not target.is_met(math.nan)
    assert seconds_to_target(Target("val_accuracy", 0.5, "max"), ()) is None


@pytest.mark.parametrize("direction", ["max", "min"])
@pytest.mark.parametrize("value", [0.1, 0.3, 0.9, 0.95])
def test_target_met_by_float32_value(direction, value):
    target = Target("loss", value, direction)
    assert target.is_met(float(np.float32(value)))
    assert not target.is_met(value + (1e-5 if direction == "min" else -1e-5))


def executed(*runs, value=0.5):
    target = Target("val_accuracy", value, "max")
    return make_trial(
        64,
        *(make_execution(64, epochs=epochs(run), target=target) for run in runs),
        objective=Objective("seconds_to_target", "min"),
    )


@pytest.mark.parametrize(("last", "mean_s"), [((0.1, 0.2, 0.5), 1.0), ((0.1, 0.2), None)])
def test_trial_seconds_to_target_is_mean_if_all_met(last, mean_s):
    trial = executed((0.5,), (0.1, 0.6), last)
    assert trial.status == "completed"
    assert trial.seconds_to_target == trial.judged_value == mean_s


def test_usage_adds_gpus():
    usage = make_usage(
        make_gpu(energy_j=100.0, power_w=200.0, utilization=0.5),
        make_gpu(energy_j=300.0, power_w=600.0, utilization=0.9),
    )
    assert (usage.gpu_energy_j, usage.gpu_power_w) == (400.0, 800.0)
    assert usage.gpu_utilization == pytest.approx(0.7)
    assert usage.joules_per_sample(200) == 2.0


@pytest.mark.parametrize("figure", ["energy_j", "power_w", "utilization"])
def test_usage_unknown_if_one_gpu_lacks_it(figure):
    usage = make_usage(make_gpu(), make_gpu(**{figure: None}))
    names = {"energy_j": "joules_per_sample", "power_w": "gpu_power_w"}
    missing = names.get(figure, "gpu_utilization")
    assert set(usage.metrics(100)) == set(USAGE_METRICS) - {missing}


RNG = np.random.default_rng(0)
VARIANCES = 90.0 + RNG.normal(size=12)
NORMS = 3.0 + 0.1 * RNG.normal(size=12)


def measured(variances=VARIANCES, norms=NORMS, updates=23, batch_size=64):
    epochs = make_epochs([0.5] * len(variances), updates=updates)
    return make_execution(
        batch_size, epochs=with_moments(epochs, zip(variances, norms, strict=True))
    )


def test_noise_scale_of_late_half():
    expected = VARIANCES[6:].mean() / NORMS[6:].mean()
    assert noise_scale([measured().epochs]).value == pytest.approx(expected)
    assert noise_scale([measured().epochs]) == noise_scale_of_runs([(VARIANCES, NORMS, 23.0)])


def test_trial_noise_scale_pools_late_halves():
    trial = make_trial(64, measured(), make_execution(), measured(2 * VARIANCES))
    expected = 1.5 * VARIANCES[6:].mean() / NORMS[6:].mean()
    assert trial.noise_scale.value == pytest.approx(expected)
