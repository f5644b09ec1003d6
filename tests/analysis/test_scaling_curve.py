"""Lines and curves of times, the batch sizes that follow from them, and slow rounds."""

import numpy as np
import pytest

from kbatch.analysis.scaling_curve import (
    batch_size_within,
    departure,
    efficient_batch_size,
    fastest_batch_size,
    fit_latency,
    fit_line,
    knee_batch_size,
    without_slow_rounds,
)

SIZES = 2.0 ** np.arange(9)
A, B = 2e-3, 5e-5


def measured(rng, x, noise):
    return (A + B * x) * (1 + noise * rng.normal(size=len(x)))


def least_squares(x, y):
    """Naive reference: least squares in units of the median at each x."""
    unit = np.array([np.median(y[x == place]) for place in x])
    design = np.stack([1 / unit, x / unit], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ design.T @ (y / unit)
    residuals = y / unit - design @ coefficients
    return coefficients, inverse * (residuals @ residuals) / (len(x) - 2)


def test_fit_line_finds_an_exact_line():
    line = fit_line(SIZES, A + B * SIZES)
    np.testing.assert_allclose([line.intercept, line.slope], [A, B])
    np.testing.assert_allclose([line.slope_interval.low, line.slope_interval.high], [B, B])
    np.testing.assert_allclose(line.intercept_in_x.value, A / B)
    np.testing.assert_allclose(line.slope_over_intercept.value, B / A)
    np.testing.assert_allclose(line.reaches(line(100.0)).value, 100.0)


def test_fit_line_without_outliers_is_weighted_least_squares():
    # Residuals of one size, so that none is cut.
    x = np.repeat(SIZES, 2)
    y = (A + B * x) * (1 + 0.01 * np.tile([1.0, -1.0], len(SIZES)))
    line = fit_line(x, y)
    coefficients, covariance = least_squares(x, y)
    np.testing.assert_allclose([line.intercept, line.slope], coefficients, rtol=1e-6)
    np.testing.assert_allclose(line.covariance, covariance, rtol=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_fit_line_with_outliers_solves_hubers_equations(seed):
    x = np.repeat(SIZES, 3)
    y = (A + B * x) * np.exp(0.03 * np.random.default_rng(seed).standard_t(2, size=len(x)))
    line = fit_line(x, y)
    unit = np.array([np.median(y[x == place]) for place in x])
    residuals = (y - line.intercept - line.slope * x) / unit
    limit = 2 * np.median(np.abs(residuals)) / 0.67449 * np.sqrt(len(x) / (len(x) - 2))
    psi = np.clip(residuals, -limit, limit)
    assert np.any(psi != residuals)
    np.testing.assert_allclose([psi @ (1 / unit), psi @ (x / unit / 256)], 0, atol=1e-3)


@pytest.mark.parametrize(("x_unit", "y_unit"), [(1e3, 1.0), (1.0, 1e-6), (1e-4, 1e9)])
def test_fit_line_scales_with_the_units(x_unit, y_unit):
    x = np.repeat(SIZES, 3)
    y = measured(np.random.default_rng(0), x, 0.05)
    plain, other = fit_line(x, y), fit_line(x * x_unit, y * y_unit)
    np.testing.assert_allclose(other.intercept, plain.intercept * y_unit)
    np.testing.assert_allclose(other.slope, plain.slope * y_unit / x_unit)
    np.testing.assert_allclose(other.intercept_in_x.high, plain.intercept_in_x.high * x_unit)
    np.testing.assert_allclose(other.noise, plain.noise)


@pytest.mark.parametrize(("x", "noise"), [(SIZES, 0.05), (np.repeat(SIZES, 5), 0.1)])
def test_fit_line_intervals_cover_the_truth_in_95_of_100_cases(x, noise):
    rng = np.random.default_rng(0)
    lines = [fit_line(x, measured(rng, x, noise)) for _ in range(300)]
    target = A + B * 100

    def covered(interval, truth):
        return interval is not None and interval.low <= truth <= interval.high

    for found in (
        [covered(line.slope_interval, B) for line in lines],
        [covered(line.intercept_in_x, A / B) for line in lines],
        [covered(line.slope_over_intercept, B / A) for line in lines],
        [covered(line.reaches(target), 100) for line in lines],
    ):
        assert 0.90 < np.mean(found) < 0.97


def test_fit_line_resists_one_outlier():
    x = np.repeat(SIZES, 5)
    y = measured(np.random.default_rng(0), x, 0.02)
    disturbed = y.copy()
    disturbed[7] *= 20
    line = fit_line(x, disturbed)
    np.testing.assert_allclose([line.intercept, line.slope], [A, B], rtol=0.02)
    assert abs(least_squares(x, disturbed)[0][0] / A - 1) > 0.1
    assert line.holds


def test_fit_line_refuses_too_few_sizes():
    with pytest.raises(ValueError, match="measurements: 3, batch sizes: 1"):
        fit_line([4, 4, 4], [1.0, 2.0, 1.0])


GROUPS = np.repeat(np.arange(8), 4)


def noise(seed, places=GROUPS, size=0.05):
    return size * np.random.default_rng(seed).normal(size=len(places))


@pytest.mark.parametrize("repetitions", [2, 3, 10])
def test_departure_noise_does_not_depend_on_repetitions(repetitions):
    places = np.repeat(np.arange(8), repetitions)
    found = [departure(places, noise(seed, places))[0] for seed in range(200)]
    np.testing.assert_allclose(np.mean(found), 0.05, rtol=0.05)


@pytest.mark.parametrize(("count", "repetitions"), [(3, 2), (8, 2), (8, 10)])
def test_departure_seldom_refuses_a_right_curve(count, repetitions):
    places = np.repeat(np.arange(count), repetitions)
    refused = [departure(places, noise(s, places))[2] is False for s in range(300)]
    assert np.mean(refused) < 0.06


def test_departure_refuses_a_wrong_curve_and_ignores_outliers():
    bent = np.where(GROUPS == 3, 0.3, 0.0)
    found = [departure(GROUPS, noise(seed) + bent) for seed in range(60)]
    assert np.mean([holds is False for *_, holds in found]) > 0.95
    np.testing.assert_allclose(np.mean([worst for _, worst, _ in found]), 0.3, rtol=0.05)
    small = noise(0, size=1e-5)
    assert departure(GROUPS, small + 0.05 * bent)[2]
    assert departure(GROUPS, small + 0.1 * bent)[2] is False
    residuals = noise(0)
    residuals[[0, 9, 22]] += [5.0, 3.0, 9.0]
    scatter, _, holds = departure(GROUPS, residuals)
    assert holds
    assert scatter < 0.1


PEAK_RATE, HALF_PEAK = 10_000.0, 10.0


def rounds_of(seed, *, noise, slower=1.0, counts=(8, 31)):
    """Return rounds of nine sizes on a line, 40 % of them slowed."""
    rng = np.random.default_rng(seed)
    groups = []
    for size in SIZES:
        count = rng.integers(*counts)
        times_s = (size + HALF_PEAK) / PEAK_RATE * (1 + noise * rng.normal(size=count)).clip(0.3)
        groups.append(times_s * rng.choice([1.0, slower], p=[0.6, 0.4], size=count))
    return groups


def test_without_slow_rounds_leaves_out_slow_rounds_in_any_order():
    rng = np.random.default_rng(0)
    calm = 1 + 0.02 * rng.normal(size=12)
    slowed = calm[:9] * rng.uniform(1.3, 3.0, size=9)
    for seed in range(10):
        values = np.random.default_rng(seed).permutation([*calm, *slowed])
        (kept,) = without_slow_rounds([list(values)])
        assert sorted(kept) == sorted(calm)


@pytest.mark.parametrize("values", [(3.0,), (3.0, 9.0), (1.0, 1.1, 1.0), (1.0,) * 5])
def test_without_slow_rounds_keeps_few_or_equal_values(values):
    assert without_slow_rounds([values]) == [values]
    assert without_slow_rounds([]) == []


@pytest.mark.parametrize(("noise", "slower"), [(0.10, 1.0), (0.10, 1.5)])
def test_without_slow_rounds_intervals_hold_with_and_without_slow_rounds(noise, slower):
    held, found = [], []
    for seed in range(30):
        kept = without_slow_rounds(rounds_of(seed, noise=noise, slower=slower))
        pairs = [(size, time_s) for size, one in zip(SIZES, kept, strict=True) for time_s in one]
        rate = fit_latency(*zip(*pairs, strict=True)).line.one_over_slope
        held.append(rate.low <= PEAK_RATE <= rate.high)
        found.append(rate.value / PEAK_RATE)
    assert np.mean(held) > 0.88
    assert np.mean(found) == pytest.approx(1, abs=0.01)


PLACES = 2 ** np.arange(9)
SCALED = np.repeat(PLACES, 3)
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
    return fit_latency(SCALED, law(SCALED) * np.tile([0.999, 1.0, 1.001], len(PLACES)))


def test_knee_batch_size_of_a_line():
    sizes = np.arange(1, 300)
    expected = sizes[np.argmax(sizes / hockney(sizes) ** 2)]
    assert knee_batch_size(exact(hockney)).value == expected == N_HALF


@pytest.mark.parametrize("share", [0.5, 0.8, 0.9])
def test_efficient_batch_size_of_a_line(share):
    sizes = np.arange(1, 1000)
    expected = sizes[np.argmax(sizes / hockney(sizes) >= share * R_INF)]
    found = efficient_batch_size(exact(hockney), share=share).value
    assert abs(found - expected) <= 1


@pytest.mark.parametrize("law", [hockney, stairs])
@pytest.mark.parametrize("latency_s", [0.0043, 0.0061, 0.0111, 0.0301])
def test_batch_size_within_is_the_largest_within_the_latency(law, latency_s):
    latency = exact(law)
    sizes = np.arange(1, 257)
    expected = max(b for b in sizes if latency.latency_s(b) <= latency_s)
    answer = batch_size_within(latency, latency_s=latency_s)
    assert answer.value == expected
    assert answer.low <= expected + 1
    assert answer.high >= expected


def test_batch_size_within_extrapolates_a_line():
    answer = batch_size_within(exact(hockney), latency_s=0.1)
    assert 470 <= answer.value <= 490
    assert efficient_batch_size(exact(hockney), share=0.99).value > 256


def test_batch_size_within_interpolation_intervals_cover_the_size():
    # The true curve has straight pieces in logarithms, like the interpolation.
    def law(sizes):
        return np.exp(np.interp(np.log2(sizes), [0, 4, 8], np.log([0.004, 0.005, 0.08])))

    truth = float(np.exp2(np.interp(np.log(0.02), np.log([0.005, 0.08]), [4, 8])))
    found = [fit_latency(SCALED, scattered(law(SCALED), 0.03, seed)) for seed in range(80)]
    assert not any(latency.follows_line for latency in found)
    answers = [batch_size_within(latency, latency_s=0.02) for latency in found]
    covered = [a.low <= truth <= a.high for a in answers]
    # It takes both neighbours to be off at once, so it covers somewhat more than 95 %.
    assert np.mean(covered) > 0.93


def test_answers_of_a_staircase_are_measured_sizes():
    latency = exact(stairs)
    assert not latency.follows_line
    rates = PLACES / stairs(PLACES)
    assert knee_batch_size(latency).value == PLACES[np.argmax(rates / stairs(PLACES))] == 32
    assert fastest_batch_size(latency).value == PLACES[np.argmax(rates)] == 128
    size = efficient_batch_size(latency).value
    assert size / latency.latency_s(size) >= 0.9 * np.max(rates) * 0.999
    assert (size - 1) / latency.latency_s(size - 1) < 0.9 * np.max(rates)


def test_fastest_batch_size_interval_holds_sizes_within_noise():
    plateau = 2.0 ** np.maximum(np.log2(SCALED), 4) / 1000
    answer = fastest_batch_size(fit_latency(SCALED, scattered(plateau, 0.02)))
    assert (answer.low, answer.high) == (16, 256)


def test_answers_of_single_measurements_have_no_interval():
    latency = fit_latency(PLACES, np.full(len(PLACES), 0.004))
    assert fastest_batch_size(latency).ends is None
    assert batch_size_within(latency, latency_s=0.01).ends is None
    assert efficient_batch_size(latency).ends is None


def test_line_of_a_flat_latency_has_only_bounds():
    flat = 0.004 * (1 + 0.01 * np.random.default_rng(0).normal(size=len(SCALED)))
    latency = fit_latency(SCALED, flat)
    assert not latency.follows_line
    assert latency.line.one_over_slope.value is None
    assert latency.line.intercept_in_x.value is None
    assert latency.line.intercept_in_x.low > 256
    assert latency.line.one_over_slope.low > 256 / 0.004


def test_fit_latency_weights_pools_by_measurements():
    curve = fit_latency([1, 2, 2, 2, 4], np.exp([1.0, 0.6, 0.6, 0.6, 2.0]))
    np.testing.assert_allclose(np.log(curve.latencies_s), [0.7, 0.7, 2.0])
