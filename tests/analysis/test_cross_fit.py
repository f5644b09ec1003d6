"""The best epoch chosen on one half of the validation blocks and valued on the other."""

import numpy as np
import pytest

from kbatch.analysis.cross_fit import CrossFit, pseudo_values

RNG = np.random.default_rng(0)


def mean(sums):
    return sums[0] / sums[1]


def auc(sums):
    """The area under the curve from counts of positives and negatives in bins of the score."""
    positives, negatives = np.split(sums, 2)
    below = np.cumsum(negatives) - negatives / 2
    return (positives * below).sum() / positives.sum() / negatives.sum()


def blocks(hits, size):
    """Total and count of each block of `size` examples."""
    starts = range(0, len(hits), size)
    return np.array([[hits[s : s + size].sum(), len(hits[s : s + size])] for s in starts])


def test_pseudo_values_of_a_mean_are_the_means_of_equal_blocks():
    hits = RNG.random(200)
    found = pseudo_values(blocks(hits, 4), mean)
    np.testing.assert_allclose(found, hits.reshape(50, 4).mean(1))


@pytest.mark.parametrize("size", [4, 7, 30])
def test_their_mean_is_the_metric_whatever_the_blocks(size):
    hits = RNG.random(200)
    assert pseudo_values(blocks(hits, size), mean).mean() == pytest.approx(hits.mean(), rel=1e-12)


def scored(count, bins=50):
    """Counts of positives and negatives in each bin, one row an example."""
    labels = RNG.random(count) < 0.3
    scores = np.clip(bins * (0.35 + 0.25 * labels + 0.15 * RNG.normal(size=count)), 0, bins - 1)
    rows = np.zeros((count, 2 * bins))
    rows[np.arange(count), scores.astype(int) + bins * ~labels] = 1
    return rows


def test_the_variance_of_pseudo_values_of_auc_is_that_of_a_bootstrap():
    rows = scored(1000)
    found = pseudo_values(rows.reshape(50, 20, -1).sum(1), auc)
    draws = [auc(rows[RNG.integers(0, 1000, 1000)].sum(0)) for _ in range(1000)]
    assert found.mean() == pytest.approx(auc(rows.sum(0)))
    # Of 50 blocks a standard deviation is known to a tenth.
    assert found.std(ddof=1) / 50**0.5 == pytest.approx(np.std(draws), rel=0.3)


def test_the_best_of_many_epochs_is_not_better_by_its_choice():
    """At 360 examples the best epoch is reported most of a point too high."""
    cross_fitted, reported = [], []
    for _ in range(400):
        # Epochs of one true accuracy, which agree on most examples as those of a training do.
        ease = RNG.normal(size=360)
        sums = [blocks(ease + 0.3 * RNG.normal(size=360) > -1.3, 8) for _ in range(20)]
        fit = CrossFit(mean, larger_is_better=True)
        for one in sums:
            fit.add(one)
        cross_fitted.append(fit.values().mean())
        reported.append(max(mean(one.sum(0)) for one in sums))
    truth = 0.8935  # P(N(0, 1 + 0.09) > -1.3)
    assert np.mean(reported) - truth > 0.005
    assert abs(np.mean(cross_fitted) - truth) < 0.002


def test_each_half_is_valued_at_the_epoch_that_the_other_half_prefers():
    first, second = np.zeros((2, 8, 2))
    first[:, 1] = second[:, 1] = 10
    first[:, 0] = [9, 1, 9, 2, 9, 3, 9, 4]
    second[:, 0] = [1, 9, 2, 9, 3, 9, 4, 9]
    for larger, expected in ((True, [0.1, 0.1, 0.2, 0.2]), (False, [0.9] * 4)):
        fit = CrossFit(mean, larger_is_better=larger)
        fit.add(first)
        fit.add(second)
        np.testing.assert_allclose(fit.values()[:4], expected)


def test_without_a_finite_epoch_there_are_no_values():
    fit = CrossFit(lambda sums: np.nan, larger_is_better=False)
    fit.add(blocks(RNG.random(20), 2))
    assert fit.values() is None
