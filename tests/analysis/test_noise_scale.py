"""The gradient noise scale: its moments, value and interval, on gradients that are known."""

import numpy as np
import pytest

from kbatch.analysis.noise_scale import gradient_moments, gradient_noise_scale, noise_scale_of_runs

# Loss (x - c)' H (x - c) / 2 with random c: the gradient is H (x - mean) plus H times c's noise.
CURVATURE = np.geomspace(1.0, 0.1, 12)


def squared_norms(rng, *, noise_scale, sizes, shape):
    """m and M of updates cut into micro-batches of `sizes`, an array of `shape` each."""
    gradient = CURVATURE / np.linalg.norm(CURVATURE)
    deviation = gradient * np.sqrt(noise_scale)  # tr(Sigma) = noise_scale, |G|^2 = 1.
    sizes = np.array(sizes)
    noise = rng.normal(size=(*shape, len(sizes), len(CURVATURE)))
    micro = gradient + deviation * noise / np.sqrt(sizes)[:, None]
    weights = sizes / sizes.sum()
    batch = np.einsum("k,...kd->...d", weights, micro)
    return np.sum(micro**2, axis=-1) @ weights, np.sum(batch**2, axis=-1)


def moments_of(gradients, sizes):
    """The estimator fed from per-example gradients, micro-batches cut as `sizes` says."""
    micro = [part.mean(axis=0) for part in np.split(gradients, np.cumsum(sizes)[:-1])]
    weights = np.array(sizes) / len(gradients)
    return gradient_moments(
        [weights @ [g @ g for g in micro]],
        [np.sum(gradients.mean(axis=0) ** 2)],
        batch_size=len(gradients),
        accumulation_steps=len(sizes),
    )


def test_gradient_moments_of_single_examples_are_the_sample_covariance():
    gradients = np.random.default_rng(0).normal(1, 2, size=(64, 10))
    expected = gradients.var(axis=0, ddof=1).sum()
    np.testing.assert_allclose(moments_of(gradients, [1] * 64)[0], expected)


@pytest.mark.parametrize("sizes", [[32, 32], [8] * 8, [20, 20, 20, 4]])
def test_gradient_moments_are_unbiased_for_unequal_micro_batches(sizes):
    rng = np.random.default_rng(1)
    m, batch = squared_norms(rng, noise_scale=40.0, sizes=sizes, shape=(20_000,))
    moments = gradient_moments(m, batch, batch_size=64, accumulation_steps=len(sizes))
    for estimates, expected in zip(moments, (40.0, 1.0), strict=True):
        error = np.mean(estimates) - expected
        assert abs(error) < 4 * np.std(estimates) / np.sqrt(len(estimates))


def test_gradient_moments_of_steps_of_different_sizes():
    norms, steps = ([3.0, 5.0, 2.5], [1.0, 1.2, 2.0]), [(64, 4), (64, 8), (20, 2)]
    sizes, micros = zip(*steps, strict=True)
    together = gradient_moments(*norms, batch_size=sizes, accumulation_steps=micros)
    for i, (size, k) in enumerate(steps):
        alone = gradient_moments(norms[0][i], norms[1][i], batch_size=size, accumulation_steps=k)
        np.testing.assert_allclose([m[i] for m in together], [m[0] for m in alone])


def test_gradient_moments_skip_overflowed_and_unsplit_steps():
    norms = [3.0, np.nan, 3.0, 9.0], [1.0, 1.0, np.inf, 9.0]
    moments = gradient_moments(*norms, batch_size=64, accumulation_steps=[4, 4, 4, 1])
    np.testing.assert_allclose(moments[0], [2 * 64 / 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulation_steps": 1}, "accumulation_steps=1"),
        ({"accumulation_steps": 65}, "accumulation_steps=65, batch_size=64"),
        ({"accumulation_steps": [2, 2, 2]}, "2 numbers, one for each step"),
        ({"batch_size": [64, 0]}, r"batch_size=\[64, 0\]"),
        ({"micro_sq_norms": [3.0]}, r"shapes \(1,\) and \(2,\)"),
        ({"micro_sq_norms": [3.0, 0.5]}, "micro_sq_norm=0.5, batch_sq_norm=1.0"),
    ],
)
def test_gradient_moments_refuse_impossible_numbers(change, message):
    arguments = {"micro_sq_norms": [3.0, 3.0], "batch_sq_norms": [1.0, 1.0]}
    arguments |= {"batch_size": 64, "accumulation_steps": 4} | change
    norms = arguments.pop("micro_sq_norms"), arguments.pop("batch_sq_norms")
    with pytest.raises(ValueError, match=message):
        gradient_moments(*norms, **arguments)


def scales(noise_scale, *, sizes, steps, repetitions, seed=0):
    rng = np.random.default_rng(seed)
    m, batch = squared_norms(rng, noise_scale=noise_scale, sizes=sizes, shape=(repetitions, steps))
    arguments = {"batch_size": sum(sizes), "accumulation_steps": len(sizes)}
    return [gradient_noise_scale(*norms, **arguments) for norms in zip(m, batch, strict=True)]


def norms(steps=60, noise_scale=40.0, seed=0):
    return squared_norms(
        np.random.default_rng(seed), noise_scale=noise_scale, sizes=[8] * 4, shape=(steps,)
    )


SIZES = {"batch_size": 32, "accumulation_steps": 4}


def test_gradient_noise_scale_is_the_ratio_of_the_means():
    m, batch = norms(steps=64)
    variance = np.mean([(a - b) * 32 / 3 for a, b in zip(m, batch, strict=True)])
    squared = np.mean([b - (a - b) / 3 for a, b in zip(m, batch, strict=True)])
    scale = gradient_noise_scale(m, batch, **SIZES)
    np.testing.assert_allclose(scale.value, variance / squared)


