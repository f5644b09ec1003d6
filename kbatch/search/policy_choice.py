"""Which dtype policy a search trains under where none is given: mixed_float16, if that pays."""

import statistics
from collections.abc import Callable, Sequence

from kbatch.page.numbers import format_number
from kbatch.search.first_updates import FEW, SOME, Updates

HALF = "mixed_float16"
_TOO_SLOW = 2.0
# Seconds of updates: fewer examples are timed where they take longer.
_LONG_S, _LONGEST_S = 0.03, 0.2
_ROUNDS_AHEAD, _MOST_ROUNDS = 2, 5


def check_half(half: Updates, full: Updates | None, batch_sizes: Sequence[int]) -> str | None:
    """Return why a search takes too long under mixed_float16, None where it does not.

    `full` makes the updates in float32 on a processor; a GPU is never asked how long they take.

    Raises:
        PolicyUnsupported: If a trial could not train.
    """
    largest = batch_sizes[-1]
    half.check(FEW, largest)
    if full is not None:
        found = slowdown(half.step_s, full.step_s, batch_sizes[len(batch_sizes) // 2])
        if found > _TOO_SLOW:
            return f"an update takes {format_number(found, 2)} times as long on this processor"
    # A loss that is a sum overflows with more examples.
    half.check(min(SOME, largest), largest)
    return None


def slowdown(
    half_s: Callable[[int], float], full_s: Callable[[int], float], batch_size: int
) -> float:
    """Return how many times as long an update takes under mixed_float16, timed in turns.

    `half_s` and `full_s` return the seconds of an update on so many rows under the two policies.
    """
    few_s = half_s(FEW)
    if few_s > max(_LONG_S, _TOO_SLOW * (few_full_s := full_s(FEW))):
        return few_s / few_full_s
    most = SOME * _LONGEST_S / half_s(min(batch_size, SOME))
    rows = min(batch_size, max(SOME, int(most)))
    ratios: list[float] = []
    ahead = 0  # Rounds that say so, less those that do not.
    while abs(ahead) < _ROUNDS_AHEAD and len(ratios) < _MOST_ROUNDS:
        ratios.append(half_s(rows) / full_s(rows))
        ahead += 1 if ratios[-1] > _TOO_SLOW else -1
    return statistics.median(ratios)
