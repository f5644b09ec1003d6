"""How batch size affects a model's latency, throughput and memory when it predicts.

Prepare: check what is asked for, take rows of the data, and the model under each policy. Measure:
the memory of each batch size in a worker process, then the time of all settings in shared rounds.
Answer: where there is a latency target, look for its batch size with fresh calls. Record: the
profile.
"""

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size
from kbatch.analysis.intervals import calls_for_quantile
from kbatch.analysis.line_fit import fit_line
from kbatch.analysis.scaling_curve import batch_size_within
from kbatch.device.environment import read_environment
from kbatch.device.memory import check_memory_limit, gpu_in_use
from kbatch.errors import InputError
from kbatch.inference import BULK_EXAMPLES, TIME_BUDGET_S
from kbatch.inference.batch_dependence import BatchDependence
from kbatch.inference.call_paths import call_paths_of
from kbatch.inference.inputs import InferenceInputs, inference_inputs
from kbatch.inference.result import (
    BULK_PATH,
    InferenceProfile,
    TargetTooLow,
    TimingRecord,
    check_target,
)
from kbatch.inference.sweep import InferenceSweep, Series
from kbatch.inference.target_search import LatencyTargetSearch
from kbatch.inference.variants import variants_of
from kbatch.memory.find import MemoryPass, memory_pass
from kbatch.memory.probe import open_probes
from kbatch.memory.search import MEMORY_WINDOW
from kbatch.memory.workload import Workload
from kbatch.records.notes import Note
from kbatch.timing.rounds import TimingPlan, check_seconds
from kbatch.timing.sweep import DEFAULT_SIZES, LARGER_SIZES, Setting
from kbatch.training.data.training_data import TrainingData
from kbatch.training.state import kept_variables

# Share of the time budget for the rounds where an answer is verified afterwards.
_SHARE_BEFORE_CHECKS = 0.6
# Default sizes with a target: every third power of two, each timed for a few rounds, since fresh
# calls verify the answer.
_STEP_WITH_TARGET = 3
# Calls that show that one batch is far above a target.
_FEW_CALLS = 10
# How much slower than typical 5 % of normally scattered rounds are, in standard deviations.
_SLOW_ROUND = 1.645
_LEAST_DRIFT = 0.2
# As long as a size is timed in the sweep: 59 short calls would be over within a fluke.
_LEAST_CHECK_S = 0.3


