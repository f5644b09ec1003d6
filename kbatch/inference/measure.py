"""How batch size affects a model's latency, throughput and memory when it predicts.

Prepare: check what is asked for, take rows of the data, and the model under each policy. Measure:
the memory of each batch size in a worker process, then the time of all settings in shared rounds.
Answer: where there is a latency target, look for its batch size with fresh calls. Record: the
profile.
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
    Function,
    Run,
    changed_classes,
    check_names,
    function_rows,
    functions_by_name,
    inference_inputs,
    open_function,
    open_path,
    repeated,
    variants_of,
)
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

# Share of the time budget for the rounds where an answer is verified afterwards.
_SHARE_BEFORE_CHECKS = 0.6
# Least seconds that a size runs in a round. Calls of inference are short.
_BLOCK_S = 0.015
# Share of the time budget in which classes are compared with those of float32.
_SHARE_TO_COMPARE = 0.05
# Default sizes with a target: every third power of two, and all around the target, each timed for a
# few rounds, since fresh calls verify the answer.
_STEP_WITH_TARGET = 3
# Most single calls that a record keeps for each block, if the quantile needs no more.
_KEPT_CALLS = 64


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

    Batch sizes, call paths and policies take turns in shuffled rounds, so that a machine that
    drifts slows all alike, and the first call of each is kept apart. A call is timed from arrays in
    the host's memory to outputs there, copies to a GPU included. A setting has been timed
    enough when its 95 % interval is within 5 % of the median and the calls that the quantile needs
    were made, or 30 rounds later. Memory is measured before, in a worker process (in this one, with
    a note, where it holds the GPU), and a batch that is expected to need over 90 % of it is not
    run.

    Example:

    >>> profile = kbatch.profile_inference(model, x, latency_slo_ms=20)
    >>> profile.batch_for(latency_ms=20).batch_size, profile.knee.batch_size
    >>> session = onnxruntime.InferenceSession("model.onnx")
    >>> functions = {"Keras": model, "ONNX Runtime": lambda x: session.run(None, {"x": x})}
    >>> kbatch.profile_inference(functions, x)

    Args:
        model: A Keras model, compiled or not. It stays as it is. Or a function that takes a batch
            of `x` as NumPy arrays and returns arrays or tensors, such as a call of ONNX Runtime,
            LiteRT, JAX or PyTorch; or a dict of names and functions or models, which take turns
            in the same rounds. The first one answers questions unless another is selected.
        x: Inputs: arrays of shape (examples, ...), nested as the model takes them, or a
            `tf.data.Dataset`; up to 64 rows are used, repeated into batches. If None, random
            inputs of the model's input shapes. Functions need it, and get its dtypes.
        batch_sizes: Sizes in ascending order. None for powers of two as far as memory and time
            allow, up to 4096, and on to 65536 while throughput still grows and they are known to
            fit; with a target for powers of eight up to it and powers of two around it, in few and
            short rounds.
        call_paths: Ways to call a Keras model: "compiled" (a `tf.function` for any batch size),
            "xla", "model(x)", "predict_one_batch" (`model.predict` of one batch),
            "predict_on_batch", "predict" (`model.predict` of `bulk_examples`, in batches),
            "saved_model" (exported and loaded). The first one answers questions unless another is
            selected.
        dtype_policies: Policies under which copies of the model run, with the same weights in
            every layer, or "int8" for Keras's quantisation. None for the model as it is.
        latency_slo_ms: A latency target in milliseconds. The largest batch that keeps to it is
            looked for and verified by fresh calls, on the first call path and policy, with room
            for calls that are 20 % slower later, or more where rounds scatter more.
        quantile: Share of the calls that has to keep to a target, in (0, 1).
        time_budget_s: Seconds for the whole call. Memory takes at most about a third of them. A
            call that has begun is not stopped, and two sizes are measured however long they take.
        measure_memory: Whether to measure the memory of a Keras model. Without, and for
            functions, nothing guards against a batch that needs too much.
        memory_limit_bytes: As in `find_max_batch_size`.
        bulk_examples: Examples of a bulk call of "predict", which runs no larger batches.
        seed: Seed of the order within rounds.
        verbose: As in `find_max_batch_size`; the bar shows how much of the time is spent.

    Raises:
        InputError: If the model takes batches of one size only, `x` does not suit its inputs or
            is needed to know their shapes, a function returns nothing or keeps state, a call path
            or policy cannot be had, or a target is asked of "predict"; it says what to give.
        OutOfMemoryError: If not even the weights fit.
        TargetTooLow: If the target is below the latency of one example; it says what can be
            reached.
        TypeError: If `model` is no model or function, or a size or memory no integer.
        ValueError: If a size or a target is not positive, or a probability not in (0, 1).
    """
    paths = check_names(CALL_PATHS, call_paths=call_paths)
    functions = None if isinstance(model, keras.Model) else functions_by_name(model)
    if functions is not None and (paths != ("compiled",) or dtype_policies is not None):
        raise InputError(
            "`call_paths` and `dtype_policies` are for one keras.Model: leave them out beside "
            f"functions. Received: call_paths={paths}, dtype_policies={dtype_policies!r}."
        )
    if latency_slo_ms is not None:
        check_target(latency_slo_ms, quantile)
        latency_slo_ms = float(latency_slo_ms)
        if paths[0] == BULK_PATH:
            raise InputError(
                "A latency target is for batches that come one by one: name another call path "
                f"first. Received: call_paths[0]={BULK_PATH!r}, latency_slo_ms={latency_slo_ms}."
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
    models, changes, notes, classes, compared = {}, {}, (), {}, 0
    memory, runs = MemoryPass(), {}
    with progress, contextlib.ExitStack() as stack:
        if functions is None:
            stack.enter_context(kept_variables(model))  # Those that a first call made are kept too.
            models, changes, notes = variants_of(model, inputs, dtype_policies)
            most_s = _SHARE_TO_COMPARE * time_budget_s
            classes, compared = changed_classes(model, models, x, rows, most_s=most_s)
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
        around = latency_slo_ms is not None and batch_sizes is None
        timing = TimingPlan(left_s, needed_calls, block_s=_BLOCK_S)
        if latency_slo_ms is not None:
            timing = dataclasses.replace(timing, time_budget_s=_SHARE_BEFORE_CHECKS * left_s)
        if around:  # A guess is enough, since fresh calls verify the answer.
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
        first = next(iter(sweep.runs))  # It answers questions.
        for setting, warm_up in sweep.warm_up_all(sizes, larger, around_target=around):
            if latency_slo_ms is not None and setting == Setting(first, sizes[0]):
                check_reachable(sweep, setting, latency_slo_ms, quantile)
            examples, run = sweep.examples_per_call(setting), sweep.runs[setting.series]
            dependence.see(setting, warm_up.returned, examples=examples, run=run)
        sweep.run()
        profile = InferenceProfile(
            model_name=model.name
            if isinstance(model, keras.Model)
            else join_words(list(functions or ())),
            quantile=float(quantile),
            timings=sweep.records(dependence),
            memory=memory.records,
            memory_limit_bytes=memory.limit_bytes,
            output_changes=changes,
            class_changes=classes,
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
    """Measure the memory of predictions in a worker process that may die of it, until a time."""
    # TensorFlow reserves most of a GPU's memory once a model lies there, and leaves a worker none.
    why_here = "model on the GPU" if gpu_in_use() else None
    say(f"measuring memory in {'this process' if why_here else 'a worker process'}")
    data, policy = TrainingData(rows), global_policy()
    found = MemoryPass()
    for others, (name, model) in zip(range(len(models), 0, -1), models.items(), strict=True):
        part_ends_s = time.perf_counter() + (ends_s - time.perf_counter()) / others
        load = Workload(lambda model=model: model, data, policy, training=False)
        with open_probes(load, memory_limit_bytes=memory_limit_bytes, why_here=why_here) as probes:
            left_s = part_ends_s - time.perf_counter()  # After the start of the process.
            one = memory_pass(probes, sizes, dtype_policy=name, time_budget_s=left_s, say=say)
        found = MemoryPass(
            (*found.records, *one.records), one.limit_bytes, (*found.notes, *one.notes)
        )
    return found


class InferenceSweep(Sweep):
    """Call paths of models, one a policy, that are open for timing."""

    def __init__(
        self,
        # By call path and policy, or by the name of a function and None.
        runs: Mapping[tuple[str, str | None], Run],
        rows: Any,  # They are repeated into batches.
        memory: MemoryPass,
        timing: TimingPlan,
        *,
        bulk_examples: int,
        target_ms: float | None = None,  # Larger sizes than two are not timed if they take longer.
        **settings: Any,
    ):
        super().__init__(timing, **settings)
        self.runs, self._rows, self._memory = runs, rows, memory
        self._bulk_examples, self._target_ms = bulk_examples, target_ms

    def prepare(self, setting: Setting) -> Callable[[], Any]:
        """Make a batch, and the call of it."""
        batch = repeated(self._rows, self.examples_per_call(setting))
        run = self.runs[setting.series]
        return lambda: run(batch, setting.size)

    def refusal(self, setting: Setting) -> Note | None:
        """Return why a batch is too large for a bulk call, or for the memory."""
        most = self._bulk_examples
        if is_bulk(*setting.series) and setting.size > most:
            return Note.of("beyond_bulk_call", examples=most)
        return self._memory.refusal(setting.series[1], setting.size)

    def shares(self, setting: Setting) -> float:
        """Return how many batches a call has."""
        return self.examples_per_call(setting) / setting.size

    def target_s(self, setting: Setting) -> float:
        """Return the target; infinite for a bulk call, whose batches nobody waits for."""
        if self._target_ms is None or is_bulk(*setting.series):
            return math.inf
        return self._target_ms / 1000

    def examples_per_call(self, setting: Setting) -> int:
        """Return how many examples a call has: a bulk call has as many whatever the batch."""
        return self._bulk_examples if is_bulk(*setting.series) else setting.size

    def warm_up_all(
        self, sizes: Sequence[int], larger: Sequence[int], *, around_target: bool = False
    ) -> Iterator[tuple[Setting, WarmUp]]:
        """Warm all settings up, small sizes first, and yield each."""
        first, *others = self.runs  # It answers questions, whatever the time leaves to the others.
        yield from self.warm_up(Setting(first, size) for size in sizes)
        if around_target:
            for size in self._around_target(first):
                setting = Setting(first, size)
                yield from self.warm_up([setting], slow_ends=False)
                if setting not in self.warm_ups or self.time_s(setting) > self.target_s(setting):
                    break  # One beyond the target is enough.
        yield from self.warm_up(Setting(one, size) for size in sizes for one in others)
        for series in self.runs:
            most = self._memory.largest_sure(series[1])
            if Setting(series, sizes[-1]) in self.warm_ups:
                yield from self.extend(series, (size for size in larger if size <= most))

    def _around_target(self, series: Any) -> tuple[int, ...]:
        """Return the powers of two between the last size within the target and the next one."""
        keep = [s.size for s in self.timed(series) if self.time_s(s) <= self.target_s(s)]
        miss = [s.size for s in self.tried(series) if keep and s.size > keep[-1]]
        return powers_of_two(keep[-1], miss[0])[1:-1] if miss else ()

    def records(self, dependence: BatchDependence) -> tuple[TimingRecord, ...]:
        """Return what was timed of each series and size, or why it was not."""
        settings = itertools.chain.from_iterable(map(self.tried, self.runs))
        return tuple(self._record(setting, dependence) for setting in settings)

    def _record(self, setting: Setting, dependence: BatchDependence) -> TimingRecord:
        (path, policy), timing = setting.series, self.timing_of(setting)
        blocks = [] if setting in self.not_run else self.blocks[setting]
        durations_s = list(itertools.chain.from_iterable(blocks))
        # Any of them is as likely: the first call of a block is slower than the others, and slow
        # blocks have fewer calls.
        most = max(_KEPT_CALLS * len(blocks), self.timing.needed_calls)
        kept = random.Random(0).sample(range(len(durations_s)), min(most, len(durations_s)))
        return TimingRecord(
            **timing,
            call_path=path,
            dtype_policy=policy,
            latencies_s=tuple(round(durations_s[place], 9) for place in sorted(kept)),
            size_effect=dependence.found.get(setting),
        )
