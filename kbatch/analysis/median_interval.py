"""The confidence interval of a median, from order statistics.

Of n independent values, the number below the median is Binomial(n, 1/2). So the median lies
between the k-th smallest and the k-th largest with confidence 1 - 2 P(Binomial(n, 1/2) < k),
whatever the distribution (David and Nagaraja 2003, Order Statistics, section 7.1): rounds that a
neighbour slowed widen it less than they widen an interval of the mean.
"""

import math
from collections.abc import Sequence

from kbatch.analysis.intervals import Interval

# Even the smallest and the largest of five values hold the median with 94 % only.
FEWEST_VALUES = 6
_TAIL = 0.025


def median_interval(values: Sequence[float]) -> Interval | None:
    """Computes the 95 % interval of a median.

    Example:

    >>> median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0])
    Interval(low=1.0, high=6.0)

    Args:
        values: Independent values.

    Returns:
        The interval; None for fewer than six values, which have none.
    """
    count = len(values)
    if count < FEWEST_VALUES:
        return None
    ordered = sorted(values)
    rank, below = 0, 2.0**-count
    while below <= _TAIL:
        rank += 1
        below += math.comb(count, rank) * 2.0**-count
    return Interval(float(ordered[rank - 1]), float(ordered[count - rank]))
