import numpy as np
import pytest
from quadratic import squared_norms

from kbatch.analysis.noise_scale import gradient_moments


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


def test_single_examples_give_the_sample_covariance():
    gradients = np.random.default_rng(0).normal(1, 2, size=(64, 10))
    expected = gradients.var(axis=0, ddof=1).sum()
    np.testing.assert_allclose(moments_of(gradients, [1] * 64)[0], expected)


@pytest.mark.parametrize("sizes", [[32, 32], [8] * 8, [20, 20, 20, 4]])
def test_unbiased_also_for_unequal_micro_batches(sizes):
    m, batch = squared_norms(
        np.random.default_rng(1), noise_scale=40.0, sizes=sizes, shape=(20_000,)
    )
    moments = gradient_moments(m, batch, batch_size=64, accumulation_steps=len(sizes))
    for estimates, expected in zip(moments, (40.0, 1.0), strict=True):
        error = np.mean(estimates) - expected
        assert abs(error) < 4 * np.std(estimates) / np.sqrt(len(estimates))


def test_steps_of_different_sizes_are_estimated_one_by_one():
    norms, steps = ([3.0, 5.0, 2.5], [1.0, 1.2, 2.0]), [(64, 4), (64, 8), (20, 2)]
    sizes, micros = zip(*steps, strict=True)
    together = gradient_moments(*norms, batch_size=sizes, accumulation_steps=micros)
    for i, (size, k) in enumerate(steps):
        alone = gradient_moments(norms[0][i], norms[1][i], batch_size=size, accumulation_steps=k)
        np.testing.assert_allclose([m[i] for m in together], [m[0] for m in alone])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_steps_that_overflowed_or_were_not_split_are_skipped(bad):
    moments = gradient_moments(
        [3.0, bad, 3.0, 9.0], [1.0, 1.0, bad, 9.0], batch_size=64, accumulation_steps=[4, 4, 4, 1]
    )
    np.testing.assert_allclose(moments[0], [2 * 64 / 3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulation_steps": 1}, "accumulation_steps=1"),
        ({"accumulation_steps": 65}, "accumulation_steps=65, batch_size=64"),
        ({"accumulation_steps": [2, 2, 2]}, "one for each of the 2 steps"),
        ({"batch_size": [64, 0]}, r"batch_size=\[64, 0\]"),
        ({"micro_sq_norms": [3.0]}, r"shapes \(1,\) and \(2,\)"),
        ({"micro_sq_norms": [3.0, 0.5]}, "micro_sq_norm=0.5, batch_sq_norm=1.0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(change, message):
    arguments = {
        "micro_sq_norms": [3.0, 3.0],
        "batch_sq_norms": [1.0, 1.0],
        "batch_size": 64,
        "accumulation_steps": 4,
    }
    arguments |= change
    norms = arguments.pop("micro_sq_norms"), arguments.pop("batch_sq_norms")
    with pytest.raises(ValueError, match=message):
        gradient_moments(*norms, **arguments)


def test_equal_micro_batches_may_differ_by_rounding():
    moments = gradient_moments(1.0 - 1e-7, 1.0, batch_size=64, accumulation_steps=4)
    assert abs(moments[0][0]) < 1e-5
