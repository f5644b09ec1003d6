"""How the micro-batch size affects a model's step time, throughput and memory in training."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import keras_tuner
import tensorflow as tf

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, powers_of_two
from kbatch.device.environment import read_environment
from kbatch.device.memory import check_memory_limit
from kbatch.errors import InputError
from kbatch.memory.find import MemoryPass, memory_pass
from kbatch.memory.probe import open_probes
from kbatch.memory.workload import Workload
from kbatch.throughput.result import TimedUpdate, TrainingProfile
from kbatch.timing import DEFAULT_SIZES, LARGER_SIZES, Setting, Sweep, TimingPlan, check_seconds
from kbatch.training.accumulation import Accumulation, varying_micro_batch
from kbatch.training.accumulation.parts_check import parts_note, rows_to_compare
from kbatch.training.build_function import BuildFunction, model_builder
from kbatch.training.data.forms import rows_of
from kbatch.training.data.training_data import TrainingData
from kbatch.training.model import accumulation_of, check_one_device, user_step, wait_for
from kbatch.training.one_graph import counted_steps, execution_steps
from kbatch.training.state import kept_state

# Rounds that a size is timed in at least, for an interval of their median, and at most.
_ROUNDS, _MOST_ROUNDS = 6, 18


def profile_training(
    build: "BuildFunction | keras_tuner.HyperModel | keras.Model",
    x: Any,
    y: Any = None,
    *,
    batch_sizes: Iterable[int] | None = None,
    batch_size: int | None = None,
    time_budget_s: float = 20.0,
    measure_memory: bool = True,
    memory_limit_bytes: int | None = None,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> TrainingProfile:
    """Measure step time, throughput and memory of training by micro-batch size, in seconds.

    Real train steps of all sizes take turns in shuffled rounds, one an execution and as many as a
    search would run (about 100 ms), so that a machine that drifts slows all alike; the first of
    each, which compiles, is kept apart. Memory is measured before, in a worker process that may die
    of it, and what is expected above the memory window is not run: that a size does not fit is a
    result.

    Example:

    >>> profile = kbatch.profile_training(build, x, y)
    >>> profile.micro_batch_size, profile.steps_per_execution, profile.gain
    >>> kbatch.plot_training_profile(profile).figure.savefig("training.png")

    Args:
        build: As in `find_max_batch_size`.
        x: As there; a few rows are used, repeated into batches.
        y: Targets of arrays.
        batch_sizes: Micro-batch sizes in ascending order. None for powers of two as far as data,
            memory and time allow, up to 4096, or 65536 while throughput grows and memory suffices.
        batch_size: Examples of an optimizer update, for steps that accumulate over micro-batches
            of these sizes. None for Keras's own step, whose batch is the micro-batch.
        time_budget_s: Seconds for the steps; tracing, compiling and the start of the worker
            process are not counted, and memory may take as long again.
        measure_memory: Whether to measure memory. Without, nothing guards against a size that
            needs too much.
        memory_limit_bytes: As in `find_max_batch_size`.
        seed: Seed of the order within rounds.
        on_progress: Receives progress messages.

    Raises:
        InputError: If the data cannot be batched, the time is not positive, or the model is spread
            over several devices.
        OutOfMemoryError: If not even the weights fit.
        TypeError: If `build` cannot build or a size no integer.
        ValueError: If a size is not positive, sizes do not ascend or exceed `batch_size`, or the
            model cannot be trained.
    """
    check_seconds(time_budget_s=time_budget_s)
    whole = None if batch_size is None else check_size(batch_size, "batch_size")
    chosen = batch_sizes is not None
    sizes = _default_sizes(whole) if batch_sizes is None else check_batch_sizes(batch_sizes)
    if whole is not None and sizes[-1] > whole:
        raise InputError(
            "A micro-batch has at most the examples of its batch: leave out larger `batch_sizes`. "
            f"Received: batch_sizes={sizes}, batch_size={whole}."
        )
    limit_bytes = check_memory_limit(memory_limit_bytes)
    say = on_progress or (lambda line: None)
    data = TrainingData(x, y)
    data.check()
    policy = keras.config.dtype_policy().name
    workload = Workload(model_builder(build), data, policy, accumulate_below=whole or 0)
    # Building the model takes the GPU: the worker process comes first.
    start = functools.cache(workload.start)

    def filled(sizes: tuple[int, ...], examples: int | None) -> tuple[int, ...]:
        """Leave out, of the default sizes, those beyond the data: they would only repeat rows."""
        if chosen or whole is not None or examples is None:
            return sizes
        return tuple(size for size in sizes if size <= examples)

    memory = MemoryPass((), 0, ())
    if measure_memory:
        say("measuring memory in a worker process")
        with open_probes(
            workload,
            memory_limit_bytes=limit_bytes,
            model=lambda: start().model,
        ) as probes:
            facts = probes.facts
            memory = memory_pass(
                probes,
                filled(sizes, facts.examples),
                dtype_policy=facts.dtype_policy,
                time_budget_s=time_budget_s,
                say=say,
            )
    run = start()
    policy, measured, larger = run.model.dtype_policy.name, filled(sizes, run.examples), ()
    if not chosen and whole is None and run.examples is not None:
        most = memory.largest_sure(policy)
        larger = (size for size in filled(LARGER_SIZES, run.examples) if size <= most)
    with update_sweep(
        run.model,
        run.batch,
        TimingPlan(
            time_budget_s,
            needed_calls=_ROUNDS,
            rounds_beyond=_MOST_ROUNDS - _ROUNDS,
            precision=0.03,
            first_calls_count=False,
        ),
        batch_size=whole,
        together=True,
        examples=run.examples,
        refused=lambda size: memory.refusal(policy, size),
        chosen=chosen,
        seed=seed,
        say=say,
    ) as sweep:
        list(sweep.warm_up(Setting(ALONE, size) for size in measured))
        list(sweep.go_on(ALONE, larger))
        alone = sweep.timed(ALONE)
        list(sweep.warm_up(Setting(TOGETHER, one.size) for one in alone))
        sweep.run()
        sizes = dict.fromkeys([*measured, *(one.size for one in alone)])
        asked = [Setting(series, size) for size in sizes for series in (ALONE, TOGETHER)]
        updates = [sweep.found(s) for s in asked if s.series == ALONE or s in sweep.blocks]
    notes = [*memory.notes, run.note]
    if whole is not None and measured[0] < whole:
        rows = data.sample(rows_to_compare(), run.model, fewest=1)
        notes.append(parts_note(run.model, rows))
    return TrainingProfile(
        model_name=run.model.name,
        dtype_policy=policy,
        jit_compile=bool(run.model.jit_compile),
        updates=tuple(updates),
        memory=memory.records,
        memory_limit_bytes=memory.limit_bytes or None,
        noted=tuple(dict.fromkeys(note for note in notes if note)),
        environment=read_environment(),
    )


def _default_sizes(batch_size: int | None) -> tuple[int, ...]:
    if batch_size is None:
        return DEFAULT_SIZES
    return tuple(sorted({*powers_of_two(1, batch_size), batch_size}))


# The series of a sweep; its sizes are micro-batches.
ALONE, TOGETHER = "one step an execution", "several steps an execution"


@contextlib.contextmanager
def update_sweep(
    model: keras.Model, batch_of: Callable[[int], Any], timing: TimingPlan, **settings: Any
) -> "Iterator[UpdateSweep]":
    """Open the train steps of a model for timing; it is returned as it was."""
    check_one_device(model)
    steps = model.steps_per_execution
    try:
        with kept_state(model):
            yield UpdateSweep(TrainSteps(model), batch_of, timing, **settings)
    finally:
        model.steps_per_execution = steps


class UpdateSweep(Sweep):
    """Train steps of a model that are open for timing."""

    def __init__(
        self,
        steps: "TrainSteps",
        batch_of: Callable[[int], Any],  # Returns a batch of so many examples, on the device.
        timing: TimingPlan,
        *,
        batch_size: int | None = None,  # Examples of an update; None for those of a micro-batch.
        # Whether to time executions of as many steps as in a search too. All then read a dataset.
        together: bool = False,
        examples: int | None = None,  # Of the data, which end an epoch.
        refused: Callable[[int], str | None] = lambda size: None,  # Why not to run a size.
        **settings: Any,
    ):
        super().__init__(timing, **settings)
        self.steps, self._batch_of, self._examples = steps, batch_of, examples
        self._batch_size, self._refused = batch_size, refused
        self._together = together and steps.can_run_together

    def prepare(self, setting: Setting) -> Callable[[], None]:
        """Make the step of a setting, or its execution of several."""
        batch = self._batch_of(self._batch_size or setting.size)
        steps = int(self.shares(setting)) if self._together else None
        return self.steps.step(batch, setting.size, steps)

    def refusal(self, setting: Setting) -> str | None:
        """Return why a size is not run, or why several steps an execution are not."""
        alike = setting.series == TOGETHER and self.shares(setting) == 1
        words = "one step an execution takes as long as several would"
        return self._refused(setting.size) or (words if alike else None)

    def shares(self, setting: Setting) -> float:
        """Return how many steps an execution of a setting runs, by the time of one step."""
        alone = self.warm_ups.get(Setting(ALONE, setting.size))
        if setting.series == ALONE or not self._together or alone is None:
            return 1
        update = self._batch_size or setting.size
        epoch = None if self._examples is None else -(-self._examples // update)
        return execution_steps(alone.call_s, epoch)

    def found(self, setting: Setting) -> TimedUpdate:
        """Return what was timed of a setting, or why it was not."""
        blocks, steps = self.blocks.get(setting, []), int(self.shares(setting))
        return TimedUpdate(
            self._batch_size or setting.size,
            setting.size,
            tuple(block.round for block in blocks),
            tuple(round(block.median_s / steps, 9) for block in blocks),
            steps,
            self.outcome(setting),
            self.warm_ups[setting].first_call_s if blocks else None,
        )


class TrainSteps:
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
        key = train_step, steps is not None
        batches = None
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
