"""How the micro-batch size affects a model's step time, throughput and memory in training."""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import keras_tuner

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, powers_of_two
from kbatch.device.environment import read_environment
from kbatch.device.memory import check_memory_limit
from kbatch.errors import InputError
from kbatch.memory.find import MemoryPass, memory_pass
from kbatch.memory.probe import open_probes
from kbatch.memory.search import MEMORY_WINDOW
from kbatch.memory.workload import Workload
from kbatch.throughput.result import TrainingProfile
from kbatch.throughput.updates import TimedUpdates, Way, micro_batch_steps
from kbatch.timing.rounds import TimingPlan, check_seconds
from kbatch.timing.sweep import DEFAULT_SIZES, LARGER_SIZES, Setting
from kbatch.training.accumulation.parts_check import parts_note, rows_to_compare
from kbatch.training.build_function import BuildFunction, model_builder
from kbatch.training.data.training_data import TrainingData

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
    accumulate_below, policy = batch_size or 0, keras.config.dtype_policy().name
    workload = Workload(model_builder(build), data, policy, accumulate_below=accumulate_below)
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
            memory_window=MEMORY_WINDOW,
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
    plan = TimingPlan(
        time_budget_s,
        needed_calls=_ROUNDS,
        rounds_beyond=_MOST_ROUNDS - _ROUNDS,
        precision=0.03,
        first_calls_count=False,
    )
    way, notes = Way(whole, fed=True), [*memory.notes, run.note]
    with micro_batch_steps(run.model) as steps:
        timed = TimedUpdates(
            steps,
            run.batch,
            plan,
            chosen=chosen,
            examples=run.examples,
            refused=lambda size: memory.refusal(policy, size),
            seed=seed,
            say=say,
        )
        list(timed.warm_up(Setting(way, size) for size in measured))
        list(timed.go_on(way, larger))
        together = way._replace(together=True)
        list(timed.warm_up(one._replace(series=together) for one in timed.timed(way)))
        timed.run()
    asked = dict.fromkeys([*(Setting(way, size) for size in measured), *timed.timed(way)])
    several = (one._replace(series=together) for one in asked)
    pairs = itertools.chain(*zip(asked, several, strict=True))
    if whole is not None and measured[0] < whole:
        rows = data.sample(rows_to_compare(), run.model, fewest=1)
        notes.append(parts_note(run.model, rows))
    return TrainingProfile(
        model_name=run.model.name,
        dtype_policy=policy,
        jit_compile=bool(run.model.jit_compile),
        updates=tuple(timed.found(one) for one in pairs if one in asked or one in timed.blocks),
        memory=memory.records,
        memory_limit_bytes=memory.limit_bytes or None,
        noted=tuple(dict.fromkeys(note for note in notes if note)),
        environment=read_environment(),
    )


def _default_sizes(batch_size: int | None) -> tuple[int, ...]:
    if batch_size is None:
        return DEFAULT_SIZES
    return tuple(sorted({*powers_of_two(1, batch_size), batch_size}))
