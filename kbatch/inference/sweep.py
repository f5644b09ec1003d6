"""The sweep over batch sizes: all call paths and policies timed in the same rounds."""

import contextlib
import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kbatch.analysis.scaling_curve import is_saturated
from kbatch.device.failures import failure_text
from kbatch.inference.call_paths import CallPath
from kbatch.inference.inputs import InferenceInputs
from kbatch.inference.record import BULK_PATH, TimingRecord, TwinRecord
from kbatch.memory.record import MemoryRecord
from kbatch.memory.search import SURE_SHARE, fit_memory
from kbatch.timing.rounds import Block, TimingPlan, TimingRounds, WarmUp, block_clocks

# Share of the time after which no more settings are warmed up: the rest is for the rounds.
_SHARE_TO_WARM_UP = 0.5
# So many are timed whatever the time.
_FEWEST_SETTINGS = 2
_BEYOND_TARGET = "batches beyond the latency target"
# A size that is expected to take more than so many times the target is not called.
_FAR_BEYOND = 1.5
# Single calls that a record keeps for each block, if the quantile needs no more.
_KEPT_CALLS = 64
_COPIES, _WARM_UP_COPIES = 7, 2


class Setting(NamedTuple):
    """What is timed; a `twin` is the second of two that are alike."""

    call_path: str
    dtype_policy: str
    batch_size: int
    twin: bool = False


OnSetting = Callable[[Setting, WarmUp | None], None]


class SweepPlan(NamedTuple):
    """What to sweep.

    Attributes:
        batch_sizes: Sizes in ascending order.
        chosen: Whether a person chose them; if not, sizes too slow for the time are left out.
        end_above_s: A time of a batch that ends the sweep; None for none. What takes longer is not
            timed, unless fewer than two sizes would be.
        bulk_examples: Examples of a bulk call.
        timing: When a setting has been timed enough.
        larger: Sizes to go on with, in ascending order, while throughput grows, and memory and
            time are left.
    """

    batch_sizes: tuple[int, ...]
    chosen: bool
    end_above_s: float | None
    bulk_examples: int
    timing: TimingPlan
    larger: tuple[int, ...] = ()


