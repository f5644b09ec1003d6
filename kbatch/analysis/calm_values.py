"""Times that nothing disturbed.

A neighbour on the same machine makes calls slower and never faster. So the fastest rounds show
what calls take by themselves, and rounds far above them show the neighbour (Chen and Revels 2016,
arXiv:1608.04295, who take the minimum for the same reason).
"""

from collections.abc import Sequence

# Rounds that are slower by less are noise of the calls themselves.
_TOLERANCE = 0.10


def calm_values(values: Sequence[float]) -> tuple[float, ...]:
    """Keeps the times that are at most 10 % above the second fastest.

    The fastest one may be a fluke; the second fastest is one only together with it.

    Example:

    >>> calm_values([1.0, 1.9, 0.97, 1.05, 2.1])
    (1.0, 0.97, 1.05)

    Args:
        values: Times of the same work, one a round.

    Returns:
        Those that are kept, in order; both of two, and a single one.
    """
    if not len(values):
        return ()
    limit = (1 + _TOLERANCE) * sorted(values)[:2][-1]
    return tuple(value for value in values if value <= limit)
