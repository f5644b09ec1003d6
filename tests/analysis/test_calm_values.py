import numpy as np
import pytest

from kbatch.analysis.calm_values import calm_values
from kbatch.analysis.latency import fit_latency


def test_rounds_beside_a_neighbour_are_left_out_in_whatever_order_they_come():
    rng = np.random.default_rng(0)
    calm = 1 + 0.02 * rng.normal(size=12)
    slowed = calm[:9] * rng.uniform(1.3, 3.0, size=9)
    for seed in range(10):
        values = np.random.default_rng(seed).permutation([*calm, *slowed])
        assert sorted(calm_values(list(values))) == sorted(calm)


def test_one_round_that_is_too_fast_does_not_cost_the_others():
    assert calm_values([0.2, 1.0, 1.02, 1.05]) == (0.2, 1.0, 1.02, 1.05)


@pytest.mark.parametrize("values", [(), (3.0,), (3.0, 9.0), (1.0, 1.1, 1.0), (1.0,) * 5])
def test_few_or_equal_values_are_all_kept(values):
    assert calm_values(values) == values


def test_the_unit_does_not_matter():
    rng = np.random.default_rng(1)
    values = rng.lognormal(0, 0.05, size=30) * rng.choice([1.0, 1.6], size=30)
    kept = calm_values(list(values))
    assert 2 <= len(kept) < 30
    np.testing.assert_allclose(calm_values(list(1000 * values)), 1000 * np.array(kept))


@pytest.mark.parametrize("noise", [0.05, 0.10, 0.20])
def test_plain_noise_is_kept(noise):
    rng = np.random.default_rng(2)
    rounds = [1 + noise * rng.normal(size=rng.integers(8, 31)).clip(-3) for _ in range(300)]
    kept = sum(len(calm_values(list(values))) for values in rounds)
    assert kept > 0.99 * sum(map(len, rounds))


@pytest.mark.parametrize("noise", [0.05, 0.10])
def test_intervals_of_the_fit_hold_where_rounds_scatter_plainly(noise):
    peak_rate, half_peak = 10_000.0, 10.0
    held, found = [], []
    for seed in range(120):
        rng = np.random.default_rng(seed)
        pairs = [
            (size, float(value))
            for size in 2.0 ** np.arange(9)
            for value in calm_values(
                list(
                    (size + half_peak)
                    / peak_rate
                    * (1 + noise * rng.normal(size=rng.integers(8, 31)))
                )
            )
        ]
        rate = fit_latency(*zip(*pairs, strict=True)).peak_throughput
        held.append(rate.interval.low <= peak_rate <= rate.interval.high)
        found.append(rate.value / peak_rate)
    assert np.mean(held) > 0.90
    assert np.mean(found) == pytest.approx(1, abs=0.01)
