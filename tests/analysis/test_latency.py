"""The latency of a call over the batch size, and the sizes that are read off it."""

import numpy as np
import pytest

from kbatch.analysis.scaling_curve import (
    batch_size_within,
    efficient_batch_size,
    fastest_batch_size,
    fit_latency,
    knee_batch_size,
)

PLACES = 2 ** np.arange(9)
SIZES = np.repeat(PLACES, 3)
R_INF, N_HALF = 5000.0, 20.0


def hockney(sizes):
    return (sizes + N_HALF) / R_INF


def stairs(sizes):
    """A kernel that takes 32 examples at a time, and memory that runs short past 128."""
    sizes = np.asarray(sizes)
    return 0.004 * np.ceil(sizes / 32) ** np.where(sizes > 128, 1.3, 0.9)


def scattered(times, noise=0.01, seed=0):
    return times * (1 + noise * np.random.default_rng(seed).normal(size=len(times)))


def exact(law):
    return fit_latency(SIZES, law(SIZES) * np.tile([0.999, 1.0, 1.001], len(PLACES)))


def test_the_knee_of_a_line_is_the_largest_throughput_over_latency():
    sizes = np.arange(1, 300)
    expected = sizes[np.argmax(sizes / hockney(sizes) ** 2)]
    assert knee_batch_size(exact(hockney)).value == expected == N_HALF


@pytest.mark.parametrize("share", [0.5, 0.8, 0.9])
def test_the_efficient_size_of_a_line_is_the_smallest_with_its_share_of_the_peak(share):
    sizes = np.arange(1, 1000)
    expected = sizes[np.argmax(sizes / hockney(sizes) >= share * R_INF)]
    found = efficient_batch_size(exact(hockney), share=share).value
    assert abs(found - expected) <= 1


@pytest.mark.parametrize("law", [hockney, stairs])
@pytest.mark.parametrize("latency_s", [0.0043, 0.0061, 0.0111, 0.0301])
def test_the_size_within_a_target_is_the_largest_that_keeps_to_it(law, latency_s):
    latency = exact(law)
    sizes = np.arange(1, 257)
    expected = max(b for b in sizes if latency.latency_s(b) <= latency_s)
    answer = batch_size_within(latency, latency_s=latency_s)
    assert answer.value == expected
    assert answer.low <= expected + 1
    assert answer.high >= expected


def test_past_the_measured_sizes_a_line_extrapolates():
    answer = batch_size_within(exact(hockney), latency_s=0.1)
    assert 470 <= answer.value <= 490
    assert efficient_batch_size(exact(hockney), share=0.99).value > 256


def test_intervals_of_a_line_cover_the_size_in_95_of_100_cases():
    covered = []
    for seed in range(150):
        latency = fit_latency(SIZES, scattered(hockney(SIZES), 0.05, seed))
        answers = {
            N_HALF: knee_batch_size(latency),
            9 * N_HALF: efficient_batch_size(latency),
            130: batch_size_within(latency, latency_s=0.03),
        }
        if latency.follows_line:
            covered.append([a.low <= n <= a.high for n, a in answers.items()])
    assert len(covered) > 142
    shares = np.mean(covered, axis=0)
    assert np.all((shares > 0.90) & (shares < 0.97))


def test_intervals_of_an_interpolation_mostly_cover_the_size():
    # Where the true curve is the interpolation's own: straight pieces in logarithms.
    def law(sizes):
        return np.exp(np.interp(np.log2(sizes), [0, 4, 8], np.log([0.004, 0.005, 0.08])))

    truth = float(np.exp2(np.interp(np.log(0.02), np.log([0.005, 0.08]), [4, 8])))
    found = [fit_latency(SIZES, scattered(law(SIZES), 0.03, seed)) for seed in range(80)]
    assert not any(latency.follows_line for latency in found)
    answers = [batch_size_within(latency, latency_s=0.02) for latency in found]
    covered = [a.low <= truth <= a.high for a in answers]
    # It takes both neighbours to be off at once, so it covers somewhat more than 95 %.
    assert np.mean(covered) > 0.93


def test_on_a_staircase_the_same_is_read_off_the_measured_sizes():
    latency = exact(stairs)
    assert not latency.follows_line
    rates = PLACES / stairs(PLACES)
    assert knee_batch_size(latency).value == PLACES[np.argmax(rates / stairs(PLACES))] == 32
    assert fastest_batch_size(latency).value == PLACES[np.argmax(rates)] == 128
    size = efficient_batch_size(latency).value
    assert size / latency.latency_s(size) >= 0.9 * np.max(rates) * 0.999
    assert (size - 1) / latency.latency_s(size - 1) < 0.9 * np.max(rates)


def test_sizes_that_noise_does_not_tell_apart_share_the_interval():
    plateau = 2.0 ** np.maximum(np.log2(SIZES), 4) / 1000
    answer = fastest_batch_size(fit_latency(SIZES, scattered(plateau, 0.02)))
    assert (answer.low, answer.high) == (16, 256)


def test_an_interval_of_what_was_measured_once_is_unknown_unless_a_line_holds():
    latency = fit_latency(PLACES, np.full(len(PLACES), 0.004))
    assert fastest_batch_size(latency).ends is None
    assert batch_size_within(latency, latency_s=0.01).ends is None
    assert efficient_batch_size(latency).ends is None


