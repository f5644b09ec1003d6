"""Measure how batch size affects the latency, throughput and memory of predictions.

`profile_inference` measures the memory of each batch size in a worker process. Then it times all
settings in shared rounds. If there is a latency target, it searches for the batch size with fresh
calls.
"""

import contextlib
import dataclasses
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size
from kbatch.analysis.intervals import calls_for_quantile
from kbatch.analysis.scaling_curve import batch_size_within
from kbatch.device.machine import read_environment
from kbatch.device.memory import check_memory_limit, gpu_in_use
from kbatch.errors import InputError, TargetTooLow
from kbatch.inference import BULK_EXAMPLES, TIME_BUDGET_S
from kbatch.inference.batch_dependence import BatchDependence
from kbatch.inference.call_paths import (
    CALL_PATHS,
    Run,
    check_names,
    compare_with_float32,
    inference_inputs,
    open_path,
    repeated,
    variants_of,
)
from kbatch.inference.functions import Function, function_rows, functions_by_name, open_function
from kbatch.inference.result import BULK_PATH, InferenceProfile, TimingRecord, is_bulk
from kbatch.inference.target_search import LatencyTargetSearch, check_target, expected_drift
from kbatch.memory.find import MemoryPass, memory_pass
from kbatch.memory.probe import open_probes
from kbatch.memory.result import MemoryRecord
from kbatch.memory.workload import Workload
from kbatch.page.numbers import join_words, pluralize
from kbatch.progress import MeasuringProgress
from kbatch.records.machine import LIBRARIES, EnvironmentRecord
from kbatch.records.notes import Note
from kbatch.timing import (
    DEFAULT_SIZES,
    LARGER_SIZES,
    SHARE_FOR_MEMORY,
    Setting,
    Sweep,
    TimingPlan,
    WarmUp,
    check_seconds,
    time_left_s,
    warm_up_calls,
)
from kbatch.training.data.training_data import TrainingData
from kbatch.training.dtype_policy import global_policy
from kbatch.training.state import kept_variables

# Share of the time budget after which a worker process that measures memory is ended. It has at
# least five seconds, if the budget has, because TensorFlow starts in about three.
_MOST_FOR_MEMORY, _LEAST_WORKER_S = 0.5, 5.0
# Least seconds for measurements after the start of the process.
_LEAST_PROBING_S = 2.0
# Share of the time budget for the rounds, if fresh calls verify the answer afterwards.
_SHARE_BEFORE_CHECKS = 0.6
# Least share of the time budget for fresh calls, however long the rounds took.
_LEAST_SHARE_TO_CHECK = 0.1
# Least seconds that a size runs in a round, and in a round that gives only a first guess.
_BLOCK_S, _GUESS_S = 0.015, 0.0075
# Share of the time budget for the comparison of classes with float32.
_SHARE_TO_COMPARE = 0.05
# With a target, the default sizes are every third power of two, and all of them near the target.
_STEP_WITH_TARGET = 3
# A record keeps at most this many calls per block, unless the quantile needs more.
_RECORDED_CALLS = 64


