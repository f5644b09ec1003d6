"""The value of a run: the mean over its best epochs, as values of validation blocks."""

import numpy as np
import pytest

from kbatch.analysis.intervals import pseudo_values
from kbatch.analysis.run_table import best_epochs

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


@pytest.mark.parametrize("size", [4, 7, 30])
def test_pseudo_values_of_a_mean_are_means_of_equal_blocks_and_have_its_mean(size):
    hits = RNG.random(200)
    values = pseudo_values(blocks(hits, size), mean)
    assert values.mean() == pytest.approx(hits.mean(), rel=1e-12)
    if size == 4:
        np.testing.assert_allclose(values, hits.reshape(50, 4).mean(1))


def scored(count, bins=50):
    """Counts of positives and negatives in each bin, one row an example."""
    labels = RNG.random(count) < 0.3
    scores = np.clip(bins * (0.35 + 0.25 * labels + 0.15 * RNG.normal(size=count)), 0, bins - 1)
    rows = np.zeros((count, 2 * bins))
    rows[np.arange(count), scores.astype(int) + bins * ~labels] = 1
    return rows


def test_pseudo_values_of_auc_have_the_variance_of_a_bootstrap():
    rows = scored(1000)
    found = pseudo_values(rows.reshape(50, 20, -1).sum(1), auc)
    draws = [auc(rows[RNG.integers(0, 1000, 1000)].sum(0)) for _ in range(1000)]
    assert found.mean() == pytest.approx(auc(rows.sum(0)))
    # The standard deviation of 50 blocks is known to a tenth.
    assert found.std(ddof=1) / 50**0.5 == pytest.approx(np.std(draws), rel=0.3)


def test_best_epochs_are_the_best_fifth_and_at_least_two():
    values = RNG.permutation(20.0 * np.arange(20)).tolist()
    for count, expected in ((1, 1), (2, 2), (3, 2), (12, 2), (13, 3), (20, 4)):
        for larger in (True, False):
            found = best_epochs(values[:count], larger_is_better=larger)
            ranked = sorted(values[:count], reverse=larger)
            assert [values[place] for place in found] == ranked[:expected]


def test_best_epochs_leave_out_those_without_a_finite_value():
    values = [None, 1.0, np.nan, 3.0, None, -np.inf, 2.0]
    assert best_epochs(values, larger_is_better=False) == [1, 6]
    assert best_epochs([None, np.nan, 4.0], larger_is_better=True) == [2]
    assert best_epochs([], larger_is_better=True) == []
    assert best_epochs([1.0] * 6, larger_is_better=True) == [0, 1]  # Of equal ones, the earlier.


def test_mean_of_the_best_epochs_varies_less_than_the_best_epoch():
    noise = RNG.normal(size=(400, 20))
    means = [np.mean(row[best_epochs(row.tolist(), larger_is_better=True)]) for row in noise]
    assert 2 * np.var(means) < np.var(noise.max(1)) * 1.5
