"""The jackknife's pseudo-values of blocks of examples (Tukey 1958), for metrics that are no means.

With v the metric of all B blocks and v_(-b) that without block b,

    p_b = B v - (B - 1) v_(-b)

For a mean over equal blocks p_b is the mean of block b. The variance of the metric is the variance
of the p_b over the number of blocks.
"""

from collections.abc import Callable

import numpy as np


def pseudo_values(sums: np.ndarray, metric: Callable[[np.ndarray], float]) -> np.ndarray:
    """Return a value for each block. Their mean is the metric of all blocks together.

    Args:
        sums: A row for each block: the sums over its examples that `metric` is made from.
        metric: Returns the metric of examples with these sums.
    """
    whole, count = sums.sum(0), len(sums)
    without = np.array([metric(whole - one) for one in sums])
    found = count * metric(whole) - (count - 1) * without
    # Blocks of unequal sizes, and a metric that is no mean, leave a bias of order 1/n.
    return found - found.mean() + metric(whole)
