"""Updates of several batch sizes, whole and in micro-batches, timed in the same rounds."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras

from kbatch.device.failures import ran_out_of_memory
from kbatch.device.gpu_monitor import NEVER_S, GpuMonitor
from kbatch.document.where_measured import clocks_text
from kbatch.records.usage import median_known
from kbatch.throughput.timed_rounds import TimedRounds
from kbatch.timing.timing_plan import TimingPlan, block_clocks
from kbatch.timing.timing_rounds import TimingRounds
from kbatch.training.accumulation.parts_checks import PartsChecks
from kbatch.training.data.data_source import DataEnded, Source, batch_of
from kbatch.training.micro_batch_steps import micro_batch_steps

_BLOCK_S = 0.03
_FEWEST_CALLS = 12
_PRECISION = 0.02
# A size whose single update takes more than this share of the budget would get too few rounds.
_LONGEST_SHARE = 0.03
_FIRST_CALLS = 3
# Of the seconds, to build train steps: XLA may take a minute for each shape. Without it the second
# shape that is traced serves all others.
_BUILDING_SHARE = 0.5
# Of the seconds, for the rounds, however long building took.
_ROUNDS_SHARE = 0.6


class Way(NamedTuple):
    """A way to make an update.

    Attributes:
        batch_size: In examples.
        micro_batch_size: Examples that go through the device at once.
    """

    batch_size: int
    micro_batch_size: int


class UpdateTimes(NamedTuple):
    """What was timed.

    Attributes:
        timings: The updates, by batch size.
        notes: What a reader must know: which sizes were not timed, and why, and GPU clocks that
            differ.
        reason: Why nothing was timed, None where something was.
    """

    timings: tuple[TimedRounds, ...]
    notes: tuple[str, ...]
    reason: str | None


def time_updates(
    model: keras.Model,
    source: Source,
    *,
    batch_sizes: Sequence[int],
    largest_whole: int | None,
    budget_s: float,
    checks: PartsChecks,
    first: int | None = None,
    seed: int = 0,
) -> UpdateTimes:
    """Times updates of whole batches, and of those that do not fit in the largest part that does.

    Args:
        model: A compiled, built model; it is given back as it was.
        source: Its data.
        batch_sizes: Batch sizes, ascending, in examples.
        largest_whole: Most examples that fit at once, None where that is not known.
        budget_s: Seconds to spend, half of them at most on building train steps.
        checks: Compare parts of a batch with the whole, where one has to be cut.
        first: Size that is timed in any case, whatever it takes; the larger ones come next, then
            the smaller ones. None for the smallest.
        seed: Seed of the order in the rounds.

    Returns:
        The timings; none where not even the smallest size could be run.
    """
    began_s = time.perf_counter()
    fitting = [size for size in batch_sizes if largest_whole is None or size <= largest_whole]
    first = fitting[0] if first not in fitting and fitting else first
    smaller = [size for size in reversed(fitting) if first is not None and size < first]
    target: Any = model
    with micro_batch_steps(model) as steps:

        def update(way: Way) -> Callable[[], None]:
            return steps.step(batch_of(source, model, way.batch_size), way.micro_batch_size)

        ready = _ReadyWays(update, budget_s, compiled=bool(target.jit_compile))
        ready.add_while_fast(Way(size, size) for size in fitting if size not in smaller)
        ready.add_while_fast(Way(size, size) for size in smaller)
        ready.add_while_fast(_beyond(ready.call_s, batch_sizes, largest_whole=largest_whole))
        if not all(map(_is_whole, ready.calls)):
            difference = checks.difference(model, source, most=largest_whole)
            ready.notes += [difference] if difference else []
        # One round of a busy machine may be off by ten times.
        left_s = budget_s - (time.perf_counter() - began_s)
        return _timed(ready, max(left_s, _ROUNDS_SHARE * budget_s), seed)


def _timed(ready: "_ReadyWays", left_s: float, seed: int) -> UpdateTimes:
    plan = TimingPlan(max(0.0, left_s), _FEWEST_CALLS, _BLOCK_S, _PRECISION)
    rounds: TimingRounds[Way] = TimingRounds(plan, seed=seed, is_result=ran_out_of_memory)
    slow = {way for way, seconds in ready.call_s.items() if seconds > ready.longest_s}
    for way, call in ready.calls.items():
        if way not in slow:
            rounds.admit(way, call, traced=True)
    with GpuMonitor(interval_s=NEVER_S) as monitor:
        rounds.run(clock_mhz=monitor.sample_clock_mhz)
    # A slow update was timed when it was built, as if in the first round.
    found = [TimedRounds(*way, (0,), (ready.call_s[way],)) for way in slow]
    found += [
        TimedRounds(
            way.batch_size,
            way.micro_batch_size,
            tuple(block.round for block in blocks),
            tuple(statistics.median(block.durations_s) for block in blocks),
        )
        for way, blocks in rounds.blocks.items()
        if blocks and way not in rounds.failures
    ]
    found.sort(key=lambda timed: (timed.batch_size, timed.micro_batch_size))
    reason = None if found else "not even the smallest batch size could be run"
    apart = clocks_text(
        (f"{way.batch_size:,}", median_known(block_clocks(blocks)))
        for way, blocks in rounds.blocks.items()
    )
    notes = [f"Sizes were timed at different clocks ({apart}): times differ by that too."]
    return UpdateTimes(tuple(found), (*ready.notes, *(notes if apart else ())), reason)


def _is_whole(way: Way) -> bool:
    return way.micro_batch_size == way.batch_size


def _beyond(
    call_s: dict[Way, float], batch_sizes: Sequence[int], *, largest_whole: int | None
) -> list[Way]:
    """Gives the batches that do not fit at once, in parts of the largest that went through."""
    whole = max((way.batch_size for way in call_s if _is_whole(way)), default=None)
    if whole is None or largest_whole is None:
        return []
    return [Way(size, whole) for size in batch_sizes if size > max(whole, largest_whole)]


class _ReadyWays:
    """The ways whose train step is built.

    Attributes:
        calls: What makes an update of each.
        call_s: Seconds that one takes about.
        notes: Which ways were left out, and why.
    """

    def __init__(
        self, update: Callable[[Way], Callable[[], None]], budget_s: float, *, compiled: bool
    ):
        self.calls: dict[Way, Callable[[], None]] = {}
        self.call_s: dict[Way, float] = {}
        self.notes: list[str] = []
        self.longest_s = _LONGEST_SHARE * budget_s
        self._update = update
        self._most_built_s = _BUILDING_SHARE * budget_s if compiled else math.inf
        self._built_s = 0.0
        self._last_s = 0.0

    def add_while_fast(self, ways: Iterable[Way]) -> None:
        """Builds ways until one takes too long or does not fit."""
        for way in ways:
            reason = self._add(way)
            if reason is not None:
                parts = "" if _is_whole(way) else f" in micro-batches of {way.micro_batch_size:,}"
                self.notes.append(f"Batch size {way.batch_size:,}{parts} {reason}")
                return

    def _add(self, way: Way) -> str | None:
        """Builds a way, or says why the next ones are left out too."""
        smaller = [s for other, s in self.call_s.items() if other.batch_size < way.batch_size]
        if smaller and max(smaller) > self.longest_s:
            return (
                "and larger ones were not timed: an update takes longer than "
                f"{self.longest_s:.1f} s. A larger `budget_s` is needed."
            )
        if self._built_s and self._built_s + self._last_s > self._most_built_s:
            return (
                "and further ones were not timed: building train steps took "
                f"{self._built_s:.0f} s. Give fewer `batch_sizes`, or a larger `budget_s`."
            )
        began_s = time.perf_counter()
        try:
            call = self._update(way)
            call()
            # A slow call is not made again only to be sure.
            calls_s = [_seconds(call)]
            while len(calls_s) < _FIRST_CALLS and sum(calls_s) < self.longest_s:
                calls_s.append(_seconds(call))
            self.call_s[way] = min(calls_s)
        except DataEnded as ended:
            return f"and larger ones were not timed: the data have {ended.rows:,} examples."
        except Exception as error:
            if not ran_out_of_memory(error, smaller_worked=bool(self.calls)):
                raise
            return "ran out of memory."
        finally:
            self._last_s = time.perf_counter() - began_s
            self._built_s += self._last_s
        self.calls[way] = call
        return None


def _seconds(call: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s
