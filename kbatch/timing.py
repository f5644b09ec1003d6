"""Timing: calls in shuffled rounds, and a sweep over batch sizes within memory and a time budget.

A sweep first warms up the sizes, small ones first, until memory, data or half of the time budget
run out. Then all sizes take turns, so that a drift of the machine slows all of them equally, and
each stops when its median is known precisely. A size that runs out of memory leaves the sweep.
"""

import abc
import collections
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

# A warm-up ends when two calls in a row differ by less than `_AGREEMENT` of the slower one. It also
# ends after `_MOST_WARM_UP_CALLS`, or after `_LONG_WARM_UP_S` without the first call.
_AGREEMENT, _MOST_WARM_UP_CALLS, _LONG_WARM_UP_S = 0.1, 12, 1.0

Result = TypeVar("Result")
Call = Callable[[], object]
Clock = Callable[[], float]


def check_seconds(**arguments: float) -> None:
    """Check that each argument is a positive number of seconds."""
    for name, seconds in arguments.items():
        real = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
        if not (real and 0 < seconds < math.inf):
            raise InputError(
                f"`{name}` must be a positive number of seconds. Received: {name}={seconds!r}."
            )


class WarmUp(NamedTuple):
    """The calls before the timed ones."""

    first_call_s: float  # Includes tracing and compiling.
    call_s: float  # The fastest of the other calls.
    returned: Any  # The result of the last call. It may be large, so a sweep drops it.


def warm_up_calls(call: Call, *, clock: Clock = time.perf_counter) -> WarmUp:
    """Call a function until two calls in a row after the first one take about the same time."""
    durations_s: list[float] = []
    returned, warm = None, False
    while not warm and len(durations_s) <= _MOST_WARM_UP_CALLS:
        returned = None  # Free the last result before the next one is made.
        began_s = clock()
        returned = call()
        durations_s.append(clock() - began_s)
        if len(durations_s) >= 3:
            fast_s, slow_s = sorted(durations_s[-2:])
            agree = slow_s - fast_s <= _AGREEMENT * slow_s
            warm = agree or sum(durations_s[1:]) > _LONG_WARM_UP_S
    return WarmUp(durations_s[0], min(durations_s[1:]), returned)


def timed_calls(
    call: Call, calls: int, *, least_s: float = 0.0, clock: Clock = time.perf_counter
) -> tuple[float, ...]:
    """Time at least `calls` calls and `least_s` seconds, without Python's garbage collection."""
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
    """Run measurements in rounds: each one once per round, in a new random order.

    Args:
        contenders: For each name, a function that makes one measurement and returns its result.
        until_s: Time of `now` in seconds. A round that would probably end later is not begun. At
            least three rounds run.
        most_rounds: Largest number of rounds.
        now: Function that returns the time in seconds.

    Returns:
        For each name, the results in the order of the rounds.
    """
    results: dict[str, list[Result]] = {name: [] for name in contenders}
    order, longest_s = random.Random(0), 0.0
    for number in range(most_rounds):
        began_s = now()
        if number >= FEWEST_ROUNDS and began_s + longest_s > until_s:
            break
        for name in order.sample(sorted(contenders), len(contenders)):
            results[name].append(contenders[name]())
        longest_s = max(longest_s, now() - began_s)
    return results


@dataclasses.dataclass(frozen=True)
class TimingPlan:
    """The time budget of a sweep, and the precision at which a setting is finished."""

    time_budget_s: float = 60.0
    needed_calls: int = 59  # The quantile needs this many.
    block_s: float = 0.05  # A setting runs at least this long in a round.
    precision: float = 0.05  # Half the width of the median's 95 % interval, as a share of it.
    rounds_beyond: int = 30  # A setting has at most this many rounds after the needed calls.


def timed_enough(blocks: Sequence[Sequence[float]], plan: TimingPlan) -> bool:
    """Return whether there are enough calls and the median is precise, or no round is left."""
    counts = itertools.accumulate(map(len, blocks))
    enough = next((n for n, calls in enumerate(counts, 1) if calls >= plan.needed_calls), None)
    if enough is None or len(blocks) < FEWEST_VALUES_OF_A_MEDIAN:
        return False
    if len(blocks) >= enough + plan.rounds_beyond:
        return True
    interval = median_interval([statistics.median(block) for block in blocks])
    assert interval is not None and interval.ends is not None
    return interval.ends[1] - interval.ends[0] <= 2 * plan.precision * interval.value


# A sweep tries the default sizes unless the user chose others. It continues with larger sizes while
# throughput grows, memory is known to suffice, and time is left.
DEFAULT_SIZES = powers_of_two(1, 4096)
LARGER_SIZES = powers_of_two(8192, 65536)
_SHARE_TO_WARM_UP = 0.5  # After this share of the time budget, no further setting is warmed up.
# A sweep measures at least these, even if the time budget is spent. A fitted line needs two sizes,
# and the error of the line needs three blocks of each series.
_FEWEST_SIZES, _FEWEST_BLOCKS = 2, 3


