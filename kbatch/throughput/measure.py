"""How the micro-batch size affects a model's step time, throughput and memory in training."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import keras_tuner

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, powers_of_two
from kbatch.device.environment import read_environment
from kbatch.device.memory import check_memory_limit
from kbatch.errors import InputError
from kbatch.memory.find import MemoryPass, data_source, memory_pass
from kbatch.memory.probe import check_weights, open_probes
from kbatch.memory.search import MEMORY_WINDOW, SURE_SHARE, fit_memory
from kbatch.memory.workload import Workload
from kbatch.page.numbers import memory_text
from kbatch.throughput.record import TrainingProfile
from kbatch.throughput.update_timing import (
    SHARE_TO_WARM_UP,
    TRAINING_TIMING,
    StepConfig,
    TrainingSweep,
)
from kbatch.timing.rounds import check_seconds
from kbatch.training.accumulation.known_checks import PartsChecks
from kbatch.training.build_function import BuildFunction, model_builder
from kbatch.training.data.sample_rows import DataEnded
from kbatch.training.train_step import micro_batch_steps

_LARGEST_DEFAULT = 4096
# Where throughput still grows there, sizes go on up to this one.
_LARGEST = 65536


def profile_training(
    build: "BuildFunction | keras_tuner.HyperModel | keras.Model",
    x: Any,
    y: Any = None,
    *,
    batch_sizes: Iterable[int] | None = None,
    batch_size: int | None = None,
    time_budget_s: float = 10.0,
    measure_memory: bool = True,
    memory_limit_bytes: int | None = None,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> TrainingProfile:
    """Measure step time, throughput and memory of training by micro-batch size, in seconds.

    Real train steps of all sizes take turns in shuffled rounds, on batches that lie on the device,
    so that a machine that drifts slows all alike; the first step of each, which compiles, is kept
    apart. Memory is measured before, in a worker process that may die of it, and what is above the
    memory window is not timed: a size that runs out of memory is a result.

    Example:

    >>> profile = kbatch.profile_training(build, x, y)
    >>> profile.efficient.value, profile.step_time.intercept
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
    began_s = time.perf_counter()
    sizes = _checked(batch_sizes, batch_size, time_budget_s)
    limit_bytes = check_memory_limit(memory_limit_bytes)
    say = on_progress or (lambda line: None)
    source = data_source(x, y)
    policy = keras.config.dtype_policy().name
    workload = Workload(model_builder(build), source, policy, accumulate_below=batch_size or 0)
    # Building the model takes the GPU: the worker process comes first.
    start = functools.cache(workload.start)
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
            check_weights(facts)
            memory = memory_pass(
                probes,
                sizes.up_to(facts.examples),
                dtype_policy=facts.dtype_policy,
                time_budget_s=time_budget_s,
                # The worker may die of sizes that were chosen.
                guard_share=math.inf if sizes.chosen and probes.isolated else MEMORY_WINDOW[1],
                say=say,
            )
    run = start()
    plan = dataclasses.replace(TRAINING_TIMING, time_budget_s=time_budget_s)
    with micro_batch_steps(run.model) as steps:
        sweep = TrainingSweep(steps, run.batch, plan, seed=seed, say=say)
        measured = sizes.up_to(run.examples)
        not_run = _warm_up(sweep, sizes, measured, memory)
        if not not_run and not sweep.rounds.failures:
            fit = fit_memory({r.batch_size: r.peak_bytes for r in memory.records if r.peak_bytes})
            most = 0.0 if fit is None else fit.largest_within(SURE_SHARE * memory.limit_bytes)
            larger = [size for size in sizes.larger(run.examples) if size <= most]
            measured = sweep.go_on(measured, larger)
        for number, live in enumerate(sweep.rounds.each_round(), start=1):
            say(f"round {number}: {len(live)} sizes go on")
    points = {s: sweep.point(sizes.config(s), not_run=not_run.get(s)) for s in measured}
    for record in memory.records:
        if (point := points.get(record.batch_size)) is not None:
            out = record.outcome == "out_of_memory"
            points[record.batch_size] = dataclasses.replace(
                point,
                outcome="out_of_memory" if out else point.outcome,
                peak_memory_bytes=record.peak_bytes,
            )
    notes = [*memory.notes, run.note]
    if any(not sizes.config(size).whole for size in points):
        notes.append(PartsChecks().find(run.model, source).note)
    return TrainingProfile(
        model_name=run.model.name,
        dtype_policy=run.model.dtype_policy.name,
        jit_compile=bool(run.model.jit_compile),
        points=tuple(points.values()),
        memory_limit_bytes=memory.limit_bytes or None,
        duration_s=round(time.perf_counter() - began_s, 3),
        notes=tuple(dict.fromkeys(str(note) for note in notes if note)),
        environment=read_environment(),
    )