def profile_inference(
    model: keras.Model | Function | Mapping[str, Function],
    x: Any = None,
    *,
    batch_sizes: Iterable[int] | None = None,
    call_paths: str | Iterable[str] = ("compiled",),
    dtype_policies: str | Iterable[str] | None = None,
    latency_slo_ms: float | None = None,
    quantile: float = 0.95,
    time_budget_s: float = TIME_BUDGET_S,
    measure_memory: bool = True,
    memory_limit_bytes: int | None = None,
    bulk_examples: int = BULK_EXAMPLES,
    seed: int = 0,
    verbose: int | str = "auto",
) -> InferenceProfile:
    """Measure latency, throughput and memory of predictions by batch size.

    Batch sizes, call paths and policies take turns in shuffled rounds, so that a machine that gets
    slower slows all of them equally. The first call of each is recorded separately. A timed call
    starts with NumPy arrays and ends with NumPy arrays, so it includes the copies to and from a
    GPU, and it waits for the results of JAX and PyTorch functions. kbatch times a setting until it
    has the calls that the quantile needs. It then continues until the 95 % interval of the median
    is within 5 %, for at most 30 more rounds.

    Memory is measured first, in a worker process, or in this process if it already uses the GPU.
    kbatch does not run a batch that would need more than 90 % of the memory.

    Example:

    >>> profile = kbatch.profile_inference(model, x, latency_slo_ms=20)
    >>> profile.batch_for(latency_ms=20).batch_size, profile.knee.batch_size
    >>> session = onnxruntime.InferenceSession("model.onnx")
    >>> functions = {"Keras": model, "ONNX Runtime": lambda x: session.run(None, {"x": x})}
    >>> kbatch.profile_inference(functions, x)

    Args:
        model: A Keras model, compiled or not. It is not changed. Or a function that takes a batch
            of `x` as NumPy arrays and returns arrays or tensors, such as a call of ONNX Runtime,
            LiteRT, JAX or PyTorch. Or a dict of names and functions or models, which are compared
            in the same rounds. The answers of the profile are for the first one.
        x: Inputs: arrays of shape `(examples, ...)`, nested as the model takes them, or a
            `tf.data.Dataset`. kbatch repeats at most 64 rows into batches. If None, the inputs are
            random. Functions require `x`: they get batches with its dtypes.
        batch_sizes: Iterable of integers, ascending. Default: powers of two up to 4,096, as long
            as memory and time allow, and up to 65,536 while throughput still grows. With a latency
            target: powers of eight up to the size that meets the target, and powers of two near it.
        call_paths: String or iterable of strings, the ways to call a Keras model: "compiled" (a
            `tf.function` for any batch size), "xla", "model(x)", "predict_one_batch"
            (`model.predict` with one batch), "predict_on_batch", "predict" (`model.predict` with
            `bulk_examples`, in batches), "saved_model" (exported and loaded). The answers of the
            profile are for the first one. Default: "compiled".
        dtype_policies: String or iterable of strings, policies to compare. Each one is measured on
            a copy of the model with the same weights. "int8" quantises the copy with Keras. If
            None, the model is measured as it is.
        latency_slo_ms: Float, a latency target in milliseconds. On the first call path and policy,
            kbatch searches for the largest batch size that meets the target, and verifies the
            size by fresh calls. The size would still meet the target if calls got 20 % slower, or
            more if the times of the rounds differ more. If None, there is no target.
        quantile: Float in (0, 1), the share of the calls that must meet the target. Default: 0.95.
        time_budget_s: Float, seconds for the whole call. Measuring memory takes at most about a
            third, or half on a busy machine. kbatch does not stop a running call, and always times
            two sizes. Default: 60.
        measure_memory: Boolean, whether to measure the memory of a Keras model. If False, and for
            functions, kbatch cannot avoid a batch that needs too much memory. Default: True.
        memory_limit_bytes: As in `find_max_batch_size`.
        bulk_examples: Integer, examples in a call of "predict", and its largest batch size.
            Default: 256.
        seed: Integer, seed of the order within rounds. Default: 0.
        verbose: As in `find_max_batch_size`. The bar shows how much of the time is spent.

    Returns:
        An `InferenceProfile`. Its samples/s are the batch size over the median time of a call, with
        one call at a time.

    Raises:
        InputError: If the model takes one batch size only, `x` does not match its inputs or is
            missing, a function returns nothing or keeps state, a call path or policy is not
            available, or `call_paths` starts with "predict" and there is a target.
        OutOfMemoryError: If not even the weights fit.
        TargetTooLow: If the target is below the latency of one example. The message says which
            latency can be reached.
        TypeError: If `model` is not a model or function, or a size or memory is not an integer.
        ValueError: If a size or a target is not positive, or a probability is not in (0, 1).
    """
    paths = check_names(CALL_PATHS, call_paths=call_paths)
    functions = None if isinstance(model, keras.Model) else functions_by_name(model)
    if functions is not None and (paths != ("compiled",) or dtype_policies is not None):
        raise InputError(
            "`call_paths` and `dtype_policies` require a keras.Model, or a .keras or .h5 file: "
            f"leave them out. Received: call_paths={paths}, dtype_policies={dtype_policies!r}."
        )
    if latency_slo_ms is not None:
        check_target(latency_slo_ms, quantile)
        latency_slo_ms = float(latency_slo_ms)
        if paths[0] == BULK_PATH:
            raise InputError(
                "A latency target needs a call path that predicts one batch at a time: put such a "
                'path, for example "compiled", first in `call_paths`. '
                f"Received: call_paths={paths}, a target of {latency_slo_ms:g} ms."
            )
    check_seconds(time_budget_s=time_budget_s)
    began_s, needed_calls = time.perf_counter(), calls_for_quantile(quantile)
    sizes, larger = DEFAULT_SIZES, LARGER_SIZES
    if batch_sizes is not None:
        sizes, larger = check_batch_sizes(batch_sizes), ()
    elif latency_slo_ms is not None:
        sizes, larger = DEFAULT_SIZES[::_STEP_WITH_TARGET], ()
    bulk_examples = check_size(bulk_examples, "bulk_examples")
    limit_bytes = check_memory_limit(memory_limit_bytes)
    progress = MeasuringProgress("inference", verbose, time_budget_s=time_budget_s)
    if functions is None:
        with kept_variables(model):
            inputs = inference_inputs(model, x)
        rows = inputs.rows
    else:
        rows = function_rows(x)
    models, notes, memory, runs = {}, (), MemoryPass(), {}
    compared, first_calls_s = ({}, {}, 0), {}
    with progress, contextlib.ExitStack() as stack:
        if functions is None:
            # A second time, because the first call may have made variables, which are kept too.
            stack.enter_context(kept_variables(model))
            models, notes = variants_of(model, dtype_policies)
            notes = (*notes, *filter(None, [inputs.note]))
            most_s = _SHARE_TO_COMPARE * time_budget_s
            compared = compare_with_float32(model, models, x, rows, most_s=most_s)
            if measure_memory:
                now_s, left_s = time.perf_counter(), time_left_s(time_budget_s, began_s=began_s)
                memory = measure_predict_memory(
                    models,
                    rows,
                    sizes,
                    memory_limit_bytes=limit_bytes,
                    ends_s=now_s + SHARE_FOR_MEMORY * left_s,
                    latest_s=now_s + max(_MOST_FOR_MEMORY * left_s, min(left_s, _LEAST_WORKER_S)),
                    say=progress.say,
                )
        for policy, copy in models.items():
            for path in paths:
                runs[path, policy] = stack.enter_context(open_path(path, copy, rows))
        for name, function in (functions or {}).items():
            runs[name, None], seconds = stack.enter_context(open_function(name, function, rows))
            first_calls_s |= {Setting((name, None), size): s for size, s in seconds.items()}
        left_s = time_left_s(time_budget_s, began_s=began_s)
        share = 1.0 if latency_slo_ms is None else _SHARE_BEFORE_CHECKS
        timing = TimingPlan(share * left_s, needed_calls, block_s=_BLOCK_S)
        around_target = latency_slo_ms is not None and batch_sizes is None
        if around_target:  # An estimate is enough, because fresh calls verify the answer.
            timing = dataclasses.replace(timing, needed_calls=1, rounds_beyond=0, block_s=_GUESS_S)
        dependence = BatchDependence(models, rows)
        sweep = InferenceSweep(
            runs,
            rows,
            memory,
            timing,
            bulk_examples=bulk_examples,
            target_ms=latency_slo_ms,
            chosen=batch_sizes is not None,
            seed=seed,
            progress=progress,
        )
        first = next(iter(sweep.runs))  # The answers are for this one.
        for setting, warm_up in sweep.warm_up_all(sizes, larger, around_target=around_target):
            if latency_slo_ms is not None and setting == Setting(first, sizes[0]):
                check_reachable(sweep, setting, latency_slo_ms, quantile)
            examples, run = sweep.examples_per_call(setting), sweep.runs[setting.series]
            dependence.see(setting, warm_up.returned, examples=examples, run=run)
        for setting in first_calls_s.keys() & sweep.warm_ups.keys():
            first_call_s = first_calls_s[setting]
            sweep.warm_ups[setting] = sweep.warm_ups[setting]._replace(first_call_s=first_call_s)
        sweep.run()
        names = [model.name] if isinstance(model, keras.Model) else [*(functions or ())]
        profile = InferenceProfile(
            model_name=join_words(names),
            quantile=float(quantile),
            timings=sweep.records(dependence),
            memory=memory.records,
            memory_limit_bytes=memory.limit_bytes,
            output_changes=compared[0],
            class_changes=compared[1],
            compared_examples=compared[2],
            target_ms=latency_slo_ms,
            noted=tuple(dict.fromkeys((*notes, *memory.notes, *dependence.notes()))),
            environment=_environment(functions or {}),
        )
        if latency_slo_ms is None:
            return profile
        return verify_target(profile, sweep, first, time_budget_s=left_s)


