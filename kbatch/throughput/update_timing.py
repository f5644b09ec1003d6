"""Updates of several batch and micro-batch sizes, timed in the same rounds."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from kbatch.analysis.scaling_curve import is_saturated
from kbatch.device.failures import failure_text
from kbatch.page.numbers import format_number
from kbatch.throughput.record import TimedRounds, TrainingPoint
from kbatch.timing.rounds import TimingPlan, TimingRounds, WarmUp
from kbatch.training.accumulation.known_checks import PartsChecks
from kbatch.training.data.sample_rows import DataEnded, Source, batch_of
from kbatch.training.model import user_step
from kbatch.training.train_step import MicroBatchSteps, micro_batch_steps

# Share of the time after which no size is begun: the rest is for the rounds.
SHARE_TO_WARM_UP = 0.5

TRAINING_TIMING = TimingPlan(
    needed_calls=6,  # Rounds that a size is timed in at least, for an interval of their median.
    block_s=0.05,
    precision=0.03,
    rounds_beyond=12,
    first_calls_count=False,
)


class StepConfig(NamedTuple):
    """What is timed: examples of a step, and those that go through the device at once."""

    batch_size: int
    micro_batch_size: int

    @property
    def whole(self) -> bool:
        return self.micro_batch_size == self.batch_size


class TrainingSweep:
    """Train steps of a model, open for timing."""

    def __init__(
        self,
        steps: MicroBatchSteps,
        batch_of: Callable[[int], Any],  # Returns a batch of so many examples, on the device.
        timing: TimingPlan,
        *,
        seed: int = 0,
        say: Callable[[str], None] = lambda line: None,  # Receives a line for each warm-up.
    ):
        self.rounds: TimingRounds[StepConfig] = TimingRounds(timing, seed=seed)
        self._steps = steps
        self._batch_of = batch_of
        self._say = say

    def warm_up(self, config: StepConfig, *, traced: bool = False) -> WarmUp | None:
        """Run the first steps and let them take part; None where memory ran out."""
        batch_size, micro_batch_size = config
        warm_up = self.rounds.admit(
            config,
            lambda: self._steps.step(self._batch_of(batch_size), micro_batch_size),
            traced=traced,
        )
        found = "out of memory"
        if warm_up is not None:
            found = f"{format_number(1000 * warm_up.call_s)} ms a step after warming up"
        self._say(f"micro-batch {micro_batch_size}: {found}")
        return warm_up

    def go_on(self, sizes: Sequence[int], larger: Sequence[int]) -> tuple[int, ...]:
        """Warm larger sizes up while throughput grows and time is left."""
        tried = tuple(sizes)
        for size in larger:
            times_s = [self.rounds.warm_ups[StepConfig(s, s)].call_s for s in tried[-2:]]
            if len(times_s) < 2 or self.rounds.too_slow_to_double(times_s[1]):
                break
            saturated = is_saturated((tried[-2], tried[-1]), (times_s[0], times_s[1]))
            if saturated or self.rounds.late(SHARE_TO_WARM_UP):
                break
            tried = (*tried, size)
            if self.warm_up(StepConfig(size, size)) is None:
                break
        return tried

    def point(self, config: StepConfig, *, not_run: str | None = None) -> TrainingPoint:
        sizes = config.micro_batch_size, config.batch_size
        if (failure := self.rounds.failures.get(config)) is not None:
            return TrainingPoint(*sizes, "out_of_memory", failure_text(failure))
        if not (blocks := self.rounds.blocks.get(config)):
            return TrainingPoint(*sizes, "not_run", not_run or "the time budget was spent")
        warm_up = self.rounds.warm_ups[config]
        return TrainingPoint(
            *sizes,
            "measured",
            first_step_s=warm_up.first_call_s,
            steps=sum(len(block.durations_s) for block in blocks),
            rounds=tuple(block.round for block in blocks),
            step_times_s=tuple(block.median_s for block in blocks),
        )


# A size whose single update takes more than this share of the budget would get too few rounds.
_LONGEST_SHARE = 0.03
# Of the seconds, to build train steps: XLA may take a minute for each shape. Without it the second
# shape that is traced serves all others.
_BUILDING_SHARE = 0.5
# Of the seconds, for the rounds, however long building took: one round of a busy machine may be off
# by ten times.
_ROUNDS_SHARE = 0.6


def time_updates(
    model: keras.Model,
    source: Source,
    *,
    batch_sizes: Sequence[int],
    largest_whole: int | None,
    budget_s: float,
    checks: PartsChecks,
    first: int | None = None,
) -> tuple[tuple[TimedRounds, ...], tuple[str, ...]]:
    """Time updates, whole or in the largest part that fits; say which were not timed, and why."""
    fitting = [size for size in batch_sizes if largest_whole is None or size <= largest_whole]
    first = fitting[0] if first not in fitting and fitting else first
    smaller = [size for size in reversed(fitting) if first is not None and size < first]
    plan = TimingPlan(budget_s, needed_calls=12, block_s=0.03, precision=0.02)
    longest_s = _LONGEST_SHARE * budget_s
    with micro_batch_steps(model) as steps:
        sweep = TrainingSweep(steps, lambda size: batch_of(source, model, size), plan)
        rounds = sweep.rounds

        def groups() -> Iterator[list[StepConfig]]:
            yield [StepConfig(size, size) for size in fitting if size not in smaller]
            yield [StepConfig(size, size) for size in smaller]
            whole = max((c.batch_size for c in rounds.warm_ups if c.whole), default=0)
            if whole and largest_whole is not None and user_step(model) is None:
                most = max(whole, largest_whole)
                yield [StepConfig(size, whole) for size in batch_sizes if size > most]

        most_s = _BUILDING_SHARE * budget_s if model.jit_compile else math.inf
        notes = _build(sweep, groups(), longest_s=longest_s, most_built_s=most_s)
        if not all(config.whole for config in rounds.warm_ups):
            notes += filter(None, [checks.find(model, source, most=largest_whole).note])
        slow = {c: w.call_s for c, w in rounds.warm_ups.items() if w.call_s > longest_s}
        for config in slow:
            rounds.withdraw(config)
        rounds.allow(max(rounds.rest_s, _ROUNDS_SHARE * budget_s))
        for _ in sweep.rounds.each_round():
            pass
    # A slow update was timed when it was built, as if in the first round.
    found = [TimedRounds(*config, (0,), (call_s,)) for config, call_s in slow.items()]
    found += [
        TimedRounds(*config, tuple(b.round for b in blocks), tuple(b.median_s for b in blocks))
        for config, blocks in rounds.blocks.items()
        if blocks and config not in rounds.failures
    ]
    found.sort(key=lambda timed: (timed.batch_size, timed.micro_batch_size))
    return tuple(found), tuple(notes)


def _build(
    sweep: TrainingSweep,
    groups: Iterable[list[StepConfig]],
    *,
    longest_s: float,
    most_built_s: float,
) -> list[str]:
    """Warm up the steps of each group until one takes too long or does not fit; say which."""
    notes, built_s, last_s = [], 0.0, 0.0
    for group in groups:
        for config in group:
            warm_ups, reason, size = sweep.rounds.warm_ups, None, config.batch_size
            smaller_s = [w.call_s for c, w in warm_ups.items() if c.batch_size < size]
            if max(smaller_s, default=0.0) > longest_s:
                reason = (
                    "and larger ones were not timed: an update takes longer than "
                    f"{format_number(longest_s, 2)} s. A larger `budget_s` is needed."
                )
            elif built_s and built_s + last_s > most_built_s:
                reason = (
                    "and further ones were not timed: building train steps took "
                    f"{built_s:.0f} s. Pass fewer `batch_sizes`, or a larger `budget_s`."
                )
            else:
                began_s = time.perf_counter()
                try:
                    if sweep.warm_up(config, traced=True) is None:
                        reason = "ran out of memory."
                except DataEnded as ended:
                    reason = (
                        f"and larger ones were not timed: the data have {ended.rows:,} examples."
                    )
                last_s = time.perf_counter() - began_s
                built_s += last_s
            if reason is not None:
                parts = "" if config.whole else f" in micro-batches of {config.micro_batch_size:,}"
                notes.append(f"Batch size {size:,}{parts} {reason}")
                break
    return notes
