"""How the micro-batch size affects a model's step time, throughput and memory in training."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import keras_tuner

from kbatch.analysis.batch_sizes import check_batch_sizes
from kbatch.device.machine import read_environment
from kbatch.device.memory import check_memory_limit
from kbatch.memory.find import MemoryPass, memory_pass
from kbatch.memory.probe import open_probes
from kbatch.memory.workload import Workload
from kbatch.progress import MeasuringProgress
from kbatch.records.notes import Note
from kbatch.throughput.result import TimedUpdate, TrainingProfile
from kbatch.timing import (
    DEFAULT_SIZES,
    LARGER_SIZES,
    SHARE_FOR_MEMORY,
    Setting,
    Sweep,
    TimingPlan,
    check_seconds,
    time_left_s,
)
from kbatch.training.build_function import BuildFunction, model_builder
from kbatch.training.data.batches import endless
from kbatch.training.data.training_data import TrainingData
from kbatch.training.dtype_policy import global_policy
from kbatch.training.model import accumulation_of, uninstall_step
from kbatch.training.state import kept_state
from kbatch.training.step_call import StepCall, check_one_device, held_by_host
from kbatch.training.steps_per_execution import EXECUTION_S, execution_steps

# Rounds that a size is timed in at least, for an interval of their median, and at most.
_ROUNDS, _MOST_ROUNDS = 6, 18


def profile_training(
    build: "BuildFunction | keras_tuner.HyperModel | keras.Model",
    x: Any,
    y: Any = None,
    *,
    batch_sizes: Iterable[int] | None = None,
    time_budget_s: float = 60.0,
    measure_memory: bool = True,
    memory_limit_bytes: int | None = None,
    seed: int = 0,
    verbose: int | str = "auto",
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
        time_budget_s: Seconds for the whole call. Memory takes at most about a third of them. A
            step that has begun is not stopped, and two sizes are measured however long they take.
        measure_memory: Whether to measure memory. Without, nothing guards against a size that
            needs too much.
        memory_limit_bytes: As in `find_max_batch_size`.
        seed: Seed of the order within rounds.
        verbose: As in `find_max_batch_size`; the bar shows how much of the time is spent.

    Raises:
        InputError: If the data cannot be batched, the time is not positive, or the model is spread
            over several devices.
        OutOfMemoryError: If not even the weights fit.
        TypeError: If `build` cannot build or a size no integer.
        ValueError: If a size is not positive, sizes do not ascend, or the model cannot be trained.
    """
    check_seconds(time_budget_s=time_budget_s)
    began_s = time.perf_counter()
    chosen = batch_sizes is not None
    sizes = DEFAULT_SIZES if batch_sizes is None else check_batch_sizes(batch_sizes)
    limit_bytes = check_memory_limit(memory_limit_bytes)
    progress = MeasuringProgress("training", verbose, time_budget_s=time_budget_s)
    data = TrainingData(x, y)
    data.check()
    policy = global_policy()
    workload = Workload(model_builder(build), data, policy)
    # Building the model takes the GPU: the worker process comes first.
    start = functools.cache(workload.start)

    def filled(sizes: tuple[int, ...], examples: int | None) -> tuple[int, ...]:
        """Leave out, of the default sizes, those beyond the data: they would only repeat rows."""
        if chosen or examples is None:
            return sizes
        return tuple(size for size in sizes if size <= examples)

    with progress:
        memory = MemoryPass()
        if measure_memory:
            progress.say("starting a worker process for the memory")
            with open_probes(
                workload, memory_limit_bytes=limit_bytes, model=lambda: start().model
            ) as probes:
                facts = probes.facts()
                memory = memory_pass(
                    probes,
                    filled(sizes, facts.examples),
                    dtype_policy=facts.dtype_policy,
                    time_budget_s=began_s + SHARE_FOR_MEMORY * time_budget_s - time.perf_counter(),
                    say=progress.say,
                )
        run = start()
        policy, measured, larger = run.model.dtype_policy.name, filled(sizes, run.examples), ()
        if not chosen and run.examples is not None:
            most = memory.largest_sure(policy)
            larger = (size for size in filled(LARGER_SIZES, run.examples) if size <= most)
        updates = timed_updates(
            run.model,
            run.batch,
            measured,
            TimingPlan(
                time_left_s(time_budget_s, began_s=began_s),
                needed_calls=_ROUNDS,
                rounds_beyond=_MOST_ROUNDS - _ROUNDS,
                precision=0.03,
            ),
            larger=larger,
            examples=run.examples,
            refused=lambda size: memory.refusal(policy, size),
            chosen=chosen,
            seed=seed,
            progress=progress,
        )
        return TrainingProfile(
            model_name=run.model.name,
            dtype_policy=policy,
            jit_compile=bool(run.model.jit_compile),
            updates=updates,
            memory=memory.records,
            memory_limit_bytes=memory.limit_bytes,
            noted=tuple(dict.fromkeys(note for note in (*memory.notes, run.note) if note)),
            environment=read_environment(),
        )