def _environment(functions: Mapping[str, Function]) -> EnvironmentRecord:
    """Return the machine. Versions of other runtimes replace those of TensorFlow and Keras."""
    environment, modules = read_environment(), sys.modules if functions else {}
    own = {name for name in environment.versions if name.startswith(("tensorflow", "keras"))}
    others = {n: modules[n].__version__ for n in LIBRARIES if n not in own and modules.get(n)}
    if others and not any(isinstance(function, keras.Model) for function in functions.values()):
        others |= {n: v for n, v in environment.versions.items() if n not in own}
        return dataclasses.replace(environment, versions=others)
    return dataclasses.replace(environment, versions={**environment.versions, **others})


def measure_predict_memory(
    models: Mapping[str, keras.Model],
    rows: Any,
    sizes: Sequence[int],
    *,
    memory_limit_bytes: int | None,
    ends_s: float,  # Then no size is begun, except the first size or two.
    latest_s: float,  # Then a worker process is ended.
    say: Callable[[str], None],
) -> MemoryPass:
    """Measure the memory of predictions in a worker process, which may run out of memory."""
    # TensorFlow reserves most of a GPU's memory for this process as soon as it uses the GPU.
    why_here = "model on the GPU" if gpu_in_use() else None
    say(f"measuring memory in {'this process' if why_here else 'a worker process'}")
    data, policy = TrainingData(rows), global_policy()
    limit_bytes, records, notes, took_s, late = None, (), (), 0.0, Note.of("memory_time_spent")
    for left, (name, model) in zip(range(len(models), 0, -1), models.items(), strict=True):
        began_s = time.perf_counter()
        part_ends_s = began_s + (ends_s - began_s) / left
        load = Workload(lambda model=model: model, data, policy, training=False)
        part = MemoryPass(tuple(MemoryRecord(name, n, "not_run", late) for n in sizes), limit_bytes)
        with contextlib.suppress(TimeoutError):
            if records and began_s + took_s > ends_s:
                raise TimeoutError
            with open_probes(
                load, memory_limit_bytes=memory_limit_bytes, why_here=why_here, ends_s=latest_s
            ) as probes:
                left_s = part_ends_s - time.perf_counter()  # Without the start of the process.
                part = memory_pass(
                    probes,
                    sizes,
                    dtype_policy=name,
                    time_budget_s=max(left_s, _LEAST_PROBING_S),
                    fewest=1 if left_s < _LEAST_PROBING_S else 2,
                    say=say,
                )
        records, notes = (*records, *part.records), (*notes, *part.notes)
        limit_bytes, took_s = part.limit_bytes, time.perf_counter() - began_s
    return MemoryPass(records, limit_bytes, notes)


