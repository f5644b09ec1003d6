"""Statistical efficiency, goodput, and the steps to a target."""

import numpy as np
import pytest

from kbatch.analysis.goodput import fit_steps_to_target, goodput, statistical_efficiency


@pytest.mark.parametrize("noise_scale", [0.0, 0.5, 100.0, 1e6])
def test_statistical_efficiency_is_one_at_the_base_and_falls(noise_scale):
    given = {"noise_scale": noise_scale, "base_batch_size": 64}
    values = [statistical_efficiency(size, **given) for size in (1, 7, 64, 1000)]
    assert values == sorted(values, reverse=True) and values[2] == 1


def test_goodput_is_inverse_to_the_time_to_a_target():
    def time_s(b):
        return (1 + 100 / b) * (0.01 + 1e-4 * b)

    def value(b, base):
        return goodput(b, 0.01 + 1e-4 * b, noise_scale=100, base_batch_size=base)

    for base in (1, 64):
        np.testing.assert_allclose(value(512, base) / value(16, base), time_s(16) / time_s(512))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"base_batch_size": 0}, "base_batch_size=0"),
        ({"step_time_s": 0.0}, r"step_time_s=0\.0"),
        ({"noise_scale": -1.0}, r"noise_scale=-1\.0"),
        ({"noise_scale": np.nan}, "noise_scale=nan"),
    ],
)
def test_goodput_names_the_argument_out_of_range(change, message):
    arguments = {"batch_size": 8, "step_time_s": 1.0, "noise_scale": 9.0, "base_batch_size": 8}
    arguments |= change
    with pytest.raises(ValueError, match=message):
        goodput(arguments.pop("batch_size"), arguments.pop("step_time_s"), **arguments)


SIZES = np.array([4, 8, 16, 32, 64, 128, 256, 512, 1024])


def steps(sizes, fewest=40.0, critical=128.0):
    return fewest * (1 + critical / np.asarray(sizes))


@pytest.mark.parametrize("size", [1, 30, 128, 5000])
def test_fit_steps_to_target_solves_equation_2_11(size):
    fit = fit_steps_to_target(SIZES, steps(SIZES))
    updates = fit.steps(size)
    trade = (updates / fit.fewest_steps - 1) * (size * updates / fit.fewest_examples - 1)
    np.testing.assert_allclose(trade, 1)


def test_fit_steps_to_target_far_below_the_critical_size_gives_a_lower_bound():
    rng = np.random.default_rng(0)
    sizes = np.repeat([4, 8, 16, 32], 3)
    trials = steps(sizes, fewest=1.0, critical=50_000) * rng.lognormal(0, 0.05, len(sizes))
    critical = fit_steps_to_target(sizes, trials).critical_batch_size
    assert critical.value is None
    assert 32 < critical.low < 50_000


@pytest.mark.parametrize(
    ("sizes", "steps"), [([4, 8, 0], [3, 2, 1]), ([4, 8, np.inf], [3, 2, 1]), ([4, 8, 9], [3, 2])]
)
def test_fit_steps_to_target_refuses_bad_trials(sizes, steps):
    with pytest.raises(ValueError, match="`batch_sizes` and `steps` must be positive and finite"):
        fit_steps_to_target(sizes, steps)
