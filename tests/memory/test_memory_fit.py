import numpy as np
import pytest

from kbatch.memory.search import fit_memory


def naive_fit(memory):
    """Weighted least squares by the normal equations, weights 1 / M^2."""
    sizes, values = np.array(list(memory), float), np.array(list(memory.values()), float)
    design = np.stack([np.ones_like(sizes), sizes], axis=1)
    weights = np.diag(1 / values**2)
    return np.linalg.solve(design.T @ weights @ design, design.T @ weights @ values)


@pytest.mark.parametrize("sizes", [(1, 2), (1, 7, 300), (1, 64, 512, 4096, 100_000)])
@pytest.mark.parametrize(("fixed", "each"), [(5e7, 2e6), (1e10, 300.0), (0.0, 1.0)])
def test_a_line_is_found_again(sizes, fixed, each):
    fit = fit_memory({b: fixed + each * b for b in sizes})
    np.testing.assert_allclose(fit.bytes_per_example, each, rtol=1e-6, atol=1e-9 * fixed)
    np.testing.assert_allclose([fit.predict(b) for b in sizes], [fixed + each * b for b in sizes])
    np.testing.assert_allclose(fit.largest_within(fit.predict(sizes[-1])), sizes[-1], rtol=1e-5)


def test_a_noisy_line_is_that_of_the_normal_equations():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        memory = {b: (1e8 + 3e6 * b) * (1 + rng.normal(0, 0.02)) for b in (1, 30, 90, 200, 600)}
        fit = fit_memory(memory)
        np.testing.assert_allclose(fit, naive_fit(memory), rtol=1e-6, err_msg=str(memory))


def test_memory_that_does_not_grow_has_no_slope():
    fit = fit_memory({1: 2352, 50: 2352, 100: 2352})
    assert fit.predict(10**6) == pytest.approx(2352)


@pytest.mark.parametrize("memory", [{}, {8: 100.0}])
def test_one_size_is_no_line(memory):
    assert fit_memory(memory) is None
