"""How the micro-batch size affects a model's step time, throughput and memory in training."""

import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import keras_tuner

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, powers_of_two
from kbatch.analysis.rows import OUT_OF_MEMORY
from kbatch.device.environment import read_environment
from kbatch.device.memory import check_memory_limit
from kbatch.errors import InputError
from kbatch.memory.find import MemoryPass, data_source, memory_pass
from kbatch.memory.probe import check_weights, open_probes
from kbatch.memory.search import MEMORY_WINDOW, SURE_SHARE, fit_memory
from kbatch.memory.workload import Workload
from kbatch.page.numbers import memory_text
from kbatch.throughput.result import TimedUpdate, TrainingProfile
from kbatch.throughput.updates import TimedUpdates, Way
from kbatch.timing.rounds import TimingPlan, check_seconds
from kbatch.timing.sweep import Setting
from kbatch.training.accumulation.parts_check import sampled_parts_note
from kbatch.training.build_function import BuildFunction, model_builder
from kbatch.training.train_step import micro_batch_steps

# Rounds that a size is timed in at least, for an interval of their median, and at most.
_ROUNDS, _MOST_ROUNDS = 6, 18
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
    of it, and what is above the memory window is not timed: a size that runs out of memory is a
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
    probed = {record.batch_size: record for record in memory.records}

    def refusal(size: int) -> str | None:
        if (record := probed.get(size)) is None:
            return None
        # Where the time for the memory did not suffice, the line through smaller sizes tells.
        needed = record.predicted_bytes if record.peak_bytes is None else record.peak_bytes
        if record.refusal is None and needed and needed > MEMORY_WINDOW[1] * memory.limit_bytes:
            limit = f"{MEMORY_WINDOW[1]:.0%} of {memory_text(memory.limit_bytes)}"
            return f"needs {memory_text(needed)}, more than {limit}"
        return record.refusal

    peaks = {r.batch_size: r.peak_bytes for r in memory.records if r.peak_bytes}
    out = {r.batch_size for r in memory.records if r.outcome == "out_of_memory"}
    measured = sizes.up_to(run.examples)
    plan = TimingPlan(
        time_budget_s,
        needed_calls=_ROUNDS,
        rounds_beyond=_MOST_ROUNDS - _ROUNDS,
        precision=0.03,
        first_calls_count=False,
    )
    way, notes = Way(sizes.batch_size, fed=True), [*memory.notes, run.note]
    with micro_batch_steps(run.model) as steps:
        timed = TimedUpdates(
            steps,
            run.batch,
            plan,
            chosen=sizes.chosen,
            examples=run.examples,
            refusal=refusal,
            seed=seed,
            say=say,
        )
        fit = fit_memory(peaks)
        most = 0.0 if fit is None else fit.largest_within(SURE_SHARE * memory.limit_bytes)
        larger = [size for size in sizes.larger(run.examples) if size <= most]
        timed.warm_up(way, measured, larger=larger)
        asked = [Setting(way, size) for size in measured]
        asked += [one for one in timed.sweep.timed(way) if one not in asked]
        together = way._replace(together=True)
        timed.warm_up(together, [one.size for one in timed.sweep.timed(way)])
        timed.run()
    updates: list[TimedUpdate] = []
    for setting in asked:
        update = timed.found(setting)
        if setting.size in out:
            update = TimedUpdate(update.batch_size, setting.size, outcome=OUT_OF_MEMORY)
        updates.append(update)
        if (more := setting._replace(series=together)) in timed.sweep.rounds.blocks:
            updates.append(timed.found(more))
    if sizes.batch_size is not None and measured[0] < sizes.batch_size:
        notes.append(sampled_parts_note(run.model, source))
    return TrainingProfile(
        model_name=run.model.name,
        dtype_policy=run.model.dtype_policy.name,
        jit_compile=bool(run.model.jit_compile),
        updates=tuple(updates),
        memory=memory.records,
        memory_limit_bytes=memory.limit_bytes or None,
        duration_s=round(time.perf_counter() - began_s, 3),
        noted=tuple(dict.fromkeys(note for note in notes if note)),
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
