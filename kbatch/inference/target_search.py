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

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import special

from kbatch.analysis.intervals import calls_for_quantile, quantile_upper_bound
from kbatch.analysis.scaling_curve import Latency, batch_size_within, fit_line
from kbatch.errors import TargetTooLow
from kbatch.inference.result import InferenceProfile, TargetCheck, TimingRecord
from kbatch.records.notes import Note
from kbatch.timing import Setting, Sweep, warm_up_calls

# A guess keeps this far below the target: half the time a guess at it would fail.
_AIM = 0.92
_MOST_CHECKS = 6
# With this share of what may be used in use, a larger size would gain little.
_IN_USE = 0.70
# How many times as long a second look at a size is as the first.
_LONGER = 4
# Where no hiccup was seen yet, it is taken to slow so many calls in a row.
_UNSEEN_RUN = 2.0
# How often all looks of a search together may verify a size that does not keep to the target.
_WRONG = 0.05


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
        self._guess, self._target_s, self.quantile = guess, target_s, quantile
        self._most_s = target_s / (1 + drift)  # What the quantile itself may be.
        self._stretches = [list(stretches) for stretches in earlier]  # Of all sizes.
        # What was found of each size, with the calls of each look and the confidence of the last.
        self._looked: list[tuple[TargetCheck, list[Sequence[float]], float]] = []
        self._looks = 0
        self._low, self._high = 0, largest + 1
        self._share = _AIM  # What the fit is asked for, as a share of what the quantile may be.
        self._next: tuple[int, int] | None = self._first_look(self._guessed())

    def ask(self, *, more_sizes: bool = True) -> tuple[int, int] | None:
        """Return a batch size and how many calls of it to make at least; None at the end."""
        # Without time for more sizes the one at hand is finished; the first is always called.
        if not more_sizes and self._looked and not self._stretches[-1]:
            self._next = None
        return self._next

    def stop(self) -> None:
        """End the search, because the time does not suffice for what `ask` returned."""
        if self._next is not None and (own := self._stretches[-1]):
            made = tuple(np.concatenate(own).tolist())
            check = TargetCheck(self._next[0], made, "unsure")
            self._looked.append((check, own, self._confidence()))
        self._next = None

    def is_lost(self, latencies_s: Sequence[float], calls: int) -> bool:
        """Return whether `calls` calls miss the target, even if those to come are fast."""
        made = np.concatenate([*self._stretches[-1], latencies_s])
        total = len(made) + max(0, calls - len(latencies_s))
        # One more, since a quantile lies between two calls.
        return int(np.sum(made > self._most_s)) > (1 - self.quantile) * total + 1

    def tell(self, latencies_s: Sequence[float]) -> None:
        """Take the seconds of the calls that were asked for; infinite where none can be made.

        Fewer are enough where `is_lost` says that the others change nothing.
        """
        assert self._next is not None
        (size, _), own = self._next, self._stretches[-1]
        own.append(latencies_s)
        made, confidence, more = np.concatenate(own), self._confidence(), _LONGER * self._step
        # Between infinite values there is nothing to interpolate.
        quantile_s = math.inf if np.isinf(made).any() else float(np.quantile(made, self.quantile))
        use = quantile_s / self._most_s
        keeps = use <= 1 and self._are_rare(own, confidence)
        self._looks += 1
        if not keeps and len(own) == 1:  # Would it keep to the target if more calls were all fast?
            slow = np.sum(made > self._most_s) / (len(made) + more)
            if slow <= 1 - self.quantile and self._are_rare(own, self._confidence(), more=more):
                self._next = (size, more)
                return
        # A quantile that leaves too little room for drift is no miss.
        missed = quantile_s > self._target_s
        outcome = "missed" if missed else "verified" if keeps else "unsure"
        check = TargetCheck(size, tuple(made[np.isfinite(made)].tolist()), outcome)
        self._looked.append((check, own, confidence))
        self._next = self._next_size(size, made, keeps, use)

    @property
    def checks(self) -> tuple[TargetCheck, ...]:
        """What was found of each size so far."""
        return tuple(
            # Calls of later sizes may have shown too many hiccups.
            dataclasses.replace(check, outcome="unsure")
            if check.outcome == "verified" and not self._are_rare(own, confidence)
            else check
            for check, own, confidence in self._looked
        )

    def _confidence(self) -> float:
        """Return how sure the next look has to be."""
        return 1 - _WRONG * 6 / (math.pi * (self._looks + 1)) ** 2

    def _guessed(self) -> int:
        return min(self._guess(self._share * self._most_s) or 1, self._high - 1)

    def _first_look(self, size: int) -> tuple[int, int]:
        enough = calls_for_quantile(self.quantile, confidence=self._confidence())
        self._step = math.ceil(_UNSEEN_RUN * enough)
        self._stretches.append([])
        return size, self._step

    def _next_size(
        self, size: int, made: np.ndarray, keeps: bool, use: float
    ) -> tuple[int, int] | None:
        """Return the first look at the next size, which lies between those that keep and miss."""
        if keeps:
            self._low = size
        else:
            self._high = size
        if len(self._looked) == _MOST_CHECKS or (keeps and use > _IN_USE):
            return None
        if math.isinf(use):  # The fit does not know what keeps calls from being made.
            size = (self._low + self._high) // 2
        else:
            bound_use = 1.0
            if keeps:  # The bound may exceed the target where the quantile itself does not.
                bound_s = quantile_upper_bound(made, quantile=self.quantile)
                bound_use = (bound_s or 0.0) / self._target_s
            self._share *= _AIM / max(use, bound_use)
            size = self._guessed()
        return self._first_look(size) if size > self._low else None

    def _are_rare(self, own: list[Sequence[float]], confidence: float, *, more: int = 0) -> bool:
        """Return whether at most 1 - quantile of all calls are slow, with confidence.

        Slow are calls of this size beyond the target, and calls of all sizes that were delayed by
        as much as would make this size miss it. `more` calls are taken to follow that are not.
        """
        made = np.concatenate(own)
        typical_s = float(np.median(made))
        delay_s = self._target_s - typical_s
        if not delay_s > 0:
            return False
        late: list[np.ndarray] = []
        for stretches in filter(None, self._stretches):  # The next size may not be called yet.
            usual_s = float(np.median(np.concatenate(stretches)))
            if math.isfinite(usual_s):  # Calls that could not be made say nothing of hiccups.
                # Noise grows with the time of a call.
                most_s = usual_s + delay_s * max(1.0, usual_s / typical_s)
                late += [np.asarray(stretch) > most_s for stretch in stretches]
        run = _UNSEEN_RUN  # How many calls in a row a hiccup slows.
        if any(one.any() for one in late):
            again = sum(int(np.sum(one[:-1] & one[1:])) for one in late)
            ended = sum(int(np.sum(one[:-1] & ~one[1:])) for one in late)
            # Four more that go on: few hiccups may all have been short.
            run = 1 + (again + 4) / max(1, ended)
        for slow in ([made > self._target_s], late):
            begun = sum(int(np.sum(one[:1]) + np.sum(one[1:] & ~one[:-1])) for one in slow)
            hiccups = max(begun, math.ceil(sum(int(one.sum()) for one in slow) / run))
            chances = int((sum(map(len, slow)) + more) / run)
            if hiccups >= chances:
                return False
            # An exact power must not be pushed beyond its bound by rounding.
            most = (1 - confidence) * (1 + 1e-9)
            if special.bdtr(hiccups, chances, 1 - self.quantile) > most:
                return False
        return True


