"""Timing in shuffled rounds: contenders take turns, so that a drift slows all alike."""

import contextlib
import dataclasses
import gc
import itertools
import math
import numbers
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from kbatch.analysis.intervals import FEWEST_VALUES_OF_A_MEDIAN, median_interval
from kbatch.device.failures import ran_out_of_memory
from kbatch.errors import InputError

# Two calls in a row that differ by less than this share agree.
_AGREEMENT = 0.1
_MOST_WARM_UP_CALLS = 12
# Long calls need no more than two of them to be warm.
_LONG_WARM_UP_S = 1.0

Key = TypeVar("Key", bound=Hashable)
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
    returned: Any = None  # By the last of them; not kept, as it may be large.

    @property
    def call_s(self) -> float:
        """Seconds that an undisturbed call takes about."""
        return min(self.later_calls_s)


def warm_up_calls(call: Call, *, clock: Clock = time.perf_counter, least: int = 3) -> WarmUp:
    """Call a contender until two calls in a row agree, which the first is not if it traces."""
    durations_s: list[float] = []
    returned = None
    while len(durations_s) <= _MOST_WARM_UP_CALLS:
        returned = None  # Never two of them in memory.
        began_s = clock()
        returned = call()
        durations_s.append(clock() - began_s)
        if len(durations_s) >= least:
            one_s, other_s = durations_s[-2:]
            if abs(one_s - other_s) <= _AGREEMENT * max(one_s, other_s):
                break
            if sum(durations_s[1:]) > _LONG_WARM_UP_S:
                break
    return WarmUp(durations_s[0], tuple(durations_s[1:]), returned)


class TimingRounds(Generic[Key]):
    """Contenders that are timed in turns; one that runs out of memory leaves, the others go on."""

    def __init__(self, plan: TimingPlan, *, seed: int, clock: Clock = time.perf_counter):
        self.blocks: dict[Key, list[Block]] = {}  # The turns of each contender, in order.
        self.warm_ups: dict[Key, WarmUp] = {}  # The calls before them.
        self.failures: dict[Key, Exception] = {}  # Of those that ran out of memory.
        self._plan = plan
        self._clock = clock
        self._started_s = clock()
        self._order = random.Random(seed)
        self._calls: dict[Key, Call] = {}
        self._first_calls_s = 0.0

    @property
    def spent_s(self) -> float:
        """Seconds since the start, warming up included; first calls where the plan says so."""
        free_s = 0.0 if self._plan.first_calls_count else self._first_calls_s
        return self._clock() - self._started_s - free_s

    @property
    def rest_s(self) -> float:
        return self._plan.time_budget_s - self.spent_s

    def allow(self, rest_s: float) -> None:
        """Let so many seconds be left, whatever was spent before."""
        self._plan = dataclasses.replace(self._plan, time_budget_s=self.spent_s + rest_s)

    def late(self, share: float) -> bool:
        return self.spent_s >= share * self._plan.time_budget_s

    def too_slow_to_double(self, call_s: float, *, contenders: int = 1) -> bool:
        """Return whether no time is left for contenders of twice the size of such a call."""
        # Twice the size takes up to twice as long, and so do all smaller ones together.
        return 4 * call_s * self._plan.needed_calls * contenders > self.rest_s

    def admit(
        self, key: Key, prepare: Callable[[], Call], *, traced: bool = False
    ) -> WarmUp | None:
        """Make a contender ready, and warm it up to take part; None where memory ran out."""
        try:
            call = prepare()
            warm_up = warm_up_calls(call, clock=self._clock, least=2 if traced else 3)
        except Exception as error:
            self._keep_if_memory(key, error)
            return None
        self.warm_ups[key] = warm_up._replace(returned=None)
        self.blocks[key], self._calls[key] = [], call
        self._first_calls_s += warm_up.first_call_s
        return warm_up

    def withdraw(self, key: Key) -> WarmUp:
        """Take a contender out that was warmed up and is not to be timed."""
        del self._calls[key], self.blocks[key]
        return self.warm_ups.pop(key)

    def each_round(self) -> Iterator[list[Key]]:
        """Time all contenders until each was timed enough; yield after each round which go on."""
        live = list(self._calls)
        for number in itertools.count():
            for key in self._order.sample(live, len(live)):
                if number > 0 and self.rest_s <= 0:
                    return
                try:
                    durations_s = self._timed(key, least_calls=1, least_s=self._plan.block_s)
                except Exception as error:
                    self._keep_if_memory(key, error)
                else:
                    self.blocks[key].append(Block(number, durations_s))
            live = [
                key
                for key in live
                if key not in self.failures and not timed_enough(self.blocks[key], self._plan)
            ]
            if not live:
                return
            yield list(live)

    def fresh_calls(
        self, key: Key, calls: int, *, least_s: float = 0.0
    ) -> tuple[float, ...] | None:
        """Time calls of one contender in a row; None where memory ran out."""
        try:
            return self._timed(key, least_calls=calls, least_s=least_s)
        except Exception as error:
            if not ran_out_of_memory(error, smaller_worked=True):
                raise
            return None

    def _keep_if_memory(self, key: Key, error: Exception) -> None:
        if not ran_out_of_memory(error, smaller_worked=bool(self.warm_ups)):
            raise error
        # The frames of a traceback hold the tensors of the call that ran out.
        self.failures[key] = error.with_traceback(None)
        error.__context__ = error.__cause__ = None
        gc.collect()

    def _timed(self, key: Key, *, least_calls: int, least_s: float) -> tuple[float, ...]:
        call, clock = self._calls[key], self._clock
        durations_s: list[float] = []
        with collection_off():
            began_s = before_s = clock()
            while len(durations_s) < least_calls or before_s - began_s < least_s:
                call()
                now_s = clock()
                durations_s.append(now_s - before_s)
                before_s = now_s
        return tuple(durations_s)


@contextlib.contextmanager
def collection_off() -> Iterator[None]:
    """Keep Python's garbage collection out of what is timed."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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
