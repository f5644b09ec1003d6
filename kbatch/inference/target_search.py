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
from scipy import special

from kbatch.analysis.intervals import calls_for_quantile, quantile_upper_bound

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
_UNSEEN_RUN = 2.0
# How often all looks of a search together may verify a size that does not keep to the target.
_WRONG = 0.05


@dataclasses.dataclass(frozen=True)
class TargetTry:
    """A batch size that was called afresh: what `TargetCheck` keeps of it."""

    batch_size: int
    latencies_s: tuple[float, ...]
    keeps: bool
    confidence: float  # Of its last look.
    calls_a_hiccup: float
    missing_calls: int | None


class Look(NamedTuple):
    """Calls to make: at least so many, of batches of one size."""

    batch_size: int
    calls: int


class LatencyTargetSearch:
    """A search for the largest batch size whose calls keep to a target."""

    def __init__(
        self,
        guess: Callable[[float], int | None],  # The batch size of a latency in seconds by a fit.
        *,
        target_s: float,
        quantile: float,  # The share of the calls that has to keep to it.
        largest: int,  # The largest size to try.
        drift: float = 0.0,  # By which share later calls may be slower.
        # Seconds of calls in a row that were timed before, a list for each batch size.
        earlier: Sequence[Sequence[Sequence[float]]] = (),
    ):
        self.tries: list[TargetTry] = []
        self._guess = guess
        self.drift = drift
        self._target_s, self._quantile = target_s, quantile
        self._most_s = target_s / (1 + drift)  # What the quantile itself may be.
        self._stretches = [list(stretches) for stretches in earlier]  # Of all sizes.
        self._earlier = len(self._stretches)
        self._looks = 0
        self._low, self._high = 0, largest + 1
        self._share = _AIM  # What the fit is asked for, as a share of what the quantile may be.
        self._next: Look | None = self._first_look(self._guessed())

    def ask(self, *, more_sizes: bool = True) -> Look | None:
        """Return the next calls to make, None at the end."""
        # Without time for more sizes the one at hand is finished; the first is always called.
        if not more_sizes and self.tries and not self._stretches[-1]:
            self._next = None
        return self._next

    def tell(self, latencies_s: Sequence[float]) -> None:
        """Take the seconds of the calls that were asked for; infinite where none can be made."""
        assert self._next is not None
        size, own = self._next.batch_size, self._stretches[-1]
        own.append(latencies_s)
        made = tuple(latency_s for stretch in own for latency_s in stretch)
        confidence = self._confidence
        everywhere, run = self._hiccups(own)
        self._looks += 1
        keeps = everywhere.are_rare(self._quantile, confidence, run) and keeps_to(
            made,
            self._target_s,
            quantile=self._quantile,
            drift=self.drift,
            confidence=confidence,
            calls_a_hiccup=run,
        )
        missing = None if keeps else self._missing(np.asarray(made), everywhere, run)
        if missing is not None and len(own) == 1 and missing <= _MOST_LONGER * self._step:
            self._next = Look(size, max(missing, _LONGER * self._step))
            return
        use = _quantile_s(made, self._quantile) / self._most_s
        unsure = missing if use <= 1 else None
        self.tries.append(TargetTry(size, made, keeps, confidence, run, unsure))
        self._next = self._next_size(size, made, keeps, use)

    @property
    def best(self) -> TargetTry | None:
        """The largest size that kept to the target, None if none did."""
        kept = [one for one in self.tries if one.keeps and not self.is_withdrawn(one)]
        return max(kept, key=lambda one: one.batch_size, default=None)

    def is_withdrawn(self, one: TargetTry) -> bool:
        """Return whether a size kept to the target, and calls after it showed too many hiccups."""
        own = self._stretches[self._earlier + self.tries.index(one)]
        everywhere, run = self._hiccups(own)
        return one.keeps and not everywhere.are_rare(self._quantile, one.confidence, run)

    @property
    def _confidence(self) -> float:
        return 1 - _WRONG * 6 / (math.pi * (self._looks + 1)) ** 2

    def _guessed(self) -> int:
        return min(self._guess(self._share * self._most_s) or 1, self._high - 1)

    def _first_look(self, size: int) -> Look:
        enough = calls_for_quantile(self._quantile, confidence=self._confidence)
        self._step = math.ceil(_UNSEEN_RUN * enough)
        self._stretches.append([])
        return Look(size, self._step)

    def _next_size(
        self, size: int, latencies_s: Sequence[float], keeps: bool, use: float
    ) -> Look | None:
        """Return the first look at the next size, which lies between those that keep and miss."""
        if keeps:
            self._low = size
        else:
            self._high = size
        if len(self.tries) == _MOST_CHECKS or (keeps and use > _IN_USE):
            return None
        if math.isinf(use):  # The fit does not know what keeps calls from being made.
            size = (self._low + self._high) // 2
        else:
            bound_use = 1.0
            if keeps:  # The bound may exceed the target where the quantile itself does not.
                bound = quantile_upper_bound(latencies_s, quantile=self._quantile)
                bound_use = (bound or 0.0) / self._target_s
            self._share *= _AIM / max(use, bound_use)
            size = self._guessed()
        return self._first_look(size) if size > self._low else None

    def _missing(self, made: np.ndarray, everywhere: "_Hiccups", run: float) -> int | None:
        """Return how many more calls would make a size keep, were they all fast; None for none."""
        both = (_Hiccups.among(made > self._target_s), everywhere)
        for calls in range(self._step, _MOST_MISSING * self._step + 1, self._step):
            slow_share = np.sum(made > self._most_s) / (len(made) + calls)
            if slow_share <= 1 - self._quantile and all(
                seen._replace(calls=seen.calls + calls).are_rare(
                    self._quantile, self._confidence, run
                )
                for seen in both
            ):
                return calls
        return None

    def _hiccups(self, own: list[Sequence[float]]) -> tuple["_Hiccups", float]:
        """Count the calls of all sizes that hiccups slowed, and how many calls one slows."""
        typical_s = float(np.median(np.concatenate(own)))
        # A call that is later than this would make the size miss the target.
        delay_s = self._target_s - typical_s
        if not delay_s > 0:
            return _Hiccups(0, 0, 0), _UNSEEN_RUN
        counts, again, ended = [], 0, 0
        for stretches in filter(None, self._stretches):  # The next size may not be called yet.
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
        # Four more that go on: few hiccups may all have been short.
        return seen, 1 + (again + 4) / max(1, ended) if seen.slow else _UNSEEN_RUN


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
    seen = _Hiccups.among(np.asarray(latencies_s) > target_s)
    rare = seen.are_rare(quantile, confidence, calls_a_hiccup)
    return rare and _quantile_s(latencies_s, quantile) <= target_s / (1 + drift)


class _Hiccups(NamedTuple):
    """How many calls there were, how many of them were slow, and in how many runs."""

    calls: int
    slow: int
    runs: int

    @classmethod
    def among(cls, slow: np.ndarray) -> "_Hiccups":
        runs = np.sum(slow[1:] & ~slow[:-1]) + np.sum(slow[:1])
        return cls(len(slow), int(np.sum(slow)), int(runs))

    def are_rare(self, quantile: float, confidence: float, calls_a_hiccup: float) -> bool:
        """Return whether at most 1 - quantile of all calls are slow, with confidence."""
        hiccups = max(self.runs, math.ceil(self.slow / calls_a_hiccup))
        chances = int(self.calls / calls_a_hiccup)
        if hiccups >= chances:
            return False
        # An exact power must not be pushed beyond its bound by rounding.
        most = (1 - confidence) * (1 + 1e-9)
        return bool(special.bdtr(hiccups, chances, 1 - quantile) <= most)


def _quantile_s(latencies_s: Sequence[float], quantile: float) -> float:
    # Between infinite values there is nothing to interpolate.
    return math.inf if math.inf in latencies_s else float(np.quantile(latencies_s, quantile))