# A look takes at least these seconds: 59 short calls would be over within one hiccup.
_LEAST_CHECK_S = 0.3
# What the first look has at least, as a share of the time budget.
_FIRST_CHECK_SHARE = 0.1
# How much slower than typical 5 % of normally scattered rounds are, in standard deviations.
_SLOW_ROUND = 1.645
_LEAST_DRIFT = 0.2


def check_reachable(sweep: Sweep, smallest: Setting, target_ms: float, quantile: float) -> None:
    """Check that the fastest call of one example is within a target, before all is measured."""
    found_ms = 1000 * sweep.time_s(smallest)
    if found_ms > target_ms and smallest.size > 1:
        one = sweep.prepare(smallest._replace(size=1))
        found_ms = 1000 * warm_up_calls(one, clock=sweep.clock).call_s
    if found_ms > target_ms:
        raise TargetTooLow(target_ms, quantile, 1, found_ms)


def verify_target(
    profile: InferenceProfile,
    sweep: Sweep,
    series: Any,  # That answers the target.
    *,
    time_budget_s: float,
) -> InferenceProfile:
    """Look for the largest batch within the target, and add the checks to a profile."""
    target_ms, stopped = profile.target_ms or math.inf, False
    if profile.answering:
        reasons = {one: reason.code for one, reason in sweep.not_run.items()}
        beyond = [one for one in sweep.tried(series) if reasons.get(one) == "beyond_target"]
        search = LatencyTargetSearch(
            _guess(profile),
            target_s=target_ms / 1000,
            quantile=profile.quantile,
            largest=max(sweep.timed(series) + beyond[:1]).size,  # By memory and time.
            drift=expected_drift(profile.answering),
            earlier=[blocks for one, blocks in sweep.blocks.items() if one.series == series],
        )
        while look := search.ask(more_sizes=sweep.spent_s < time_budget_s):
            (size, calls), latencies_s = look, None
            setting = Setting(series, size)
            if setting in sweep.warm_ups or sweep.admit(setting) is not None:
                left_s = time_budget_s - sweep.spent_s
                if not search.checks:  # A promise is worth a little more time.
                    left_s = max(left_s, _FIRST_CHECK_SHARE * time_budget_s)
                calls = min(calls, int(left_s / sweep.warm_ups[setting].call_s))
                if calls < calls_for_quantile(profile.quantile):
                    stopped = True
                    search.stop()
                    break
                latencies_s = _look(sweep, search, setting, calls, min(_LEAST_CHECK_S, left_s))
            found, done = "memory ran out", len(search.checks)
            search.tell(latencies_s or [math.inf] * calls)  # No target is kept to.
            if latencies_s is not None:
                slow_ms = 1000 * float(np.quantile(latencies_s, profile.quantile))
                found = f"p{100 * profile.quantile:g} {slow_ms:.3g} ms in {len(latencies_s)} calls"
                more = len(search.checks) == done
                found += ", not sure yet" if more else f", {search.checks[-1].outcome}"
            sweep.progress.say(f"checked batch {size}: {found}")
        profile = dataclasses.replace(profile, checks=search.checks)
    if profile.verified is not None:
        return profile
    note = Note.of("target_not_verified", longer=stopped or sweep.spent_s >= time_budget_s)
    return dataclasses.replace(profile, noted=(*profile.noted, note))


