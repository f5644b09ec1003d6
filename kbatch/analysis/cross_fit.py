"""The best epoch of a training, chosen on one half of the validation blocks, valued on the other.

An epoch that is chosen as the best on some examples looks better on these than on others. So the
blocks b = 1 ... B are dealt into two halves. The epoch that is best by one half is valued by the
other half, both ways (cross-fitting), and the value of the training is the mean over all blocks.

The values of the blocks are the pseudo-values of the jackknife (Tukey 1958), so that a metric need
not be a mean over examples. With v the metric of a half of n blocks and v_(-b) that without b,

    p_b = n v - (n - 1) v_(-b)

For a mean over equal blocks p_b is the mean of block b. The variance of the metric is the variance
of the p_b over the number of blocks.
"""

from collections.abc import Callable

import numpy as np

FEWEST_BLOCKS = 4  # Two in each half, of which one can be left out.


def pseudo_values(sums: np.ndarray, metric: Callable[[np.ndarray], float]) -> np.ndarray:
    """Return a value for each block, whose mean is the metric of all of them together.

    `sums` has a row for each block: the sums over its examples that `metric` is made from.
    """
    whole, count = sums.sum(0), len(sums)
    without = np.array([metric(whole - one) for one in sums])
    found = count * metric(whole) - (count - 1) * without
    # Blocks of unequal sizes, and a metric that is no mean, leave a bias of order 1/n.
    return found - found.mean() + metric(whole)


class CrossFit:
    """Takes the block sums of epochs as they end, and values the best ones."""

    def __init__(self, metric: Callable[[np.ndarray], float], *, larger_is_better: bool):
        self._metric = metric
        self._sign = 1 if larger_is_better else -1
        # For each half by which an epoch is chosen its best score, and the other half's sums then.
        self._best: list[tuple[float, np.ndarray]] = [(-np.inf, np.zeros((0, 0)))] * 2

    def add(self, sums: np.ndarray) -> None:
        """Take an epoch, one row of sums for each block of the same examples in each epoch."""
        for half in (0, 1):
            score = self._sign * self._metric(sums[half::2].sum(0))
            if score > self._best[half][0]:
                self._best[half] = score, sums[1 - half :: 2]

    def values(self) -> np.ndarray | None:
        """Return a value for each block in order; None where no epoch has a finite metric."""
        (_, odd), (_, even) = self._best
        if not len(odd) or not len(even):
            return None
        values = np.empty(len(odd) + len(even))
        values[1::2] = pseudo_values(odd, self._metric)
        values[::2] = pseudo_values(even, self._metric)
        return values