class _Sizes(NamedTuple):
    """Micro-batch sizes, whether they were chosen, and the batch size where steps accumulate."""

    sizes: tuple[int, ...]
    chosen: bool
    batch_size: int | None

    def up_to(self, examples: int | None) -> tuple[int, ...]:
        """Leave out, of the default sizes, those beyond the data: they would only repeat rows."""
        if self.chosen or examples is None or self.batch_size is not None:
            return self.sizes
        return tuple(size for size in self.sizes if size <= examples)

    def larger(self, examples: int | None) -> tuple[int, ...]:
        """Return the sizes to go on with, beyond the default ones, that the data fill."""
        smallest = 2 * _LARGEST_DEFAULT
        if self.chosen or self.batch_size is not None or (examples or 0) < smallest:
            return ()
        return powers_of_two(smallest, min(_LARGEST, examples or 0))

    def config(self, size: int) -> StepConfig:
        return StepConfig(self.batch_size or size, size)


def _checked(
    batch_sizes: Iterable[int] | None, batch_size: int | None, time_budget_s: float
) -> _Sizes:
    check_seconds(time_budget_s=time_budget_s)
    whole = None if batch_size is None else check_size(batch_size, "batch_size")
    if batch_sizes is None:
        sizes = powers_of_two(1, whole or _LARGEST_DEFAULT)
        return _Sizes(sizes if whole in (None, sizes[-1]) else (*sizes, whole), False, whole)
    sizes = check_batch_sizes(batch_sizes)
    if whole is not None and sizes[-1] > whole:
        raise InputError(
            "A micro-batch has at most the examples of its batch: leave out larger `batch_sizes`. "
            f"Received: batch_sizes={sizes}, batch_size={whole}."
        )
    return _Sizes(sizes, True, whole)


def _warm_up(
    sweep: TrainingSweep, sizes: _Sizes, measured: Sequence[int], memory: MemoryPass
) -> dict[int, str]:
    """Warm sizes up in ascending order; returns why some were not."""
    probed = {record.batch_size: record for record in memory.records}
    most_bytes = MEMORY_WINDOW[1] * memory.limit_bytes
    not_run: dict[int, str] = {}
    end: str | None = None
    for size in measured:
        reason = end
        if reason is None and (record := probed.get(size)) is not None:
            # Where the time for the memory did not suffice, the line through smaller sizes tells.
            needed = record.predicted_bytes if record.peak_bytes is None else record.peak_bytes
            reason = record.refusal
            if reason is None and needed is not None and needed > most_bytes:
                limit = f"{MEMORY_WINDOW[1]:.0%} of {memory_text(memory.limit_bytes)}"
                reason = f"needs {memory_text(needed)}, more than {limit}"
        if reason is None and sweep.rounds.late(SHARE_TO_WARM_UP):
            reason = "half of the time budget was spent on warming up smaller sizes"
        if reason is not None:
            not_run[size] = reason
            continue
        try:
            warm_up = sweep.warm_up(sizes.config(size))
        except DataEnded as ended:
            end = not_run[size] = f"the data function gave {ended.rows} examples"
            continue
        if warm_up is None:
            end = f"memory ran out at micro-batch size {size}"
            continue
        if not sizes.chosen and sweep.rounds.too_slow_to_double(warm_up.call_s):
            end = "too slow for the time budget"
    return not_run