class InferenceSweep(Sweep):
    """A sweep over batch sizes, call paths and policies, or over functions."""

    def __init__(
        self,
        # By call path and policy, or by the name of a function and None.
        runs: Mapping[tuple[str, str | None], Run],
        rows: Any,
        memory: MemoryPass,
        timing: TimingPlan,
        *,
        bulk_examples: int,
        target_ms: float | None = None,  # Sizes that take longer are left out after two sizes.
        **settings: Any,
    ):
        super().__init__(timing, **settings)
        self.runs, self._rows, self._memory = runs, rows, memory
        self._bulk_examples, self._target_ms = bulk_examples, target_ms

    def prepare(self, setting: Setting) -> Callable[[], Any]:
        batch = repeated(self._rows, self.examples_per_call(setting))
        run = self.runs[setting.series]
        return lambda: run(batch, setting.size)

    def refusal(self, setting: Setting) -> Note | None:
        if is_bulk(*setting.series) and setting.size > self._bulk_examples:
            return Note.of("beyond_bulk_call", examples=self._bulk_examples)
        return self._memory.refusal(setting.series[1], setting.size)

    def batches_per_call(self, setting: Setting) -> float:
        """Return the number of batches in a call."""
        return self.examples_per_call(setting) / setting.size

    def target_s(self, setting: Setting) -> float:
        if self._target_ms is None or is_bulk(*setting.series):
            return math.inf
        return self._target_ms / 1000

    def examples_per_call(self, setting: Setting) -> int:
        return self._bulk_examples if is_bulk(*setting.series) else setting.size

    def warm_up_all(
        self, sizes: Sequence[int], larger: Sequence[int], *, around_target: bool = False
    ) -> Iterator[tuple[Setting, WarmUp]]:
        """Warm up all settings and yield each. The first series and small sizes come first."""
        first, *others = self.runs
        if around_target:
            yield from self.warm_up(self._up_to_target(first, sizes[-1]), slow_ends=False)
        else:
            yield from self.warm_up(Setting(first, size) for size in sizes)
        yield from self.warm_up(Setting(series, size) for size in sizes for series in others)
        for series in self.runs:
            most = self._memory.largest_sure(series[1])
            if Setting(series, sizes[-1]) in self.warm_ups:
                yield from self.extend(series, (size for size in larger if size <= most))

    def _up_to_target(self, series: Any, most: int) -> Iterator[Setting]:
        """Yield powers of two up to the first one beyond the target.

        Far below the target, only powers of eight are needed. A step is eight if the line through
        the last two times expects at most twice the target for it, and two otherwise.
        """
        size, before, before_s = 1, 0, 0.0
        while 0 < size <= most:
            yield (setting := Setting(series, size))
            target_s = self.target_s(setting)
            if setting not in self.warm_ups or self.time_s(setting) > target_s:
                size, most = 2 * before, size - 1
                continue
            time_s = self.time_s(setting)
            expected_s = time_s + 7 * size * (time_s - before_s) / (size - before)
            before, before_s = size, time_s
            size *= 8 if expected_s <= 2 * target_s and 8 * size <= most else 2

    def records(self, dependence: BatchDependence) -> tuple[TimingRecord, ...]:
        """Return the times of each setting, or the reason why it was not timed."""
        records = []
        for setting in itertools.chain.from_iterable(map(self.all_settings, self.runs)):
            blocks = [] if setting in self.not_run else self.blocks[setting]
            durations_s = list(itertools.chain.from_iterable(blocks))
            # A random sample, because the first call of each block is slower than the others.
            most = max(_RECORDED_CALLS * len(blocks), self.timing.needed_calls)
            sample = random.Random(0).sample(range(len(durations_s)), min(most, len(durations_s)))
            record = TimingRecord(
                **self.timing_of(setting),
                call_path=setting.series[0],
                dtype_policy=setting.series[1],
                latencies_s=tuple(round(durations_s[call], 9) for call in sorted(sample)),
                size_effect=dependence.effects.get(setting),
            )
            records.append(record)
        return tuple(records)


