"""Timing: calls in shuffled rounds, and one sweep over sizes that memory and time end.

A sweep warms sizes up, small ones first, as far as memory, data and half of the time allow. Then
all take turns, so that a machine that drifts slows all alike, each until its median is known well.
One that runs out of memory leaves, and the others go on.
"""

import abc
import dataclasses
import functools
import gc
import itertools
import math
import numbers
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from kbatch.analysis.batch_sizes import powers_of_two
from kbatch.analysis.intervals import FEWEST_VALUES_OF_A_MEDIAN, median_interval
from kbatch.analysis.scaling_curve import is_saturated
from kbatch.device.failures import MEMORY_ERRORS, ran_out_of_memory
from kbatch.errors import DataEnded, InputError
from kbatch.page.numbers import format_number, pluralize
from kbatch.progress import SILENT, MeasuringProgress
from kbatch.records.notes import Note

# Two calls in a row that differ by less than this share agree.
_AGREEMENT = 0.1
_MOST_WARM_UP_CALLS = 12
# Long calls need no more than two of them to be warm.
_LONG_WARM_UP_S = 1.0

Result = TypeVar("Result")
Call = Callable[[], object]
Clock = Callable[[], float]


def check_seconds(**given: float) -> None:
    """Check that each argument is a positive number of seconds."""
    for name, seconds in given.items():
        real = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
        if not (real and 0 < seconds < math.inf):
            raise InputError(
                f"`{name}` must be a positive number of seconds. Received: {name}={seconds!r}."
            )


class WarmUp(NamedTuple):
    """The calls before the first that counts."""

    first_call_s: float  # With tracing and compiling.
    call_s: float  # What an undisturbed call takes, about.
    returned: Any  # By the last call; not kept, as it may be large.


def warm_up_calls(call: Call, *, clock: Clock = time.perf_counter) -> WarmUp:
    """Call a contender until two calls in a row agree, of which none is the first."""
    durations_s: list[float] = []
    returned, warm = None, False
    while not warm and len(durations_s) <= _MOST_WARM_UP_CALLS:
        returned = None  # Never two of them in memory.
        began_s = clock()
        returned = call()
        durations_s.append(clock() - began_s)
        if len(durations_s) >= 3:
            one_s, other_s = durations_s[-2:]
            agree = abs(one_s - other_s) <= _AGREEMENT * max(one_s, other_s)
            warm = agree or sum(durations_s[1:]) > _LONG_WARM_UP_S
    return WarmUp(durations_s[0], min(durations_s[1:]), returned)


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


@dataclasses.dataclass(frozen=True)
class TimingPlan:
    """How long a sweep takes, and when one of its settings has been timed enough."""

    time_budget_s: float = 60.0
    needed_calls: int = 59  # What the quantile needs.
    block_s: float = 0.05  # Least seconds that a setting runs in a round.
    precision: float = 0.05  # Share of the median, to each side of its 95 % interval.
    rounds_beyond: int = 30  # Most rounds after the needed calls were made.


def timed_enough(blocks: Sequence[Sequence[float]], plan: TimingPlan) -> bool:
    """Return whether a setting has the needed calls, and the precision or many rounds more."""
    made = itertools.accumulate(map(len, blocks))
    with_calls = next((n for n, calls in enumerate(made, 1) if calls >= plan.needed_calls), None)
    if with_calls is None or len(blocks) < FEWEST_VALUES_OF_A_MEDIAN:
        return False
    if len(blocks) >= with_calls + plan.rounds_beyond:
        return True
    found = median_interval([statistics.median(block) for block in blocks])
    assert found is not None and found.ends is not None
    return found.ends[1] - found.ends[0] <= 2 * plan.precision * found.value


# The sizes that a sweep tries unless you chose others, and those to go on with while
# throughput grows, memory is known to suffice, and time is left.
DEFAULT_SIZES = powers_of_two(1, 4096)
LARGER_SIZES = powers_of_two(8192, 65536)
# After this share of the time no more settings are warmed up. The rounds have the rest, and each
# setting is timed once however late it is.
_SHARE_TO_WARM_UP = 0.5
# So many are timed whatever the time, by all their contenders: without two sizes there is no fit,
# and no answer.
_FEWEST_SIZES = 2
# Blocks of a series whatever the time: a line with its error takes as many.
_FEWEST_BLOCKS = 3


