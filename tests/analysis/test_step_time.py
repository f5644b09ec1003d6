import numpy as np
import pytest

from kbatch.analysis.line_fit import fit_step_time

SIZES = np.repeat([16, 32, 64, 128, 256], 3)
SCATTER = 1 + 0.01 * np.tile([-1.0, 0.0, 1.0], 5)


def test_overhead_and_time_per_example_are_the_lines():
    fit = fit_step_time(SIZES, (0.004 + 2e-5 * SIZES) * SCATTER)
    np.testing.assert_allclose([fit.overhead_s, fit.per_example_s], [0.004, 2e-5], rtol=1e-3)
    assert fit.overhead_interval_s.low < 0.004 < fit.overhead_interval_s.high
    assert fit.per_example_interval_s.low < 2e-5 < fit.per_example_interval_s.high
    np.testing.assert_allclose(fit.overhead_examples.value, 200, rtol=1e-3)
    np.testing.assert_allclose(fit.step_time_s(1000), 0.024, rtol=1e-3)
    assert fit.holds


def test_at_the_overheads_examples_half_the_peak_throughput_is_reached():
    fit = fit_step_time(SIZES, (0.004 + 2e-5 * SIZES) * SCATTER)
    size = fit.overhead_examples.value
    np.testing.assert_allclose(size / fit.step_time_s(size), 0.5 / fit.per_example_s)


def test_caches_that_overflow_are_no_line():
    times = np.where(SIZES > 64, 3.0, 1.0) * (0.004 + 2e-5 * SIZES) * SCATTER
    assert fit_step_time(SIZES, times).holds is False


def test_single_measurements_leave_it_open():
    assert fit_step_time([1, 2, 4], [0.1, 0.2, 0.9]).holds is None


def test_a_step_time_must_be_positive():
    with pytest.raises(ValueError, match=r"0\.0"):
        fit_step_time([1, 2, 4], [0.1, 0.2, 0.0])
