"""Search for the largest batch size that meets a latency target.

A fit predicts the latency of a typical call well, and of a slow call less well. The search
therefore makes fresh calls of the size that the fit suggests. Their latency scales the fit for the
next size: up if it was below the target, down if it was above.

The fresh calls can mislead in three ways:

- They are few. So an upper bound of the quantile must meet the target. A search looks at its calls
  several times. The k-th look may be wrong with probability 5 % * 6 / (pi k)^2, which adds up to
  5 % (a union bound).
- Slow calls come in a row. If a hiccup of the machine slows r calls in a row, n calls tell as much
  as n / r independent calls. So the test counts hiccups among n / r calls. It does this for the
  size and for all sizes together, because a hiccup does not depend on the size.
- The machine may be slower later. So the quantile must be below the target by a margin for drift.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import special

from kbatch.analysis.intervals import calls_for_quantile, quantile_upper_bound
from kbatch.analysis.scaling_curve import Latency, batch_size_within
from kbatch.errors import TargetTooLow
from kbatch.inference.result import WELL_USED, InferenceProfile, TargetCheck, expected_drift
from kbatch.records.notes import Note
from kbatch.timing import Setting, Sweep, warm_up_calls

# The search aims at this share of the target, because a size exactly at it fails half the time.
_AIM = 0.92
_MOST_CHECKS = 6
# Calls of a second look at a size, as a multiple of the first look.
_SECOND_LOOK_FACTOR = 4
# Calls in a row that a hiccup slows, assumed until one is seen.
_ASSUMED_RUN = 2.0
# Probability that a search verifies a size which does not meet the target.
_ERROR_RATE = 0.05


class LatencyTargetSearch:
    """A search for the largest batch size that meets a latency target."""

    def __init__(
        self,
        guess: Callable[[float], int | None],  # From a latency in seconds to a batch size.
        *,
        target_s: float,
        quantile: float,  # Share of the calls that must meet the target.
        largest: int,  # The largest size to try.
        drift: float = 0.0,  # Later calls may be slower by this share.
        # Earlier calls in seconds: for each batch size, a list of blocks of calls in a row.
        earlier: Sequence[Sequence[Sequence[float]]] = (),
    ):
        self._guess, self._target_s, self.quantile = guess, target_s, quantile
        self._most_s = target_s / (1 + drift)  # Upper limit of the quantile.
        self._blocks = [list(blocks) for blocks in earlier]  # A list for each size.
        # The check of each size, the blocks of its calls, and the confidence that it needed.
        self._results: list[tuple[TargetCheck, list[Sequence[float]], float]] = []
        self.looks = 0
        self._repeated: set[int] = set()  # Sizes that got further calls because none was verified.
        self._largest = largest
        self._low, self._high = 0, largest + 1
        self._share = _AIM  # The fit gives the size for this share of the allowed time.
        self._next: tuple[int, int] | None = self._first_look(self._guessed_size())

    def ask(self, *, more_sizes: bool = True) -> tuple[int, int] | None:
        """Return a batch size and the least number of calls to make of it, or None at the end."""
        # Without time for more sizes, the search finishes the current one.
        if not more_sizes and self._results and not self._blocks[-1]:
            self._next = None
        return self._next

    def ask_again(self, *, left_s: float) -> tuple[int, int] | None:
        """Return an undecided size and as many calls as it had, None if a size was verified.

        The calls of a size are doubled once. They are doubled again if the size would be verified
        in the time that is left if all further calls were fast.
        """
        outcomes = [check.outcome for check in self.checks]
        unsure = [i for i, outcome in enumerate(outcomes) if outcome == "unsure"]
        if self._next is not None or "verified" in outcomes or not unsure:
            return None
        size, index = min((self._results[i][0].batch_size, i) for i in unsure)
        _, blocks, _ = self._results[index]
        all_s = np.concatenate(blocks)
        most = int(left_s / np.median(all_s))
        if size in self._repeated and not self._can_pass(blocks, most):
            return None
        del self._results[index]
        self._blocks = [*(other for other in self._blocks if other is not blocks), blocks]
        self._repeated.add(size)
        larger = [check.batch_size for check, _, _ in self._results if check.batch_size > size]
        self._low, self._high = 0, min(larger, default=self._largest + 1)
        self._next = size, len(all_s)
        return self._next

    def stop(self) -> None:
        """End the search, because there is no time for the calls that `ask` returned."""
        if self._next is not None and (blocks := self._blocks[-1]):
            latencies_s = np.concatenate(blocks)
            is_missed = np.quantile(latencies_s, self.quantile) > self._target_s
            outcome = "missed" if is_missed else "unsure"
            check = TargetCheck(self._next[0], tuple(latencies_s.tolist()), outcome)
            self._results.append((check, blocks, self._confidence()))
        self._next = None

    def is_lost(self, latencies_s: Sequence[float], calls: int) -> bool:
        """Return whether the target is missed after `calls` calls even if the others are fast."""
        if self._next is not None and self._next[0] in self._repeated:
            return False  # `ask_again` has counted the slow calls.
        all_s = np.concatenate([*self._blocks[-1], latencies_s])
        total = len(all_s) + max(0, calls - len(latencies_s))
        # One more may be slow, because NumPy interpolates a quantile between two calls.
        return int(np.sum(all_s > self._most_s)) > (1 - self.quantile) * total + 1

    def tell(self, latencies_s: Sequence[float]) -> None:
        """Take the seconds of the calls. They are infinite if the calls could not be made.

        Fewer calls than `ask` returned are enough if `is_lost` is true for them.
        """
        assert self._next is not None
        (size, _), blocks = self._next, self._blocks[-1]
        blocks.append(latencies_s)
        all_s, confidence = np.concatenate(blocks), self._confidence()
        # NumPy cannot interpolate between infinite values.
        quantile_s = math.inf if np.isinf(all_s).any() else float(np.quantile(all_s, self.quantile))
        use = quantile_s / self._most_s
        meets = use <= 1 and self._are_rare(blocks, confidence)
        self.looks += 1
        if not meets and len(blocks) == 1:  # Would the size pass if all further calls were fast?
            more = _SECOND_LOOK_FACTOR * self._step
            if self._can_pass(blocks, more):
                self._next = (size, more)
                return
        # A quantile between the target and its margin for drift is not a miss.
        missed = quantile_s > self._target_s
        outcome = "missed" if missed else "verified" if meets else "unsure"
        check = TargetCheck(size, tuple(all_s[np.isfinite(all_s)].tolist()), outcome)
        self._results.append((check, blocks, confidence))
        self._next = self._next_size(size, all_s, meets, use)

    @property
    def checks(self) -> tuple[TargetCheck, ...]:
        """The checks so far. Hiccups in later calls can make a verified size unsure."""
        return tuple(
            dataclasses.replace(check, outcome="unsure")
            if check.outcome == "verified" and not self._are_rare(blocks, confidence)
            else check
            for check, blocks, confidence in self._results
        )

    def _confidence(self) -> float:
        """Return the confidence that the next look needs."""
        return 1 - _ERROR_RATE * 6 / (math.pi * (self.looks + 1)) ** 2

    def _guessed_size(self) -> int:
        return min(self._guess(self._share * self._most_s) or 1, self._high - 1)

    def _first_look(self, size: int) -> tuple[int, int]:
        calls = calls_for_quantile(self.quantile, confidence=self._confidence())
        self._step = math.ceil(_ASSUMED_RUN * calls)
        self._blocks.append([])
        return size, self._step

    def _next_size(
        self, size: int, latencies_s: np.ndarray, meets: bool, use: float
    ) -> tuple[int, int] | None:
        """Return the next size, between the largest that passed and the smallest that failed."""
        if meets:
            self._low = size
        else:
            self._high = size
        if len(self._results) == _MOST_CHECKS or (meets and use > WELL_USED):
            return None
        if math.isinf(use):  # Memory ran out, which the fit cannot predict.
            size = (self._low + self._high) // 2
        else:
            bound_use = 1.0
            if meets:  # The bound may be above the target although the quantile is not.
                bound_s = quantile_upper_bound(latencies_s, quantile=self.quantile)
                bound_use = (bound_s or 0.0) / self._target_s
            self._share *= _AIM / max(use, bound_use)
            size = self._guessed_size()
        return self._first_look(size) if size > self._low else None

    def _can_pass(self, blocks: list[Sequence[float]], more: int) -> bool:
        """Return whether a size would pass if `more` further calls were fast."""
        all_s = np.concatenate(blocks)
        slow = float(np.sum(all_s > self._most_s)) / (len(all_s) + more)
        return slow <= 1 - self.quantile and self._are_rare(blocks, self._confidence(), more=more)

    def _are_rare(self, blocks: list[Sequence[float]], confidence: float, *, more: int = 0) -> bool:
        """Return whether at most 1 - quantile of the calls are slow, at a confidence.

        There are two tests: calls of this size above the target, and calls of all sizes with a
        delay that would make this size miss the target. `more` fast calls are added to each.
        """
        all_s = np.concatenate(blocks)
        typical_s = float(np.median(all_s))
        delay_s = self._target_s - typical_s
        if not delay_s > 0:
            return False
        delayed: list[np.ndarray] = []
        for other_blocks in filter(None, self._blocks):  # The next size may have no calls yet.
            other_s = float(np.median(np.concatenate(other_blocks)))
            if math.isfinite(other_s):
                # The noise of a call grows with its time.
                most_s = other_s + delay_s * max(1.0, other_s / typical_s)
                delayed += [np.asarray(block) > most_s for block in other_blocks]
        run = _ASSUMED_RUN  # Calls in a row that a hiccup slows.
        if any(slow.any() for slow in delayed):
            continued = sum(int(np.sum(slow[:-1] & slow[1:])) for slow in delayed)
            ended = sum(int(np.sum(slow[:-1] & ~slow[1:])) for slow in delayed)
            # Four are added, because a few hiccups may all have been short by chance.
            run = 1 + (continued + 4) / max(1, ended)
        for tested in ([all_s > self._target_s], delayed):
            starts = sum(int(np.sum(slow[:1]) + np.sum(slow[1:] & ~slow[:-1])) for slow in tested)
            hiccups = max(starts, math.ceil(sum(int(slow.sum()) for slow in tested) / run))
            independent_calls = int((sum(map(len, tested)) + more) / run)
            if hiccups >= independent_calls:
                return False
            # Without the small factor, rounding could reject a result that is exactly enough.
            most = (1 - confidence) * (1 + 1e-9)
            if special.bdtr(hiccups, independent_calls, 1 - self.quantile) > most:
                return False
        return True


# Least seconds of a look, so that one hiccup does not cover all of it.
_LEAST_CHECK_S = 0.3
# Share of the time budget that the first look always gets.
_FIRST_CHECK_SHARE = 0.1


def check_reachable(sweep: Sweep, smallest: Setting, target_ms: float, quantile: float) -> None:
    """Check that the fastest call of one example is within the target."""
    fastest_ms = 1000 * sweep.time_s(smallest)
    if fastest_ms > target_ms and smallest.size > 1:
        call = sweep.prepare(smallest._replace(size=1))
        fastest_ms = 1000 * warm_up_calls(call, clock=sweep.clock).call_s
    if fastest_ms > target_ms:
        raise TargetTooLow(target_ms, quantile, 1, fastest_ms)


def verify_target(
    profile: InferenceProfile, sweep: Sweep, series: Any, *, time_budget_s: float
) -> InferenceProfile:
    """Search for the largest batch size within the target, and add the checks to the profile."""
    target_ms, stopped = profile.target_ms or math.inf, False
    if profile.answering:
        codes = {setting: reason.code for setting, reason in sweep.not_run.items()}
        beyond = [tried for tried in sweep.tried(series) if codes.get(tried) == "beyond_target"]
        search = LatencyTargetSearch(
            _guess(profile),
            target_s=target_ms / 1000,
            quantile=profile.quantile,
            largest=max(sweep.timed(series) + beyond[:1]).size,  # Larger sizes had no room or time.
            drift=expected_drift(profile.answering),
            earlier=[blocks for timed, blocks in sweep.blocks.items() if timed.series == series],
        )
        while look := (
            search.ask(more_sizes=(left_s := time_budget_s - sweep.spent_s) > 0)
            or (search.ask_again(left_s=left_s) if left_s > 0 else None)
        ):
            (size, calls), latencies_s = look, None
            setting = Setting(series, size)
            if setting in sweep.warm_ups or sweep.admit(setting) is not None:
                left_s = time_budget_s - sweep.spent_s
                if not search.looks:
                    left_s = max(left_s, _FIRST_CHECK_SHARE * time_budget_s)
                calls = min(calls, int(left_s / sweep.warm_ups[setting].call_s))
                if calls < calls_for_quantile(profile.quantile):
                    stopped = True
                    search.stop()
                    break
                latencies_s = _look(sweep, search, setting, calls, left_s)
            words, checks_before = "memory ran out", len(search.checks)
            search.tell(latencies_s or [math.inf] * calls)
            if latencies_s is not None:
                slow_ms = 1000 * float(np.quantile(latencies_s, profile.quantile))
                words = f"p{100 * profile.quantile:g} {slow_ms:.3g} ms in {len(latencies_s)} calls"
                checks = search.checks
                words += (
                    f", {checks[-1].outcome if len(checks) > checks_before else 'not sure yet'}"
                )
            sweep.progress.say(f"checked batch {size}: {words}")
        profile = dataclasses.replace(profile, checks=search.checks)
    if profile.verified is not None:
        return profile
    unsure = [check for check in profile.checks if check.outcome == "unsure"]
    why = profile.doubt(unsure[-1]) if unsure else "missed" if profile.checks else "no calls"
    longer = stopped or sweep.spent_s >= time_budget_s
    note = Note.of("target_not_verified", longer=longer, why=why)
    return dataclasses.replace(profile, noted=(*profile.noted, note))


def _look(
    sweep: Sweep, search: LatencyTargetSearch, setting: Setting, calls: int, most_s: float
) -> Sequence[float] | None:
    """Make calls in parts, until they are enough, the target is missed or the time is over.

    Return None if memory runs out.
    """
    latencies_s: list[float] = []
    part, least_s = calls_for_quantile(search.quantile), min(_LEAST_CHECK_S, most_s)
    while len(latencies_s) < calls or sum(latencies_s) < least_s:
        left = calls - len(latencies_s)
        fresh_s = sweep.fresh_calls(setting, min(part, left) if left > 0 else part)
        if fresh_s is None:
            return None
        latencies_s += fresh_s
        if search.is_lost(latencies_s, calls) or sum(latencies_s) >= most_s:
            break
    return latencies_s


def _guess(profile: InferenceProfile) -> Callable[[float], int | None]:
    """Return a function from a latency to the batch size whose quantile has that latency."""
    # Large sizes have few calls, so the ratio of quantile to median comes from all sizes.
    shares = np.concatenate([np.asarray(t.latencies_s) / t.median_s for t in profile.answering])
    ratio = float(np.quantile(shares, profile.quantile)) if len(shares) else 1.0
    with contextlib.suppress(ValueError):  # There are too few rounds for a fit.
        latency = profile.latency
        return lambda latency_s: _inverse(latency, latency_s / ratio)
    first = profile.answering[0]
    return lambda latency_s: max(1, int(first.batch_size * latency_s / first.median_s))


def _inverse(latency: Latency, latency_s: float) -> int:
    sizes, times_s = latency.batch_sizes, latency.latencies_s
    if not latency.follows_line and latency_s > times_s[-1]:
        # Above the largest size the time is assumed to be proportional to the size.
        return int(sizes[-1] * latency_s / times_s[-1])
    batch_size = batch_size_within(latency, latency_s=latency_s).value
    # If no measured size is fast enough, the time is assumed to be proportional to the size. The
    # result is too large if a call has a fixed cost, and fresh calls will correct it.
    return int(sizes[0] * latency_s / times_s[0]) if batch_size is None else int(batch_size)
