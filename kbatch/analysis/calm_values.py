"""Times that nothing disturbed.

A neighbour on the same machine makes calls slower and never faster (Chen and Revels 2016,
arXiv:1608.04295). One that comes and goes leaves two groups of rounds, with a gap between them that
the scatter of the fast ones does not explain. Without such a gap slow rounds are noise of the calls
themselves: a fit without them would find the model faster than it is.
"""

import math
from collections.abc import Sequence

import numpy as np

# Rounds that are slower by less are noise of the calls themselves.
_TOLERANCE = 0.10
# The fast group has so many rounds, and so much of them, or else it is a fluke.
_FEWEST = 3
_LEAST_SHARE = 1 / 3
# Width of the gap, in standard deviations of many fast rounds; a few show less than they have.
_GAP = 2.0
_GAP_OF_FEW = 4.0


def calm_values(values: Sequence[float]) -> tuple[float, ...]:
    """Keeps the times below a gap that sets slow ones apart; all where there is none.

    The gap is over 10 % wide and over 2 + 4 / n standard deviations of the n times below it, which
    are a third of all or more.

    Example:

    >>> calm_values([1.0, 1.9, 0.97, 1.05, 2.1])
    (1.0, 0.97, 1.05)
    >>> calm_values([1.0, 1.15, 0.9, 1.05, 1.2])
    (1.0, 1.15, 0.9, 1.05, 1.2)

    Args:
        values: Times of the same work, one a round, positive.

    Returns:
        Those that are kept, in order.
    """
    logs = np.sort(np.log(np.asarray(values, float)))
    for count in range(max(_FEWEST, math.ceil(_LEAST_SHARE * len(logs))), len(logs)):
        spread = (_GAP + _GAP_OF_FEW / count) * float(np.std(logs[:count], ddof=1))
        if logs[count] - logs[count - 1] > max(math.log1p(_TOLERANCE), spread):
            limit = sorted(values)[count]
            return tuple(value for value in values if value < limit)
    return tuple(values)
