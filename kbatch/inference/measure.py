"""How batch size affects a model's latency, throughput and memory when it predicts."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, powers_of_two
from kbatch.analysis.intervals import calls_for_quantile
from kbatch.device.environment import read_environment
from kbatch.device.gpu_monitor import NEVER_S, GpuMonitor
from kbatch.device.memory import check_memory_limit, gpu_in_use
from kbatch.document.numbers import counted, memory_text, readable
from kbatch.errors import InputError
from kbatch.inference import BULK_EXAMPLES, TIME_BUDGET_S
from kbatch.inference.answers import check_target
from kbatch.inference.call_paths import CallPath, call_paths_of, check_functions
from kbatch.inference.inputs import InferenceInputs, check_inputs, inference_inputs
from kbatch.inference.memory import measure_memory
from kbatch.inference.profile import InferenceProfile
from kbatch.inference.record import BULK_PATH, OutputChange
from kbatch.inference.sweep import InferenceSweep, Setting, SweepPlan
from kbatch.inference.variants import (
    INT8,
    check_variants,
    output_change,
    outputs_of,
    policy_of,
    quantised_note,
    variant,
)
from kbatch.inference.verify import check_reachable, verify_target
from kbatch.memory.curve import MemoryPass
from kbatch.memory.record import MemoryRecord
from kbatch.timing.rounds import TimingPlan, WarmUp
from kbatch.training.dtype_policy import NoVariant
from kbatch.training.state import kept_variables

_LARGEST_DEFAULT = 4096
# Where throughput still grows there and nobody waits for a batch, sizes go on up to this one.
_LARGEST = 65536
# Share of the time budget for the rounds where an answer is verified afterwards.
_SHARE_BEFORE_CHECKS = 0.6
# Default sizes with a target: every third power of two, each timed for a few rounds, since fresh
# calls verify the answer.
_STEP_WITH_TARGET = 3

Progress = Callable[[str], None]


class InferenceRequest(NamedTuple):
    """What to measure: sizes and times in the plan, and what it does not hold.

    The time budget, in seconds, is for timing, and again for the memory of each policy.
    """

    paths: tuple[CallPath, ...]
    plan: SweepPlan
    target_ms: float | None
    quantile: float
    time_budget_s: float
    memory_limit_bytes: int | None


def inference_request(
    model: Any,
    *,
    batch_sizes: Iterable[int] | None,
    call_paths: "str | Callable[..., Any] | Iterable[Any]",
    latency_slo_ms: float | None,
    quantile: float,
    time_budget_s: float,
    bulk_examples: int,
    memory_limit_bytes: int | None,
) -> InferenceRequest:
    """Check the arguments of `kbatch.profile_inference`, and take and raises what that does."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`model` must be a keras.Model: build or load it first "
            f"(`keras.saving.load_model`). Received: model of type {type(model).__name__}."
        )
    paths = call_paths_of(call_paths)
    if latency_slo_ms is not None:
        check_target(latency_slo_ms, quantile)
        if paths[0].name == BULK_PATH:
            raise InputError(
                "A latency target is for batches that come one by one: name another call path "
                f"first. Received: call_paths[0]={BULK_PATH!r}, latency_slo_ms={latency_slo_ms}."
            )
    needed_calls = calls_for_quantile(quantile)
    if not isinstance(time_budget_s, numbers.Real) or not 0 < time_budget_s < math.inf:
        raise InputError(
            "`time_budget_s` must be positive, in seconds. "
            f"Received: time_budget_s={time_budget_s!r}."
        )
    target_ms = None if latency_slo_ms is None else float(latency_slo_ms)
    timing = TimingPlan(time_budget_s=float(time_budget_s), needed_calls=needed_calls)
    return InferenceRequest(
        paths,
        _plan(batch_sizes, target_ms, timing, check_size(bulk_examples, "bulk_examples")),
        target_ms,
        float(quantile),
        float(time_budget_s),
        check_memory_limit(memory_limit_bytes),
    )


