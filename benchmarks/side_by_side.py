"""Contenders timed in turn, so that a drifting machine slows all of them alike."""

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    block_s: float,
    during: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, list[float]]:
    """Times each contender once a round, in shuffled order.

    Args:
        contenders: Functions by name; each has been called before.
        rounds: How many rounds.
        block_s: Least seconds that a contender runs in a round; it is called as often as that
            takes.
        during: Makers of context managers, by the names of the contenders that run inside one;
            entering and leaving it is not timed.

    Returns:
        Seconds a call, one value a round, by name.
    """
    calls = {name: _calls_in(run, block_s) for name, run in contenders.items()}
    seconds = {name: [] for name in contenders}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(sorted(contenders), len(contenders)):
            with (during or {}).get(name, contextlib.nullcontext)():
                seconds[name].append(_time(contenders[name], calls[name]))
    return seconds


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """Returns the median over the rounds of one contender's time over another's."""
    return statistics.median(_ratios(numerator, denominator))


def ratio_interval(numerator: list[float], denominator: list[float]) -> tuple[float, float]:
    """Returns a 95 % interval of that median, by the ranks of the rounds: it assumes no shape.

    Raises:
        ValueError: For fewer than six rounds, which have no such interval.
    """
    ratios = sorted(_ratios(numerator, denominator))
    count = len(ratios)
    below = [sum(math.comb(count, i) for i in range(k)) / 2**count for k in range(count // 2)]
    rank = max(k for k, share in enumerate(below) if share <= 0.025)
    if rank == 0:
        raise ValueError(f"An interval needs six rounds at least. Received: {count}.")
    return ratios[rank - 1], ratios[count - rank]


def _ratios(numerator: list[float], denominator: list[float]) -> list[float]:
    return [n / d for n, d in zip(numerator, denominator, strict=True)]


def _calls_in(run: Callable[[], object], block_s: float) -> int:
    return max(1, round(block_s / _time(run, 1)))


def _time(run: Callable[[], object], calls: int) -> float:
    started_s = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - started_s) / calls