# The series of a sweep; its sizes are micro-batches.
ALONE, TOGETHER = "one step an execution", "several steps an execution"


def timed_updates(
    model: keras.Model,
    batch_of: Callable[[int], Any],
    sizes: Iterable[int],
    timing: TimingPlan,
    *,
    larger: Iterable[int] = (),  # To go on with while throughput grows.
    **settings: Any,
) -> tuple[TimedUpdate, ...]:
    """Time updates by size, one an execution and as many as a search would run, where it would."""
    with update_sweep(model, batch_of, timing, **settings) as sweep:
        # Both of a size in turn: where time ends them, it ends them at about the same size.
        list(sweep.warm_up(Setting(one, size) for size in sizes for one in (ALONE, TOGETHER)))
        list(sweep.warm_up(Setting(TOGETHER, s.size) for s, _ in sweep.go_on(ALONE, larger)))
        sweep.run()
        return tuple(
            TimedUpdate(**sweep.timing_of(setting), steps_per_execution=int(sweep.shares(setting)))
            for one in sweep.tried(ALONE)
            for setting in (one, Setting(TOGETHER, one.size))
            if setting == one or setting in sweep.blocks
        )


@contextlib.contextmanager
def update_sweep(
    model: keras.Model, batch_of: Callable[[int], Any], timing: TimingPlan, **settings: Any
) -> "Iterator[UpdateSweep]":
    """Open the train steps of a model for timing; it is returned as it was."""
    check_one_device(model)
    with kept_state(model) as state:
        if accumulation_of(model) is not None:
            uninstall_step(model)
        step = StepCall(model, state, several=True)
        yield UpdateSweep(step, batch_of, timing, **settings)


class UpdateSweep(Sweep):
    """Train steps of a model on whole batches, that are open for timing."""

    def __init__(
        self,
        step: StepCall,
        batch_of: Callable[[int], Any],  # Returns a batch of so many examples.
        timing: TimingPlan,
        *,
        examples: int | None = None,  # Of the data, which end an epoch.
        execution_s: float = EXECUTION_S,  # About how long several steps take.
        refused: Callable[[int], Note | None] = lambda size: None,  # Why not to run a size.
        **settings: Any,
    ):
        super().__init__(timing, **settings)
        self._step, self._batch_of, self._examples = step, batch_of, examples
        self._refused, self._execution_s = refused, execution_s

    def prepare(self, setting: Setting) -> Callable[[], None]:
        """Make the step of a setting, or its execution of several."""
        return self.call(self._batch_of(setting.size), int(self.shares(setting)))

    def call(self, batch: Any, steps: int) -> Callable[[], None]:
        """Make an execution of steps on a batch; the first call of a shape compiles."""
        held = held_by_host(batch)  # Batches of all sizes would fill a GPU.
        if not self._step.several:
            return functools.partial(self._step, held)
        return functools.partial(self._step.execute, iter(endless(held)), steps)

    def refusal(self, setting: Setting) -> Note | None:
        """Return why a size is not run, or why several steps an execution are not."""
        alike = setting.series == TOGETHER and self.shares(setting) == 1
        reason = Note.of("one_step_as_fast") if alike else None
        return self._refused(setting.size) or reason

    def shares(self, setting: Setting) -> float:
        """Return how many steps an execution of a setting runs, by the time of one step."""
        alone = self.warm_ups.get(Setting(ALONE, setting.size))
        if setting.series == ALONE or not self._step.several or alone is None:
            return 1
        epoch = None if self._examples is None else -(-self._examples // setting.size)
        return execution_steps(alone.call_s, epoch, execution_s=self._execution_s)
