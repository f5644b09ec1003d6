"""The calls of a profile: all call paths and policies on one sweep over batch sizes."""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kbatch.analysis.rows import MEASURED
from kbatch.inference.batch_dependence import BatchDependence
from kbatch.inference.call_paths import Run
from kbatch.inference.inputs import InferenceInputs
from kbatch.inference.result import BULK_PATH, TimingRecord
from kbatch.memory.find import MemoryPass
from kbatch.timing.rounds import Clock, TimingPlan, WarmUp
from kbatch.timing.sweep import BEYOND_TARGET, Setting, Sweep

# Single calls that a record keeps for each block, if the quantile needs no more.
_KEPT_CALLS = 64


class Series(NamedTuple):
    """A call path of the model under a policy."""

    call_path: str
    dtype_policy: str

    def __str__(self) -> str:
        return f"{self.call_path} under {self.dtype_policy}"


class InferenceSweep(Sweep):
    """Call paths of models, one a policy, that are open for timing."""

    def __init__(
        self,
        runs: Mapping[Series, Run],
        inputs: InferenceInputs,
        memory: MemoryPass,
        timing: TimingPlan,
        *,
        chosen: bool,
        bulk_examples: int,
        target_ms: float | None = None,  # Larger sizes than two are not timed if they take longer.
        seed: int = 0,
        say: Callable[[str], None] = lambda line: None,
        clock: Clock = time.perf_counter,
    ):
        super().__init__(timing, chosen=chosen, seed=seed, say=say, clock=clock)
        self.runs = runs
        self.first_series = next(iter(runs))  # It answers questions.
        self._inputs, self._memory, self._seed = inputs, memory, seed
        self._bulk_examples, self._target_ms = bulk_examples, target_ms

    def prepare(self, setting: Setting) -> Callable[[], Any]:
        """Make a batch, and the call of it."""
        batch = self._inputs.batch(self.examples_per_call(setting))
        run = self.runs[setting.series]
        return lambda: run(batch, setting.size)

    def refusal(self, setting: Setting) -> str | None:
        """Return why a batch is too large for a bulk call, or for the memory."""
        (path, policy), most = setting.series, self._bulk_examples
        if path == BULK_PATH and setting.size > most:
            return f"more than the {most} examples of a bulk call: see `bulk_examples`"
        return self._memory.refusal(policy, setting.size)

    def shares(self, setting: Setting) -> float:
        """Return how many batches a call has."""
        return self.examples_per_call(setting) / setting.size

    def target_s(self, setting: Setting) -> float:
        """Return the target; infinite for a bulk call, whose batches nobody waits for."""
        bulk = setting.series.call_path == BULK_PATH
        return math.inf if self._target_ms is None or bulk else self._target_ms / 1000

    def examples_per_call(self, setting: Setting) -> int:
        """Return how many examples a call has: a bulk call has as many whatever the batch."""
        return self._bulk_examples if setting.series.call_path == BULK_PATH else setting.size

    def warm_up_all(
        self, sizes: Sequence[int], larger: Sequence[int]
    ) -> Iterator[tuple[Setting, WarmUp]]:
        """Warm all settings up, small sizes first, and yield each."""
        # The first series answers questions, whatever the time leaves to the others.
        first, *others = self.runs
        yield from self.warm_up(Setting(first, size) for size in sizes)
        yield from self.warm_up(Setting(one, size) for size in sizes for one in others)
        for series in self.runs:
            most = self._memory.largest_sure(series.dtype_policy)
            if Setting(series, sizes[-1]) in self.warm_ups:
                yield from self.go_on(series, (size for size in larger if size <= most))

    @property
    def largest_allowed(self) -> int:
        """The largest size of the first series by memory and time; it may miss the target."""
        beyond = [
            setting.size
            for setting, reason in self.not_run.items()
            if setting.series == self.first_series and reason == BEYOND_TARGET
        ]
        timed = [setting.size for setting in self.timed(self.first_series)]
        return max([*timed, *beyond[:1]])

    def records(
        self, sizes: Sequence[int], larger: Iterable[int], dependence: BatchDependence
    ) -> tuple[TimingRecord, ...]:
        """Return what was timed of each series and size; of larger sizes, those that were tried."""
        asked = [Setting(series, size) for series in self.runs for size in (*sizes, *larger)]
        tried = self.warm_ups.keys() | self.not_run.keys()
        return tuple(
            self._record(setting, dependence)
            for setting in asked
            if setting in tried or setting.size in sizes
        )

    def _record(self, setting: Setting, dependence: BatchDependence) -> TimingRecord:
        (path, policy), size = setting
        outcome = self.outcome(setting)
        if outcome != MEASURED:
            return TimingRecord(path, policy, size, outcome)
        blocks = self.blocks[setting]
        durations_s = [duration_s for block in blocks for duration_s in block.durations_s]
        least = max(_KEPT_CALLS * len(blocks), self.timing.needed_calls)
        kept_s = spaced_calls(durations_s, least=least, seed=self._seed)
        return TimingRecord(
            path,
            policy,
            size,
            MEASURED,
            examples_per_call=self.examples_per_call(setting),
            first_call_s=self.warm_ups[setting].first_call_s,
            block_medians_s=tuple(block.median_s for block in blocks),
            latencies_s=tuple(round(duration_s, 9) for duration_s in kept_s),
            size_effect=dependence.found.get((path, policy, size)),
        )


def spaced_calls(durations_s: Sequence[float], *, least: int, seed: int) -> list[float]:
    """Pick one call at random of every k in a row, with the largest k that leaves enough."""
    # The first call of a block is slower than the others, and slow blocks have fewer calls: picks
    # at fixed places, or as many of each block, would count such calls too often.
    step = max(1, len(durations_s) // least)
    picks = random.Random(seed)
    places = (start + picks.randrange(step) for start in range(0, len(durations_s), step))
    return [durations_s[place] for place in places if place < len(durations_s)]
