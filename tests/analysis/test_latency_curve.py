import numpy as np
import pytest

from kbatch.analysis.scaling_curve import fit_latency

SIZES = [1, 2, 4, 8, 16]
LATENCIES = [1.0, 1.1, 1.2, 4.0, 9.0]


def is_best_not_descending(values, fitted):
    """Whether the fit is the projection on the non-descending sequences."""
    rng = np.random.default_rng(0)
    rivals = np.sort(values + rng.normal(size=(5000, len(values))), axis=1)
    return np.sum((fitted - values) ** 2) <= np.min(np.sum((rivals - values) ** 2, axis=1))


def test_between_sizes_it_is_straight_in_logarithms():
    curve = fit_latency(SIZES, LATENCIES).curve
    np.testing.assert_allclose(curve.latency_s(np.sqrt(4 * 8)), np.sqrt(1.2 * 4.0))


@pytest.mark.parametrize("seed", range(5))
def test_it_never_descends_and_is_the_nearest_such(seed):
    values = np.random.default_rng(seed).normal(size=6)
    curve = fit_latency(2 ** np.arange(6), np.exp(values)).curve
    fitted = np.log(curve.latencies_s)
    assert np.all(np.diff(fitted) >= 0)
    assert is_best_not_descending(values, fitted)


def test_pools_are_weighted_by_their_measurements():
    curve = fit_latency([1, 2, 2, 2, 4], np.exp([1.0, 0.6, 0.6, 0.6, 2.0])).curve
    np.testing.assert_allclose(np.log(curve.latencies_s), [0.7, 0.7, 2.0])


@pytest.mark.parametrize("size", [1, 1.5, 3, 7.9, 15.9])
def test_inverting_gives_the_size_back(size):
    curve = fit_latency(SIZES, LATENCIES).curve
    np.testing.assert_allclose(curve.largest_within(curve.latency_s(size)), size)


def test_a_target_outside_the_measured_latencies():
    curve = fit_latency(SIZES, LATENCIES).curve
    assert curve.largest_within(0.99) is None
    assert curve.largest_within(100.0) == 16


def test_the_smallest_size_of_a_rate_has_it_and_no_smaller_one():
    curve = fit_latency(SIZES, LATENCIES).curve
    for rate in (1.5, 2.5, 3.3):
        size = curve.smallest_of_rate(rate)
        np.testing.assert_allclose(size / curve.latency_s(size), rate)
        below = np.linspace(1, size * 0.999, 50)
        assert all(b / curve.latency_s(b) < rate for b in below)
    assert curve.smallest_of_rate(0.5) == 1
    assert curve.smallest_of_rate(10.0) is None


@pytest.mark.parametrize("size", [0.5, 17])
def test_it_does_not_extrapolate(size):
    with pytest.raises(ValueError, match=f"measured range, 1 to 16.*batch_size={size}"):
        fit_latency(SIZES, LATENCIES).curve.latency_s(size)
