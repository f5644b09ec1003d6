"""One sweep over sizes: grow, time all in shuffled rounds, and stop where memory or time end."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from kbatch.analysis.rows import MEASURED, OUT_OF_MEMORY
from kbatch.analysis.scaling_curve import is_saturated
from kbatch.timing.rounds import Call, Clock, TimingPlan, TimingRounds, WarmUp
from kbatch.training.data.sample_rows import DataEnded

# Share of the time after which no more settings are warmed up: the rest is for the rounds.
_SHARE_TO_WARM_UP = 0.5
# So many are timed whatever the time: without two sizes there is no fit, and no answer.
_FEWEST_SETTINGS = 2
BEYOND_TARGET = "batches beyond the latency target"
# A size that is expected to take more than so many times the target is not called.
_FAR_BEYOND = 1.5


class Setting(NamedTuple):
    """What is timed: a size, and with what."""

    series: Any  # Hashable, in a form of its maker's.
    size: int


class Sweep:
    """Sizes of one or more series that are timed in the same rounds."""

    def __init__(
        self,
        prepare: Callable[[Setting], Call],  # Makes a setting ready to be called.
        timing: TimingPlan,
        *,
        chosen: bool,  # By a person: else sizes too slow for the time are left out.
        refusal: Callable[[Setting], str | None] = lambda setting: None,  # Why not to run it.
        call_share: Callable[[Setting], float] = lambda setting: 1.0,  # That its examples take.
        target_s: Callable[[Setting], float] = lambda setting: math.inf,  # Larger are left out.
        seed: int = 0,
        clock: Clock = time.perf_counter,
    ):
        self.rounds: TimingRounds[Setting] = TimingRounds(timing, seed=seed, clock=clock)
        self.not_run: dict[Setting, str] = {}  # Why.
        self._prepare, self._chosen, self._refusal = prepare, chosen, refusal
        self._call_share, self._target_s = call_share, target_s
        self._ended: dict[Any, tuple[int, str]] = {}  # The last size of a series, and why.

    def warm_up(self, settings: Iterable[Setting]) -> Iterator[tuple[Setting, WarmUp | None]]:
        """Warm settings up and yield each that was called; None where memory ran out."""
        for setting in settings:
            last, end = self._ended.get(setting.series, (math.inf, None))
            reason = end if setting.size > last else self._reason_not_to_run(setting)
            if reason is None and self._is_far_beyond(setting):
                reason = self._end(setting, BEYOND_TARGET)
            if reason is None:
                try:
                    warm_up = self.admit(setting)
                except DataEnded as ended:
                    reason = self._end(setting, f"the data function gave {ended.rows} examples")
                else:
                    yield setting, warm_up
                    self._look_at(setting, warm_up)
            if reason is not None:
                self.not_run[setting] = reason

    def go_on(self, series: Any, sizes: Iterable[int]) -> Iterator[tuple[Setting, WarmUp | None]]:
        """Warm larger sizes than those before up, until throughput is flat."""
        for size in sizes:
            setting, before = Setting(series, size), self.timed(series)[-2:]
            if series in self._ended or len(before) < 2 or self._reason_not_to_run(setting):
                return
            small, large = before
            if is_saturated((small.size, large.size), (self.time_s(small), self.time_s(large))):
                return
            yield from self.warm_up([setting])

    def admit(self, setting: Setting) -> WarmUp | None:
        """Warm one setting up and let it take part; None where memory ran out."""
        return self.rounds.admit(setting, lambda: self._prepare(setting))

    def timed(self, series: Any) -> list[Setting]:
        """Return the settings of a series that were warmed up, in order."""
        return [setting for setting in self.rounds.warm_ups if setting.series == series]

    def time_s(self, setting: Setting) -> float:
        """Return the seconds that its examples took in the fastest call of its warm-up."""
        return self._call_share(setting) * self.rounds.warm_ups[setting].call_s

    def outcome(self, setting: Setting) -> str:
        """Return `MEASURED`, `OUT_OF_MEMORY`, or why it was not run."""
        if setting in self.rounds.failures:
            return OUT_OF_MEMORY
        if self.rounds.blocks.get(setting):
            return MEASURED
        return self.not_run.get(setting, "the time budget was spent")

    def _reason_not_to_run(self, setting: Setting) -> str | None:
        late = len(self.rounds.warm_ups) >= _FEWEST_SETTINGS and self.rounds.late(_SHARE_TO_WARM_UP)
        spent = "half of the time budget was spent on preparing and warming up others"
        return self._refusal(setting) or (spent if late else None)

    def _look_at(self, setting: Setting, warm_up: WarmUp | None) -> None:
        """End a series where memory ran out, or a size that nobody chose is too slow."""
        if warm_up is None:
            self._end(setting, f"memory ran out at size {setting.size}")
        elif not self._chosen:
            time_s, series = self.time_s(setting), {one.series for one in self.rounds.warm_ups}
            if time_s > self._target_s(setting):
                self._end(setting, BEYOND_TARGET)
                if len(self.timed(setting.series)) > 2:
                    self.rounds.withdraw(setting)
                    self.not_run[setting] = BEYOND_TARGET
            elif self.rounds.too_slow_to_double(time_s, contenders=len(series)):
                self._end(setting, "too slow for the time budget")

    def _end(self, setting: Setting, reason: str) -> str:
        self._ended[setting.series] = setting.size, reason
        return reason

    def _is_far_beyond(self, setting: Setting) -> bool:
        """Return whether the line through the two sizes before is far above the target there."""
        before = self.timed(setting.series)[-2:]
        if self._chosen or len(before) < 2:
            return False
        (small, large), (small_s, large_s) = before, map(self.time_s, before)
        slope_s = (large_s - small_s) / (large.size - small.size)
        expected_s = large_s + slope_s * (setting.size - large.size)
        return expected_s > _FAR_BEYOND * self._target_s(setting)