class InferenceSweep:
    """Call paths of models, one a policy, that are open for timing."""

    def __init__(
        self,
        models: Mapping[str, Any],
        paths: Sequence[CallPath],
        inputs: InferenceInputs,
        plan: SweepPlan,
        *,
        seed: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.rounds: TimingRounds[Setting] = TimingRounds(plan.timing, seed=seed, clock=clock)
        self._plan = plan
        self._seed = seed
        self._inputs = inputs
        self._paths = {path.name: path for path in paths}
        self._models = models
        self._prepare: dict[tuple[str, str], Callable[[int], Callable[[], Any]]] = {}
        self._not_run: dict[Setting, str] = {}
        self._copies_s: dict[int, float | None] = {}
        self._largest_allowed: dict[tuple[str, str], int] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "InferenceSweep":
        try:
            for policy, model in self._models.items():
                for path in self._paths.values():
                    opened = path.open(model, self._inputs, self._plan.bulk_examples)
                    self._prepare[path.name, policy] = self._stack.enter_context(opened)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def warm_up(
        self,
        memory: Mapping[tuple[str, int], MemoryRecord],
        on_setting: OnSetting,
        *,
        memory_limit_bytes: int = 0,
    ) -> None:
        """Warm all settings up, small sizes first; `memory` is by policy and batch size.

        The first series comes before the others: it answers questions, whatever the time leaves
        to those.
        """
        first, *others = self._prepare
        sizes = self._plan.batch_sizes
        settings = [Setting(*first, size) for size in sizes]
        settings += [Setting(*series, size) for size in sizes for series in others]
        ended: dict[tuple[str, str], str] = {}
        for setting in settings:
            series = setting[:2]
            probe = memory.get((setting.dtype_policy, setting.batch_size))
            reason = ended.get(series) or self._reason_not_to_run(setting, probe)
            if reason is None and self._is_far_beyond(setting):
                reason = ended[series] = _BEYOND_TARGET
                self._largest_allowed[series] = setting.batch_size
            if reason is not None:
                self._not_run[setting] = reason
                continue
            warm_up = self.admit(setting)
            if warm_up is not None:
                self._largest_allowed[series] = setting.batch_size
            on_setting(setting, warm_up)
            end = self._reason_to_end(setting, warm_up)
            if end is not None:
                ended[series] = end
            if end == _BEYOND_TARGET and len(self._timed(setting)) > 2:
                self.rounds.withdraw(setting)
                self._not_run[setting] = end
        for series in self._prepare:
            if series not in ended:
                known = {
                    size: float(record.peak_bytes)
                    for (policy, size), record in memory.items()
                    if policy == series[1] and record.peak_bytes is not None
                }
                fit = fit_memory(known)
                # Nothing is probed above these sizes, so only a part of the limit is sure.
                most = 0.0 if fit is None else fit.largest_within(SURE_SHARE * memory_limit_bytes)
                self._go_on(series, most, on_setting)

    def _go_on(self, series: tuple[str, str], most: float, on_setting: OnSetting) -> None:
        """Warm larger sizes up, as far as memory is known to suffice, until throughput is flat."""
        sizes = (self._plan.batch_sizes[-1], *self._plan.larger)
        for size_before, size in itertools.pairwise(sizes):
            setting = Setting(*series, size)
            before = self._timed(setting)[-2:]
            if len(before) < 2 or before[1].batch_size != size_before:
                return  # One before it was not run.
            small_s, large_s = map(self._batch_s, before)
            flat = is_saturated((before[0].batch_size, size_before), (small_s, large_s))
            if flat or size > most or self._reason_not_to_run(setting, None):
                return
            warm_up = self.admit(setting)
            on_setting(setting, warm_up)
            if self._reason_to_end(setting, warm_up) is not None:
                return

    def admit(self, setting: Setting) -> WarmUp | None:
        """Warm one setting up and let it take part; None where memory ran out."""
        return self.rounds.admit_prepared(setting, functools.partial(self._call, setting))

    def _call(self, setting: Setting) -> Callable[[], Any]:
        size = setting.batch_size
        if size not in self._copies_s:
            self._copies_s[size] = measure_copy_s(self._inputs.batch(size))
        return self._prepare[setting.call_path, setting.dtype_policy](size)

    @property
    def first_series(self) -> tuple[str, str]:
        """The call path and policy that answer questions."""
        return next(iter(self._prepare))

    def largest_allowed(self, call_path: str, dtype_policy: str) -> int:
        """Return the largest size that memory and time allow; it may miss the target."""
        return self._largest_allowed[call_path, dtype_policy]

    def stretches(self, call_path: str, dtype_policy: str) -> list[list[tuple[float, ...]]]:
        """Return the seconds of calls in a row that were timed, a list for each batch size."""
        return [
            [block.durations_s for block in blocks]
            for setting, blocks in self.rounds.blocks.items()
            if setting[:2] == (call_path, dtype_policy) and blocks
        ]

    def run(
        self,
        on_round: Callable[[int, int], None],
        *,
        clock_mhz: Callable[[], float | None] = lambda: None,
    ) -> TwinRecord | None:
        """Time all settings in rounds, one of them twice."""
        settings = list(self.rounds.warm_ups)
        if not settings:
            return None
        alike = self._timed(settings[0])
        one = alike[(len(alike) - 1) // 2]
        twin = one._replace(twin=True)
        self.admit(twin)
        for number, live in enumerate(self.rounds.each_round(clock_mhz=clock_mhz), start=1):
            on_round(number, len(live))
        twins = {block.round: block for block in self.rounds.blocks.get(twin, [])}
        log_ratios = tuple(
            math.log(_median(block) / _median(twins[block.round]))
            for block in self.rounds.blocks[one]
            if block.round in twins
        )
        return TwinRecord(one.call_path, one.dtype_policy, one.batch_size, log_ratios)

    def records(self) -> tuple[TimingRecord, ...]:
        """Return what was timed of each series and size; of larger sizes, those that were tried."""
        tried = self.rounds.warm_ups.keys() | self.rounds.failures.keys()
        settings = (
            Setting(*series, size)
            for series in self._prepare
            for size in (*self._plan.batch_sizes, *self._plan.larger)
        )
        return tuple(
            self._record(setting)
            for setting in settings
            if setting.batch_size not in self._plan.larger or setting in tried
        )

    def _record(self, setting: Setting) -> TimingRecord:
        failure = self.rounds.failures.get(setting)
        blocks = self.rounds.blocks.get(setting, [])
        if failure is not None:
            return TimingRecord(*setting[:3], "out_of_memory", failure_text(failure))
        if not blocks:
            reason = self._not_run.get(setting, "the time budget was spent")
            return TimingRecord(*setting[:3], "not_run", reason)
        warm_up = self.rounds.warm_ups[setting]
        durations_s = [duration_s for block in blocks for duration_s in block.durations_s]
        least = max(_KEPT_CALLS * len(blocks), self._plan.timing.needed_calls)
        kept_s = kept_calls(durations_s, least=least, seed=self._seed)
        return TimingRecord(
            *setting[:3],
            "measured",
            examples_per_call=self._examples(setting),
            first_call_s=warm_up.first_call_s,
            warm_up_calls=len(warm_up.later_calls_s),
            calls=len(durations_s),
            block_rounds=tuple(block.round for block in blocks),
            block_medians_s=tuple(_median(block) for block in blocks),
            latencies_s=tuple(round(duration_s, 9) for duration_s in kept_s),
            copy_s=self._copies_s[setting.batch_size],
            sm_clocks_mhz=block_clocks(blocks),
        )

    def _reason_not_to_run(self, setting: Setting, memory: MemoryRecord | None) -> str | None:
        path = self._paths[setting.call_path]
        reason = path.reason_not_to_run(setting.batch_size, self._plan.bulk_examples)
        if reason is not None:
            return reason
        if memory is not None and memory.outcome == "out_of_memory":
            return "memory ran out when it was probed"
        if memory is not None and memory.guarded:
            return memory.reason
        # Without two sizes there is no fit, and no answer.
        some = len(self.rounds.warm_ups) >= _FEWEST_SETTINGS
        if some and self.rounds.spent_s >= _SHARE_TO_WARM_UP * self._plan.timing.time_budget_s:
            return "half of the time budget was spent on preparing and warming up others"
        return None

    def _reason_to_end(self, setting: Setting, warm_up: WarmUp | None) -> str | None:
        if warm_up is None:
            return f"memory ran out at batch size {setting.batch_size}"
        if self._plan.chosen:
            return None
        end_s, batch_s = self._end_above_s(setting), self._batch_s(setting)
        if end_s is not None and batch_s > end_s:
            return _BEYOND_TARGET
        # Twice the size takes up to twice as long, and so do all smaller ones together.
        timing = self._plan.timing
        rest_s = timing.time_budget_s - self.rounds.spent_s
        if 4 * batch_s * timing.needed_calls * len(self._prepare) > rest_s:
            return "too slow for the time budget"
        return None

    def _is_far_beyond(self, setting: Setting) -> bool:
        """Return whether the line through the two sizes before is far above the target there."""
        before, end_s = self._timed(setting)[-2:], self._end_above_s(setting)
        if self._plan.chosen or end_s is None or len(before) < 2:
            return False
        small, large = before
        small_s, large_s = map(self._batch_s, before)
        slope_s = (large_s - small_s) / (large.batch_size - small.batch_size)
        expected_s = large_s + slope_s * (setting.batch_size - large.batch_size)
        return expected_s > _FAR_BEYOND * end_s

    def _end_above_s(self, setting: Setting) -> float | None:
        """Return the target; None for a bulk call, whose batches nobody waits for."""
        return None if setting.call_path == BULK_PATH else self._plan.end_above_s

    def _batch_s(self, setting: Setting) -> float:
        call_s = self.rounds.warm_ups[setting].call_s
        return call_s * setting.batch_size / self._examples(setting)

    def _timed(self, setting: Setting) -> list[Setting]:
        """Return the settings of its call path and policy so far."""
        return [other for other in self.rounds.warm_ups if other[:2] == setting[:2]]

    def _examples(self, setting: Setting) -> int:
        path = self._paths[setting.call_path]
        return path.examples_per_call(setting.batch_size, self._plan.bulk_examples)


def _median(block: Block) -> float:
    return round(statistics.median(block.durations_s), 9)


def measure_copy_s(batch: Any) -> float | None:
    """Time the copy of a batch to the first GPU, None without one.

    A copy is over when an element of it can be read on the GPU.
    """
    if not tf.config.list_physical_devices("GPU"):
        return None
    with tf.device("CPU:0"):
        on_host = keras.tree.flatten(keras.tree.map_structure(tf.constant, batch))
    durations_s = []
    for _ in range(_WARM_UP_COPIES + _COPIES):
        began_s = time.perf_counter()
        with tf.device("GPU:0"):
            copies = [tf.identity(leaf) for leaf in on_host]
            for copy in copies:
                tf.reshape(copy, [-1])[:1].numpy()
        durations_s.append(time.perf_counter() - began_s)
    return statistics.median(durations_s[_WARM_UP_COPIES:])


def kept_calls(durations_s: Sequence[float], *, least: int, seed: int) -> list[float]:
    """Pick one call at random of every k in a row, with the largest k that leaves enough.

    The first call of a block is slower than the others, and slow blocks have fewer calls: picks at
    fixed places, or as many of each block, would count such calls too often.

    >>> len(kept_calls([0.01] * 1000, least=100, seed=0))
    100
    """
    step = max(1, len(durations_s) // least)
    picks = random.Random(seed)
    places = (start + picks.randrange(step) for start in range(0, len(durations_s), step))
    return [durations_s[place] for place in places if place < len(durations_s)]
