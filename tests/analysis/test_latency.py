import numpy as np
import pytest

from kbatch.analysis.scaling_curve import fit_latency

SIZES = np.repeat(2 ** np.arange(9), 3)
SCATTER = 1 + 0.01 * np.tile([-1.0, 0.0, 1.0], 9)
R_INF, N_HALF = 5000.0, 20.0


def hockney(sizes):
    return (sizes + N_HALF) / R_INF


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
