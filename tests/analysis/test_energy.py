import numpy as np
import pytest

from kbatch.analysis.throughput import PowerIntegral, counted_energy_j


def integral(times_s, powers_w):
    found = PowerIntegral()
    for time_s, power_w in zip(times_s, powers_w, strict=True):
        found = found.add(time_s, power_w)
    return found


@pytest.fixture
def readings():
    rng = np.random.default_rng(0)
    return np.cumsum(rng.uniform(0.01, 1.0, 50)), rng.uniform(50, 700, 50)


def test_the_integral_is_the_trapezoid_rule(readings):
    times_s, powers_w = readings
    np.testing.assert_allclose(integral(*readings).energy_j, np.trapezoid(powers_w, times_s))


def test_the_parts_of_a_time_add_up_to_the_whole(readings):
    times_s, powers_w = readings
    parts = [integral(times_s[:21], powers_w[:21]), integral(times_s[20:], powers_w[20:])]
    np.testing.assert_allclose(sum(p.energy_j for p in parts), integral(*readings).energy_j)


def test_a_reading_that_failed_is_bridged_by_a_line():
    whole = integral([0, 1, 2, 3], [100, 200, 300, 400])
    assert integral([0, 1, 2, 3], [100, None, None, 400]).energy_j == whole.energy_j


@pytest.mark.parametrize(
    ("powers_w", "energy_j"),
    [
        ([100, 100, 100], 200.0),
        ([100, None, 100], 200.0),
        ([None, 100, 100], None),
        ([100, 100, None], None),
    ],
)
def test_the_energy_of_a_time_is_known_where_both_ends_are(powers_w, energy_j):
    assert integral([5.0, 6.0, 7.0], powers_w).between(5.0, 7.0) == energy_j


@pytest.mark.parametrize(
    ("first_mj", "last_mj", "energy_j"),
    [(1000, 3500, 2.5), (7, 7, 0.0), (2**40, 2**40 + 1, 0.001), (3500, 1000, None)],
)
def test_a_counter_counts_what_it_rose_by(first_mj, last_mj, energy_j):
    assert counted_energy_j(first_mj, last_mj) == energy_j