@pytest.mark.parametrize("share", [0.0, 1.0, 90])
def test_a_share_lies_between_zero_and_one(share):
    with pytest.raises(ValueError, match=f"share={share}"):
        efficient_batch_size(exact(hockney), share=share)


@pytest.mark.parametrize("latency_s", [0.0, -1.0, np.nan, np.inf])
def test_a_target_is_positive(latency_s):
    with pytest.raises(ValueError, match=f"latency_s={latency_s}"):
        batch_size_within(exact(hockney), latency_s=latency_s)


SCATTER = 1 + 0.01 * np.tile([-1.0, 0.0, 1.0], 9)


def test_both_parameters_are_found():
    latency = fit_latency(SIZES, hockney(SIZES) * SCATTER)
    assert latency.follows_line
    peak, half = latency.peak_throughput, latency.half_peak_batch_size
    np.testing.assert_allclose([peak.value, half.value], [R_INF, N_HALF], rtol=1e-3)
    assert peak.low < R_INF < peak.high
    assert half.low < N_HALF < half.high


def test_intervals_cover_both_parameters_in_95_of_100_cases():
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(150):
        found = fit_latency(SIZES, hockney(SIZES) * (1 + 0.05 * rng.normal(size=len(SIZES))))
        peak, half = found.peak_throughput, found.half_peak_batch_size
        covered.append([peak.low <= R_INF <= peak.high, half.low <= N_HALF <= half.high])
    shares = np.mean(covered, axis=0)
    assert np.all((shares > 0.90) & (shares < 0.97))


def test_a_staircase_is_interpolated():
    stairs = np.where(SIZES > 32, 0.02, 0.004) * SCATTER
    latency = fit_latency(SIZES, stairs)
    assert not latency.follows_line
    np.testing.assert_allclose([latency.latency_s(16), latency.latency_s(64)], [0.004, 0.02])
    with pytest.raises(ValueError, match="measured range"):
        latency.latency_s(512)


def test_a_flat_latency_has_no_peak_but_bounds():
    flat = 0.004 * (1 + 0.01 * np.random.default_rng(0).normal(size=len(SIZES)))
    latency = fit_latency(SIZES, flat)
    assert not latency.follows_line
    assert latency.peak_throughput.value is None
    assert latency.half_peak_batch_size.value is None
    assert latency.half_peak_batch_size.low > 256
    assert latency.peak_throughput.low > 256 / 0.004


MEASURED = [1, 2, 4, 8, 16]
LATENCIES = [1.0, 1.1, 1.2, 4.0, 9.0]


def is_best_not_descending(values, fitted):
    """Whether the fit is the projection on the non-descending sequences."""
    rng = np.random.default_rng(0)
    rivals = np.sort(values + rng.normal(size=(5000, len(values))), axis=1)
    return np.sum((fitted - values) ** 2) <= np.min(np.sum((rivals - values) ** 2, axis=1))


def test_between_sizes_it_is_straight_in_logarithms():
    curve = fit_latency(MEASURED, LATENCIES)
    np.testing.assert_allclose(curve.interpolated_s(np.sqrt(4 * 8)), np.sqrt(1.2 * 4.0))


@pytest.mark.parametrize("seed", range(5))
def test_it_never_descends_and_is_the_nearest_such(seed):
    values = np.random.default_rng(seed).normal(size=6)
    curve = fit_latency(2 ** np.arange(6), np.exp(values))
    fitted = np.log(curve.latencies_s)
    assert np.all(np.diff(fitted) >= 0)
    assert is_best_not_descending(values, fitted)


def test_pools_are_weighted_by_their_measurements():
    curve = fit_latency([1, 2, 2, 2, 4], np.exp([1.0, 0.6, 0.6, 0.6, 2.0]))
    np.testing.assert_allclose(np.log(curve.latencies_s), [0.7, 0.7, 2.0])


@pytest.mark.parametrize("size", [1, 1.5, 3, 7.9, 15.9])
def test_inverting_gives_the_size_back(size):
    curve = fit_latency(MEASURED, LATENCIES)
    np.testing.assert_allclose(curve.largest_within(curve.interpolated_s(size)), size)


def test_a_target_outside_the_measured_latencies():
    curve = fit_latency(MEASURED, LATENCIES)
    assert curve.largest_within(0.99) is None
    assert curve.largest_within(100.0) == 16


def test_the_smallest_size_of_a_rate_has_it_and_no_smaller_one():
    curve = fit_latency(MEASURED, LATENCIES)
    for rate in (1.5, 2.5, 3.3):
        size = curve.smallest_of_rate(rate)
        np.testing.assert_allclose(size / curve.interpolated_s(size), rate)
        below = np.linspace(1, size * 0.999, 50)
        assert all(b / curve.interpolated_s(b) < rate for b in below)
    assert curve.smallest_of_rate(0.5) == 1
    assert curve.smallest_of_rate(10.0) is None


@pytest.mark.parametrize("size", [0.5, 17])
def test_it_does_not_extrapolate(size):
    with pytest.raises(ValueError, match=f"measured range, 1 to 16.*batch_size={size}"):
        fit_latency(MEASURED, LATENCIES).interpolated_s(size)