def _plan(
    batch_sizes: Iterable[int] | None,
    target_ms: float | None,
    timing: TimingPlan,
    bulk_examples: int,
) -> SweepPlan:
    chosen = batch_sizes is not None
    sizes = check_batch_sizes(batch_sizes) if chosen else powers_of_two(1, _LARGEST_DEFAULT)
    if target_ms is None:
        larger = () if chosen else powers_of_two(2 * _LARGEST_DEFAULT, _LARGEST)
        return SweepPlan(sizes, chosen, None, bulk_examples, timing, larger)
    share_s = _SHARE_BEFORE_CHECKS * timing.time_budget_s
    timing = dataclasses.replace(timing, time_budget_s=share_s)
    if not chosen:
        sizes = sizes[::_STEP_WITH_TARGET]
        timing = dataclasses.replace(timing, rounds_beyond=0)
    return SweepPlan(sizes, chosen, target_ms / 1000, bulk_examples, timing)


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
    on_progress: Progress | None = None,
) -> InferenceProfile:
    """Measure latency, throughput and memory of predictions by batch size.

    Batch sizes, call paths and policies take turns in shuffled rounds, so that a machine that
    drifts slows all alike, and the first call of each is kept apart. A setting has been timed
    enough when its 95 % interval is within 5 % of the median and the calls that the quantile needs
    were made, or 30 rounds later. Memory is measured before, in a worker process that may die of
    it, and a batch that is expected to need over 80 % of it is not run. A GPU that holds the model
    leaves no room to a worker: its memory is measured in this process, and a note says so.

    Example:

    >>> profile = kbatch.profile_inference(model, x, latency_slo_ms=20)
    >>> profile.batch_for(latency_ms=20).batch_size, profile.knee.batch_size

    Args:
        model: A Keras model, compiled or not. It stays as it is.
        x: Inputs: arrays of shape (examples, ...), nested as the model takes them, or a
            `tf.data.Dataset`; up to 64 rows are used, repeated into batches. None for random
            inputs of the model's input shapes.
        batch_sizes: Sizes in ascending order. None for powers of two as far as memory and time
            allow, up to 4096, and on to 65536 while throughput still grows and the measured memory
            says that they fit. None with a target is the quickest way to an answer: powers of eight
            up to the target, and few and short rounds; give sizes for a fuller picture.
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
        memory_limit_bytes: Memory that may be taken. None for what TensorFlow has of the GPU, on
            a CPU half of what the host and its control group leave.
        bulk_examples: Examples of a bulk call of "predict", which runs no larger batches.
        seed: Seed of the order within rounds.
        on_progress: Receives lines that tell what happens.

    Returns:
        The profile.

    Raises:
        InputError: If the model takes batches of one size only, `x` does not suit its inputs or
            is missing where their shapes do not tell it, a call path is unknown, has the name of
            one of kbatch's own or cannot run the model, functions are to run under other policies,
            a target is asked of "predict", or no policy can be had; it says what to give.
        OutOfMemoryError: If not even the weights fit.
        TargetTooLow: If the target is below the latency of one example; it says what can be
            reached.
        TypeError: If `model` is no Keras model, or a size or memory no integer.
        ValueError: If a size or a target is not positive, or a probability not in (0, 1).
    """
    request = inference_request(
        model,
        batch_sizes=batch_sizes,
        call_paths=call_paths,
        latency_slo_ms=latency_slo_ms,
        quantile=quantile,
        time_budget_s=time_budget_s,
        bulk_examples=bulk_examples,
        memory_limit_bytes=memory_limit_bytes,
    )
    say = on_progress or (lambda line: None)
    with kept_variables(model):
        inputs = _ready(model, x)
    with kept_variables(model):
        prepared = _prepare(model, inputs, dtype_policies, request)
        memory = MemoryPass((), 0, ())
        if measure_memory:
            memory = _measure_memory(prepared, say)
        models, plan = prepared.models, request.plan
        with InferenceSweep(models, request.paths, inputs, plan, seed=seed) as sweep:
            with GpuMonitor(interval_s=NEVER_S) as monitor:
                _warm_up(prepared, sweep, memory, say)
                twin = sweep.run(
                    lambda number, live: say(
                        f"round {number}: {counted(live, 'setting')} to go on, "
                        f"{sweep.rounds.spent_s:.0f} of at most {plan.timing.time_budget_s:.0f} s"
                    ),
                    clock_mhz=monitor.sample_clock_mhz,
                )
            profile = InferenceProfile(
                model_name=model.name,
                quantile=request.quantile,
                timings=sweep.records(),
                memory=memory.records,
                memory_limit_bytes=memory.limit_bytes or None,
                output_changes=prepared.output_changes,
                twin=twin,
                notes=tuple(dict.fromkeys((*prepared.notes, *memory.notes))),
                environment=read_environment(),
                gpus=monitor.gpus or (),
            )
            if request.target_ms is None:
                return profile
            return verify_target(
                profile,
                sweep,
                target_ms=request.target_ms,
                time_budget_s=request.time_budget_s,
                say=say,
            )


