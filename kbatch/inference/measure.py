"""How batch size affects a model's latency, throughput and memory when it predicts."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, powers_of_two
from kbatch.analysis.intervals import calls_for_quantile
from kbatch.device.environment import read_environment
from kbatch.device.gpu_monitor import NEVER_S, GpuMonitor
from kbatch.device.memory import check_memory_limit
from kbatch.document.numbers import counted, memory_text, readable
from kbatch.errors import InputError
from kbatch.inference import BULK_EXAMPLES, TIME_BUDGET_S
from kbatch.inference.answers import check_target
from kbatch.inference.call_paths import CallPath, call_paths_of, check_functions
from kbatch.inference.inputs import InferenceInputs, check_inputs, inference_inputs
from kbatch.inference.memory import measure_memory, probing_place
from kbatch.inference.profile import InferenceProfile
from kbatch.inference.record import BULK_PATH, OutputChange, TwinRecord
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


class InferenceRequest(NamedTuple):
    """What to measure.

    Attributes:
        paths: The call paths.
        plan: Sizes, and when each has been timed enough.
        target_ms: A latency target in milliseconds, None for none.
        quantile: Share of the calls that has to keep to it, in (0, 1).
        time_budget_s: Seconds for timing, and again for the memory of each policy.
        memory_limit_bytes: Memory that may be taken, None for what there is.
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
    target_ms = None if latency_slo_ms is None else _target_ms(latency_slo_ms, quantile, paths)
    needed_calls = calls_for_quantile(quantile)
    budget_s = _budget_s(time_budget_s)
    return InferenceRequest(
        paths,
        _plan(
            batch_sizes,
            target_ms,
            time_budget_s=budget_s,
            needed_calls=needed_calls,
            bulk_examples=check_size(bulk_examples, "bulk_examples"),
        ),
        target_ms,
        float(quantile),
        budget_s,
        check_memory_limit(memory_limit_bytes),
    )


def _target_ms(latency_slo_ms: float, quantile: float, paths: tuple[CallPath, ...]) -> float:
    check_target(latency_slo_ms, quantile)
    if paths[0].name == BULK_PATH:
        raise InputError(
            "A latency target is for batches that come one by one: name another call path "
            f"first. Received: call_paths[0]={BULK_PATH!r}, latency_slo_ms={latency_slo_ms}."
        )
    return float(latency_slo_ms)


def _budget_s(time_budget_s: float) -> float:
    if not isinstance(time_budget_s, numbers.Real) or not 0 < time_budget_s < math.inf:
        raise InputError(
            "`time_budget_s` must be positive, in seconds. "
            f"Received: time_budget_s={time_budget_s!r}."
        )
    return float(time_budget_s)


def _plan(
    batch_sizes: Iterable[int] | None,
    target_ms: float | None,
    *,
    time_budget_s: float,
    needed_calls: int,
    bulk_examples: int,
) -> SweepPlan:
    chosen = batch_sizes is not None
    sizes = check_batch_sizes(batch_sizes) if chosen else powers_of_two(1, _LARGEST_DEFAULT)
    share = 1.0 if target_ms is None else _SHARE_BEFORE_CHECKS
    timing = TimingPlan(time_budget_s=share * time_budget_s, needed_calls=needed_calls)
    if not chosen and target_ms is not None:
        sizes = sizes[::_STEP_WITH_TARGET]
        timing = dataclasses.replace(timing, rounds_beyond=0)
    end_above_s = None if target_ms is None else target_ms / 1000
    goes_on = not chosen and target_ms is None
    larger = powers_of_two(2 * _LARGEST_DEFAULT, _LARGEST) if goes_on else ()
    return SweepPlan(sizes, chosen, end_above_s, bulk_examples, timing, larger)


