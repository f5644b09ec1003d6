"""The turns of contenders that are timed: how each is warmed up and called, and for how long."""

import dataclasses
import gc
import itertools
import math
import numbers
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from kbatch.analysis.intervals import FEWEST_VALUES_OF_A_MEDIAN, median_interval
from kbatch.errors import InputError

# Two calls in a row that differ by less than this share agree.
_AGREEMENT = 0.1
_MOST_WARM_UP_CALLS = 12
# Long calls need no more than two of them to be warm.
_LONG_WARM_UP_S = 1.0

Result = TypeVar("Result")
Call = Callable[[], object]
Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class TimingPlan:
    """When a contender has been timed enough."""

    time_budget_s: float = 60.0  # After these no block is begun, once each contender had one.
    needed_calls: int = 59  # That the asked quantile needs.
    block_s: float = 0.05  # Least seconds that a contender runs in a round.
    precision: float = 0.05  # Share of the median, to each side of its 95 % interval.
    rounds_beyond: int = 30  # Most rounds after the needed calls were made.
    first_calls_count: bool = True  # Whether those, which trace and compile, are charged.


def check_seconds(**given: float) -> None:
    """Check that what an experiment may take is a number of seconds, by its argument's name."""
    for name, seconds in given.items():
        real = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
        if not (real and 0 < seconds < math.inf):
            raise InputError(
                f"`{name}` must be a positive number of seconds. Received: {name}={seconds!r}."
            )


class Block(NamedTuple):
    """One turn of a contender."""

    round: int  # From 0.
    durations_s: tuple[float, ...]  # Of each call.

    @property
    def median_s(self) -> float:
        """Median seconds of a call, to the nanosecond."""
        return round(statistics.median(self.durations_s), 9)


def timed_enough(blocks: list[Block], plan: TimingPlan) -> bool:
    """Return whether a contender has the needed calls, and the precision or many rounds more."""
    made = itertools.accumulate(len(block.durations_s) for block in blocks)
    with_calls = next((n for n, calls in enumerate(made, 1) if calls >= plan.needed_calls), None)
    if with_calls is None or len(blocks) < FEWEST_VALUES_OF_A_MEDIAN:
        return False
    if len(blocks) >= with_calls + plan.rounds_beyond:
        return True
    medians_s = [block.median_s for block in blocks]
    interval = median_interval(medians_s)
    most_s = 2 * plan.precision * statistics.median(medians_s)
    ends_s = interval and interval.ends
    return ends_s is not None and ends_s[1] - ends_s[0] <= most_s


class WarmUp(NamedTuple):
    """The calls before the first that counts."""

    first_call_s: float  # With tracing and compiling.
    later_calls_s: tuple[float, ...]  # The last two agree, or there are many.
    returned: Any  # By the last of them; not kept, as it may be large.

    @property
    def call_s(self) -> float:
        """Seconds that an undisturbed call takes about."""
        return min(self.later_calls_s)


def warm_up_calls(call: Call, *, clock: Clock = time.perf_counter) -> WarmUp:
    """Call a contender until two calls in a row agree, of which none is the first."""
    durations_s: list[float] = []
    returned = None
    while len(durations_s) <= _MOST_WARM_UP_CALLS:
        returned = None  # Never two of them in memory.
        began_s = clock()
        returned = call()
        durations_s.append(clock() - began_s)
        if len(durations_s) >= 3:
            one_s, other_s = durations_s[-2:]
            if abs(one_s - other_s) <= _AGREEMENT * max(one_s, other_s):
                break
            if sum(durations_s[1:]) > _LONG_WARM_UP_S:
                break
    return WarmUp(durations_s[0], tuple(durations_s[1:]), returned)


def timed_calls(
    call: Call, calls: int, *, least_s: float = 0.0, clock: Clock = time.perf_counter
) -> tuple[float, ...]:
    """Time calls in a row, as many and as long as asked, without Python's garbage collection."""
    durations_s: list[float] = []
    was_on = gc.isenabled()
    gc.disable()
    try:
        began_s = before_s = clock()
        while len(durations_s) < calls or before_s - began_s < least_s:
            call()
            now_s = clock()
            durations_s.append(now_s - before_s)
            before_s = now_s
    finally:
        if was_on:
            gc.enable()
    return tuple(durations_s)


FEWEST_ROUNDS = 3


def interleaved(
    contenders: Mapping[str, Callable[[], Result]],
    *,
    until_s: float,
    most_rounds: int,
    now: Clock = time.perf_counter,
) -> dict[str, list[Result]]:
    """Call contenders that measure themselves once a round, in another order each round."""
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
