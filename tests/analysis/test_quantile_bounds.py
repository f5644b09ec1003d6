import math

import numpy as np
import pytest

from kbatch.analysis.intervals import calls_for_quantile, quantile_upper_bound


def bound_of(values, quantile, confidence):
    """The naive reference: the first rank k with P(Binomial(n, q) < k) >= confidence."""
    n, below = len(values), 0.0
    for k in range(1, n + 1):
        below += math.comb(n, k - 1) * quantile ** (k - 1) * (1 - quantile) ** (n - k + 1)
        if below >= confidence:
            return sorted(values)[k - 1]
    return None


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_it_is_the_order_statistic_of_the_definition(quantile, confidence):
    for n in (1, 3, 10, 58, 59, 60, 93, 299, 500):
        values = np.random.default_rng(n).exponential(size=n)
        found = quantile_upper_bound(values, quantile=quantile, confidence=confidence)
        assert found == bound_of(values.tolist(), quantile, confidence)


@pytest.mark.parametrize(("quantile", "calls"), [(0.5, 5), (0.9, 29), (0.95, 59), (0.99, 299)])
def test_the_calls_needed(quantile, calls):
    assert calls_for_quantile(quantile) == calls
    enough = quantile_upper_bound(np.arange(calls), quantile=quantile)
    assert enough == calls - 1
    few = quantile_upper_bound(np.arange(calls - 1), quantile=quantile)
    assert few is None


@pytest.mark.parametrize(("quantile", "calls"), [(0.5, 20), (0.95, 59), (0.95, 200), (0.99, 400)])
def test_it_bounds_the_true_quantile_as_often_as_it_says(quantile, calls):
    draws = np.random.default_rng(0).exponential(size=(2000, calls))
    true = -math.log(1 - quantile)
    held = [quantile_upper_bound(values, quantile=quantile) >= true for values in draws]
    # Four standard errors below; the confidence is a least one, for ranks are whole.
    assert np.mean(held) > 0.95 - 4 * np.sqrt(0.05 * 0.95 / 2000)


def test_an_infinite_call_counts_as_slow():
    assert quantile_upper_bound([*range(58), math.inf], quantile=0.95) == math.inf


@pytest.mark.parametrize("change", [{"quantile": 0}, {"quantile": 95}, {"confidence": 1.0}])
def test_probabilities_lie_between_zero_and_one(change):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"`{name}` must lie between.*{name}={value}"):
        quantile_upper_bound([1.0], **({"quantile": 0.95} | change))


def test_a_value_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="`values` must be one number a call"):
        quantile_upper_bound([1.0, math.nan], quantile=0.95)