def profile_inference(
    model: keras.Model,
    x: Any = None,
    *,
    batch_sizes: Iterable[int] | None = None,
    call_paths: "str | Callable[..., Any] | Iterable[Any]" = ("compiled",),
    dtype_policies: "str | Iterable[str] | None" = None,
    latency_slo_ms: float | None = None,
    quantile: float = 0.95,
    time_budget_s: float = TIME_BUDGET_S,
    measure_memory: bool = True,
    memory_limit_bytes: int | None = None,
    bulk_examples: int = BULK_EXAMPLES,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> InferenceProfile:
    """Measure latency, throughput and memory of predictions by batch size.

    Batch sizes, call paths and policies take turns in shuffled rounds, so that a machine that
    drifts slows all alike, and the first call of each is kept apart. A call is timed from arrays in
    the host's memory to outputs there, copies to a GPU included. A setting has been timed
    enough when its 95 % interval is within 5 % of the median and the calls that the quantile needs
    were made, or 30 rounds later. Memory is measured before, in a worker process (in this one, with
    a note, where it holds the GPU), and a batch that is expected to need over 80 % of it is not
    run.

    Example:

    >>> profile = kbatch.profile_inference(model, x, latency_slo_ms=20)
    >>> profile.batch_for(latency_ms=20).batch_size, profile.knee.batch_size

    Args:
        model: A Keras model, compiled or not. It stays as it is.
        x: Inputs: arrays of shape (examples, ...), nested as the model takes them, or a
            `tf.data.Dataset`; up to 64 rows are used, repeated into batches. None for random
            inputs of the model's input shapes.
        batch_sizes: Sizes in ascending order. None for powers of two as far as memory and time
            allow, up to 4096, and on to 65536 while throughput still grows and they are known to
            fit; with a target for powers of eight up to it, in few and short rounds.
        call_paths: Ways to call the model: "compiled" (a `tf.function` for any batch size), "xla",
            "predict_on_batch", "call" (eager), "predict" (all of `bulk_examples`, in batches),
            "saved_model" (exported and loaded), or a function of a batch, under the model's own
            policy only. The first one answers questions unless another is selected.
        dtype_policies: Policies under which copies of the model run, with the same weights in
            every layer, or "int8" for Keras's quantisation. None for the model as it is.
        latency_slo_ms: A latency target in milliseconds. The largest batch that keeps to it is
            looked for and verified by fresh calls, on the first call path and policy, with room
            for calls that are 20 % slower later, or more where rounds scatter more.
        quantile: Share of the calls that has to keep to a target, in (0, 1).
        time_budget_s: Seconds for timing; the memory of each policy may take as long again.
        measure_memory: Whether to measure memory. Without, nothing guards against a batch that
            needs too much.
        memory_limit_bytes: As in `find_max_batch_size`.
        bulk_examples: Examples of a bulk call of "predict", which runs no larger batches.
        seed: Seed of the order within rounds.
        on_progress: Receives progress messages.

    Raises:
        InputError: If the model takes batches of one size only, `x` does not suit its inputs or
            is needed to know their shapes, a call path or policy cannot be had, or a target is
            asked of "predict"; it says what to give.
        OutOfMemoryError: If not even the weights fit.
        TargetTooLow: If the target is below the latency of one example; it says what can be
            reached.
        TypeError: If `model` is no Keras model, or a size or memory no integer.
        ValueError: If a size or a target is not positive, or a probability not in (0, 1).
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a keras.Model: build or load it first "
            f"(`keras.saving.load_model`). Received: model of type {type(model).__name__}."
        )
    paths = call_paths_of(call_paths)
    if latency_slo_ms is not None:
        check_target(latency_slo_ms, quantile)
        latency_slo_ms = float(latency_slo_ms)
        if paths[0].bulk:
            raise InputError(
                "A latency target is for batches that come one by one: name another call path "
                f"first. Received: call_paths[0]={BULK_PATH!r}, latency_slo_ms={latency_slo_ms}."
            )
    needed_calls = calls_for_quantile(quantile)
    check_seconds(time_budget_s=time_budget_s)
    timing = TimingPlan(float(time_budget_s), needed_calls)
    chosen = batch_sizes is not None
    sizes, larger = DEFAULT_SIZES, LARGER_SIZES
    if batch_sizes is not None:
        sizes, larger = check_batch_sizes(batch_sizes), ()
    if latency_slo_ms is not None:
        share_s = _SHARE_BEFORE_CHECKS * timing.time_budget_s
        timing = dataclasses.replace(timing, time_budget_s=share_s)
        if not chosen:
            sizes, larger = DEFAULT_SIZES[::_STEP_WITH_TARGET], ()
            timing = dataclasses.replace(timing, rounds_beyond=0)
    bulk_examples = check_size(bulk_examples, "bulk_examples")
    limit_bytes = check_memory_limit(memory_limit_bytes)
    say = on_progress or (lambda line: None)
    with kept_variables(model):
        inputs = inference_inputs(model, x)
    # Those that a first call made are kept too.
    with kept_variables(model), contextlib.ExitStack() as stack:
        models, changes, notes = variants_of(model, inputs, dtype_policies, paths)
        memory = MemoryPass((), 0, ())
        if measure_memory:
            memory = measure_predict_memory(
                models,
                inputs,
                sizes,
                memory_limit_bytes=limit_bytes,
                time_budget_s=time_budget_s,
                say=say,
            )
        dependence = BatchDependence(models, inputs, time_budget_s=time_budget_s)
        sweep = InferenceSweep(
            {
                Series(path.name, policy): stack.enter_context(path.open(copy, inputs))
                for policy, copy in models.items()
                for path in paths
            },
            inputs,
            memory,
            timing,
            chosen=chosen,
            bulk_examples=bulk_examples,
            target_ms=latency_slo_ms,
            seed=seed,
            say=say,
        )
        for setting, warm_up in sweep.warm_up_all(sizes, larger):
            if latency_slo_ms is not None and setting == Setting(sweep.first_series, sizes[0]):
                check_reachable(sweep, setting, latency_slo_ms, quantile)
            dependence.see(
                setting.series,
                setting.size,
                warm_up.returned,
                examples=sweep.examples_per_call(setting),
                run=sweep.runs[setting.series],
                call_s=warm_up.call_s,
            )
        sweep.run()
        profile = InferenceProfile(
            model_name=model.name,
            quantile=float(quantile),
            timings=sweep.records(sizes, larger, dependence),
            memory=memory.records,
            memory_limit_bytes=memory.limit_bytes or None,
            output_changes=changes,
            target_ms=latency_slo_ms,
            noted=tuple(dict.fromkeys((*notes, *memory.notes, *dependence.notes()))),
            environment=read_environment(),
        )
        if latency_slo_ms is None:
            return profile
        return verify_target(profile, sweep, time_budget_s=time_budget_s, say=say)


def measure_predict_memory(
    models: Mapping[str, keras.Model],
    inputs: InferenceInputs,
    sizes: Sequence[int],
    *,
    memory_limit_bytes: int | None,
    time_budget_s: float,
    say: Callable[[str], None],
) -> MemoryPass:
    """Measure the memory of predictions in a worker process that may die of it."""
    # TensorFlow reserves most of a GPU's memory once a model lies there, and leaves a worker none.
    why_here = "model on the GPU" if gpu_in_use() else None
    say(f"measuring memory in {'this process' if why_here else 'a worker process'}")
    rows, policy = TrainingData(inputs.rows), keras.config.dtype_policy().name
    passes = []
    for name, model in models.items():
        workload = Workload(lambda model=model: model, rows, policy, training=False)
        with open_probes(
            workload,
            memory_limit_bytes=memory_limit_bytes,
            memory_window=MEMORY_WINDOW,
            why_here=why_here,
        ) as probes:
            found = memory_pass(
                probes, sizes, dtype_policy=name, time_budget_s=time_budget_s, say=say
            )
            passes.append(found)
    records = tuple(record for one in passes for record in one.records)
    notes = tuple(note for one in passes for note in one.notes)
    return MemoryPass(records, passes[0].limit_bytes, notes)


def check_reachable(
    sweep: InferenceSweep, smallest: Setting, target_ms: float, quantile: float
) -> None:
    """Check that one example is not far above a target, before all is measured."""

    def median_ms(one: Setting) -> float:
        latencies_s = sweep.fresh_calls(one, _FEW_CALLS)
        # Where memory ran out, the rounds will tell.
        return 0.0 if latencies_s is None else 1000 * statistics.median(latencies_s)

    found_ms, one = median_ms(smallest), smallest._replace(size=1)
    if found_ms > target_ms and one != smallest:
        if sweep.admit(one) is None:
            return
        found_ms = median_ms(one)
        sweep.withdraw(one)  # Not one of the sizes to sweep.
    if found_ms > target_ms:
        raise TargetTooLow(target_ms, quantile, 1, found_ms)


def verify_target(
    profile: InferenceProfile,
    sweep: InferenceSweep,
    *,
    time_budget_s: float,
    say: Callable[[str], None],
) -> InferenceProfile:
    """Look for the largest batch within the target, and add the checks to a profile."""
    series, target_ms = sweep.first_series, profile.target_ms or math.inf
    if profile.answering:
        search = LatencyTargetSearch(
            _guess(profile),
            target_s=target_ms / 1000,
            quantile=profile.quantile,
            largest=sweep.largest_allowed,
            drift=expected_drift(profile.answering),
            earlier=[
                [block.durations_s for block in blocks]
                for setting, blocks in sweep.blocks.items()
                if setting.series == series and blocks
            ],
        )
        while look := search.ask(more_sizes=sweep.spent_s < time_budget_s):
            (size, calls), latencies_s = look, None
            setting = Setting(series, size)
            if setting in sweep.warm_ups or sweep.admit(setting) is not None:
                latencies_s = sweep.fresh_calls(setting, calls, least_s=_LEAST_CHECK_S)
            found = "memory ran out"
            if latencies_s is not None:
                found = f"{1000 * max(latencies_s):.3g} ms at most"
            say(f"checked batch {size}: {found}")
            search.tell(latencies_s or [math.inf] * calls)  # No target is kept to.
        profile = dataclasses.replace(profile, checks=search.checks)
    if profile.verified is not None:
        return profile
    unsure = [check for check in profile.checks if check.missing_calls is not None]
    likely = max(unsure, key=lambda check: check.batch_size, default=None)
    more = ""
    if likely is not None:
        more = f" (batch size {likely.batch_size:,} lacks about {likely.missing_calls:,} calls)"
    note = Note.of("target_not_verified", target_ms=target_ms, quantile=profile.quantile, more=more)
    return dataclasses.replace(profile, noted=(*profile.noted, note))


def expected_drift(timings: Sequence[TimingRecord]) -> float:
    """Return how much slower later calls may be than those that verify an answer."""
    # The calls of a check are over within about a second; how far the rounds of the sweep scatter
    # shows what a machine does between two moments, and a short sweep may have seen a calm one.
    pairs = [(t.batch_size, value) for t in timings for value in t.batch_times_s]
    noise = None
    with contextlib.suppress(ValueError):  # Too few for a line; slow rounds count too.
        noise = fit_line(*zip(*pairs, strict=True)).departure.noise
    return max(_LEAST_DRIFT, _SLOW_ROUND * (noise or 0.0))


def _guess(profile: InferenceProfile) -> Callable[[float], int | None]:
    """Invert the fit of the quantile, or of the medians, or take the time as proportional."""
    latency = None
    for fit in (lambda: profile.latency_quantile(profile.quantile), lambda: profile.latency):
        with contextlib.suppress(ValueError):  # Calls or rounds are too few, as checks will tell.
            latency = fit()
            break
    if latency is None:
        row = profile.answering[0].row
        return lambda latency_s: max(1, int(row.size * latency_s / (row.value or math.inf)))

    def guess(latency_s: float) -> int | None:
        sizes, times_s = latency.batch_sizes, latency.latencies_s
        if not latency.follows_line and latency_s > times_s[-1]:
            # The curve ends here; on a plateau the time grows with the size.
            return int(sizes[-1] * latency_s / times_s[-1])
        found = batch_size_within(latency, latency_s=latency_s).value
        # Where the smallest measured size is above the target, smaller ones in proportion, which is
        # too many where a call has a fixed part, as fresh calls will show.
        return int(sizes[0] * latency_s / times_s[0]) if found is None else int(found)

    return guess
