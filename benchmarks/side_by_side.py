"""Contenders timed in turn, so that a drifting machine slows all of them alike."""

import random
import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, block_s: float
) -> dict[str, list[float]]:
    """Times each contender once a round, in shuffled order.

    Args:
        contenders: Functions by name; each has been called before.
        rounds: How many rounds.
        block_s: Least seconds that a contender runs in a round; it is called as often as that
            takes.

    Returns:
        Seconds a call, one value a round, by name.
    """
    calls = {name: _calls_in(run, block_s) for name, run in contenders.items()}
    seconds = {name: [] for name in contenders}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(sorted(contenders), len(contenders)):
            seconds[name].append(_time(contenders[name], calls[name]))
    return seconds


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """Gives the median over the rounds of one contender's time over another's."""
    return statistics.median(n / d for n, d in zip(numerator, denominator, strict=True))


def _calls_in(run: Callable[[], object], block_s: float) -> int:
    return max(1, round(block_s / _time(run, 1)))


def _time(run: Callable[[], object], calls: int) -> float:
    started_s = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - started_s) / calls
