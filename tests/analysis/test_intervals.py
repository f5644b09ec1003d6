import numpy as np
import pytest
from scipy import stats

from kbatch.analysis.intervals import mean_interval


@pytest.mark.parametrize("n", [3, 4, 10, 31, 32, 60, 500])
def test_it_is_students_interval(n):
    values = np.random.default_rng(n).normal(5, 2, size=n)
    interval = mean_interval(values)
    low, high = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=stats.sem(values))
    np.testing.assert_allclose([interval.low, interval.high], [low, high], rtol=3e-4)


@pytest.mark.parametrize("n", [3, 4, 12])
def test_it_covers_the_true_mean_in_95_of_100_cases(n):
    draws = np.random.default_rng(0).normal(5, 2, size=(4000, n))
    intervals = [mean_interval(values) for values in draws]
    covered = np.mean([interval.low <= 5 <= interval.high for interval in intervals])
    # Four standard errors of a share of 95 % over 4000 cases.
    assert abs(covered - 0.95) < 4 * np.sqrt(0.95 * 0.05 / 4000)


def test_equal_values_have_an_interval_without_width():
    interval = mean_interval([0.9, 0.9, 0.9])
    assert interval.low == interval.high == pytest.approx(0.9)


@pytest.mark.parametrize("values", [[], [0.9], [0.5, 0.7]])
def test_fewer_than_three_values_have_none(values):
    assert mean_interval(values) is None