def _ready(model: keras.Model, x: Any) -> InferenceInputs:
    inputs = inference_inputs(model, x)
    check_inputs(model, inputs)
    if not model.built or not getattr(model, "inputs", None):
        outputs_of(model, inputs.batch(1))  # A subclass has its weights after a first call.
    return inputs


class _Prepared(NamedTuple):
    """What each step of the experiment works with; the models are by policy."""

    request: InferenceRequest
    inputs: InferenceInputs
    models: dict[str, Any]
    output_changes: tuple[OutputChange, ...]
    notes: tuple[str, ...]


def _prepare(
    model: keras.Model, inputs: InferenceInputs, dtype_policies: Any, request: InferenceRequest
) -> _Prepared:
    """Take the model under each policy under which it can be had, with notes on the others."""
    own = policy_of(model)
    names = (own,) if dtype_policies is None else check_variants(dtype_policies)
    check_functions(request.paths, names, own=own)
    models: dict[str, Any] = {}
    notes: list[str | None] = []
    for name in names:
        try:
            models[name] = variant(model, name)
        except NoVariant as reason:
            notes.append(f"Not measured under {name}: {reason}")
    if not models:
        raise InputError(
            "The model can be had under none of the policies: leave `dtype_policies` out to "
            f"measure it as it is. {' '.join(filter(None, notes))} "
            f"Received: dtype_policies={names}."
        )
    if INT8 in models:
        notes.append(quantised_note(models[INT8]))
    changes: tuple[OutputChange, ...] = ()
    if set(models) != {"float32"}:
        try:
            changes = _output_changes(variant(model, "float32"), models, inputs.rows)
        except NoVariant as reason:
            notes.append(f"Outputs are not compared with float32: {reason}")
    return _Prepared(request, inputs, models, changes, tuple(filter(None, (inputs.note, *notes))))


def _output_changes(
    reference: keras.Model, models: dict[str, Any], rows: Any
) -> tuple[OutputChange, ...]:
    expected, examples = outputs_of(reference, rows), len(keras.tree.flatten(rows)[0])
    return tuple(
        output_change(outputs_of(one, rows), expected, name, examples=examples)
        for name, one in models.items()
        if name != "float32"
    )


def _measure_memory(prepared: _Prepared, say: Progress) -> MemoryPass:
    def on_probe(record: MemoryRecord) -> None:
        found = record.reason or "out of memory"
        if record.peak_bytes is not None:
            found = memory_text(record.peak_bytes)
        say(f"memory of batch {record.batch_size} under {record.dtype_policy}: {found}")

    place = "this process, which holds the GPU" if gpu_in_use() else "a worker process"
    say(f"measuring memory in {place}")
    passes = [
        measure_memory(
            model,
            prepared.inputs,
            prepared.request.plan.batch_sizes,
            dtype_policy=policy,
            memory_limit_bytes=prepared.request.memory_limit_bytes,
            time_budget_s=prepared.request.time_budget_s,
            on_probe=on_probe,
        )
        for policy, model in prepared.models.items()
    ]
    records = tuple(record for one in passes for record in one.records)
    notes = tuple(note for one in passes for note in one.notes)
    return MemoryPass(records, passes[0].limit_bytes, notes)


def _warm_up(prepared: _Prepared, sweep: InferenceSweep, memory: MemoryPass, say: Progress) -> None:
    """Warm all settings up, and refuse at once a target far below what the smallest batch takes."""
    request = prepared.request

    def on_setting(setting: Setting, warm_up: WarmUp | None) -> None:
        name = f"{setting.call_path} under {setting.dtype_policy}, batch {setting.batch_size}"
        if warm_up is None:
            say(f"{name}: out of memory")
            return
        say(f"{name}: {readable(1000 * warm_up.call_s)} ms after warming up")
        smallest = setting.batch_size == request.plan.batch_sizes[0]
        if request.target_ms is not None and smallest and setting[:2] == sweep.first_series:
            check_reachable(sweep, setting, target_ms=request.target_ms, quantile=request.quantile)

    by_size = {(record.dtype_policy, record.batch_size): record for record in memory.records}
    sweep.warm_up(by_size, on_setting, memory_limit_bytes=memory.limit_bytes)
