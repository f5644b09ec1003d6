"""Search for the largest batch size that meets a latency target.

A fit predicts the latency of a typical call well, and of a slow call less well. The search
therefore makes fresh calls of the size that the fit suggests. Their latency scales the fit for the
next size: up if it was below the target, down if it was above.

Fresh calls can be misleading for three reasons:

- There are few calls. So an upper bound of the quantile must meet the target. A search looks at its
  calls several times. The k-th look may be wrong with probability 5 % * 6 / (pi k)^2. Over all
  looks this adds up to 5 % (a union bound).
- Slow calls come in a row. If a hiccup of the machine slows r calls in a row, n calls tell as much
  as n / r independent calls. So the test counts hiccups among n / r calls. It does this for the
  size and for all sizes together, because a hiccup does not depend on the size.
- The machine may be slower later. So the quantile must be below the target by a margin for drift.
"""

import contextlib
import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from scipy import special

from kbatch.analysis.intervals import Estimate, calls_for_quantile, quantile_upper_bound
from kbatch.analysis.scaling_curve import Latency, Timed, fit_latency, fit_line
from kbatch.errors import TargetTooLow
from kbatch.records.notes import Note

# Largest number of groups of a size's calls. The scatter of their quantiles shows the noise.
_MOST_GROUPS = 8
# If the quantile is above this share of the allowed time, a larger size would gain little.
WELL_USED = 0.70
# In a normal distribution 5 % of the rounds are slower than this, in standard deviations.
_SLOW_ROUND = 1.645
LEAST_DRIFT = 0.2
# The search aims at this share of the target, because a size exactly at it fails half the time.
_AIM = 0.92
_MOST_CHECKS = 6
# The search lowers its aim by at most this factor at once, because a pause may have slowed calls.
_LARGEST_STEP = 2.0
# Calls of a second look at a size, and of a repeated check, as a multiple of the first look.
_SECOND_LOOK_FACTOR = 4
# Calls in a row that a hiccup slows, assumed until one is seen.
_ASSUMED_RUN = 2.0
# Least seconds of a look, so that one hiccup does not cover all of it. Each repeated check doubles
# it, so that few checks fill the time.
_LEAST_CHECK_S = 0.3
# Longer than any call, in seconds.
_LONG_S = 1e9
# Probability that a search verifies a size which does not meet the target.
_ERROR_RATE = 0.05


@dataclasses.dataclass(frozen=True)
class InferenceAnswer:
    """A batch size, and how certain it is."""

    batch_size: int  #: The size, in examples.
    #: 95 % interval of the size, in fractions of examples. The ends are None if they are unknown,
    #: or if the answer is the largest measured size.
    interval: Estimate[float | None]
    reason: str  #: Where the answer comes from.
    #: Whether fresh calls met the target, at 95 % confidence over the whole search.
    verified: bool = False
    extrapolated: bool = False  #: Whether the size is outside the measured sizes.

    def __str__(self) -> str:
        how = ", verified by further calls" if self.verified else ""
        ends = [f"{max(1, int(end)):,}" for end in self.interval.ends or ()]
        interval = f" ({' to '.join(ends)})" if ends else ""
        return f"batch size {self.batch_size:,}{interval}{how}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class TargetCheck:
    """Fresh calls of one batch size, which check it against a latency target."""

    batch_size: int  #: Examples in a batch.
    latencies_s: tuple[float, ...]  #: Seconds of each call. Empty if memory ran out.
    #: `"unsure"` if the calls met the target without the margin for slower calls later, or if they
    #: were too few to outweigh the pauses of the machine.
    outcome: Literal["verified", "missed", "unsure"]

    def quantile_ms(self, quantile: float) -> float:
        """Return a quantile of the calls in milliseconds. It is infinite if memory ran out."""
        calls_s = self.latencies_s
        return 1000 * float(np.quantile(calls_s, quantile)) if calls_s else math.inf