def check_reachable(sweep: Sweep, smallest: Setting, target_ms: float, quantile: float) -> None:
    """Raise `TargetTooLow` if even the fastest call of one example takes longer than the target."""
    fastest_ms = 1000 * sweep.time_s(smallest)
    if fastest_ms > target_ms and smallest.size > 1:
        call = sweep.prepare(smallest._replace(size=1))
        fastest_ms = 1000 * warm_up_calls(call, clock=sweep.clock).call_s
    if fastest_ms > target_ms:
        raise TargetTooLow(target_ms, quantile, 1, fastest_ms)


def verify_target(
    profile: InferenceProfile, sweep: Sweep, series: Any, *, time_budget_s: float
) -> InferenceProfile:
    """Search for the largest batch size within the target, and add the checks to the profile."""
    target_ms, is_hopeless = profile.target_ms or math.inf, not profile.answering
    if profile.answering:
        ends_s = max(time_budget_s, sweep.spent_s + _LEAST_SHARE_TO_CHECK * time_budget_s)
        search = LatencyTargetSearch(
            _guess(profile),
            target_s=target_ms / 1000,
            quantile=profile.quantile,
            largest=max(sweep.warmed_up(series)).size,  # Larger ones miss it or did not run.
            left_s=ends_s - sweep.spent_s,
            drift=expected_drift(profile.answering),
            earlier=[blocks for timed, blocks in sweep.blocks.items() if timed.series == series],
        )
        while look := search.ask(left_s=(left_s := ends_s - sweep.spent_s)):
            (size, calls), latencies_s = look, None
            setting = Setting(series, size)
            if setting in sweep.warm_ups or sweep.admit(setting) is not None:
                if calls * sweep.warm_ups[setting].call_s > left_s:
                    search.stop()
                    if size == 1:
                        break
                    continue
                latencies_s = sweep.fresh_calls(setting, calls)
            if (check := search.tell(latencies_s or [math.inf] * calls)) is not None:
                words = f"{check.outcome} by {pluralize(len(check.latencies_s), 'call')}"
                sweep.progress.say(f"checked batch {size}: {words}")
        profile = dataclasses.replace(profile, checks=search.checks)
        is_hopeless = search.is_hopeless
    if profile.verified is not None:
        return profile
    unsure = [check for check in profile.checks if check.outcome == "unsure"]
    why = profile.doubt(unsure[-1]) if unsure else "missed" if profile.checks else "no calls"
    note = Note.of("target_not_verified", longer=not is_hopeless, why=why)
    return dataclasses.replace(profile, noted=(*profile.noted, note))


def _guess(profile: InferenceProfile) -> Callable[[float], int]:
    """Return a function that estimates the batch size whose latency quantile has a given value."""
    # The ratio of quantile to median comes from the largest sizes, which are near the target.
    near = profile.answering[-3:]
    shares = np.concatenate([np.asarray(t.latencies_s) / t.median_s for t in near])
    ratio = float(np.quantile(shares, profile.quantile)) if len(shares) else 1.0
    first, latency = profile.answering[0], None
    with contextlib.suppress(ValueError):  # There are too few rounds for a fit.
        latency = profile.latency

    def guess(latency_s: float) -> int:
        # Outside the measured sizes, the time is assumed to be proportional to the size. Below
        # them, the size is too large if a call has a fixed cost, and fresh calls will correct it.
        if latency is None:
            return int(first.batch_size * latency_s / ratio / first.median_s)
        known_s = np.clip(latency_s / ratio, *latency.latencies_s[[0, -1]])
        batch_size = batch_size_within(latency, latency_s=known_s).value or latency.batch_sizes[0]
        return int(batch_size * latency_s / ratio / known_s)

    return guess
