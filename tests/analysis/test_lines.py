"""Lines through timings: what is fitted, how far it departs, and which rounds are left out."""

import numpy as np
import pytest

from kbatch.analysis.line_fit import fit_line, measure_departure, without_slow_rounds
from kbatch.analysis.scaling_curve import fit_latency

SIZES = 2.0 ** np.arange(9)
A, B = 2e-3, 5e-5


def measured(rng, x, noise):
    return (A + B * x) * (1 + noise * rng.normal(size=len(x)))


def least_squares(x, y):
    """The naive reference: least squares in units of the median at each x."""
    unit = np.array([np.median(y[x == place]) for place in x])
    design = np.stack([1 / unit, x / unit], axis=1)
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ design.T @ (y / unit)
    residuals = y / unit - design @ coefficients
    return coefficients, inverse * (residuals @ residuals) / (len(x) - 2)


def test_a_line_is_found_exactly():
    line = fit_line(SIZES, A + B * SIZES)
    np.testing.assert_allclose([line.intercept, line.slope], [A, B])
    np.testing.assert_allclose([line.slope_interval.low, line.slope_interval.high], [B, B])
    np.testing.assert_allclose(line.intercept_in_x.value, A / B)
    np.testing.assert_allclose(line.slope_over_intercept.value, B / A)
    np.testing.assert_allclose(line.reaches(line(100.0)).value, 100.0)


def test_without_outliers_it_is_weighted_least_squares():
    # Residuals of one size, so that none is cut.
    x = np.repeat(SIZES, 2)
    y = (A + B * x) * (1 + 0.01 * np.tile([1.0, -1.0], len(SIZES)))
    line = fit_line(x, y)
    coefficients, covariance = least_squares(x, y)
    np.testing.assert_allclose([line.intercept, line.slope], coefficients, rtol=1e-6)
    np.testing.assert_allclose(line.covariance, covariance, rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_with_outliers_it_solves_hubers_equations(seed):
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
def test_units_pass_through(x_unit, y_unit):
    x = np.repeat(SIZES, 3)
    y = measured(np.random.default_rng(0), x, 0.05)
    plain, other = fit_line(x, y), fit_line(x * x_unit, y * y_unit)
    np.testing.assert_allclose(other.intercept, plain.intercept * y_unit)
    np.testing.assert_allclose(other.slope, plain.slope * y_unit / x_unit)
    np.testing.assert_allclose(other.intercept_in_x.high, plain.intercept_in_x.high * x_unit)
    np.testing.assert_allclose(other.departure.noise, plain.departure.noise)


@pytest.mark.parametrize(("x", "noise"), [(SIZES, 0.05), (np.repeat(SIZES, 5), 0.1)])
def test_intervals_cover_the_truth_in_95_of_100_cases(x, noise):
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


def test_one_hiccup_moves_it_by_less_than_its_noise():
    x = np.repeat(SIZES, 5)
    y = measured(np.random.default_rng(0), x, 0.02)
    disturbed = y.copy()
    disturbed[7] *= 20
    line = fit_line(x, disturbed)
    np.testing.assert_allclose([line.intercept, line.slope], [A, B], rtol=0.02)
    assert abs(least_squares(x, disturbed)[0][0] / A - 1) > 0.1
    assert line.departure.holds


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([4, 4, 4], [1.0, 2.0, 1.0], "3 at 1 sizes"),
        ([1, 2, 3], [1.0, 2.0], r"shapes \(3,\) and \(2,\)"),
        ([1, 2, 0], [1.0, 2.0, 3.0], r"x=\[1.0, 2.0, 0.0\]"),
        ([1, 2, 4], [1.0, np.nan, 3.0], r"y=\[1.0, nan, 3.0\]"),
    ],
)
def test_measurements_that_give_no_line_are_refused(x, y, message):
    with pytest.raises(ValueError, match=message):
        fit_line(x, y)


PLACES = np.repeat(np.arange(8), 4)


def noise(seed, places=PLACES, size=0.05):
    return size * np.random.default_rng(seed).normal(size=len(places))


@pytest.mark.parametrize("repetitions", [2, 3, 10])
def test_the_noise_is_found_whatever_the_repetitions(repetitions):
    places = np.repeat(np.arange(8), repetitions)
    found = [measure_departure(places, noise(seed, places)).noise for seed in range(200)]
    np.testing.assert_allclose(np.mean(found), 0.05, rtol=0.05)


@pytest.mark.parametrize(("count", "repetitions"), [(3, 2), (8, 2), (8, 10)])
def test_a_right_curve_is_seldom_refused(count, repetitions):
    places = np.repeat(np.arange(count), repetitions)
    refused = [measure_departure(places, noise(s, places)).holds is False for s in range(300)]
    assert np.mean(refused) < 0.06


