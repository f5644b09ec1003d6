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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, powers_of_two
from kbatch.analysis.intervals import calls_for_quantile
from kbatch.device.machine import read_environment
from kbatch.device.memory import check_memory_limit, gpu_in_use
from kbatch.errors import InputError
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
from kbatch.inference.result import (
    BULK_PATH,
    InferenceProfile,
    TimingRecord,
    calls_to_show,
    check_target,
    is_bulk,
)
from kbatch.inference.target_search import check_reachable, verify_target
from kbatch.memory.find import MemoryPass, memory_pass
from kbatch.memory.probe import open_probes
from kbatch.memory.workload import Workload
from kbatch.page.numbers import join_words
from kbatch.progress import MeasuringProgress
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
)
from kbatch.training.data.training_data import TrainingData
from kbatch.training.dtype_policy import global_policy
from kbatch.training.state import kept_variables

# Share of the time budget for the rounds, if fresh calls verify the answer afterwards.
_SHARE_BEFORE_CHECKS = 0.6
# Least seconds that a size runs in a round.
_BLOCK_S = 0.015
# Share of the time budget for the comparison of classes with float32.
_SHARE_TO_COMPARE = 0.05
# With a target, the default sizes are every third power of two, and all of them near the target.
# A few rounds are enough for each, because fresh calls verify the answer.
_STEP_WITH_TARGET = 3
# Most calls of a block that a record keeps, unless the quantile needs more.
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
    GPU, and it waits for the results of JAX and PyTorch functions. kbatch stops timing a setting
    when it has the calls that the quantile needs, and the 95 % interval of the median is within
    5 % or 30 more rounds have passed.

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
            random. Functions need `x`, and get its dtypes.
        batch_sizes: Iterable of integers, ascending. Default: powers of two up to 4,096, as long
            as memory and time allow, and up to 65,536 while throughput still grows. With a target:
            powers of eight up to the target, and the powers of two near it.
        call_paths: String or iterable of strings, the ways to call a Keras model: "compiled" (a
            `tf.function` for any batch size), "xla", "model(x)", "predict_one_batch"
            (`model.predict` with one batch), "predict_on_batch", "predict" (`model.predict` with
            `bulk_examples`, in batches), "saved_model" (exported and loaded). The answers of the
            profile are for the first one. Default: "compiled".
        dtype_policies: String or iterable of strings, policies to compare. Each one is measured on
            a copy of the model with the same weights. "int8" quantises the copy with Keras. If
            None, the model is measured as it is.
        latency_slo_ms: Float, a latency target in milliseconds. kbatch searches for the largest
            batch size that meets it, and verifies it by fresh calls, on the first call path and
            policy. It leaves room for calls that get 20 % slower later, or more if the rounds
            scatter more. If None, there is no target.
        quantile: Float in (0, 1), the share of the calls that must meet the target. Default: 0.95.
        time_budget_s: Float, seconds for the whole call. Measuring memory takes at most about a
            third. kbatch does not stop a running call, and always measures two sizes. Default: 60.
        measure_memory: Boolean, whether to measure the memory of a Keras model. If False, and for
            functions, kbatch cannot avoid a batch that needs too much memory. Default: True.
        memory_limit_bytes: As in `find_max_batch_size`.
        bulk_examples: Integer, examples in a call of "predict", and its largest batch size.
            Default: 256.
        seed: Integer, seed of the order within rounds. Default: 0.
        verbose: As in `find_max_batch_size`. The bar shows how much of the time is spent.

    Returns:
        An `InferenceProfile`.

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
            "Call paths and dtype policies need a single keras.Model: leave out `call_paths` "
            "(--paths) and `dtype_policies` (--policies) for functions and other formats. "
            f"Received: call_paths={paths}, dtype_policies={dtype_policies!r}."
        )
    if latency_slo_ms is not None:
        check_target(latency_slo_ms, quantile)
        latency_slo_ms = float(latency_slo_ms)
        if paths[0] == BULK_PATH:
            raise InputError(
                "A latency target needs a call path that predicts one batch at a time: put such a "
                'path, for example "compiled", first in `call_paths` (--paths). '
                f"Received: call_paths[0]={BULK_PATH!r}, latency_slo_ms={latency_slo_ms}."
            )
    check_seconds(time_budget_s=time_budget_s)
    began_s, needed_calls = time.perf_counter(), calls_for_quantile(quantile)
    sizes, larger = DEFAULT_SIZES, LARGER_SIZES
    if latency_slo_ms is not None:
        sizes, larger = DEFAULT_SIZES[::_STEP_WITH_TARGET], ()
    if batch_sizes is not None:
        sizes, larger = check_batch_sizes(batch_sizes), ()
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
    output_changes, class_changes, compared = {}, {}, 0
    with progress, contextlib.ExitStack() as stack:
        if functions is None:
            # Entered again, to keep the variables that the first call made.
            stack.enter_context(kept_variables(model))
            models, notes = variants_of(model, dtype_policies)
            notes = (*notes, *filter(None, [inputs.note]))
            most_s = _SHARE_TO_COMPARE * time_budget_s
            output_changes, class_changes, compared = compare_with_float32(
                model, models, x, rows, most_s=most_s
            )
            if measure_memory:
                memory = measure_predict_memory(
                    models,
                    rows,
                    sizes,
                    memory_limit_bytes=limit_bytes,
                    ends_s=began_s + SHARE_FOR_MEMORY * time_budget_s,
                    say=progress.say,
                )
        for policy, copy in models.items():
            for path in paths:
                runs[path, policy] = stack.enter_context(open_path(path, copy, rows))
        for name, function in (functions or {}).items():
            runs[name, None] = stack.enter_context(open_function(name, function, rows))
        left_s = time_left_s(time_budget_s, began_s=began_s)
        timing = TimingPlan(left_s, needed_calls, block_s=_BLOCK_S)
        if latency_slo_ms is not None:
            timing = dataclasses.replace(timing, time_budget_s=_SHARE_BEFORE_CHECKS * left_s)
        around_target = latency_slo_ms is not None and batch_sizes is None
        if around_target:  # An estimate is enough, because fresh calls verify the answer.
            calls = min(needed_calls, calls_to_show(quantile))
            timing = dataclasses.replace(timing, needed_calls=calls, rounds_beyond=0)
        dependence = BatchDependence(models, rows)
        sweep = InferenceSweep(
            runs,
            rows,
            memory,
            timing,
            chosen=batch_sizes is not None,
            bulk_examples=bulk_examples,
            target_ms=latency_slo_ms,
            seed=seed,
            progress=progress,
        )
        first = next(iter(sweep.runs))  # The answers are for this one.
        for setting, warm_up in sweep.warm_up_all(sizes, larger, around_target=around_target):
            if latency_slo_ms is not None and setting == Setting(first, sizes[0]):
                check_reachable(sweep, setting, latency_slo_ms, quantile)
            examples, run = sweep.examples_per_call(setting), sweep.runs[setting.series]
            dependence.see(setting, warm_up.returned, examples=examples, run=run)
        sweep.run()
        names = [model.name] if isinstance(model, keras.Model) else [*(functions or ())]
        profile = InferenceProfile(
            model_name=join_words(names),
            quantile=float(quantile),
            timings=sweep.records(dependence),
            memory=memory.records,
            memory_limit_bytes=memory.limit_bytes,
            output_changes=output_changes,
            class_changes=class_changes,
            compared_examples=compared,
            target_ms=latency_slo_ms,
            noted=tuple(dict.fromkeys((*notes, *memory.notes, *dependence.notes()))),
            environment=read_environment(),
        )
        if latency_slo_ms is None:
            return profile
        return verify_target(profile, sweep, first, time_budget_s=left_s)


