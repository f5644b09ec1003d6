"""Updates of several batch and micro-batch sizes, timed in the same rounds."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras

from kbatch.analysis.scaling_curve import is_saturated
from kbatch.device.failures import failure_text, ran_out_of_memory
from kbatch.device.gpu_monitor import NEVER_S, GpuMonitor
from kbatch.document.numbers import readable
from kbatch.document.section import clocks_text
from kbatch.records.usage import median_known
from kbatch.throughput.choice import micro_batch_candidates, sizes_to_leave
from kbatch.throughput.record import TimedRounds, TrainingPoint
from kbatch.timing.rounds import TimingPlan, TimingRounds, WarmUp, block_clocks
from kbatch.training.accumulation.parts_check import PartsChecks
from kbatch.training.data.sample_rows import DataEnded, Source, batch_of
from kbatch.training.train_step import MicroBatchSteps, micro_batch_steps, rows_of

# Rounds that a size is timed in at least, for an interval of their median.
_FEWEST_ROUNDS = 6

# Share of the time after which no size is begun: the rest is for the rounds.
SHARE_TO_WARM_UP = 0.5

TRAINING_TIMING = TimingPlan(
    needed_calls=_FEWEST_ROUNDS,
    block_s=0.05,
    precision=0.03,
    rounds_beyond=12,
    first_calls_count=False,
)


class StepSetting(NamedTuple):
    """What is timed.

    Attributes:
        micro_batch_size: Examples that go through the device at once.
        batch_size: Examples of a step.
    """

    micro_batch_size: int
    batch_size: int

    @property
    def whole(self) -> bool:
        """Whether the batch goes through the device at once."""
        return self.micro_batch_size == self.batch_size


class TrainingSweep:
    """Train steps of a model, open for timing.

    Args:
        steps: The steps of the model.
        batch_of: Gives a batch of as many examples, on the device.
        timing: When a setting has been timed enough.
        seed: Seed of the order within rounds.
    """

    def __init__(
        self,
        steps: MicroBatchSteps,
        batch_of: Callable[[int], Any],
        timing: TimingPlan,
        *,
        seed: int = 0,
    ):
        self.rounds: TimingRounds[StepSetting] = TimingRounds(timing, seed=seed)
        self._steps = steps
        self._batch_of = batch_of

    def warm_up(self, setting: StepSetting, *, traced: bool = False) -> WarmUp | None:
        """Run the first steps and let the setting take part; None where memory ran out."""
        return self.rounds.admit_prepared(
            setting,
            lambda: self._steps.step(self._batch_of(setting.batch_size), setting.micro_batch_size),
            traced=traced,
        )

    def is_too_slow(self, step_s: float) -> bool:
        """Return whether no time is left for twice the size of a step that takes so long."""
        # Twice the size takes up to twice as long, and so do all smaller ones together.
        return 4 * step_s * TRAINING_TIMING.needed_calls > self.rounds.rest_s

    def go_on(
        self, sizes: Sequence[int], larger: Sequence[int], say: Callable[[str], None]
    ) -> tuple[int, ...]:
        """Warm larger sizes up while throughput grows and time is left."""
        tried = tuple(sizes)
        for size in larger:
            times_s = [self.rounds.warm_ups[StepSetting(s, s)].call_s for s in tried[-2:]]
            if len(times_s) < 2 or self.is_too_slow(times_s[1]):
                break
            if self.rounds.late(SHARE_TO_WARM_UP) or is_saturated(
                (tried[-2], tried[-1]), (times_s[0], times_s[1])
            ):
                break
            warm_up = self.warm_up(StepSetting(size, size))
            tried = (*tried, size)
            if warm_up is None:
                say(f"micro-batch {size}: out of memory")
                break
            say(f"micro-batch {size}: {readable(1000 * warm_up.call_s)} ms a step after warming up")
        return tried

    def point(self, setting: StepSetting, *, not_run: str | None = None) -> TrainingPoint:
        """Return what was found of a setting."""
        failure = self.rounds.failures.get(setting)
        blocks = self.rounds.blocks.get(setting, [])
        empty = TrainingPoint(*setting, "not_run", not_run or "the time budget was spent")
        if failure is not None:
            reason = failure_text(failure)
            return dataclasses.replace(empty, outcome="out_of_memory", reason=reason)
        if not blocks:
            return empty
        warm_up = self.rounds.warm_ups[setting]
        return TrainingPoint(
            *setting,
            "measured",
            first_step_s=warm_up.first_call_s,
            warm_up_steps=len(warm_up.later_calls_s),
            steps=sum(len(block.durations_s) for block in blocks),
            rounds=tuple(block.round for block in blocks),
            step_times_s=tuple(block.median_s for block in blocks),
            sm_clocks_mhz=block_clocks(blocks),
        )


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
    """Time updates of whole batches, and of those that do not fit in the largest part that does."""
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
    rounds: TimingRounds[Way] = TimingRounds(plan, seed=seed)
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
            tuple(block.median_s for block in blocks),
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
    """Return the batches that do not fit at once, in parts of the largest that went through."""
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
        """Build ways until one takes too long or does not fit."""
        for way in ways:
            reason = self._add(way)
            if reason is not None:
                parts = "" if _is_whole(way) else f" in micro-batches of {way.micro_batch_size:,}"
                self.notes.append(f"Batch size {way.batch_size:,}{parts} {reason}")
                return

    def _add(self, way: Way) -> str | None:
        """Build a way, or describe why the next ones are left out too."""
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


# Most of the time is left over where the choice is settled sooner.
TIMING = TimingPlan(
    time_budget_s=12.0,
    needed_calls=1,
    block_s=0.03,
    precision=0.0,
    rounds_beyond=23,
    first_calls_count=False,
)
# Share of the time after which no more sizes are warmed up.
_SHARE_TO_WARM_UP = 0.4
# Sizes this many times slower than the fastest when they are warm are not timed.
_HOPELESS = 1.25
_SLOWER = "far slower than others when it was warmed up"
_LEFT = "slower than another in the first rounds"


def time_micro_batches(
    model: keras.Model,
    batch: Any,
    *,
    largest: int,
    moments_every: int,
    timing: TimingPlan = TIMING,
) -> tuple[TrainingPoint, ...]:
    """Time steps on a batch, whole and as micro-batches of half as many examples each time.

    It goes down from the largest size and ends when two in a row are far slower than the fastest
    so far: under XLA, where each size is compiled, the first that is slower. The sizes take turns;
    after the first rounds the largest and the fastest of the others go on by themselves.
    """
    batch_size = rows_of(batch)
    with micro_batch_steps(model, moments_every=moments_every) as steps:
        sweep = TrainingSweep(steps, lambda _: batch, timing)
        settings = [
            StepSetting(size, batch_size) for size in micro_batch_candidates(batch_size, largest)
        ]
        run = _warmed_up(sweep, settings, compiled=bool(model.jit_compile))
        left = _duel(sweep)
        points = [sweep.point(setting, not_run=_SLOWER) for setting in sorted(run)]
        return tuple(
            dataclasses.replace(point, reason=_LEFT) if point.micro_batch_size in left else point
            for point in points
        )


def _duel(sweep: TrainingSweep) -> set[int]:
    """Time the sizes in rounds; returns those that left them to others."""
    left: set[int] = set()
    with GpuMonitor(interval_s=NEVER_S) as monitor:
        for live in sweep.rounds.each_round(clock_mhz=monitor.sample_clock_mhz):
            times_s = {
                setting.micro_batch_size: {
                    block.round: block.median_s for block in sweep.rounds.blocks[setting]
                }
                for setting in live
            }
            gone = sizes_to_leave(times_s)
            if len(gone) < len(live):
                left.update(gone)
            sweep.rounds.leave([way for way in live if way.micro_batch_size in gone])
    return left


def _warmed_up(
    sweep: TrainingSweep, settings: list[StepSetting], *, compiled: bool
) -> list[StepSetting]:
    """Warm sizes up in descending order, and take those out that are far slower."""
    times_s: dict[StepSetting, float] = {}
    tried: list[StepSetting] = []
    slower_in_a_row = 0
    for setting in settings:
        tried.append(setting)
        # The sizes below the whole batch share one graph, unless XLA compiles it.
        traced = not compiled and len(tried) > (2 if settings[0].whole else 1)
        warm_up = sweep.warm_up(setting, traced=traced)
        if warm_up is None:
            continue
        times_s[setting] = warm_up.call_s
        behind = warm_up.call_s > (1.0 if compiled else _HOPELESS) * min(times_s.values())
        slower_in_a_row = slower_in_a_row + 1 if behind else 0
        if slower_in_a_row == (1 if compiled else 2) or sweep.rounds.late(_SHARE_TO_WARM_UP):
            break
    fastest_s = min(times_s.values(), default=0.0)
    for setting, time_s in times_s.items():
        if time_s > _HOPELESS * fastest_s and setting != settings[0]:
            sweep.rounds.withdraw(setting)
    return tried