class Setting(NamedTuple):
    """One batch size of one series. A sweep times several settings."""

    series: Any  # A name, or a pair of call path and dtype policy, or of a function and None.
    size: int

    def __str__(self) -> str:
        parts = [self.series] if isinstance(self.series, str) else filter(None, self.series)
        return f"{' under '.join(parts)}, size {self.size}"


class Sweep(abc.ABC):
    """Sizes of one or more series that are timed in the same rounds."""

    def __init__(
        self,
        timing: TimingPlan,
        *,
        chosen: bool,  # Whether the user chose the sizes. If not, slow ones are left out.
        seed: int = 0,
        progress: MeasuringProgress = SILENT,
        clock: Clock = time.perf_counter,
    ):
        self.warm_ups: dict[Setting, WarmUp] = {}
        # The durations of the calls of each round.
        self.blocks: dict[Setting, list[tuple[float, ...]]] = {}
        self.not_run: dict[Setting, Note] = {}  # With the reason, for example out of memory.
        self.timing, self._chosen, self.progress, self.clock = timing, chosen, progress, clock
        self._order, self._began_s = random.Random(seed), clock()
        self._calls: dict[Setting, Call] = {}
        self._ended: dict[Any, tuple[int, Note]] = {}  # Last size of a series, and why it ended.

    @abc.abstractmethod
    def prepare(self, setting: Setting) -> Call:
        """Return the function to time."""

    @abc.abstractmethod
    def refusal(self, setting: Setting) -> Note | None:
        """Return why a setting must not be called, or None."""

    @abc.abstractmethod
    def batches_per_call(self, setting: Setting) -> float:
        """Return the number of batches in one call."""

    def target_s(self, setting: Setting) -> float:
        """Return the longest time of a batch. Sizes that take longer are left out."""
        return math.inf

    @property
    def spent_s(self) -> float:
        """Seconds since the start, including the warm-up."""
        return self.clock() - self._began_s

    def warm_up(
        self, settings: Iterable[Setting], *, slow_ends: bool = True
    ) -> Iterator[tuple[Setting, WarmUp]]:
        """Warm up settings, and yield each one that ran.

        A size that is too slow ends its series, unless `slow_ends` is False.
        """
        for setting in settings:
            last, end = self._ended.get(setting.series, (math.inf, None))
            if reason := end if setting.size > last else self._reason_not_to_run(setting):
                self.not_run[setting] = reason
            elif (warm_up := self.admit(setting)) is not None:
                time_ms = format_number(1e3 * self.time_s(setting))
                self.progress.say(f"{setting}: {time_ms} ms after warm-up")
                yield setting, warm_up
                if slow_ends:
                    self._end_if_slow(setting)
            else:
                reason = self.not_run[setting]
                self.progress.say(f"{setting}: {reason}")
                if reason.code == "out_of_memory":
                    reason = Note.of("memory_ran_out_at", size=setting.size)
                self._ended[setting.series] = setting.size, reason

    def extend(self, series: Any, sizes: Iterable[int]) -> Iterator[tuple[Setting, WarmUp]]:
        """Warm up larger sizes until throughput no longer grows."""
        for size in sizes:
            setting, before = Setting(series, size), self.warmed_up(series)[-2:]
            if series in self._ended or len(before) < 2 or self._reason_not_to_run(setting):
                return
            small, large = before
            if is_saturated((small.size, large.size), (self.time_s(small), self.time_s(large))):
                return
            yield from self.warm_up([setting])

    def admit(self, setting: Setting) -> WarmUp | None:
        """Warm up one setting and add it to the sweep. Return None if memory or data ran out."""

        def warm_up() -> tuple[Call, WarmUp]:
            call = self.prepare(setting)
            return call, warm_up_calls(call, clock=self.clock)

        try:
            result = self._within_memory(setting, warm_up)
        except DataEnded as ended:
            self.not_run[setting] = Note.of("data_gave_fewer", rows=ended.rows)
            return None
        if result is None:
            return None
        self._calls[setting], calls = result
        self.blocks[setting], self.warm_ups[setting] = [], calls._replace(returned=None)
        return calls

    def run(self) -> None:
        """Time all settings in rounds, until each is timed enough or the time is spent."""
        live = list(self.warm_ups)
        for number in itertools.count():
            for setting in self._order.sample(live, len(live)):
                late = number > 0 and self.spent_s >= self.timing.time_budget_s
                if late and self._fewest_blocks() >= _FEWEST_BLOCKS:
                    return
                durations_s = self.fresh_calls(setting, 1, least_s=self.timing.block_s)
                if durations_s is not None:
                    self.blocks[setting].append(durations_s)
            live = [s for s in live if s not in self.not_run and not self._timed_enough(s)]
            if not live:
                return
            count = pluralize(len(live), "setting")
            self.progress.tick(f"round {number + 1}, {count} not precise enough yet")

    def _fewest_blocks(self) -> int:
        """Return the number of blocks of the series with the fewest."""
        counts = collections.Counter[Any]()
        for setting, blocks in self.blocks.items():
            if setting not in self.not_run:
                counts[setting.series] += len(blocks)
        return min(counts.values(), default=_FEWEST_BLOCKS)

    def _timed_enough(self, setting: Setting) -> bool:
        plan = self.timing
        if self.time_s(setting) > self.target_s(setting):  # Its quantile is not needed.
            plan = dataclasses.replace(plan, needed_calls=1)
        return timed_enough(self.blocks[setting], plan)

    def fresh_calls(
        self, setting: Setting, calls: int, *, least_s: float = 0.0
    ) -> tuple[float, ...] | None:
        """Time calls of one setting in a row. Return None if memory runs out."""
        call = self._calls[setting]
        timed = functools.partial(timed_calls, call, calls, least_s=least_s, clock=self.clock)
        return self._within_memory(setting, timed)

    def warmed_up(self, series: Any) -> list[Setting]:
        """Return the settings of a series that were warmed up, in order."""
        return [setting for setting in self.warm_ups if setting.series == series]

    def time_s(self, setting: Setting) -> float:
        """Return the seconds of a batch in the fastest call of the warm-up."""
        return self.warm_ups[setting].call_s / self.batches_per_call(setting)

    def all_settings(self, series: Any) -> list[Setting]:
        """Return all settings of a series, also those that were not run, ordered by size."""
        return sorted(s for s in {*self.warm_ups, *self.not_run} if s.series == series)

    def timing_of(self, setting: Setting) -> dict[str, Any]:
        """Return the fields of a `Timed`: the measured times, or the reason why there are none."""
        if reason := self.not_run.get(setting):
            outcome = "out_of_memory" if reason.code == "out_of_memory" else "not_run"
            return {"batch_size": setting.size, "outcome": outcome, "reason": reason}
        batches = self.batches_per_call(setting)
        times_s = tuple(round(statistics.median(b) / batches, 9) for b in self.blocks[setting])
        first_call_s = self.warm_ups[setting].first_call_s
        return {"batch_size": setting.size, "first_call_s": first_call_s, "times_s": times_s}

    def _within_memory(self, setting: Setting, call: Callable[[], Result]) -> Result | None:
        """Return the result of a call. If memory runs out, end the setting and return None."""
        try:
            return call()
        except MEMORY_ERRORS as error:
            if not ran_out_of_memory(error, smaller_worked=bool(self.warm_ups)):
                raise
        self.not_run[setting] = Note.of("out_of_memory")
        gc.collect()  # The frames of the error held tensors of the call.
        return None

    def _reason_not_to_run(self, setting: Setting) -> Note | None:
        late = self.spent_s >= _SHARE_TO_WARM_UP * self.timing.time_budget_s
        enough = len({setting.size, *(other.size for other in self.warm_ups)}) > _FEWEST_SIZES
        return self.refusal(setting) or (Note.of("warm_up_time_spent") if late and enough else None)

    def _end_if_slow(self, setting: Setting) -> None:
        """End a series after a size that is too slow, unless the user chose the sizes."""
        if self._chosen:
            return
        time_s = self.time_s(setting)
        contenders = sum(other.size == setting.size for other in self.warm_ups)
        rest_s = self.timing.time_budget_s - self.spent_s
        if time_s > self.target_s(setting):
            beyond = Note.of("beyond_target")
            self._ended[setting.series] = setting.size, beyond
            if len(self.warmed_up(setting.series)) > 2:
                del self._calls[setting], self.blocks[setting], self.warm_ups[setting]
                self.not_run[setting] = beyond
        # The next size is twice as large and takes up to 2 `time_s`. All smaller sizes together
        # take as long again, so a call of each size takes up to 4 `time_s` in each series.
        elif 4 * time_s * self.timing.needed_calls * contenders > rest_s:
            self._ended[setting.series] = setting.size, Note.of("too_slow_to_time")


# Share of a time budget for measuring memory. Timing gets at least `_LEAST_SHARE` of the budget,
# even if the start of a worker process took too long.
SHARE_FOR_MEMORY, _LEAST_SHARE = 0.3, 0.2


def time_left_s(time_budget_s: float, *, began_s: float) -> float:
    """Return the part of a time budget that is left for timing."""
    return max(began_s + time_budget_s - time.perf_counter(), _LEAST_SHARE * time_budget_s)
