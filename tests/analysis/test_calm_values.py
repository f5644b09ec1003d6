import numpy as np
import pytest

from kbatch.analysis.calm_values import calm_values


def test_rounds_beside_a_neighbour_are_left_out_in_whatever_order_they_come():
    rng = np.random.default_rng(0)
    calm = 1 + 0.02 * rng.normal(size=12)
    slowed = calm[:9] * rng.uniform(1.3, 3.0, size=9)
    for seed in range(10):
        values = np.random.default_rng(seed).permutation([*calm, *slowed])
        assert sorted(calm_values(list(values))) == sorted(calm)


def test_one_round_that_is_too_fast_does_not_cost_the_others():
    assert calm_values([0.2, 1.0, 1.02, 1.05]) == (0.2, 1.0, 1.02, 1.05)


@pytest.mark.parametrize("values", [(), (3.0,), (3.0, 9.0), (1.0, 1.1, 1.0)])
def test_few_or_equal_values_are_all_kept(values):
    assert calm_values(values) == values


def test_the_unit_does_not_matter():
    values = np.random.default_rng(1).lognormal(0, 0.2, size=30)
    kept = calm_values(list(values))
    assert 2 <= len(kept) < 30
    np.testing.assert_allclose(calm_values(list(1000 * values)), 1000 * np.array(kept))
