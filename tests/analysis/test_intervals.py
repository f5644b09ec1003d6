"""Intervals of means, medians, quantiles and ratios, and how often they hold the truth."""

import math

import numpy as np
import pytest
from scipy import stats

from kbatch.analysis.intervals import (
    calls_for_quantile,
    mean_interval,
    median_interval,
    over_rounds,
    quantile_upper_bound,
    ratio_of_estimates,
    ratio_of_means,
    ratio_over_rounds,
    t_quantile,
)


@pytest.mark.parametrize("n", [3, 4, 10, 31, 32, 60, 500])
def test_mean_interval_is_students_t(n):
    values = np.random.default_rng(n).normal(5, 2, size=n)
    interval = mean_interval(values)
    low, high = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=stats.sem(values))
    np.testing.assert_allclose([interval.low, interval.high], [low, high], rtol=3e-4)


def test_intervals_need_three_values_or_six_for_a_median():
    assert mean_interval([0.5, 0.7]) is median_interval(5 * [1.0]) is over_rounds([]) is None
    assert over_rounds([1.0, 1.1]).ends is None
    assert over_rounds([0.8, 1.3, 1.1, 0.9, 1.0, 1.2, 1.05]).n == 7


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (12, 3), (20, 6), (100, 40)])
def test_median_interval_has_the_ranks_of_the_tables(count, rank):
    interval = median_interval(list(range(1, count + 1)))
    assert (interval.low, interval.high) == (rank, count + 1 - rank)


def bound_of(values, quantile, confidence):
    """Naive reference: the first rank k with P(Binomial(n, q) < k) >= confidence."""
    n, below = len(values), 0.0
    for k in range(1, n + 1):
        below += math.comb(n, k - 1) * quantile ** (k - 1) * (1 - quantile) ** (n - k + 1)
        if below >= confidence:
            return sorted(values)[k - 1]
    return None


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_quantile_upper_bound_is_the_order_statistic_of_the_definition(quantile, confidence):
    for n in (1, 3, 10, 58, 59, 60, 93, 299, 500):
        values = np.random.default_rng(n).exponential(size=n)
        values[0] = math.inf  # It counts as the slowest call.
        found = quantile_upper_bound(values, quantile=quantile, confidence=confidence)
        assert found == bound_of(values.tolist(), quantile, confidence)


@pytest.mark.parametrize(("quantile", "calls"), [(0.5, 5), (0.9, 29), (0.95, 59), (0.99, 299)])
def test_calls_for_quantile_is_the_smallest_number_with_a_bound(quantile, calls):
    assert calls_for_quantile(np.float32(quantile)) == calls
    assert quantile_upper_bound(np.arange(calls), quantile=quantile) == calls - 1
    assert quantile_upper_bound(np.arange(calls - 1), quantile=quantile) is None


@pytest.mark.parametrize("change", [{"quantile": 0}, {"quantile": 95}, {"confidence": 1.0}])
def test_quantile_upper_bound_refuses_probabilities_out_of_range(change):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"`{name}` must be between.*{name}={value}"):
        quantile_upper_bound([1.0], **({"quantile": 0.95} | change))


COVARIANCE = np.array([[0.04, 0.01], [0.01, 0.02]])
GRID = np.linspace(0, 200, 400_001)


def compatible(r, n, d, covariance, df):
    """The definition: n - r d lies within t standard errors of 0."""
    variance = covariance[0, 0] - 2 * r * covariance[0, 1] + r**2 * covariance[1, 1]
    return (n - r * d) ** 2 <= t_quantile(df) ** 2 * variance


@pytest.mark.parametrize(("n", "d"), [(3.0, 1.0), (0.1, 2.0), (1.0, 0.6), (5.0, 0.5)])
def test_ratio_of_estimates_interval_holds_the_compatible_ratios_only(n, d):
    ratio = ratio_of_estimates(n, d, covariance=COVARIANCE, degrees_of_freedom=9)
    inside = GRID[compatible(GRID, n, d, COVARIANCE, 9)]
    np.testing.assert_allclose([ratio.low, ratio.high], [inside[0], inside[-1]], atol=1e-3)
    np.testing.assert_allclose(ratio.value, n / d)
    negative = ratio_of_estimates(-n / 50, d, covariance=COVARIANCE, degrees_of_freedom=9)
    assert negative.value == negative.low == 0 < negative.high


@pytest.mark.parametrize("d", [0.2, 0.01, 0.0, -0.2])
def test_ratio_of_estimates_denominator_near_zero_gives_a_lower_bound(d):
    ratio = ratio_of_estimates(3.0, d, covariance=COVARIANCE, degrees_of_freedom=9)
    assert (ratio.value, ratio.ends) == (None, None)
    inside = GRID[compatible(GRID, 3.0, d, COVARIANCE, 9)]
    np.testing.assert_allclose(ratio.low, inside[0], atol=1e-3)


@pytest.mark.parametrize("units", [(1e-90, 1.0), (1e-90, 1e90)])
def test_ratio_of_estimates_scales_with_the_units(units):
    a, b = units
    plain = ratio_of_estimates(3.0, 1.0, covariance=COVARIANCE, degrees_of_freedom=9)
    covariance = COVARIANCE * np.outer(units, units)
    other = ratio_of_estimates(3.0 * a, 1.0 * b, covariance=covariance, degrees_of_freedom=9)
    np.testing.assert_allclose(other.high, plain.high * a / b)
    np.testing.assert_allclose(other.low, plain.low * a / b)


@pytest.mark.parametrize("weights", [np.ones(12), np.arange(1.0, 13.0)])
def test_ratio_of_means_covers_the_true_ratio_in_95_of_100_cases(weights):
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(2000):
        noise = rng.normal(size=(2, 12)) / np.sqrt(weights)
        found = ratio_of_means(6 + noise[0], 2 + noise[0] / 3 + noise[1] / 2, weights=weights)
        covered.append(found.low <= 3 <= found.high)
    assert 0.93 < np.mean(covered) < 0.97


@pytest.mark.parametrize("rounds", [4, 9, 15])
def test_ratio_over_rounds_of_the_inverse_has_the_inverse_interval(rounds):
    numerator, denominator = np.random.default_rng(1).lognormal(0, 0.2, (2, rounds))
    ratio = ratio_over_rounds(numerator, denominator)
    inverse = ratio_over_rounds(denominator, numerator)
    assert (inverse.low, inverse.high) == pytest.approx((1 / ratio.high, 1 / ratio.low))
    assert ratio.low < ratio.value < ratio.high
    assert ratio.value == pytest.approx(np.median(numerator / denominator))


@pytest.mark.parametrize("rounds", [5, 9, 12, 17])
def test_over_rounds_interval_holds_the_true_median_in_95_of_100(rounds):
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        interval = over_rounds(rng.lognormal(0, 0.3, rounds))
        held += interval.low <= 1 <= interval.high
    assert 0.94 <= held / 2000 <= 1