class LatencyTargetSearch:
    """A search for the largest batch size that meets a latency target."""

    def __init__(
        self,
        guess: Callable[[float], int | None],  # From a latency in seconds to a batch size.
        *,
        target_s: float,
        quantile: float,  # Share of the calls that must meet the target.
        largest: int,  # The largest size to try.
        left_s: float = math.inf,  # Seconds for the fresh calls.
        drift: float = 0.0,  # Later calls may be slower by this share.
        # Earlier calls in seconds: for each batch size, a list of blocks of calls in a row.
        earlier: Sequence[Sequence[Sequence[float]]] = (),
    ):
        self._guess, self._target_s, self._quantile = guess, target_s, quantile
        self._most_s = target_s / (1 + drift)  # Upper limit of the quantile.
        # For each size, blocks of calls in a row. The current size is the last one.
        self._blocks = [[np.asarray(block) for block in blocks] for blocks in earlier]
        # The check of each size, the blocks of its calls, and the confidence that it needed.
        self._results: list[tuple[TargetCheck, list[np.ndarray], float]] = []
        self._looks = 0
        self._part = calls_for_quantile(quantile)  # Calls to make between two looks.
        self._repeated: set[int] = set()  # Sizes that were checked again.
        self.is_hopeless = False  # Whether one example missed the target twice, or has no memory.
        self._left_s = left_s
        self._is_repeat, self._checks_left, self._least_s = False, _MOST_CHECKS, _LEAST_CHECK_S
        self._low, self._high, self._largest = 0, largest + 1, largest
        # The next size is where the fit reaches this share of the allowed time. Checks correct it.
        self._target_share = _AIM
        self._size = self._first_look(self._guessed_size())

    def ask(self, *, left_s: float) -> tuple[int, int] | None:
        """Return a batch size and the number of calls to make of it now, or None at the end.

        If no size was verified in the end, sizes are checked again in the seconds left.
        """
        self._left_s = left_s
        if left_s <= 0:
            self.stop()
        elif self._size is None:
            self._size = self._again()
        if self._size is None:
            return None
        missing = self._needed - len(self._blocks[-1][-1])
        return self._size, min(self._part, missing) if missing > 0 else self._part

    def tell(self, latencies_s: Sequence[float]) -> TargetCheck | None:
        """Take the seconds of the calls. They are infinite if the calls could not be made.

        Return the check of the size if it is decided.
        """
        blocks = self._blocks[-1]
        blocks[-1] = np.concatenate([blocks[-1], latencies_s])
        all_s = np.concatenate(blocks)
        missing = max(0, self._needed - len(blocks[-1]))
        # A size is lost if it would miss the target even if all missing calls (at most as many as
        # there are) were fast. One more slow call is allowed, because NumPy interpolates a quantile
        # between two calls.
        most = (1 - self._quantile) * (len(all_s) + min(missing, len(all_s))) + 1
        is_lost = np.sum(all_s > self._most_s) > most
        is_short = np.sum(blocks[-1]) < self._least_s
        return None if is_short or (missing and not is_lost) else self._look()

    def stop(self) -> None:
        """End the check of this size, because there is no time for the calls of `ask`."""
        if self._size is not None:
            self._high = min(self._high, self._size)
            if any(map(len, self._blocks[-1])):
                self._look(is_last=True)
        self._size = None

    def _look(self, *, is_last: bool = False) -> TargetCheck | None:
        """Decide about the current size, or ask for more calls if they were too few."""
        assert self._size is not None
        size, blocks, confidence = self._size, self._blocks[-1], self._confidence()
        all_s = np.concatenate(blocks)
        # NumPy cannot interpolate between infinite values.
        quantile_s = math.inf if np.isinf(all_s).any() else np.quantile(all_s, self._quantile)
        usage = float(quantile_s) / self._most_s
        meets = usage <= 1 and self._are_rare(blocks, confidence)
        self._looks += 1
        may_look_again = usage <= 1 and not (meets or is_last) and len(blocks) == 1
        more = _SECOND_LOOK_FACTOR * self._needed
        may_look_again &= more * float(np.median(all_s)) <= self._left_s
        if may_look_again and self._are_rare(blocks, self._confidence(), more=more):
            self._needed = more
            blocks.append(np.empty(0))
            return None
        # A quantile below the target, but without the margin for drift, is not a miss.
        missed = quantile_s > self._target_s
        outcome = "missed" if missed else "verified" if meets else "unsure"
        check = TargetCheck(size, tuple(all_s[np.isfinite(all_s)].tolist()), outcome)
        self._results = [result for result in self._results if result[0].batch_size != size]
        self._results.append((check, blocks, confidence))
        self._size = self._next_size(size, all_s, meets, usage)
        return check

    def _again(self) -> int | None:
        """Return the next size if none was verified, or None if time or hope is gone.

        An undecided size is checked once more, then smaller sizes, and one example many times.
        """
        checks = {check.batch_size: check for check in self.checks}
        outcomes = {size: check.outcome for size, check in checks.items()}
        if "verified" in outcomes.values():
            return None
        unsure = [n for n, o in outcomes.items() if o == "unsure" and n not in self._repeated]
        size = min(unsure) if unsure else max(1, self._high // 2)
        if size in checks:
            calls_s = checks[size].latencies_s
            is_slow = not calls_s or float(np.median(calls_s)) > self._target_s
            self.is_hopeless = size == 1 and is_slow and (not calls_s or size in self._repeated)
            self._repeated.add(size)
        many = _SECOND_LOOK_FACTOR
        factor = many if size in checks and self._within(_LONG_S, many) >= size else 1
        size = min(size, self._within(_LONG_S, factor))
        if self.is_hopeless or size < 1:
            return None
        self._checks_left, self._is_repeat = 0, True
        self._least_s = min(2 * self._least_s, self._left_s / 2)
        return self._first_look(size, factor)

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
        return 1 - _ERROR_RATE * 6 / (math.pi * (self._looks + 1)) ** 2

    def _within(self, latency_s: float, factor: int = 1) -> int:
        """Return the size for a latency, or a smaller one whose calls fit in the time left."""
        return self._guess(min(latency_s, self._left_s / self._calls(factor))) or 0

    def _guessed_size(self) -> int:
        size = self._within(self._target_share * self._most_s) or 1
        if size < self._high or not self._results:
            return min(size, self._high - 1)
        # The fit is wrong, because the size is known to fail: take one in the middle.
        return math.isqrt(max(self._low, self._high // 4) * self._high)

    def _calls(self, factor: int = 1) -> int:
        calls = calls_for_quantile(self._quantile, confidence=self._confidence())
        return math.ceil(factor * _ASSUMED_RUN * calls)

    def _first_look(self, size: int, factor: int = 1) -> int:
        self._needed = self._calls(factor)
        self._blocks.append([np.empty(0)])
        return size

    def _next_size(self, size: int, calls_s: np.ndarray, meets: bool, usage: float) -> int | None:
        """Return the next size, between the largest that passed and the smallest that failed."""
        if meets:
            self._low = size
        else:
            self._high = size
        if meets and self._is_repeat:  # The machine was busy before: try the larger sizes again.
            self._is_repeat, self._high, self._checks_left = False, self._largest + 1, _MOST_CHECKS
            self._least_s = _LEAST_CHECK_S
        self._checks_left -= 1
        is_near = (meets and usage > WELL_USED) or self._low > WELL_USED * self._high
        if self._checks_left <= 0 or is_near:
            return None
        if not math.isinf(usage):  # Memory may have run out, which the fit cannot predict.
            # The bound may be above the target although the quantile is not.
            bound_s = quantile_upper_bound(calls_s, quantile=self._quantile) if meets else None
            bound_usage = (bound_s or self._target_s) / self._target_s
            self._target_share *= _AIM / min(_LARGEST_STEP, max(usage, bound_usage))
        size = self._guessed_size()
        return self._first_look(size) if size > self._low else None

    def _are_rare(self, blocks: list[np.ndarray], confidence: float, *, more: int = 0) -> bool:
        """Return whether at most a share 1 - quantile of all calls is slow, at a confidence.

        There are two tests: calls of this size above the target, and calls of all sizes with a
        delay that would make this size miss the target. `more` fast calls are added to each.
        """
        all_s = np.concatenate(blocks)
        typical_s = float(np.median(all_s))
        delay_s = self._target_s - typical_s
        if not delay_s > 0:
            return False
        delayed: list[np.ndarray] = []
        for other_blocks in filter(None, self._blocks):
            # The next size may have no calls yet.
            calls_s = np.concatenate(other_blocks)
            other_s = float(np.median(calls_s)) if len(calls_s) else math.inf
            if math.isfinite(other_s):
                # The noise of a call grows with its time.
                most_s = other_s + delay_s * max(1.0, other_s / typical_s)
                delayed += [block > most_s for block in other_blocks]
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
            if special.bdtr(hiccups, independent_calls, 1 - self._quantile) > most:
                return False
        return True


def check_target(latency_ms: float, quantile: float) -> None:
    is_number = isinstance(latency_ms, numbers.Real) and not isinstance(latency_ms, bool)
    if not is_number or not 0 < latency_ms < math.inf:
        raise ValueError(
            "The latency target must be a positive number of milliseconds. "
            f"Received: latency_ms={latency_ms!r}."
        )
    calls_for_quantile(quantile)


def expected_drift(timings: Sequence[Timed]) -> float:
    """Return the share by which later calls may be slower than the fresh calls."""
    # Fresh calls take about a second. The scatter of the rounds shows how the speed of the machine
    # changes between two moments. A short sweep may miss such changes, so there is a least value.
    pairs = [(timing.batch_size, time_s) for timing in timings for time_s in timing.times_s]
    noise = None
    with contextlib.suppress(ValueError):  # There are too few rounds for a line.
        noise = fit_line(*zip(*pairs, strict=True)).noise
    return max(LEAST_DRIFT, _SLOW_ROUND * (noise or 0.0))


def no_size_error(checks: Sequence[TargetCheck], latency_ms: float, quantile: float) -> ValueError:
    """Return the error for a target that no checked size met and that has no fit."""
    for check in checks:
        if check.batch_size == 1 and check.outcome == "missed" and check.latencies_s:
            return TargetTooLow(latency_ms, quantile, 1, check.quantile_ms(quantile))
    checked = ", ".join(f"{check.batch_size:,} {check.outcome}" for check in checks)
    return ValueError(
        "No batch size was shown to meet this latency target, and too few sizes were measured to "
        "estimate which size does. Measure on a quieter machine, give a higher target, or give "
        f"`batch_sizes`: kbatch then times {calls_for_quantile(quantile)} calls of each size. "
        f"Received: latency_ms={latency_ms:g}, checked sizes: {checked}."
    )


def contradictions(
    checks: Sequence[TargetCheck], bounds_s: Mapping[int, float], target_s: float
) -> list[Note]:
    """Return notes on checks that disagree with upper bounds of the quantile of timed sizes."""
    notes = []
    for check in checks:
        size, is_verified = check.batch_size, check.outcome == "verified"
        slow = any(timed <= size and bound_s > target_s for timed, bound_s in bounds_s.items())
        fast = any(timed >= size and bound_s <= target_s for timed, bound_s in bounds_s.items())
        if (is_verified and slow) or (check.outcome == "missed" and fast):
            when = "while the table was measured" if is_verified else "during the check"
            notes.append(Note.of("busy_while_timed", size=size, when=when))
    return notes


def last_undecided(size: int, refuted: Mapping[int, bool], *, is_near: bool) -> int:
    """Return the largest size that may meet the target although it is above a verified size.

    `refuted` says of each size that was tried whether it misses the target. If the verified size
    is near the target, the untried sizes up to the next refuted one gain nothing.
    """
    end = min((n for n, is_refuted in refuted.items() if is_refuted and n > size), default=None)
    tried = [n for n in refuted if n > size and (end is None or n < end)]
    if end is None:
        return max(tried, default=size)
    return size if is_near and not tried else end - 1


def fit_quantile(latencies_s: Mapping[int, Sequence[float]], quantile: float) -> Latency:
    """Fit a quantile of the latency to the seconds of the calls of each size, in order of time.

    The calls of a size are cut into groups. Each group gives one value of the quantile.
    """
    # In the shortest group, one call is expected beyond the quantile.
    pairs, shortest = [], math.ceil(1 / min(quantile, 1 - quantile))
    for size, calls_s in latencies_s.items():
        groups = max(1, min(_MOST_GROUPS, len(calls_s) // shortest))
        parts = np.array_split(np.asarray(calls_s), groups)
        pairs += [(size, float(np.quantile(part, quantile))) for part in parts]
    return fit_latency(*zip(*pairs, strict=True))