def _look(
    sweep: Sweep, search: LatencyTargetSearch, setting: Setting, calls: int, least_s: float
) -> Sequence[float] | None:
    """Make calls in parts, until they are enough or cannot keep to the target any more."""
    made: list[float] = []
    part = calls_for_quantile(search.quantile)
    while len(made) < calls or sum(made) < least_s:
        more = min(part, calls - len(made)) if len(made) < calls else part
        found = sweep.fresh_calls(setting, more)
        if found is None:
            return None
        made += found
        if search.is_lost(made, calls):
            break
    return made


def expected_drift(timings: Sequence[TimingRecord]) -> float:
    """Return how much slower later calls may be than those that verify an answer."""
    # The calls of a check are over within about a second; how far the rounds of the sweep scatter
    # shows what a machine does between two moments, and a short sweep may have seen a calm one.
    pairs = [(t.batch_size, value) for t in timings for value in t.times_s]
    noise = None
    with contextlib.suppress(ValueError):  # Too few for a line; slow rounds count too.
        noise = fit_line(*zip(*pairs, strict=True)).noise
    return max(_LEAST_DRIFT, _SLOW_ROUND * (noise or 0.0))


def _guess(profile: InferenceProfile) -> Callable[[float], int | None]:
    """Invert the fit of the medians times the quantile over the median, or take a proportion."""
    # Large sizes have few calls: what the quantile is over the median is taken from all.
    shares = [np.asarray(one.latencies_s) / one.median_s for one in profile.answering]
    made = np.concatenate(shares)
    ratio = float(np.quantile(made, profile.quantile)) if len(made) else 1.0
    with contextlib.suppress(ValueError):  # Too few rounds: the checks will decide.
        latency = profile.latency
        return lambda latency_s: _inverse(latency, latency_s / ratio)
    one = profile.answering[0]
    return lambda latency_s: max(1, int(one.batch_size * latency_s / one.median_s))


def _inverse(latency: Latency, latency_s: float) -> int:
    sizes, times_s = latency.batch_sizes, latency.latencies_s
    if not latency.follows_line and latency_s > times_s[-1]:
        # The curve ends here; on a plateau the time grows with the size.
        return int(sizes[-1] * latency_s / times_s[-1])
    found = batch_size_within(latency, latency_s=latency_s).value
    # Where the smallest measured size is above the target, smaller ones in proportion, which is
    # too many where a call has a fixed part, as fresh calls will show.
    return int(sizes[0] * latency_s / times_s[0]) if found is None else int(found)