def measure_predict_memory(
    models: Mapping[str, keras.Model],
    rows: Any,
    sizes: Sequence[int],
    *,
    memory_limit_bytes: int | None,
    ends_s: float,
    say: Callable[[str], None],
) -> MemoryPass:
    """Measure the memory of predictions in a worker process, which may run out of memory."""
    # TensorFlow reserves most of a GPU's memory for this process as soon as it uses the GPU.
    why_here = "model on the GPU" if gpu_in_use() else None
    say(f"measuring memory in {'this process' if why_here else 'a worker process'}")
    data, policy = TrainingData(rows), global_policy()
    limit_bytes, records, notes = None, (), ()
    for left, (name, model) in zip(range(len(models), 0, -1), models.items(), strict=True):
        part_ends_s = time.perf_counter() + (ends_s - time.perf_counter()) / left
        load = Workload(lambda model=model: model, data, policy, training=False)
        with open_probes(load, memory_limit_bytes=memory_limit_bytes, why_here=why_here) as probes:
            left_s = part_ends_s - time.perf_counter()  # Without the start of the process.
            part = memory_pass(probes, sizes, dtype_policy=name, time_budget_s=left_s, say=say)
        records, notes = (*records, *part.records), (*notes, *part.notes)
        limit_bytes = part.limit_bytes
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
        target_ms: float | None = None,  # After two sizes, slower ones are not timed.
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
        most = self._bulk_examples
        if is_bulk(*setting.series) and setting.size > most:
            return Note.of("beyond_bulk_call", examples=most)
        return self._memory.refusal(setting.series[1], setting.size)

    def shares(self, setting: Setting) -> float:
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
        yield from self.warm_up(Setting(first, size) for size in sizes)
        if around_target:
            for size in self._around_target(first):
                setting = Setting(first, size)
                yield from self.warm_up([setting], slow_ends=False)
                if setting not in self.warm_ups or self.time_s(setting) > self.target_s(setting):
                    break  # One size above the target is enough.
        yield from self.warm_up(Setting(series, size) for size in sizes for series in others)
        for series in self.runs:
            most = self._memory.largest_sure(series[1])
            if Setting(series, sizes[-1]) in self.warm_ups:
                yield from self.extend(series, (size for size in larger if size <= most))

    def _around_target(self, series: Any) -> tuple[int, ...]:
        """Return the powers of two between the last size within the target and the next one."""
        within = [s.size for s in self.timed(series) if self.time_s(s) <= self.target_s(s)]
        beyond = [s.size for s in self.tried(series) if within and s.size > within[-1]]
        return powers_of_two(within[-1], beyond[0])[1:-1] if beyond else ()

    def records(self, dependence: BatchDependence) -> tuple[TimingRecord, ...]:
        """Return the times of each setting, or the reason why it was not timed."""
        records = []
        for setting in itertools.chain.from_iterable(map(self.tried, self.runs)):
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
