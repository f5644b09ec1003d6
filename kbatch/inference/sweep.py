"""The calls of a profile: all call paths and policies on one sweep over batch sizes."""

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kbatch.analysis.rows import MEASURED
from kbatch.inference.call_paths import CallPath, Run
from kbatch.inference.inputs import InferenceInputs
from kbatch.inference.result import TimingRecord
from kbatch.memory.find import MemoryPass
from kbatch.memory.result import peaks_under
from kbatch.memory.search import SURE_SHARE, fit_memory
from kbatch.timing.rounds import TimingPlan, WarmUp
from kbatch.timing.sweep import BEYOND_TARGET, Setting, Sweep

# Single calls that a record keeps for each block, if the quantile needs no more.
_KEPT_CALLS = 64


class Series(NamedTuple):
    """A call path of the model under a policy."""

    call_path: str
    dtype_policy: str


class InferencePlan(NamedTuple):
    """What was asked for, checked."""

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
        memory: MemoryPass,
        *,
        seed: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.plan, self.runs = plan, dict[Series, Run]()
        self._models, self._inputs, self._seed, self._memory = models, inputs, seed, memory
        self._bulk = {path.name for path in plan.paths if path.bulk}
        self._probed = {
            (record.dtype_policy, record.batch_size): record for record in memory.records
        }
        self.sweep = Sweep(
            self._prepare,
            plan.timing,
            chosen=plan.chosen,
            refusal=self._refusal,
            call_share=lambda setting: setting.size / self.examples_per_call(setting),
            target_s=self._target_s,
            seed=seed,
            clock=clock,
        )
        self.rounds = self.sweep.rounds
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "InferenceSweep":
        with contextlib.ExitStack() as stack:
            for policy, model in self._models.items():
                for path in self.plan.paths:
                    opened = path.open(model, self._inputs)
                    self.runs[Series(path.name, policy)] = stack.enter_context(opened)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def first_series(self) -> Series:
        """The call path and policy that answer questions."""
        return next(iter(self.runs))

    @property
    def largest_allowed(self) -> int:
        """The largest size of the first series by memory and time; it may miss the target."""
        beyond = [
            setting.size
            for setting, reason in self.sweep.not_run.items()
            if setting.series == self.first_series and reason == BEYOND_TARGET
        ]
        timed = [setting.size for setting in self.sweep.timed(self.first_series)]
        return max([*timed, *beyond[:1]])

    def warm_up(self) -> Iterator[tuple[Setting, WarmUp | None]]:
        """Warm all settings up, small sizes first, and yield each; None where memory ran out."""
        # The first series answers questions, whatever the time leaves to the others.
        first, *others = self.runs
        sizes = self.plan.batch_sizes
        yield from self.sweep.warm_up(Setting(first, size) for size in sizes)
        yield from self.sweep.warm_up(Setting(one, size) for size in sizes for one in others)
        for series in self.runs:
            fit = fit_memory(peaks_under(series.dtype_policy, self._memory.records))
            # Nothing is probed above these sizes, so only a part of the limit is sure.
            most = 0.0 if fit is None else fit.largest_within(SURE_SHARE * self._memory.limit_bytes)
            larger = (size for size in self.plan.larger if size <= most)
            if (series, sizes[-1]) in self.rounds.warm_ups:
                yield from self.sweep.go_on(series, larger)

    def examples_per_call(self, setting: Setting) -> int:
        """Return how many examples a call has: a bulk call has as many whatever the batch."""
        bulk = setting.series.call_path in self._bulk
        return self.plan.bulk_examples if bulk else setting.size

    def records(self) -> tuple[TimingRecord, ...]:
        """Return what was timed of each series and size; of larger sizes, those that were tried."""
        tried = self.rounds.warm_ups.keys() | self.rounds.failures.keys()
        return tuple(
            self._record(setting)
            for series in self.runs
            for size in (*self.plan.batch_sizes, *self.plan.larger)
            if (setting := Setting(series, size)) in tried or size not in self.plan.larger
        )

    def _record(self, setting: Setting) -> TimingRecord:
        (path, policy), size = setting
        outcome = self.sweep.outcome(setting)
        if outcome != MEASURED:
            return TimingRecord(path, policy, size, outcome)
        blocks = self.rounds.blocks[setting]
        durations_s = [duration_s for block in blocks for duration_s in block.durations_s]
        least = max(_KEPT_CALLS * len(blocks), self.plan.timing.needed_calls)
        kept_s = spaced_calls(durations_s, least=least, seed=self._seed)
        return TimingRecord(
            path,
            policy,
            size,
            MEASURED,
            examples_per_call=self.examples_per_call(setting),
            first_call_s=self.rounds.warm_ups[setting].first_call_s,
            calls=len(durations_s),
            block_medians_s=tuple(block.median_s for block in blocks),
            latencies_s=tuple(round(duration_s, 9) for duration_s in kept_s),
        )

    def _prepare(self, setting: Setting) -> Callable[[], Any]:
        batch = self._inputs.batch(self.examples_per_call(setting))
        run = self.runs[setting.series]
        return lambda: run(batch, setting.size)

    def _refusal(self, setting: Setting) -> str | None:
        most = self.plan.bulk_examples
        if setting.series.call_path in self._bulk and setting.size > most:
            return f"more than the {most} examples of a bulk call: see `bulk_examples`"
        record = self._probed.get((setting.series.dtype_policy, setting.size))
        return None if record is None else record.refusal

    def _target_s(self, setting: Setting) -> float:
        """Return the target; infinite for a bulk call, whose batches nobody waits for."""
        target_ms = None if setting.series.call_path in self._bulk else self.plan.target_ms
        return math.inf if target_ms is None else target_ms / 1000


def spaced_calls(durations_s: Sequence[float], *, least: int, seed: int) -> list[float]:
    """Pick one call at random of every k in a row, with the largest k that leaves enough."""
    # The first call of a block is slower than the others, and slow blocks have fewer calls: picks
    # at fixed places, or as many of each block, would count such calls too often.
    step = max(1, len(durations_s) // least)
    picks = random.Random(seed)
    places = (start + picks.randrange(step) for start in range(0, len(durations_s), step))
    return [durations_s[place] for place in places if place < len(durations_s)]
