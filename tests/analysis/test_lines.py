import numpy as np
import pytest

from kbatch.analysis.line_fit import fit_line

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
    np.testing.assert_allclose([line.intercept_interval.low, line.slope_interval.high], [A, B])
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
        [covered(line.intercept_interval, A) for line in lines],
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
