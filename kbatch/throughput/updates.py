"""Updates of several batch and micro-batch sizes, timed in the same rounds."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from kbatch.page.numbers import format_number
from kbatch.throughput.result import TimedUpdate
from kbatch.timing.rounds import TimingPlan
from kbatch.timing.sweep import Setting, Sweep
from kbatch.training.data.sample_rows import Source, batch_of
from kbatch.training.model import user_step
from kbatch.training.train_step import MicroBatchSteps, execution_steps, micro_batch_steps

# Of the seconds, for the rounds, however long building took: one round of a busy machine may be off
# by ten times.
_ROUNDS_SHARE = 0.6

Say = Callable[[str], None]


class Way(NamedTuple):
    """How updates are made: the series of a sweep whose sizes are micro-batches, or batches."""

    batch_size: int | None = None  # Examples of an update; None for as many as the micro-batch has.
    most_at_once: int | None = None  # The sizes are batches, which are cut into so many at most.
    fed: bool = False  # From a dataset, as in `fit`; else by batches that lie on the device.
    together: bool = False  # As many updates an execution as a search would run.


class TimedUpdates:
    """Train steps of a model that are open for timing."""

    def __init__(
        self,
        steps: MicroBatchSteps,
        batch_of: Callable[[int], Any],  # Returns a batch of so many examples, on the device.
        timing: TimingPlan,
        *,
        chosen: bool,
        examples: int | None = None,  # Of the data, which end an epoch.
        refusal: Callable[[int], str | None] = lambda size: None,
        seed: int = 0,
        say: Say = lambda line: None,  # Receives a line for each warm-up.
    ):
        self.sweep = Sweep(
            self._prepare,
            timing,
            chosen=chosen,
            refusal=lambda setting: refusal(setting.size) or self._alike(setting),
            call_share=lambda setting: 1 / self._steps_of(setting),
            seed=seed,
        )
        self._steps, self._batch_of, self._examples, self._say = steps, batch_of, examples, say

    def warm_up(self, way: Way, sizes: Sequence[int], *, larger: Sequence[int] = ()) -> None:
        """Warm sizes up, and go on to larger ones while throughput grows."""
        for sought in (
            self.sweep.warm_up(Setting(way, size) for size in sizes),
            self.sweep.go_on(way, larger),
        ):
            for setting, warm_up in sought:
                found = "out of memory"
                if warm_up is not None:
                    time_ms = 1000 * warm_up.call_s / self._steps_of(setting)
                    found = f"{format_number(time_ms)} ms a step after warming up"
                self._say(f"size {setting.size}: {found}")

    def run(self) -> None:
        """Time all in rounds."""
        for number, live in enumerate(self.sweep.rounds.each_round(), start=1):
            self._say(f"round {number}: {len(live)} go on")

    def found(self, setting: Setting) -> TimedUpdate:
        """Return what was timed of a setting, or why it was not."""
        batch_size, micro_batch_size = _sizes(setting)
        rounds, outcome = self.sweep.rounds, self.sweep.outcome(setting)
        blocks, steps = rounds.blocks.get(setting, []), self._steps_of(setting)
        warm_up = rounds.warm_ups.get(setting)
        return TimedUpdate(
            batch_size,
            micro_batch_size,
            tuple(block.round for block in blocks),
            tuple(round(block.median_s / steps, 9) for block in blocks),
            steps,
            outcome,
            warm_up.first_call_s if blocks and warm_up else None,
        )

    def _prepare(self, setting: Setting) -> Callable[[], None]:
        batch_size, micro_batch_size = _sizes(setting)
        fed = setting.series.fed and self._steps.can_run_together
        steps = self._steps_of(setting) if fed else None
        return self._steps.step(self._batch_of(batch_size), micro_batch_size, steps)

    def _steps_of(self, setting: Setting) -> int:
        """Return how many steps an execution of a setting runs, by the time of one step."""
        if not setting.series.together:
            return 1
        alone = self._alone(setting)
        if alone not in self.sweep.rounds.warm_ups or not self._steps.can_run_together:
            return 1
        epoch = None if self._examples is None else -(-self._examples // _sizes(setting)[0])
        return execution_steps(self.sweep.rounds.warm_ups[alone].call_s, epoch)

    def _alone(self, setting: Setting) -> Setting:
        return setting._replace(series=setting.series._replace(together=False))

    def _alike(self, setting: Setting) -> str | None:
        """Return why several steps an execution are not timed beside one."""
        if not setting.series.together or self._steps_of(setting) > 1:
            return None
        return "one step an execution takes as long as several would"


def _sizes(setting: Setting) -> tuple[int, int]:
    """Return the examples of an update, and of a micro-batch of it."""
    way, size = setting.series, setting.size
    if way.most_at_once is not None:
        return size, min(size, way.most_at_once)
    return way.batch_size or size, size


def time_updates(
    model: keras.Model,
    source: Source,
    *,
    batch_sizes: Sequence[int],
    largest_whole: int | None,
    budget_s: float,
    first: int,
) -> tuple[TimedUpdate, ...]:
    """Time updates, `first` before the others: whole, or in the largest part that fits.

    Those that were not timed have the reason as their outcome.
    """
    fitting = [size for size in batch_sizes if largest_whole is None or size <= largest_whole]
    ordered = sorted(fitting, key=lambda size: (size != first, size))
    timing = TimingPlan(
        budget_s,
        needed_calls=12,
        block_s=0.03,
        precision=0.02,
        # XLA may take a minute for each shape. Without it the second that is traced serves all.
        first_calls_count=bool(model.jit_compile),
    )
    whole = Way()
    with micro_batch_steps(model) as steps:
        updates = TimedUpdates(
            steps, lambda size: batch_of(source, model, size), timing, chosen=False
        )
        updates.warm_up(whole, ordered)
        most = max((setting.size for setting in updates.sweep.timed(whole)), default=0)
        parts, larger = Way(most_at_once=most), []
        if most and largest_whole is not None and user_step(model) is None:
            larger = [size for size in batch_sizes if size > max(most, largest_whole)]
        updates.warm_up(parts, larger)
        rounds = updates.sweep.rounds
        rounds.allow(max(rounds.rest_s, _ROUNDS_SHARE * budget_s))
        updates.run()
        asked = [Setting(whole, size) for size in ordered]
        asked += [Setting(parts, size) for size in larger]
        found = [updates.found(setting) for setting in asked]
    return tuple(sorted(found, key=lambda one: one.batch_size))
