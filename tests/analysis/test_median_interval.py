import numpy as np
import pytest

from kbatch.analysis.intervals import median_interval


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (12, 3), (20, 6), (100, 40)])
def test_the_ranks_are_those_of_the_tables(count, rank):
    interval = median_interval(list(range(1, count + 1)))
    assert (interval.low, interval.high) == (rank, count + 1 - rank)


def test_five_values_have_no_interval():
    assert median_interval([1.0] * 5) is None


@pytest.mark.parametrize("count", [6, 7, 15, 40])
def test_it_holds_the_median_of_a_skewed_distribution_as_often_as_it_says(count):
    draws = np.random.default_rng(count).lognormal(sigma=1.5, size=(4000, count))
    held = [interval.low <= 1 <= interval.high for interval in map(median_interval, draws)]
    assert 0.94 <= np.mean(held) <= 0.99
