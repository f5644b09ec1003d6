"""Updates of several batch and micro-batch sizes, timed in the same rounds."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kbatch.throughput.result import TimedUpdate
from kbatch.timing.rounds import TimingPlan
from kbatch.timing.sweep import Setting, Sweep
from kbatch.training.accumulation import Accumulation, varying_micro_batch
from kbatch.training.data.forms import rows_of
from kbatch.training.data.training_data import TrainingData
from kbatch.training.model import (
    accumulation_of,
    check_one_device,
    user_step,
    wait_for,
)
from kbatch.training.one_graph import counted_steps, execution_steps
from kbatch.training.state import kept_state

# Of the seconds, for the rounds, however long building took: one round of a busy machine may be off
# by ten times.
_ROUNDS_SHARE = 0.6


class MicroBatchSteps:
    """Makes train steps of a model, each with a micro-batch size and a batch of its own."""

    # Keras's own where the batch goes through at once, else one that accumulates. Those of all
    # micro-batch sizes share one graph, unless XLA compiles it.

    def __init__(self, model: keras.Model):
        self._model: Any = model
        # A step of the user's own stays; one that accumulates gives way to those asked for.
        stays = accumulation_of(model) is None
        self._whole = vars(model).get("train_step") if stays else None
        self._cut: tuple[Any, tf.Variable | None] | None = None  # A step, with a size that varies.
        # What Keras made of a step, for one or several an execution.
        self._functions: dict[tuple[Any, bool], Any] = {}
        if stays and model.train_function is not None:
            self._functions[self._whole, False] = model.train_function
        self._count: Any = None  # Of the functions that run several steps.

    @property
    def can_run_together(self) -> bool:
        """Whether an execution may run several steps."""
        return not self._model.run_eagerly and user_step(self._model) is None

    def step(
        self, batch: Any, micro_batch_size: int, steps: int | None = None
    ) -> Callable[[], None]:
        """Make the step of a batch, or an execution of steps; the first call compiles."""
        train_step, size = self._whole, None
        if micro_batch_size < rows_of(batch):
            train_step, size = self._accumulating(micro_batch_size)
        key, batches = (train_step, steps is not None), None
        if steps is not None:
            batches = iter(tf.data.Dataset.from_tensors(batch).repeat())

        def run() -> None:
            model = self._model
            function: Any = self._functions.get(key)
            if steps is not None:
                self._count = (self._count or counted_steps(model, 1)).changed(steps)
                model.steps_per_execution = self._count
            if function is None or model.train_function is not function:
                vars(model).pop("train_step", None)
                if train_step is not None:
                    model.train_step = train_step
                model.train_function = function
                model.make_train_function()
                function = self._functions[key] = model.train_function
            if size is not None:
                size.assign(micro_batch_size)
            # A Python iterator gives one step, a dataset's as many as the model is set to.
            wait_for(function(batches or iter((batch,))))

        return run

    def _accumulating(self, micro_batch_size: int) -> tuple[Any, tf.Variable | None]:
        xla = self._model.jit_compile
        if self._cut is None or xla:
            Accumulation(micro_batch_size).apply(self._model)
            size = None if xla else varying_micro_batch(self._model)
            self._cut = self._model.train_step, size
        return self._cut


@contextlib.contextmanager
def micro_batch_steps(model: keras.Model) -> Iterator[MicroBatchSteps]:
    """Open the steps of a model, which is returned as it was."""
    check_one_device(model)
    steps = model.steps_per_execution
    try:
        with kept_state(model):
            yield MicroBatchSteps(model)
    finally:
        model.steps_per_execution = steps


class Way(NamedTuple):
    """How updates are made: the series of a sweep whose sizes are micro-batches, or batches."""

    batch_size: int | None = None  # Examples of an update; None for as many as the micro-batch has.
    most_at_once: int | None = None  # The sizes are batches, which are cut into so many at most.
    fed: bool = False  # From a dataset, as in `fit`; else by batches that lie on the device.
    together: bool = False  # As many updates an execution as a search would run.

    def __str__(self) -> str:
        return "several steps an execution" if self.together else "one step an execution"

    def sizes(self, size: int) -> tuple[int, int]:
        """Return the examples of an update, and of a micro-batch of it."""
        if self.most_at_once is not None:
            return size, min(size, self.most_at_once)
        return self.batch_size or size, size


class TimedUpdates(Sweep):
    """Train steps of a model that are open for timing."""

    def __init__(
        self,
        steps: MicroBatchSteps,
        batch_of: Callable[[int], Any],  # Returns a batch of so many examples, on the device.
        timing: TimingPlan,
        *,
        chosen: bool,
        examples: int | None = None,  # Of the data, which end an epoch.
        refused: Callable[[int], str | None] = lambda size: None,  # Why not to run a size.
        seed: int = 0,
        say: Callable[[str], None] = lambda line: None,
    ):
        super().__init__(timing, chosen=chosen, seed=seed, say=say)
        self._steps, self._batch_of, self._examples = steps, batch_of, examples
        self._refused = refused

    def prepare(self, setting: Setting) -> Callable[[], None]:
        """Make the step of a setting, or its execution of several."""
        batch_size, micro_batch_size = setting.series.sizes(setting.size)
        fed = setting.series.fed and self._steps.can_run_together
        steps = int(self.shares(setting)) if fed else None
        return self._steps.step(self._batch_of(batch_size), micro_batch_size, steps)

    def refusal(self, setting: Setting) -> str | None:
        """Return why a size is not run, or several steps an execution not beside one."""
        alike = setting.series.together and self.shares(setting) == 1
        words = "one step an execution takes as long as several would"
        return self._refused(setting.size) or (words if alike else None)

    def shares(self, setting: Setting) -> float:
        """Return how many steps an execution of a setting runs, by the time of one step."""
        alone = setting._replace(series=setting.series._replace(together=False))
        if not setting.series.together or not self._steps.can_run_together:
            return 1
        if alone not in self.warm_ups:
            return 1
        update = setting.series.sizes(setting.size)[0]
        epoch = None if self._examples is None else -(-self._examples // update)
        return execution_steps(self.warm_ups[alone].call_s, epoch)

    def found(self, setting: Setting) -> TimedUpdate:
        """Return what was timed of a setting, or why it was not."""
        batch_size, micro_batch_size = setting.series.sizes(setting.size)
        blocks, steps = self.blocks.get(setting, []), int(self.shares(setting))
        return TimedUpdate(
            batch_size,
            micro_batch_size,
            tuple(block.round for block in blocks),
            tuple(round(block.median_s / steps, 9) for block in blocks),
            steps,
            self.outcome(setting),
            self.warm_ups[setting].first_call_s if blocks else None,
        )


def time_updates(
    model: keras.Model,
    data: TrainingData,
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
        updates = TimedUpdates(steps, lambda size: data.sample(size, model), timing, chosen=False)
        asked = [Setting(whole, size) for size in ordered]
        list(updates.warm_up(asked))
        most = max((setting.size for setting in updates.timed(whole)), default=0)
        if most and largest_whole is not None and user_step(model) is None:
            parts, largest = Way(most_at_once=most), max(most, largest_whole)
            larger = [Setting(parts, size) for size in batch_sizes if size > largest]
            asked += larger
            list(updates.warm_up(larger))
        updates.allow(max(updates.rest_s, _ROUNDS_SHARE * budget_s))
        updates.run()
        found = [updates.found(setting) for setting in asked]
    return tuple(sorted(found, key=lambda one: one.batch_size))
