"""The largest batch size that keeps to a latency target: a guess from a fit, checked by calls.

A fit knows the latency of a typical call well and that of a slow one less well. So its guess is
called afresh, and what the calls show scales the fit for the next guess: upwards where they had
room, downwards where they had not.

Two things may go wrong with what calls show. They are few: the upper 95 % bound of the quantile has
to keep to the target. And the machine may be slower later: the quantile itself has to keep below it
by a room for drift. Both at once, a bound with that room, is improbable, and costs throughput.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from kbatch.analysis.quantile_bounds import calls_for_quantile, quantile_upper_bound

# A guess keeps this far below the target: half the time a guess at it would fail.
_AIM = 0.92
_MOST_CHECKS = 6
# With this share of what may be used in use, a larger size would gain little.
_IN_USE = 0.70
# A check makes up to so many times the calls that the quantile needs.
_MOST_LOOKS = 2


@dataclasses.dataclass(frozen=True)
class TargetTry:
    """A batch size that was called afresh.

    Attributes:
        batch_size: Examples in the batch.
        latencies_s: Seconds of each call.
        keeps: Whether it keeps to the target, see `keeps_to`.
    """

    batch_size: int
    latencies_s: tuple[float, ...]
    keeps: bool


def search_latency_target(
    call: Callable[[int, int], Sequence[float]],
    guess: Callable[[float], int | None],
    *,
    target_s: float,
    quantile: float,
    largest: int,
    drift: float = 0.0,
    more_time: Callable[[], bool] = lambda: True,
) -> tuple[TargetTry, ...]:
    """Looks for the largest batch size whose calls keep to a target.

    Args:
        call: Calls a batch size so many times and gives the seconds of each; infinite ones where
            the calls cannot be made, as when memory runs out.
        guess: Gives the largest batch size of at most a latency (in seconds) by a fit, None where
            there is none.
        target_s: The target, in seconds.
        quantile: Share of the calls that has to keep to it, in (0, 1).
        largest: Largest size to try, in examples.
        drift: By which share later calls may be slower than those that are made now.
        more_time: Tells whether another size may be tried; the first always is.

    Returns:
        All tries, in order. The answer is `best_try` of them.
    """
    target = _Target(target_s, quantile, drift)
    tries: list[TargetTry] = []
    low, high = 0, largest + 1
    share = _AIM  # What the fit is asked for, as a share of what the quantile may be.
    size = min(guess(share * target.quantile_s) or 1, largest)
    while True:
        found = _try(call, size, target)
        tries.append(found)
        low, high = (size, high) if found.keeps else (low, size)
        use = target.use(found.latencies_s)
        if len(tries) == _MOST_CHECKS or not more_time() or (found.keeps and use > _IN_USE):
            return tuple(tries)
        if math.isinf(use):  # The fit does not know what keeps calls from being made.
            size = (low + high) // 2
        else:
            # The bound may exceed the target where the quantile itself does not.
            share *= _AIM / max(use, target.use_of_bound(found.latencies_s) if found.keeps else 1.0)
            size = min(guess(share * target.quantile_s) or 1, high - 1)
        if size <= low:
            return tuple(tries)


def best_try(tries: Sequence[TargetTry]) -> TargetTry | None:
    """Gives the largest size that kept to the target, None if none did."""
    return max((one for one in tries if one.keeps), key=lambda one: one.batch_size, default=None)


def keeps_to(
    latencies_s: Sequence[float], target_s: float, *, quantile: float, drift: float = 0.0
) -> bool:
    """Tells whether a latency keeps to a target, with 95 % confidence and with room for drift.

    Args:
        latencies_s: Seconds of each call.
        target_s: The target, in seconds.
        quantile: Share of the calls that has to keep to it, in (0, 1).
        drift: By which share later calls may be slower.

    Returns:
        Whether the upper 95 % bound of the quantile is at most the target, and the quantile of
        these calls at most the target over 1 + `drift`; False for too few calls.
    """
    bound_s = quantile_upper_bound(latencies_s, quantile=quantile).value
    if bound_s is None or bound_s > target_s:
        return False
    return _quantile_s(latencies_s, quantile) <= target_s / (1 + drift)


@dataclasses.dataclass(frozen=True)
class _Target:
    bound_s: float
    quantile: float
    drift: float

    @property
    def quantile_s(self) -> float:
        """What the quantile itself may be, in seconds."""
        return self.bound_s / (1 + self.drift)

    def keeps(self, latencies_s: Sequence[float]) -> bool:
        return keeps_to(latencies_s, self.bound_s, quantile=self.quantile, drift=self.drift)

    def is_lost(self, latencies_s: Sequence[float], *, calls: int) -> bool:
        """Tells whether not even fast calls, up to so many in all, could make it keep."""
        above = sum(latency_s > self.bound_s for latency_s in latencies_s)
        slow = sum(latency_s > self.quantile_s for latency_s in latencies_s)
        return above > _allowed_above(calls, self.quantile) or slow > (1 - self.quantile) * calls

    def use(self, latencies_s: Sequence[float]) -> float:
        """Gives the quantile as a share of what it may be."""
        return _quantile_s(latencies_s, self.quantile) / self.quantile_s

    def use_of_bound(self, latencies_s: Sequence[float]) -> float:
        """Gives the upper bound of the quantile as a share of what that may be."""
        bound_s = quantile_upper_bound(latencies_s, quantile=self.quantile).value
        return (bound_s or 0.0) / self.bound_s


def _try(call: Callable[[int, int], Sequence[float]], size: int, target: _Target) -> TargetTry:
    """Calls a size until it surely keeps to the target or no longer can."""
    needed = calls_for_quantile(target.quantile)
    most = _MOST_LOOKS * needed
    latencies_s: list[float] = []
    while len(latencies_s) < most:
        look = call(size, needed)  # More calls than were asked for where they are short.
        latencies_s += look
        if target.keeps(latencies_s):
            return TargetTry(size, tuple(latencies_s), True)
        if target.is_lost(latencies_s, calls=len(latencies_s) + len(look)):
            break
    return TargetTry(size, tuple(latencies_s), False)


def _quantile_s(latencies_s: Sequence[float], quantile: float) -> float:
    # Between infinite values there is nothing to interpolate.
    return math.inf if math.inf in latencies_s else float(np.quantile(latencies_s, quantile))


def _allowed_above(calls: int, quantile: float) -> int:
    """Counts how many of the calls may lie above an upper bound of the quantile."""
    rank = quantile_upper_bound(range(calls), quantile=quantile).value
    return 0 if rank is None else calls - 1 - int(rank)
