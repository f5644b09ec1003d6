"""The sweep over batch sizes: all call paths and policies timed in the same rounds."""

import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kbatch.analysis.scaling_curve import is_saturated
from kbatch.device.failures import failure_text
from kbatch.inference.call_paths import CallPath, Run
from kbatch.inference.inputs import InferenceInputs
from kbatch.inference.result import BULK_PATH, TimingRecord
from kbatch.memory.find import MemoryPass
from kbatch.memory.result import MemoryRecord, peaks_under
from kbatch.memory.search import SURE_SHARE, fit_memory
from kbatch.timing.rounds import TimingPlan, TimingRounds, WarmUp

# Share of the time after which no more settings are warmed up: the rest is for the rounds.
_SHARE_TO_WARM_UP = 0.5
# So many are timed whatever the time: without two sizes there is no fit, and no answer.
_FEWEST_SETTINGS = 2
_BEYOND_TARGET = "batches beyond the latency target"
# A size that is expected to take more than so many times the target is not called.
_FAR_BEYOND = 1.5
# Single calls that a record keeps for each block, if the quantile needs no more.
_KEPT_CALLS = 64

Series = tuple[str, str]


class Setting(NamedTuple):
    """What is timed."""

    call_path: str
    dtype_policy: str
    batch_size: int


class InferencePlan(NamedTuple):
    paths: tuple[CallPath, ...]
    batch_sizes: tuple[int, ...]  # Ascending.
    chosen: bool  # By a person: else sizes too slow for the time are left out.
    timing: TimingPlan  # Of the sweep.
    bulk_examples: int
    larger: tuple[int, ...] = ()  # To go on with while throughput grows, and memory and time last.
    target_ms: float | None = None  # Larger sizes than two are not timed if they take longer.
    quantile: float = 0.95
    time_budget_s: float = 60.0  # For all timing, and again for the memory of each policy.
    memory_limit_bytes: int | None = None


