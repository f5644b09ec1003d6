import numpy as np
import pytest

from kbatch.analysis.intervals import ratio_of_estimates, ratio_of_means, t_quantile

COVARIANCE = np.array([[0.04, 0.01], [0.01, 0.02]])


def compatible(r, n, d, covariance, df):
    """The definition: n - r d lies within t standard errors of 0."""
    variance = covariance[0, 0] - 2 * r * covariance[0, 1] + r**2 * covariance[1, 1]
    return (n - r * d) ** 2 <= t_quantile(df) ** 2 * variance


@pytest.mark.parametrize(("n", "d"), [(3.0, 1.0), (0.1, 2.0), (1.0, 0.6), (5.0, 0.5)])
def test_the_interval_holds_what_is_compatible_and_nothing_else(n, d):
    ratio = ratio_of_estimates(n, d, covariance=COVARIANCE, degrees_of_freedom=9)
    grid = np.linspace(0, 200, 400_001)
    inside = grid[compatible(grid, n, d, COVARIANCE, 9)]
    np.testing.assert_allclose([ratio.low, ratio.high], [inside[0], inside[-1]], atol=1e-3)
    np.testing.assert_allclose(ratio.value, n / d)


@pytest.mark.parametrize("d", [0.2, 0.01, 0.0, -0.2])
def test_a_denominator_that_may_be_zero_gives_a_lower_bound_alone(d):
    ratio = ratio_of_estimates(3.0, d, covariance=COVARIANCE, degrees_of_freedom=9)
    grid = np.linspace(0, 200, 400_001)
    assert ratio.value is None
    assert ratio.ends is None
    inside = grid[compatible(grid, 3.0, d, COVARIANCE, 9)]
    np.testing.assert_allclose(ratio.low, inside[0], atol=1e-3)


def test_the_lower_bound_does_not_jump_where_the_value_is_lost():
    edge = t_quantile(9) * np.sqrt(COVARIANCE[1, 1])
    both = [
        ratio_of_estimates(3.0, d, covariance=COVARIANCE, degrees_of_freedom=9)
        for d in (edge * (1 - 1e-9), edge * (1 + 1e-9))
    ]
    assert both[0].value is None
    assert both[1].value is not None
    np.testing.assert_allclose(both[0].low, both[1].low, rtol=1e-6)


def test_a_ratio_is_never_negative():
    ratio = ratio_of_estimates(-0.1, 2.0, covariance=COVARIANCE, degrees_of_freedom=9)
    assert ratio.value == ratio.low == 0 < ratio.high


@pytest.mark.parametrize("units", [(1e-90, 1.0), (1.0, 1e90), (1e-90, 1e-90)])
def test_units_pass_through(units):
    a, b = units
    plain = ratio_of_estimates(3.0, 1.0, covariance=COVARIANCE, degrees_of_freedom=9)
    other = ratio_of_estimates(
        3.0 * a, 1.0 * b, covariance=COVARIANCE * np.outer(units, units), degrees_of_freedom=9
    )
    np.testing.assert_allclose(other.high, plain.high * a / b)
    np.testing.assert_allclose(other.low, plain.low * a / b)


@pytest.mark.parametrize("weights", [np.ones(12), np.arange(1.0, 13.0)])
def test_weighted_means_cover_the_true_ratio_in_95_of_100_cases(weights):
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(2000):
        noise = rng.normal(size=(2, 12)) / np.sqrt(weights)
        found = ratio_of_means(6 + noise[0], 2 + noise[0] / 3 + noise[1] / 2, weights=weights)
        covered.append(found.low <= 3 <= found.high)
    assert 0.93 < np.mean(covered) < 0.97