class Setting(NamedTuple):
    """What is timed: a size, and with what."""

    series: Any  # A text, or a call path of a model and the policy of that.
    size: int

    def __str__(self) -> str:
        # A function has no policy.
        parts = [self.series] if isinstance(self.series, str) else filter(None, self.series)
        series = " under ".join(parts)
        return f"{series}, size {self.size}"


class Sweep(abc.ABC):
    """Sizes of one or more series that are timed in the same rounds."""

    def __init__(
        self,
        timing: TimingPlan,
        *,
        chosen: bool,  # By a person: else sizes too slow for the time are left out.
        seed: int = 0,
        progress: MeasuringProgress = SILENT,
        clock: Clock = time.perf_counter,
    ):
        self.warm_ups: dict[Setting, WarmUp] = {}  # Of those that were called.
        # The seconds of each call of a turn; each setting has one a round, until it is done.
        self.blocks: dict[Setting, list[tuple[float, ...]]] = {}
        self.not_run: dict[Setting, Note] = {}  # Why; those that ran out of memory among them.
        self.timing, self._chosen, self.progress, self.clock = timing, chosen, progress, clock
        self._order, self._began_s = random.Random(seed), clock()
        self._calls: dict[Setting, Call] = {}
        self._ended: dict[Any, tuple[int, Note]] = {}  # The last size of a series, and why.

    @abc.abstractmethod
    def prepare(self, setting: Setting) -> Call:
        """Make a setting ready to be called."""

    @abc.abstractmethod
    def refusal(self, setting: Setting) -> Note | None:
        """Return why a setting is not to be called."""

    @abc.abstractmethod
    def shares(self, setting: Setting) -> float:
        """Return how many batches a call has."""

    def target_s(self, setting: Setting) -> float:
        """Return the seconds that its examples may take: larger sizes are left out."""
        return math.inf

    @property
    def spent_s(self) -> float:
        """Seconds since the start, warming up included."""
        return self.clock() - self._began_s

    def warm_up(
        self, settings: Iterable[Setting], *, slow_ends: bool = True
    ) -> Iterator[tuple[Setting, WarmUp]]:
        """Warm settings up, and yield each that was called and had memory enough.

        A size that is too slow ends its series, unless `slow_ends` is false.
        """
        for setting in settings:
            last, end = self._ended.get(setting.series, (math.inf, None))
            if reason := end if setting.size > last else self._reason_not_to_run(setting):
                self.not_run[setting] = reason
            elif (warm_up := self.admit(setting)) is not None:
                time_ms = format_number(1e3 * self.time_s(setting))
                self.progress.say(f"{setting}: {time_ms} ms when warm")
                yield setting, warm_up
                if slow_ends:
                    self._look_at(setting)
            else:
                reason = self.not_run[setting]
                self.progress.say(f"{setting}: {reason}")
                if reason.code == "out_of_memory":
                    reason = Note.of("memory_ran_out_at", size=setting.size)
                self._ended[setting.series] = setting.size, reason

    def go_on(self, series: Any, sizes: Iterable[int]) -> Iterator[tuple[Setting, WarmUp]]:
        """Warm up larger sizes, until throughput is flat."""
        for size in sizes:
            setting, before = Setting(series, size), self.timed(series)[-2:]
            if series in self._ended or len(before) < 2 or self._reason_not_to_run(setting):
                return
            small, large = before
            if is_saturated((small.size, large.size), (self.time_s(small), self.time_s(large))):
                return
            yield from self.warm_up([setting])

    def admit(self, setting: Setting) -> WarmUp | None:
        """Warm one setting up and let it take part; None where memory ran out or data ended."""

        def warmed() -> tuple[Call, WarmUp]:
            call = self.prepare(setting)
            return call, warm_up_calls(call, clock=self.clock)

        try:
            found = self._within_memory(setting, warmed)
        except DataEnded as ended:
            self.not_run[setting] = Note.of("data_gave_fewer", rows=ended.rows)
            return None
        if found is None:
            return None
        self._calls[setting], warm_up = found
        self.blocks[setting], self.warm_ups[setting] = [], warm_up._replace(returned=None)
        return warm_up

    def run(self) -> None:
        """Time all in rounds, each until it was timed enough or the time is spent."""
        live = list(self.warm_ups)
        for number in itertools.count():
            for setting in self._order.sample(live, len(live)):
                late = number > 0 and self.spent_s >= self.timing.time_budget_s
                if late and self._fewest_blocks() >= _FEWEST_BLOCKS:
                    return
                durations_s = self.fresh_calls(setting, 1, least_s=self.timing.block_s)
                if durations_s is not None:
                    self.blocks[setting].append(durations_s)
            live = [one for one in live if one not in self.not_run and not self._timed_enough(one)]
            if not live:
                return
            still = pluralize(len(live), "setting")
            self.progress.tick(f"round {number + 1}, {still} not known well enough")

    def _fewest_blocks(self) -> int:
        """Return how many blocks the series with the fewest has."""
        made: dict[Any, int] = {}
        for setting, blocks in self.blocks.items():
            if setting not in self.not_run:
                made[setting.series] = made.get(setting.series, 0) + len(blocks)
        return min(made.values(), default=_FEWEST_BLOCKS)

    def _timed_enough(self, setting: Setting) -> bool:
        plan = self.timing
        if self.time_s(setting) > self.target_s(setting):  # Only the median is of use.
            plan = dataclasses.replace(plan, needed_calls=1)
        return timed_enough(self.blocks[setting], plan)

    def fresh_calls(
        self, setting: Setting, calls: int, *, least_s: float = 0.0
    ) -> tuple[float, ...] | None:
        """Time calls of one setting in a row; None where memory ran out."""
        call = self._calls[setting]
        timed = functools.partial(timed_calls, call, calls, least_s=least_s, clock=self.clock)
        return self._within_memory(setting, timed)

    def timed(self, series: Any) -> list[Setting]:
        """Return the settings of a series that were warmed up, in order."""
        return [setting for setting in self.warm_ups if setting.series == series]

    def time_s(self, setting: Setting) -> float:
        """Return the seconds that its examples took in the fastest call of its warm-up."""
        return self.warm_ups[setting].call_s / self.shares(setting)

    def tried(self, series: Any) -> list[Setting]:
        """Return the settings of a series, by size: those that were warmed up and those not run."""
        return sorted(one for one in {*self.warm_ups, *self.not_run} if one.series == series)

    def timing_of(self, setting: Setting) -> dict[str, Any]:
        """Return the fields of a `Timed`: what was measured, or why it was not."""
        found: dict[str, Any] = {"batch_size": setting.size}
        if reason := self.not_run.get(setting):
            outcome = "out_of_memory" if reason.code == "out_of_memory" else "not_run"
            return {**found, "outcome": outcome, "reason": reason}
        medians_s = map(statistics.median, self.blocks[setting])
        times_s = tuple(round(median_s / self.shares(setting), 9) for median_s in medians_s)
        return {**found, "first_call_s": self.warm_ups[setting].first_call_s, "times_s": times_s}

    def _within_memory(self, setting: Setting, call: Callable[[], Result]) -> Result | None:
        """Return what a call returns; None where memory ran out, which ends the setting."""
        try:
            return call()
        except MEMORY_ERRORS as error:
            if not ran_out_of_memory(error, smaller_worked=bool(self.warm_ups)):
                raise
        self.not_run[setting] = Note.of("out_of_memory")
        gc.collect()  # The frames of the error held what the call had of the device.
        return None

    def _reason_not_to_run(self, setting: Setting) -> Note | None:
        late = self.spent_s >= _SHARE_TO_WARM_UP * self.timing.time_budget_s
        enough = len({setting.size, *(one.size for one in self.warm_ups)}) > _FEWEST_SIZES
        spent = Note.of("warm_up_time_spent") if late and enough else None
        return self.refusal(setting) or spent

    def _look_at(self, setting: Setting) -> None:
        """End a series after a size that nobody chose and that is too slow."""
        if self._chosen:
            return
        time_s = self.time_s(setting)
        contenders = sum(one.size == setting.size for one in self.warm_ups)
        rest_s = self.timing.time_budget_s - self.spent_s
        if time_s > self.target_s(setting):
            beyond = Note.of("beyond_target")
            self._ended[setting.series] = setting.size, beyond
            if len(self.timed(setting.series)) > 2:
                del self._calls[setting], self.blocks[setting], self.warm_ups[setting]
                self.not_run[setting] = beyond
        # Twice the size takes up to twice as long, and so do all smaller ones together.
        elif 4 * time_s * self.timing.needed_calls * contenders > rest_s:
            self._ended[setting.series] = setting.size, Note.of("too_slow_to_time")


# Share of a time budget in which memory is measured, and what timing has at least, however long the
# start of a worker process took.
SHARE_FOR_MEMORY, _LEAST_SHARE = 0.3, 0.2


def time_left_s(time_budget_s: float, *, began_s: float) -> float:
    """Return what is left of a time budget for timing."""
    return max(began_s + time_budget_s - time.perf_counter(), _LEAST_SHARE * time_budget_s)