class InferenceSweep:
    """Call paths of models, one a policy, that are open for timing."""

    def __init__(
        self,
        models: Mapping[str, Any],
        inputs: InferenceInputs,
        plan: InferencePlan,
        *,
        seed: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.rounds: TimingRounds[Setting] = TimingRounds(plan.timing, seed=seed, clock=clock)
        # By memory and time: it may miss the target.
        self.largest_allowed: dict[Series, int] = {}
        self.plan = plan
        self._models, self._inputs, self._seed = models, inputs, seed
        self._paths = {path.name: path for path in plan.paths}
        self.runs: dict[Series, Run] = {}
        self._not_run: dict[Setting, str] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "InferenceSweep":
        with contextlib.ExitStack() as stack:
            for policy, model in self._models.items():
                for path in self.plan.paths:
                    opened = path.open(model, self._inputs)
                    self.runs[path.name, policy] = stack.enter_context(opened)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def first_series(self) -> Series:
        """The call path and policy that answer questions."""
        return next(iter(self.runs))

    def warm_up(self, memory: MemoryPass) -> Iterator[tuple[Setting, WarmUp | None]]:
        """Warm all settings up, small sizes first, and yield each; None where memory ran out."""
        probed = {(record.dtype_policy, record.batch_size): record for record in memory.records}
        # The first series answers questions, whatever the time leaves to the others.
        first, *others = self.runs
        sizes = self.plan.batch_sizes
        settings = [Setting(*first, size) for size in sizes]
        settings += [Setting(*series, size) for size in sizes for series in others]
        ended: dict[Series, str] = {}
        for setting in settings:
            series, size = setting[:2], setting.batch_size
            probe = probed.get((setting.dtype_policy, size))
            reason = ended.get(series) or self._reason_not_to_run(setting, probe)
            if reason is None and self._is_far_beyond(setting):
                reason = ended[series] = _BEYOND_TARGET
                self.largest_allowed[series] = size
            if reason is not None:
                self._not_run[setting] = reason
                continue
            warm_up = self.admit(setting)
            if warm_up is not None:
                self.largest_allowed[series] = size
            yield setting, warm_up
            end = self._reason_to_end(setting, warm_up)
            if end is not None:
                ended[series] = end
            if end == _BEYOND_TARGET and len(self._timed(series)) > 2:
                self.rounds.withdraw(setting)
                self._not_run[setting] = end
        for series in self.runs:
            if series not in ended:
                yield from self._go_on(series, memory)

    def _go_on(self, series: Series, memory: MemoryPass) -> Iterator[tuple[Setting, WarmUp | None]]:
        """Warm larger sizes up, as far as memory is known to suffice, until throughput is flat."""
        fit = fit_memory(peaks_under(series[1], memory.records))
        # Nothing is probed above these sizes, so only a part of the limit is sure.
        most = 0.0 if fit is None else fit.largest_within(SURE_SHARE * memory.limit_bytes)
        sizes = (self.plan.batch_sizes[-1], *self.plan.larger)
        for size_before, size in itertools.pairwise(sizes):
            setting, before = Setting(*series, size), self._timed(series)[-2:]
            if len(before) < 2 or before[1].batch_size != size_before:
                return  # One before it was not run.
            small_s, large_s = map(self._batch_s, before)
            flat = is_saturated((before[0].batch_size, size_before), (small_s, large_s))
            if flat or size > most or self._reason_not_to_run(setting, None):
                return
            warm_up = self.admit(setting)
            yield setting, warm_up
            if self._reason_to_end(setting, warm_up) is not None:
                return

    def admit(self, setting: Setting) -> WarmUp | None:
        """Warm one setting up and let it take part; None where memory ran out."""

        def prepare() -> Callable[[], Any]:
            size, run = setting.batch_size, self.runs[setting[:2]]
            batch = self._inputs.batch(self.examples_per_call(setting))
            return lambda: run(batch, size)

        return self.rounds.admit(setting, prepare)

    def records(self) -> tuple[TimingRecord, ...]:
        """Return what was timed of each series and size; of larger sizes, those that were tried."""
        tried = self.rounds.warm_ups.keys() | self.rounds.failures.keys()
        sizes = (*self.plan.batch_sizes, *self.plan.larger)
        settings = (Setting(*series, size) for series in self.runs for size in sizes)
        larger = self.plan.larger
        return tuple(self._record(s) for s in settings if s.batch_size not in larger or s in tried)

    def _record(self, setting: Setting) -> TimingRecord:
        failure = self.rounds.failures.get(setting)
        blocks = self.rounds.blocks.get(setting, [])
        if failure is not None:
            return TimingRecord(*setting, "out_of_memory", failure_text(failure))
        if not blocks:
            reason = self._not_run.get(setting, "the time budget was spent")
            return TimingRecord(*setting, "not_run", reason)
        warm_up = self.rounds.warm_ups[setting]
        durations_s = [duration_s for block in blocks for duration_s in block.durations_s]
        least = max(_KEPT_CALLS * len(blocks), self.plan.timing.needed_calls)
        kept_s = spaced_calls(durations_s, least=least, seed=self._seed)
        return TimingRecord(
            *setting,
            "measured",
            examples_per_call=self.examples_per_call(setting),
            first_call_s=warm_up.first_call_s,
            calls=len(durations_s),
            block_medians_s=tuple(block.median_s for block in blocks),
            latencies_s=tuple(round(duration_s, 9) for duration_s in kept_s),
        )

    def _reason_not_to_run(self, setting: Setting, memory: MemoryRecord | None) -> str | None:
        most = self.plan.bulk_examples
        if setting.call_path == BULK_PATH and setting.batch_size > most:
            return f"more than the {most} examples of a bulk call: see `bulk_examples`"
        if memory is not None and memory.refusal:
            return memory.refusal
        if len(self.rounds.warm_ups) >= _FEWEST_SETTINGS and self.rounds.late(_SHARE_TO_WARM_UP):
            return "half of the time budget was spent on preparing and warming up others"
        return None

    def _reason_to_end(self, setting: Setting, warm_up: WarmUp | None) -> str | None:
        if warm_up is None:
            return f"memory ran out at batch size {setting.batch_size}"
        if self.plan.chosen:
            return None
        batch_s = self._batch_s(setting)
        if batch_s > self._target_s(setting):
            return _BEYOND_TARGET
        if self.rounds.too_slow_to_double(batch_s, contenders=len(self.runs)):
            return "too slow for the time budget"
        return None

    def _is_far_beyond(self, setting: Setting) -> bool:
        """Return whether the line through the two sizes before is far above the target there."""
        before = self._timed(setting[:2])[-2:]
        if self.plan.chosen or len(before) < 2:
            return False
        small, large = before
        small_s, large_s = map(self._batch_s, before)
        slope_s = (large_s - small_s) / (large.batch_size - small.batch_size)
        expected_s = large_s + slope_s * (setting.batch_size - large.batch_size)
        return expected_s > _FAR_BEYOND * self._target_s(setting)

    def _target_s(self, setting: Setting) -> float:
        """Return the target; infinite for a bulk call, whose batches nobody waits for."""
        target_ms = None if setting.call_path == BULK_PATH else self.plan.target_ms
        return math.inf if target_ms is None else target_ms / 1000

    def _batch_s(self, setting: Setting) -> float:
        call_s = self.rounds.warm_ups[setting].call_s
        return call_s * setting.batch_size / self.examples_per_call(setting)

    def _timed(self, series: Series) -> list[Setting]:
        return [setting for setting in self.rounds.warm_ups if setting[:2] == series]

    def examples_per_call(self, setting: Setting) -> int:
        """Return how many examples a call has: a bulk call has as many whatever the batch."""
        bulk = self._paths[setting.call_path].bulk
        return self.plan.bulk_examples if bulk else setting.batch_size


def spaced_calls(durations_s: Sequence[float], *, least: int, seed: int) -> list[float]:
    """Pick one call at random of every k in a row, with the largest k that leaves enough."""
    # The first call of a block is slower than the others, and slow blocks have fewer calls: picks
    # at fixed places, or as many of each block, would count such calls too often.
    step = max(1, len(durations_s) // least)
    picks = random.Random(seed)
    places = (start + picks.randrange(step) for start in range(0, len(durations_s), step))
    return [durations_s[place] for place in places if place < len(durations_s)]
