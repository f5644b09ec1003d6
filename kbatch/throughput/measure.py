"""Measure step time, throughput and memory of training by micro-batch size."""

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
from kbatch.training.data.training_data import TrainingData
from kbatch.training.dtype_policy import global_policy
from kbatch.training.model import accumulation_of, uninstall_step
from kbatch.training.state import kept_state
from kbatch.training.step_call import StepCall, check_one_device, endless, held_by_host
from kbatch.training.steps_per_execution import EXECUTION_S, execution_steps

# Fewest and most rounds in which a size is timed. A 95 % interval of a median needs six.
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
    """Measure step time, throughput and memory of training by micro-batch size.

    kbatch times real train steps of all sizes in shuffled rounds, so that a slow moment of the
    machine affects all sizes alike. Each size runs with one step per execution and with as many as
    a search would run (about 100 ms). The first call, which compiles, is recorded separately.
    Memory is measured first, in a worker process that may run out of it. A size that is expected
    not to fit is not run.

    Example:

    >>> profile = kbatch.profile_training(build, x, y)
    >>> profile.micro_batch_size, profile.steps_per_execution, profile.gain
    >>> kbatch.plot_training_profile(profile).figure.savefig("training.png")

    Args:
        build: A function that returns a compiled model (it may take keras-tuner's `hp`), a
            `HyperModel`, or a compiled model, which is not changed.
        x: Inputs: arrays of shape (examples, ...), a `tf.data.Dataset`, batched or not, a
            `PyDataset`, or a function `batch_size -> tf.data.Dataset`. kbatch reads a few rows and
            repeats them into batches.
        y: Targets, if `x` is arrays. A dataset yields (x, y) or (x, y, sample_weight).
        batch_sizes: Ascending integers. Micro-batch sizes to time. If None, powers of two up to
            4,096, or up to 65,536 if throughput still grows, as far as data, memory and time allow.
        time_budget_s: Float. Time budget of the call, in seconds. Memory takes at most about a
            third of it. At least two sizes are measured, and a step that has begun is not stopped.
            Default: 60.
        measure_memory: Boolean. Whether to measure memory. If False, a size that needs too much
            memory ends the process. Default: True.
        memory_limit_bytes: Integer. Memory that the model may use, in bytes. If None, all that
            TensorFlow can have of the GPU; on a CPU, half of the memory that is free.
        seed: Integer. Seed of the order within rounds. Default: 0.
        verbose: 0, 1 or 2. 0 prints nothing. 1 shows one line that changes in a terminal or a
            notebook, and lines in a log. 2 prints lines everywhere. Default: `"auto"`, which is 1.

    Returns:
        A `TrainingProfile`: the times and the memory of each size, and the size to train with.

    Raises:
        InputError: If the data cannot be batched, `time_budget_s` is not positive, or the model is
            distributed over several devices.
        OutOfMemoryError: If not even the weights fit.
        TypeError: If `build` is not one of the above, or a size is not an integer.
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
    # The model is built after the worker process has ended, because it takes the GPU's memory.
    start = functools.cache(workload.start)

    def within_data(sizes: tuple[int, ...], examples: int | None) -> tuple[int, ...]:
        """Return the sizes of which the data fills a batch, or all sizes if the user chose them."""
        if chosen or examples is None:
            return sizes
        return tuple(size for size in sizes if size <= examples)

    with progress:
        memory = MemoryPass()
        if measure_memory:
            progress.say("starting a worker process that measures memory")
            with open_probes(
                workload, memory_limit_bytes=limit_bytes, model=lambda: start().model
            ) as probes:
                facts = probes.facts()
                memory = memory_pass(
                    probes,
                    within_data(sizes, facts.examples),
                    dtype_policy=facts.dtype_policy,
                    time_budget_s=began_s + SHARE_FOR_MEMORY * time_budget_s - time.perf_counter(),
                    say=progress.say,
                )
        run = start()
        policy, larger = run.model.dtype_policy.name, ()
        if not chosen and run.examples is not None:
            most = memory.largest_sure(policy)
            larger = (size for size in within_data(LARGER_SIZES, run.examples) if size <= most)
        updates = timed_updates(
            run.model,
            run.batch,
            within_data(sizes, run.examples),
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


# The two series of a sweep, which differ in Keras's `steps_per_execution`.
SINGLE, SEVERAL = "one step per execution", "several steps per execution"


def timed_updates(
    model: keras.Model,
    batch_of: Callable[[int], Any],
    sizes: Iterable[int],
    timing: TimingPlan,
    *,
    larger: Iterable[int] = (),  # Further sizes, timed as long as throughput grows.
    **settings: Any,
) -> tuple[TimedUpdate, ...]:
    """Time train steps by size, with one step per execution and with as many as a search runs."""
    with update_sweep(model, batch_of, timing, **settings) as sweep:
        # Both series of a size, one after the other, so that both end at the same size.
        list(sweep.warm_up(Setting(name, size) for size in sizes for name in (SINGLE, SEVERAL)))
        list(sweep.warm_up(Setting(SEVERAL, s.size) for s, _ in sweep.extend(SINGLE, larger)))
        sweep.run()
        steps = sweep.batches_per_call
        return tuple(
            TimedUpdate(**sweep.timing_of(setting), steps_per_execution=int(steps(setting)))
            for alone in sweep.all_settings(SINGLE)
            for setting in (alone, Setting(SEVERAL, alone.size))
            if setting == alone or setting in sweep.blocks
        )


@contextlib.contextmanager
def update_sweep(
    model: keras.Model, batch_of: Callable[[int], Any], timing: TimingPlan, **settings: Any
) -> "Iterator[UpdateSweep]":
    """Open a sweep over the train steps of a model, whose state is restored at the end."""
    check_one_device(model)
    with kept_state(model) as state:
        if accumulation_of(model) is not None:
            uninstall_step(model)
        step = StepCall(model, state, several=True)
        yield UpdateSweep(step, batch_of, timing, **settings)


class UpdateSweep(Sweep):
    """A sweep over the train steps of a model."""

    def __init__(
        self,
        step: StepCall,
        batch_of: Callable[[int], Any],  # Returns a batch of a given size.
        timing: TimingPlan,
        *,
        examples: int | None = None,  # Examples of an epoch: an execution is not longer than one.
        execution_s: float = EXECUTION_S,  # Target duration of an execution of several steps.
        refused: Callable[[int], Note | None] = lambda size: None,  # Why a size must not be run.
        **settings: Any,
    ):
        super().__init__(timing, **settings)
        self._step, self._batch_of, self._examples = step, batch_of, examples
        self._refused, self._execution_s = refused, execution_s

    def prepare(self, setting: Setting) -> Callable[[], None]:
        """Return a function that runs one execution of a setting."""
        return self.call(self._batch_of(setting.size), int(self.batches_per_call(setting)))

    def call(self, batch: Any, steps: int) -> Callable[[], None]:
        """Return a function that runs steps on a batch. Its first call for a shape compiles."""
        held = held_by_host(batch)  # On the device, the batches of all sizes would fill its memory.
        if not self._step.several:
            return functools.partial(self._step, held)
        return functools.partial(self._step.execute, iter(endless(held)), steps)

    def refusal(self, setting: Setting) -> Note | None:
        """Return why a setting is not run, or None if it is."""
        same = setting.series == SEVERAL and self.batches_per_call(setting) == 1
        reason = Note.of("one_step_as_fast") if same else None
        return self._refused(setting.size) or reason

    def batches_per_call(self, setting: Setting) -> float:
        """Return the number of steps per execution of a setting, from the time of one step."""
        alone = self.warm_ups.get(Setting(SINGLE, setting.size))
        if setting.series == SINGLE or not self._step.several or alone is None:
            return 1
        epoch = None if self._examples is None else -(-self._examples // setting.size)
        return execution_steps(alone.call_s, epoch, execution_s=self._execution_s)
