import numpy as np
import pytest

from kbatch.analysis.goodput import fit_steps_to_target

SIZES = np.array([4, 8, 16, 32, 64, 128, 256, 512, 1024])


def steps(sizes, fewest=40.0, critical=128.0):
    return fewest * (1 + critical / np.asarray(sizes))


@pytest.mark.parametrize("size", [1, 30, 128, 5000])
def test_steps_and_examples_trade_as_in_equation_2_11(size):
    fit = fit_steps_to_target(SIZES, steps(SIZES))
    updates = fit.steps(size)
    trade = (updates / fit.fewest_steps - 1) * (size * updates / fit.fewest_examples - 1)
    np.testing.assert_allclose(trade, 1)


def test_at_the_critical_size_both_are_twice_their_least():
    fit = fit_steps_to_target(SIZES, steps(SIZES))
    size = fit.critical_batch_size.value
    np.testing.assert_allclose(fit.steps(size), 2 * fit.fewest_steps)
    np.testing.assert_allclose(size * fit.steps(size), 2 * fit.fewest_examples)


def test_the_interval_covers_the_critical_size_in_95_of_100_cases():
    rng = np.random.default_rng(0)
    sizes = np.repeat(SIZES, 2)
    covered = []
    for _ in range(150):
        found = fit_steps_to_target(sizes, steps(sizes) * rng.lognormal(0, 0.1, len(sizes)))
        interval = found.critical_batch_size
        covered.append(interval.low <= 128 <= interval.high)
    assert 0.90 < np.mean(covered) < 0.97


def test_trials_far_below_the_critical_size_bound_it_from_below_alone():
    rng = np.random.default_rng(0)
    sizes = np.repeat([4, 8, 16, 32], 3)
    trials = steps(sizes, fewest=1.0, critical=50_000) * rng.lognormal(0, 0.05, len(sizes))
    critical = fit_steps_to_target(sizes, trials).critical_batch_size
    assert critical.value is None
    assert 32 < critical.low < 50_000


def test_the_digits_curve_has_a_critical_size_near_its_bend():
    # Updates to 95 % of a one-layer net on scikit-learn's digits, SGD with the linear rule.
    updates = [2256, 1128, 587, 296, 146, 77, 48, 40, 36]
    fit = fit_steps_to_target(SIZES, updates)
    assert 200 < fit.critical_batch_size.value < 500
    np.testing.assert_allclose([fit.steps(size) for size in SIZES], updates, rtol=0.25)


@pytest.mark.parametrize("sizes", [[4, 8, 0], [4, 8, -1], [4, 8, np.inf]])
def test_a_batch_size_must_be_positive(sizes):
    with pytest.raises(ValueError, match="`batch_sizes` must be positive and finite"):
        fit_steps_to_target(sizes, [300, 200, 100])