@pytest.mark.parametrize(
    ("sizes", "steps", "noise_scale"),
    [([16, 16], 400, 90.0), ([8] * 4, 30, 3.0), ([8] * 4, 100, 32.0), ([10, 10, 10, 2], 100, 32.0)],
)
def test_gradient_noise_scale_interval_covers_the_truth_in_95_of_100_cases(
    sizes, steps, noise_scale
):
    found = scales(noise_scale, sizes=sizes, steps=steps, repetitions=250)
    resolved = [scale for scale in found if scale.value is not None]
    assert len(resolved) > 0.99 * len(found)
    covered = np.mean([s.low <= noise_scale <= s.high for s in resolved])
    assert 0.90 < covered < 0.97


@pytest.mark.parametrize("noise_scale", [300.0, 1e6])
def test_gradient_noise_scale_far_above_the_batch_gives_a_lower_bound(noise_scale):
    found = scales(noise_scale, sizes=[8] * 4, steps=30, repetitions=250)
    wrong = [s for s in found if s.value and not s.low <= noise_scale <= s.high]
    assert len(wrong) < 0.06 * len(found)
    bounded = [s.low is None or s.low <= noise_scale for s in found]
    assert np.mean(bounded) > 0.95
    unresolved = [s for s in found if s.value is None]
    assert len(unresolved) > 0.5 * len(found)
    assert np.mean([(s.low or 0.0) > 8 for s in unresolved]) > 0.9


def test_gradient_noise_scale_of_few_steps_and_without_noise():
    for steps in (0, 2):
        scale = gradient_noise_scale([3.0] * steps, [2.0] * steps, **SIZES)
        assert (scale.value, scale.low) == (None, None)
    scale = gradient_noise_scale([2.0] * 30, [2.0] * 30, **SIZES)
    assert scale.value == scale.low == scale.high == 0


def test_noise_scale_of_runs_agrees_with_the_noise_scale_of_steps():
    m, batch = norms(steps=1000)
    variance, squared = (m - batch) * 32 / 3, batch - (m - batch) / 3
    # The early half is left out.
    means = (
        [early] * 10 + [part.mean() for part in np.split(values, 10)]
        for early, values in ((1e9, variance), (1e-9, squared))
    )
    by_epoch = noise_scale_of_runs([(*means, 1.0)])
    by_step = gradient_noise_scale(m, batch, **SIZES)
    np.testing.assert_allclose(by_epoch.value, by_step.value)
    assert 0.4 < by_epoch.high / by_step.high < 2.5


def test_noise_scale_of_runs_weights_epochs_by_measured_updates():
    heavy = noise_scale_of_runs([([20.0, 20, 41], [1.0, 1, 0.99], [1, 1, 2])])
    np.testing.assert_allclose(heavy.value, (20.0 + 20 + 2 * 41) / (1 + 1 + 2 * 0.99))


def test_noise_scale_of_runs_pools_late_halves():
    rng = np.random.default_rng(4)
    runs = [(50 + rng.normal(size=n), 2 + 0.1 * rng.normal(size=n), 1.0 + n) for n in (4, 9)]
    found = noise_scale_of_runs(runs)
    late = [(v[-k:], n[-k:], [w] * k) for (v, n, w), k in zip(runs, (3, 5), strict=True)]
    variances, norms, weights = (np.concatenate(parts) for parts in zip(*late, strict=True))
    expected = np.average(variances, weights=weights) / np.average(norms, weights=weights)
    np.testing.assert_allclose(found.value, expected)


def correlated_moments(rng, count, rho, shape=()):
    """tr(Sigma) about 100 and |G|^2 about 1, each like its neighbours: AR(1) noise."""
    noise = rng.standard_normal((2, *shape, count))
    for i in range(1, count):
        noise[..., i] = rho * noise[..., i - 1] + np.sqrt(1 - rho**2) * noise[..., i]
    return 100 * (1 + 0.2 * noise[0]), 1 + 0.1 * noise[1]


def share_covered(found):
    return np.mean([s.ends is not None and s.low <= 100 <= s.high for s in found])


@pytest.mark.parametrize("late", [10, 50])
def test_noise_scale_of_runs_covers_the_truth_with_correlated_epochs(late):
    # If they counted as independent, the intervals would cover in about 60 of 100 cases.
    moments = correlated_moments(np.random.default_rng(0), 2 * late, 0.7, (200,))
    found = [noise_scale_of_runs([(*pair, 1.0)]) for pair in zip(*moments, strict=True)]
    assert share_covered(found) > 0.8


def test_gradient_noise_scale_covers_the_truth_with_correlated_steps():
    moments = correlated_moments(np.random.default_rng(0), 200, 0.9, (200,))
    found = [
        gradient_noise_scale(norm + 4 / 32 * variance, norm + 1 / 32 * variance, **SIZES)
        for variance, norm in zip(*moments, strict=True)
    ]
    assert share_covered(found) > 0.8


def test_noise_scale_of_runs_that_differ_has_a_wider_interval():
    rng = np.random.default_rng(0)

    def pooled():
        offsets = 100 * (1 + 0.2 * rng.standard_normal(4))
        return noise_scale_of_runs(
            [(o + 5 * rng.standard_normal(12), np.ones(12), 1.0) for o in offsets]
        )

    # Four runs of six late epochs are four values, not 24.
    assert share_covered([pooled() for _ in range(100)]) > 0.85
