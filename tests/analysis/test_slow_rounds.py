import numpy as np
import pytest

from kbatch.analysis.line_fit import without_slow_rounds
from kbatch.analysis.scaling_curve import fit_latency

PEAK_RATE, HALF_PEAK = 10_000.0, 10.0
SIZES = 2.0 ** np.arange(9)


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