Progress = Callable[[str], None]


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
        models, notes = _models(model, dtype_policies, request.paths)
        changes, uncompared = _output_changes(model, models, inputs)
        memory = MemoryPass((), 0, ())
        if measure_memory:
            memory = _memory(models, inputs, request, say)
        with InferenceSweep(models, request.paths, inputs, request.plan, seed=seed) as sweep:
            with GpuMonitor(interval_s=NEVER_S) as monitor:
                twin = _time_all(sweep, memory, request, say, monitor.sample_clock_mhz)
            profile = InferenceProfile(
                model_name=model.name,
                quantile=request.quantile,
                timings=sweep.records(),
                memory=memory.records,
                memory_limit_bytes=memory.limit_bytes or None,
                output_changes=changes,
                twin=twin,
                notes=_unique(inputs.note, *notes, uncompared, *memory.notes),
                environment=read_environment(),
                gpus=monitor.gpus or (),
            )
            if request.target_ms is None:
                return profile
            return verify_target(
                profile,
                sweep,
                target_ms=request.target_ms,
                quantile=request.quantile,
                time_budget_s=request.time_budget_s,
                say=say,
            )


def _ready(model: keras.Model, x: Any) -> InferenceInputs:
    inputs = inference_inputs(model, x)
    check_inputs(model, inputs)
    if not model.built or not getattr(model, "inputs", None):
        outputs_of(model, inputs.batch(1))  # A subclass has its weights after a first call.
    return inputs


def _models(
    model: keras.Model, dtype_policies: Any, paths: Sequence[CallPath]
) -> tuple[dict[str, Any], list[str]]:
    """Return the model under each policy under which it can be had, and notes on the others."""
    own = policy_of(model)
    names = (own,) if dtype_policies is None else check_variants(dtype_policies)
    check_functions(paths, names, own=own)
    models: dict[str, Any] = {}
    notes: list[str] = []
    for name in names:
        try:
            models[name] = variant(model, name)
        except NoVariant as reason:
            notes.append(f"Not measured under {name}: {reason}")
    if not models:
        raise InputError(
            "The model can be had under none of the policies: leave `dtype_policies` out to "
            f"measure it as it is. {' '.join(notes)} Received: dtype_policies={names}."
        )
    if INT8 in models and (note := quantised_note(models[INT8])):
        notes.append(note)
    return models, notes


def _output_changes(
    model: keras.Model, models: dict[str, Any], inputs: InferenceInputs
) -> tuple[tuple[OutputChange, ...], str | None]:
    """Compare outputs with those in float32; a note where there is nothing to compare with."""
    if set(models) == {"float32"}:
        return (), None
    try:
        reference = variant(model, "float32")
    except NoVariant as reason:
        return (), f"Outputs are not compared with float32: {reason}"
    rows, count = inputs.rows, len(keras.tree.flatten(inputs.rows)[0])
    expected = outputs_of(reference, rows)
    changes = tuple(
        output_change(outputs_of(one, rows), expected, name, examples=count)
        for name, one in models.items()
        if name != "float32"
    )
    return changes, None


def _memory(
    models: dict[str, Any],
    inputs: InferenceInputs,
    request: InferenceRequest,
    say: Progress,
) -> MemoryPass:
    say(f"measuring memory in {probing_place()}")
    passes = [
        measure_memory(
            model,
            inputs,
            request.plan.batch_sizes,
            dtype_policy=policy,
            memory_limit_bytes=request.memory_limit_bytes,
            time_budget_s=request.time_budget_s,
            on_probe=functools.partial(_say_memory, say),
        )
        for policy, model in models.items()
    ]
    records = tuple(record for one in passes for record in one.records)
    notes = tuple(note for one in passes for note in one.notes)
    return MemoryPass(records, passes[0].limit_bytes, notes)


def _time_all(
    sweep: InferenceSweep,
    memory: MemoryPass,
    request: InferenceRequest,
    say: Progress,
    clock_mhz: Callable[[], float | None],
) -> TwinRecord | None:
    """Warm all settings up and times them in rounds; gives the A/A test."""
    budget_s = request.plan.timing.time_budget_s

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
    return sweep.run(
        lambda number, live: say(
            f"round {number}: {counted(live, 'setting')} to go on, "
            f"{sweep.rounds.spent_s:.0f} of at most {budget_s:.0f} s"
        ),
        clock_mhz=clock_mhz,
    )


def _say_memory(say: Progress, record: MemoryRecord) -> None:
    found = record.reason or "out of memory"
    if record.peak_bytes is not None:
        found = memory_text(record.peak_bytes)
    say(f"memory of batch {record.batch_size} under {record.dtype_policy}: {found}")


def _unique(*notes: str | None) -> tuple[str, ...]:
    kept: Sequence[str] = [note for note in notes if note]
    return tuple(dict.fromkeys(kept))
