"""A sample of many calls that prefers none of them."""

import random
from collections.abc import Sequence


def kept_calls(durations_s: Sequence[float], *, least: int, seed: int) -> list[float]:
    """Picks one call at random of every k in a row, with the largest k that leaves enough.

    The first call of a block is slower than the others, and slow blocks have fewer calls: picks at
    fixed places, or as many of each block, would count such calls too often.

    Example:

    >>> len(kept_calls([0.01] * 1000, least=100, seed=0))
    100

    Args:
        durations_s: Seconds of each call, in order of time.
        least: How many to keep at least, if there are as many; fewer than twice as many are kept.
        seed: Seed of the picks.

    Returns:
        The durations that were picked, in order.
    """
    step = max(1, len(durations_s) // least)
    picks = random.Random(seed)
    places = (start + picks.randrange(step) for start in range(0, len(durations_s), step))
    return [durations_s[place] for place in places if place < len(durations_s)]