def test_a_wrong_curve_is_refused():
    bent = np.where(PLACES == 3, 0.3, 0.0)
    departures = [measure_departure(PLACES, noise(seed) + bent) for seed in range(60)]
    assert np.mean([departure.holds is False for departure in departures]) > 0.95
    np.testing.assert_allclose(np.mean([d.worst for d in departures]), 0.3, rtol=0.05)


def test_a_departure_too_small_to_matter_is_none():
    bent = np.where(PLACES == 3, 0.015, 0.0)
    assert measure_departure(PLACES, noise(0, size=1e-5) + bent).holds
    assert measure_departure(PLACES, noise(0, size=1e-5) + 2 * bent).holds is False


def test_a_hiccup_here_and_there_is_neither_departure_nor_noise():
    residuals = noise(0)
    residuals[[0, 9, 22]] += [5.0, 3.0, 9.0]
    departure = measure_departure(PLACES, residuals)
    assert departure.holds
    assert departure.noise < 0.1


PEAK_RATE, HALF_PEAK = 10_000.0, 10.0


def rounds_of(seed, *, noise, slower=1.0, counts=(8, 31)):
    """Rounds of nine sizes on a line, 40 % of them beside a neighbour."""
    rng = np.random.default_rng(seed)
    groups = []
    for size in SIZES:
        count = rng.integers(*counts)
        times_s = (size + HALF_PEAK) / PEAK_RATE * (1 + noise * rng.normal(size=count)).clip(0.3)
        groups.append(times_s * rng.choice([1.0, slower], p=[0.6, 0.4], size=count))
    return groups


def test_rounds_beside_a_neighbour_are_left_out_in_whatever_order_they_come():
    rng = np.random.default_rng(0)
    calm = 1 + 0.02 * rng.normal(size=12)
    slowed = calm[:9] * rng.uniform(1.3, 3.0, size=9)
    for seed in range(10):
        values = np.random.default_rng(seed).permutation([*calm, *slowed])
        (kept,) = without_slow_rounds([list(values)])
        assert sorted(kept) == sorted(calm)


def test_rounds_of_one_size_tell_what_those_of_another_are():
    """Two of three rounds of the last size are slow; alone they would be taken for its time."""
    groups = [[1.0, 1.5, 1.01, 0.99, 1.52, 1.0, 1.49, 1.01]] * 4 + [[3.0, 4.5, 4.55]]
    assert without_slow_rounds(groups[-1:]) == [(3.0, 4.5, 4.55)]
    assert without_slow_rounds(groups)[-1] == (3.0,)


@pytest.mark.parametrize("values", [(3.0,), (3.0, 9.0), (1.0, 1.1, 1.0), (1.0,) * 5])
def test_few_or_equal_values_are_all_kept(values):
    assert without_slow_rounds([values]) == [values]
    assert without_slow_rounds([]) == []


def test_the_unit_does_not_matter_size_by_size():
    groups = rounds_of(1, noise=0.05, slower=1.6)
    kept = without_slow_rounds(groups)
    assert 0.5 < sum(map(len, kept)) / sum(map(len, groups)) < 0.7
    units = [10.0 ** (i % 4) for i in range(len(groups))]
    scaled = without_slow_rounds([unit * group for unit, group in zip(units, groups, strict=True)])
    for unit, one, other in zip(units, kept, scaled, strict=True):
        np.testing.assert_allclose(other, unit * np.array(one))


def kept_share(profiles):
    kept = sum(sum(map(len, without_slow_rounds(groups))) for groups in profiles)
    return kept / sum(sum(map(len, groups)) for groups in profiles)


@pytest.mark.parametrize("noise", [0.05, 0.20])
def test_plain_noise_is_kept(noise):
    assert kept_share([rounds_of(seed, noise=noise) for seed in range(20)]) > 0.99


def test_a_round_that_is_too_fast_stays_beside_a_neighbour_as_well():
    calm, slow = [1.0, 1.01, 0.99, 1.0, 1.02], [1.5, 2.0, 3.0, 4.0]
    assert without_slow_rounds([[*calm, *slow, 0.5]] + 4 * [calm + slow])[0] == (*calm, 0.5)


@pytest.mark.parametrize(("noise", "slower"), [(0.10, 1.0), (0.10, 1.5)])
def test_intervals_of_the_fit_hold_with_and_without_a_neighbour(noise, slower):
    held, found = [], []
    for seed in range(30):
        kept = without_slow_rounds(rounds_of(seed, noise=noise, slower=slower))
        pairs = [(size, time_s) for size, one in zip(SIZES, kept, strict=True) for time_s in one]
        rate = fit_latency(*zip(*pairs, strict=True)).peak_throughput
        held.append(rate.low <= PEAK_RATE <= rate.high)
        found.append(rate.value / PEAK_RATE)
    assert np.mean(held) > 0.88
    assert np.mean(found) == pytest.approx(1, abs=0.01)
