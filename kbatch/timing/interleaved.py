"""Contenders that take turns, in shuffled rounds, within a time budget."""

import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Result = TypeVar("Result")

FEWEST_ROUNDS = 3


def interleaved(
    contenders: Mapping[str, Callable[[], Result]],
    *,
    until_s: float,
    most_rounds: int,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, list[Result]]:
    """Measures every contender once a round, in another order each round.

    A machine that drifts slows all contenders of a round alike.

    Args:
        contenders: What measures a contender, by its name.
        until_s: Time on the clock `now` by which the last round should end; three rounds are
            made in any case.
        most_rounds: Rounds after which it ends.
        now: Gives the time, in seconds.

    Returns:
        One result a round, by name.
    """
    found: dict[str, list[Result]] = {name: [] for name in contenders}
    order, longest_s = random.Random(0), 0.0
    for number in range(most_rounds):
        began_s = now()
        if number >= FEWEST_ROUNDS and began_s + longest_s > until_s:
            break
        for name in order.sample(sorted(contenders), len(contenders)):
            found[name].append(contenders[name]())
        longest_s = max(longest_s, now() - began_s)
    return found
