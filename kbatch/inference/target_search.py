"""The largest batch size that keeps to a latency target: a guess from a fit, checked by calls.

A fit knows the latency of a typical call well and that of a slow one less well. So its guess is
called afresh, and what the calls show scales the fit for the next guess: upwards where they had
room, downwards where they had not.

Three things may go wrong with what calls show. They are few: the upper bound of the quantile has to
keep to the target, and since a search looks at its calls several times, at several sizes, the k-th
look may be wrong in 5 % * 6 / (pi k)^2 only, 5 % in all (a union bound). They come in a
row: a hiccup of the machine that slows r calls in a row is seen in n calls as often as one of
a single call in n / r, so n / r calls and the number of hiccups are what counts, of this size and
of all sizes together: a hiccup does not ask for the size. And the machine may be slower later: the
quantile itself has to keep below the target by a room for drift.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kbatch.analysis.intervals import calls_for_quantile, chance_of_at_most, quantile_upper_bound

# A guess keeps this far below the target: half the time a guess at it would fail.
_AIM = 0.92
_MOST_CHECKS = 6
# With this share of what may be used in use, a larger size would gain little.
_IN_USE = 0.70
# A second look at a size is longer than its first one, and at most so many times as long.
_LONGER, _MOST_LONGER = 2, 4
# More missing calls than this many first looks have are not worth a number.
_MOST_MISSING = 100
# Where no hiccup was seen yet, it is taken to slow so many calls in a row.
_UNSEEN_RUN = 1.5
# How often all looks of a search together may verify a size that does not keep to the target.
_WRONG = 0.05

Stretches = Sequence[Sequence[float]]


@dataclasses.dataclass(frozen=True)
class TargetTry:
    """A batch size that was called afresh.

    Attributes:
        batch_size: Examples in the batch.
        latencies_s: Seconds of each call.
        keeps: Whether it keeps to the target, see `keeps_to`.
        confidence: Confidence of its last look, in (0, 1).
        calls_a_hiccup: Calls in a row that a hiccup slows, as far as it was known then.
        missing_calls: Fast calls that are missing where the quantile of these calls keeps to the
            target and too little is known to be sure; else None.
    """

    batch_size: int
    latencies_s: tuple[float, ...]
    keeps: bool
    confidence: float = 0.95
    calls_a_hiccup: float = 1.0
    missing_calls: int | None = None


def search_latency_target(
    call: Callable[[int, int], Sequence[float]],
    guess: Callable[[float], int | None],
    *,
    target_s: float,
    quantile: float,
    largest: int,
    drift: float = 0.0,
    earlier: Sequence[Stretches] = (),
    more_time: Callable[[], bool] = lambda: True,
) -> tuple[TargetTry, ...]:
    """Look for the largest batch size whose calls keep to a target."""
    target = _Target(target_s, quantile, drift)
    looks = _Looks(call, target, list(earlier))
    tries: list[TargetTry] = []
    low, high = 0, largest + 1
    share = _AIM  # What the fit is asked for, as a share of what the quantile may be.
    size = min(guess(share * target.quantile_s) or 1, largest)
    while True:
        found = looks.at(size)
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
    """Return the largest size that kept to the target, None if none did."""
    return max((one for one in tries if one.keeps), key=lambda one: one.batch_size, default=None)


def keeps_to(
    latencies_s: Sequence[float],
    target_s: float,
    *,
    quantile: float,
    drift: float = 0.0,
    confidence: float = 0.95,
    calls_a_hiccup: float = 1.0,
) -> bool:
    """Return whether a latency keeps to a target, with confidence and with room for drift."""
    target = _Target(target_s, quantile, drift)
    return target.keeps(latencies_s, confidence=confidence, calls_a_hiccup=calls_a_hiccup)


@dataclasses.dataclass(frozen=True)
class _Target:
    bound_s: float
    quantile: float
    drift: float

    @property
    def quantile_s(self) -> float:
        """What the quantile itself may be, in seconds."""
        return self.bound_s / (1 + self.drift)

    def keeps(
        self, latencies_s: Sequence[float], *, confidence: float, calls_a_hiccup: float
    ) -> bool:
        """Return whether quantile and upper bound of the quantile are within the target."""
        seen = _Hiccups.among(np.asarray(latencies_s) > self.bound_s)
        rare = seen.are_rare(self.quantile, confidence=confidence, calls_a_hiccup=calls_a_hiccup)
        return rare and _quantile_s(latencies_s, self.quantile) <= self.quantile_s

    def use(self, latencies_s: Sequence[float]) -> float:
        """Return the quantile as a share of what it may be."""
        return _quantile_s(latencies_s, self.quantile) / self.quantile_s

    def use_of_bound(self, latencies_s: Sequence[float]) -> float:
        """Return the upper bound of the quantile as a share of what that may be."""
        bound_s = quantile_upper_bound(latencies_s, quantile=self.quantile).value
        return (bound_s or 0.0) / self.bound_s


class _Hiccups(NamedTuple):
    """How many calls there were, how many of them were slow, and in how many runs."""

    calls: int
    slow: int
    runs: int

    @classmethod
    def among(cls, slow: np.ndarray) -> "_Hiccups":
        runs = np.sum(slow[1:] & ~slow[:-1]) + np.sum(slow[:1])
        return cls(len(slow), int(np.sum(slow)), int(runs))

    def are_rare(self, quantile: float, *, confidence: float, calls_a_hiccup: float) -> bool:
        """Return whether at most 1 - quantile of all calls are slow, with confidence."""
        hiccups = max(self.runs, math.ceil(self.slow / calls_a_hiccup))
        chances = int(self.calls / calls_a_hiccup)
        if hiccups >= chances:
            return False
        # An exact power must not be pushed beyond its bound by rounding.
        most = (1 - confidence) * (1 + 1e-9)
        return chance_of_at_most(hiccups, chances, 1 - quantile) <= most


class _Looks:
    """The looks of a search, at all its sizes."""

    def __init__(
        self,
        call: Callable[[int, int], Sequence[float]],
        target: _Target,
        earlier: Sequence[Stretches],
    ):
        self._call = call
        self._target = target
        self._called = [list(stretches) for stretches in earlier]
        self._number = 0

    def at(self, size: int) -> TargetTry:
        """Call a size, in two looks at most, until it keeps to the target or no longer can."""
        target, own = self._target, []
        self._called.append(own)
        enough = calls_for_quantile(target.quantile, confidence=self._confidence)
        least = calls = math.ceil(_UNSEEN_RUN * enough)
        while True:
            own.append(self._call(size, calls))
            latencies_s = tuple(latency_s for stretch in own for latency_s in stretch)
            confidence = self._confidence
            everywhere, run = self._hiccups(own)
            self._number += 1
            keeps = target.keeps(latencies_s, confidence=confidence, calls_a_hiccup=run)
            keeps = keeps and everywhere.are_rare(
                target.quantile, confidence=confidence, calls_a_hiccup=run
            )
            missing = None if keeps else self._missing(latencies_s, everywhere, run, step=least)
            if keeps or len(own) > 1 or missing is None or missing > _MOST_LONGER * least:
                unsure = missing if target.use(latencies_s) <= 1 else None
                return TargetTry(size, latencies_s, keeps, confidence, run, unsure)
            calls = max(missing, _LONGER * least)

    @property
    def _confidence(self) -> float:
        """Return the confidence of the next look."""
        return 1 - _WRONG * 6 / (math.pi * (self._number + 1)) ** 2

    def _missing(
        self, latencies_s: Sequence[float], everywhere: _Hiccups, run: float, *, step: int
    ) -> int | None:
        """Return how many more calls would make a size keep, were they all fast; None for none."""
        target, made = self._target, np.asarray(latencies_s)
        both = (_Hiccups.among(made > target.bound_s), everywhere)
        for calls in range(step, _MOST_MISSING * step + 1, step):
            slow_share = np.sum(made > target.quantile_s) / (len(made) + calls)
            if slow_share <= 1 - target.quantile and all(
                seen._replace(calls=seen.calls + calls).are_rare(
                    target.quantile, confidence=self._confidence, calls_a_hiccup=run
                )
                for seen in both
            ):
                return calls
        return None

    def _hiccups(self, own: Stretches) -> tuple[_Hiccups, float]:
        """Count the calls of all sizes that hiccups slowed, and how many calls one slows."""
        typical_s = float(np.median(np.concatenate(own)))
        # A call that is later than this would make the size miss the target.
        delay_s = self._target.bound_s - typical_s
        if not delay_s > 0:
            return _Hiccups(0, 0, 0), _UNSEEN_RUN
        counts, again, ended = [], 0, 0
        for stretches in self._called:
            usual_s = float(np.median(np.concatenate(stretches)))
            if math.isinf(usual_s):
                continue  # Calls that could not be made say nothing of hiccups.
            # Noise grows with the time of a call.
            most_s = usual_s + delay_s * max(1.0, usual_s / typical_s)
            for stretch in stretches:
                slow = np.asarray(stretch) > most_s
                counts.append(_Hiccups.among(slow))
                again += int(np.sum(slow[:-1] & slow[1:]))
                ended += int(np.sum(slow[:-1] & ~slow[1:]))
        seen = _Hiccups(*(sum(values) for values in zip(*counts, strict=True)))
        # Two more that go on: few hiccups may all have been short.
        return seen, 1 + (again + 2) / max(1, ended) if seen.slow else _UNSEEN_RUN


def _quantile_s(latencies_s: Sequence[float], quantile: float) -> float:
    # Between infinite values there is nothing to interpolate.
    return math.inf if math.inf in latencies_s else float(np.quantile(latencies_s, quantile))
