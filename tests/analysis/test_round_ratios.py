import math

import numpy as np
import pytest

from kbatch.analysis.intervals import over_rounds, ratio_over_rounds

ROUNDS = [0.8, 1.3, 1.1, 0.9, 1.0, 1.2, 1.05]


@pytest.mark.parametrize("rounds", [3, 8, 12])
def test_the_interval_scales_with_the_values_and_holds_the_median(rounds):
    values = np.random.default_rng(rounds).lognormal(0, 0.1, rounds)
    one, tenfold = over_rounds(values), over_rounds(10 * values)
    assert one.value == pytest.approx(np.median(values))
    assert one.low < one.value < one.high
    assert (tenfold.value, tenfold.low, tenfold.high) == pytest.approx(
        (10 * one.value, 10 * one.low, 10 * one.high)
    )


@pytest.mark.parametrize("rounds", [4, 9, 15])
def test_the_inverse_ratio_has_the_inverse_interval(rounds):
    numerator, denominator = np.random.default_rng(1).lognormal(0, 0.2, (2, rounds))
    ratio = ratio_over_rounds(numerator, denominator)
    inverse = ratio_over_rounds(denominator, numerator)
    assert (inverse.low, inverse.high) == pytest.approx((1 / ratio.high, 1 / ratio.low))


@pytest.mark.parametrize("rounds", [5, 9, 12, 17])
def test_the_interval_holds_the_true_median_in_95_of_100(rounds):
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        interval = over_rounds(rng.lognormal(0, 0.3, rounds))
        held += interval.low <= 1 <= interval.high
    assert 0.94 <= held / 2000 <= 1


@pytest.mark.parametrize("rounds", [9, 12, 17, 30, 40])
def test_as_many_rounds_are_left_out_as_the_binomial_distribution_allows(rounds):
    interval = over_rounds(range(1, rounds + 1))
    ends = [math.comb(rounds, k) / 2**rounds for k in range(rounds)]
    allowed = max(k for k in range(rounds // 2) if 2 * sum(ends[: k + 1]) <= 0.05)
    assert (interval.low, interval.high) == (1 + allowed, rounds - allowed)


def test_few_rounds_have_no_interval_and_none_no_estimate():
    assert over_rounds([]) is None
    assert over_rounds([1.0, 1.1]).ends is None
    assert over_rounds(ROUNDS).n == 7
