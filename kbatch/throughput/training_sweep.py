"""The sweep over micro-batch sizes: train steps of one model timed in the same rounds."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kbatch.analysis.latency_batches import is_saturated
from kbatch.device.failures import failure_text, ran_out_of_memory
from kbatch.document.number_text import readable
from kbatch.throughput.training_profile_record import TrainingPoint
from kbatch.timing.timing_plan import TimingPlan, block_clocks
from kbatch.timing.timing_rounds import TimingRounds, WarmUp
from kbatch.training.micro_batch_steps import MicroBatchSteps

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
        self.rounds: TimingRounds[StepSetting] = TimingRounds(
            timing, seed=seed, is_result=ran_out_of_memory
        )
        self._steps = steps
        self._batch_of = batch_of
        self._time_budget_s = timing.time_budget_s

    def warm_up(self, setting: StepSetting, *, traced: bool = False) -> WarmUp | None:
        """Runs the first steps and lets the setting take part; None where memory ran out.

        Args:
            setting: What is timed.
            traced: Whether another one's first step has traced and compiled for it.
        """
        call = self._steps.step(self._batch_of(setting.batch_size), setting.micro_batch_size)
        return self.rounds.admit(setting, call, traced=traced)

    def late(self, share: float) -> bool:
        """Tells whether a share of the time budget is spent."""
        return self.rounds.spent_s >= share * self._time_budget_s

    @property
    def rest_s(self) -> float:
        """Seconds of the time budget that are left."""
        return self._time_budget_s - self.rounds.spent_s

    def is_too_slow(self, step_s: float) -> bool:
        """Return whether no time is left for twice the size of a step that takes so long."""
        # Twice the size takes up to twice as long, and so do all smaller ones together.
        return 4 * step_s * TRAINING_TIMING.needed_calls > self.rest_s

    def go_on(
        self, sizes: Sequence[int], larger: Sequence[int], say: Callable[[str], None]
    ) -> tuple[int, ...]:
        """Warm larger sizes up while throughput grows and time is left.

        Args:
            sizes: Batch sizes whose whole batches are warmed up, ascending.
            larger: Sizes that fit in memory, ascending.
            say: Receives a line for each of them.

        Returns:
            All sizes that were tried.
        """
        tried = tuple(sizes)
        for size in larger:
            times_s = [self.rounds.warm_ups[StepSetting(s, s)].call_s for s in tried[-2:]]
            if len(times_s) < 2 or self.late(SHARE_TO_WARM_UP) or self.is_too_slow(times_s[1]):
                break
            if is_saturated((tried[-2], tried[-1]), (times_s[0], times_s[1])):
                break
            warm_up = self.warm_up(StepSetting(size, size))
            tried = (*tried, size)
            if warm_up is None:
                say(f"micro-batch {size}: out of memory")
                break
            say(f"micro-batch {size}: {readable(1000 * warm_up.call_s)} ms a step after warming up")
        return tried

    def point(self, setting: StepSetting, *, not_run: str | None = None) -> TrainingPoint:
        """Gives what was found of a setting.

        Args:
            setting: What was timed, or was to be.
            not_run: Why it was not, if so.
        """
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
            step_times_s=tuple(round(statistics.median(b.durations_s), 9) for b in blocks),
            sm_clocks_mhz=block_clocks(blocks),
        )
