"""Make the plan of a search, once before its first trial.

A plan holds what all training runs have in common: the dtype policy, the micro-batch size, and how
long a train step takes. kbatch measures it on models that it builds for this purpose.
"""

import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import keras
import keras_tuner
import tensorflow as tf

from kbatch.analysis.batch_sizes import equal_parts
from kbatch.device.failures import device_is_lost, failure_text, ran_out_of_memory
from kbatch.device.memory import gpu_visible
from kbatch.errors import (
    DataEnded,
    DeviceLostError,
    InputError,
    OutOfMemoryError,
    PolicyUnsupported,
    RecordError,
)
from kbatch.library_internals import model_supports_jit
from kbatch.memory.probe import MaxBatchExperiment, open_probes
from kbatch.memory.search import MEMORY_WINDOW, expected_bytes
from kbatch.memory.workload import Workload
from kbatch.page.numbers import format_number
from kbatch.records.notes import Note
from kbatch.records.training_run import Plan
from kbatch.search.first_updates import FIRST_ROWS, TIMED_ROWS, TOO_SLOW, Updates, check_float16
from kbatch.training.accumulation.parts_check import parts_note, rows_to_compare
from kbatch.training.data.training_data import TrainingData
from kbatch.training.dtype_policy import HALF
from kbatch.training.fingerprint import model_fingerprint
from kbatch.training.model import ModelFacts, is_compiled, limit_xla, replica_count, uninstall_step
from kbatch.training.state import kept_seeds
from kbatch.training.steps_per_execution import Steps, Training, steps_within, why_single_step

ON_POLICY = ("float32_instead", "half_slower", "compiled_by_xla")  # Notes that a new plan keeps.
MOMENTS_EVERY = 8  # A trial measures the moments of its gradients in every eighth update.
# If the largest batch is expected to take at most this share of the memory limit, it is not tried
# in another process. The share is small, because a peak may be twice as high as expected.
_SURE_SHARE = 0.25

# Seconds outside the train steps, on two idle cores of a server: building a model and writing its
# files, once per training run; callbacks and the start of a validation, once per epoch.
_PER_RUN_S, _PER_EPOCH_S = 0.07, 0.015
_VALIDATION_SHARE = 1 / 3  # Of the time of a train step. The backward pass takes the other 2 / 3.

# Limits of XLA on a net with `_SMALL_NET` trainable weights: the largest share of the step time
# that XLA saves, and the least seconds to compile one shape, in proportion to the weights.
_MOST_SAVED, _LEAST_COMPILE_S, _SMALL_NET = 0.75, 0.6, 10
_TRIED_SHAPES = 4  # Timing steps with and without XLA takes as long as compiling four shapes.
_XLA_ROUNDS = 3  # Rounds in which steps are timed with and without XLA, in turns.
_NOTED_RATIO = 1.1  # If float16 takes this many times as long as float32, a note says so.

Build = Callable[[str], keras.Model]  # Builds a new model under a dtype policy.


def make_plan(
    build: Build,
    data: TrainingData,
    hypermodel: Any,
    *,
    build_elsewhere: Build,
    batch_size: int,
    known: Plan | None = None,
) -> Plan:
    """Make the plan of a search, or change it for larger batch sizes.

    If a model works only for batches of `batch_size`, kbatch measures only such batches. With the
    resulting plan, each trial trains and validates on whole batches.

    Args:
        build: Function that builds a model under a dtype policy.
        data: The training data.
        hypermodel: The `BatchSizeHyperModel` of the search, whose settings decide the plan.
        build_elsewhere: The same as `build`, but can be pickled for another process.
        batch_size: The batch size that `build` builds for, in examples.
        known: The plan before larger batch sizes were added. Its policy stays. Default: None.
    """
    measure = functools.partial(_measured_plan, build, data, hypermodel, build_elsewhere, known)
    try:
        return measure(None)
    except Exception as error:  # A model for one batch size may raise anything.
        other_cause = not may_be_from_float16(error) or isinstance(error, PolicyUnsupported)
        if other_cause or isinstance(hypermodel.micro_batch_size, int):
            raise
        try:
            return measure(batch_size)
        except Exception:  # The batch size was not the cause.
            raise error from None


def _measured_plan(
    build: Build,
    data: TrainingData,
    hypermodel: Any,
    build_elsewhere: Build,
    known: Plan | None,
    only_rows: int | None,
) -> Plan:
    began_at, began_s = time.time(), time.perf_counter()
    model_of = functools.cache(build)

    @functools.cache
    def updates_of(policy: str) -> Updates:
        model = model_of(policy)
        counted = only_rows is None and _chooses_steps(model, hypermodel)
        return Updates(model, data, counted=counted, only_rows=only_rows)

    with kept_seeds():  # Training then draws the same random numbers as without a plan.
        policy, notes = _policy(updates_of, model_of, hypermodel, known)
        # If the policy is a hyperparameter, only the first policy is measured.
        model = model_of(policy or hypermodel.dtype_policies[0])
        updates = functools.partial(updates_of, model.dtype_policy.name)
        facts, asked = ModelFacts(model), hypermodel.micro_batch_size
        if not isinstance(asked, int):
            only_rows = only_rows or facts.declared_rows
        if facts.cut_by_user is not None:
            most, reason = facts.cut_by_user.micro_batch_size, "given"
        elif only_rows is not None:
            updates().step_s(only_rows)
            most, reason = None, "whole"
        elif asked == "auto":
            most, reason, note = _most_that_fit(updates(), facts, hypermodel, build_elsewhere)
            notes += (note,) if note else ()
        else:
            most, reason = (None, "own_step") if facts.own_step else (asked, "given")
        plan = Plan(
            number=1 if known is None else known.number + 1,
            dtype_policy=policy,
            micro_batch_size=most,
            reason=reason,
            largest_batch_size=hypermodel.batch_sizes[-1],
            model=model_fingerprint(model),
            notes=notes,
            jit_compile=None if known is None else known.jit_compile,
            step_s=None if only_rows else _step_s(updates, model, most, hypermodel),
        )
        size = micro_batch_size(plan, facts, plan.largest_batch_size)
        if is_cut(facts, size, plan.largest_batch_size):
            note = compare_parts(model, data, size)
            plan = dataclasses.replace(plan, parts_equal=note is None, parts_note=note)
    took_s = time.perf_counter() - began_s
    return dataclasses.replace(plan, began_at=began_at, duration_s=took_s)


def choose_xla(
    plan: Plan,
    model: Any,
    data: TrainingData,
    batch_sizes: Sequence[int],
    expected_s: Callable[[Plan], float],
    *,
    shapes: float,
    left_s: float | None,
) -> Plan:
    """Let XLA compile the steps of a search if that saves time, and return the plan that says so.

    Args:
        plan: A plan with a step time.
        model: A model for this plan. If XLA is chosen, its steps are compiled afterwards.
        data: The training data.
        batch_sizes: The batch sizes of the search, in examples, ascending.
        expected_s: Function of a plan that returns the seconds of all train steps of the search.
        shapes: Number of shapes that XLA would compile, including those that are timed here.
        left_s: Seconds that are left to the search. If None, it has no limit.
    """
    began_s, plain_s = time.perf_counter(), expected_s(plan)
    share = 1.0 if left_s is None else min(1.0, left_s / plain_s)
    most = min(plan.micro_batch_size or batch_sizes[-1], batch_sizes[-1])
    sizes = sorted({min(batch_sizes[0], most), most})
    least_s = _LEAST_COMPILE_S * shapes * max(1.0, len(model.trainable_weights) / _SMALL_NET)
    saved_s, tried_s = _MOST_SAVED * share * plain_s, _TRIED_SHAPES * least_s / shapes
    # The expected gain, if XLA saves U seconds, uniform in [0, saved_s], and compiles only if U is
    # larger than least_s: the mean of max(U - least_s, 0).
    gain_s = (saved_s - least_s) ** 2 / (2 * saved_s) if saved_s > least_s else 0.0
    compiled: Plan | None = None
    if gain_s > tried_s and model_supports_jit(model):
        before = vars(model).get("train_step"), model.train_function
        try:
            limit_xla(model, True)
            plain = Updates(model, data, counted=True, compiled=False)
            by_xla = Updates(model, data, counted=True)
            for rows in sizes:
                for _ in range(_XLA_ROUNDS):
                    plain.step_s(rows)
                    by_xla.step_s(rows)
                gain = 1 - by_xla.seconds[rows] / plain.seconds[rows]
                # About half of the seconds of the first step are tracing, the rest is compiling.
                least_s = max(least_s, (shapes - 1) * by_xla.first_s[rows] / 2)
                if rows < most and gain * share * plain_s < least_s:
                    break
            else:
                jitted = dataclasses.replace(plan, step_s=_line(by_xla.seconds), jit_compile=True)
                plain_s = expected_s(dataclasses.replace(plan, step_s=_line(plain.seconds)))
                xla_s, compile_s = expected_s(jitted), (shapes - len(sizes)) * by_xla.first_s[most]
                if share * (plain_s - xla_s) > compile_s:
                    note = Note.of("compiled_by_xla", speedup=format_number(plain_s / xla_s, 2))
                    compiled = dataclasses.replace(
                        jitted, compile_s=compile_s, notes=(*plan.notes, note)
                    )
        except DeviceLostError:
            raise
        except Exception:  # XLA cannot compile every model, and raises errors of many kinds.
            pass
        if compiled is None:  # Give the model its graph from before the timing.
            uninstall_step(model)
            if before[0] is not None:
                model.train_step = before[0]
            model.jit_compile, model.train_function = False, before[1]
    duration_s = plan.duration_s + time.perf_counter() - began_s
    plan = compiled or dataclasses.replace(plan, jit_compile=False)
    return dataclasses.replace(plan, duration_s=duration_s)


def outgrown(plan: Plan, hypermodel: Any) -> bool:
    """Return whether larger batch sizes have been added, which may not fit in memory."""
    larger = hypermodel.batch_sizes[-1] > plan.largest_batch_size
    return hypermodel.micro_batch_size == "auto" and larger and most_in_memory(plan) is None


def micro_batch_size(plan: Plan, facts: ModelFacts, batch_size: int) -> int:
    """Return the micro-batch size on one replica for a batch size, in examples."""
    rows, most = facts.rows(batch_size), plan.micro_batch_size
    if facts.cut_by_user is not None:
        return min(facts.cut_by_user.micro_batch_size, rows)
    if most is None or rows <= most or plan.reason == "own_step" or facts.own_step:
        return rows
    return most if plan.reason == "given" else equal_parts(rows, most)


def is_cut(facts: ModelFacts, size: int, batch_size: int) -> bool:
    """Return whether a batch is cut in a way that may change the training."""
    exact = facts.cut_by_user is not None and facts.cut_by_user.exact
    return size < facts.rows(batch_size) and not exact


def most_in_memory(plan: Plan) -> int | None:
    """Return the most examples that fit in memory at once, or None if the largest batch fits."""
    most = plan.micro_batch_size
    reached = plan.reason == "own_step" and most is not None and most < plan.largest_batch_size
    return most if reached or plan.reason == "cut" else None


def halved(plan: Plan, facts: ModelFacts, rows: int, size: int) -> Plan | None:
    """Return a plan with smaller micro-batches, after memory ran out in training.

    `rows` is the batch size on one replica, and `size` is its micro-batch size. If the user gave
    the micro-batch size, or single examples ran out of memory, return None.
    """
    whole = plan.reason == "own_step" or facts.own_step
    most, known = rows - 1 if whole else size // 2, plan.micro_batch_size
    if facts.cut_by_user is not None or plan.reason == "given" or known is None or most < 1:
        return None
    if known <= most:  # Another training run has already changed the plan.
        return plan
    number = plan.number + 1
    notes = tuple(note for note in plan.notes if note.code in ON_POLICY)
    if not whole:
        notes += (Note.of("memory_ran_out", before=size, after=most, plan=number),)
    return dataclasses.replace(
        plan,
        number=number,
        micro_batch_size=most,
        validation_batch_size=plan.validation_batch_size or known,
        reason=plan.reason if whole else "cut",
        notes=notes,
    )


def notes_on_size(plan: Plan, asked: Steps, model: Any, batch_size: int) -> tuple[Note, ...]:
    """Return the notes of a plan for one batch size. `asked` is the argument `micro_batch_size`.

    Raises:
        OutOfMemoryError: If batches of this size do not fit in memory and cannot be cut.
    """
    facts, most = ModelFacts(model), plan.micro_batch_size if asked == "auto" else asked
    whole = facts.cut_by_user is None and (plan.reason == "own_step" or facts.own_step)
    if not whole or not isinstance(most, int) or most >= facts.rows(batch_size):
        return plan.notes
    if asked != "auto":
        return (*plan.notes, Note.of("own_step_whole", size=most))
    rows = facts.rows(batch_size)
    # A changed plan has the size that ran out minus 1, and it is unknown whether that size fits.
    measured = plan.number == 1
    known = f"At most {most} examples fit" if measured else f"More than {most} examples do not fit"
    raise OutOfMemoryError(
        f"A batch of {rows} examples does not fit in memory, and kbatch cannot cut the batches of "
        f"a model with its own `train_step`. {known}: leave out larger `batch_sizes`, or call "
        f"`kbatch.accumulate_gradients(model, {most}, exact=True)` in the build function. "
        f"Received: model of class {type(model).__name__}.",
        examples=rows,
        fitting_examples=most if measured else None,
    )


def compare_parts(model: keras.Model, data: TrainingData, size: int) -> Note | None:
    """Return a note on how training on parts of this size differs from whole batches, or None."""
    try:
        with model.distribute_strategy.scope():
            data.build(model)
    except InputError:  # `fit` refuses most such data, and says what is missing.
        return Note.of("parts_not_compared", found="single rows cannot be taken out of the data")
    return parts_note(model, data.sample(rows_to_compare(size), model, fewest=1))


def loss_is_sum(model: Any, data: TrainingData) -> bool:
    """Return whether a loss sums over the rows of a batch, instead of averaging over them."""
    if type(model).train_step is not keras.Model.train_step or replica_count(model) > 1:
        return False
    try:
        rows = tf.data.Dataset.from_tensors(data.sample(8, model, fewest=1)).unbatch()
    except (InputError, DataEnded):  # `fit` says what is missing.
        return False
    logs = [model.evaluate(rows.batch(n), verbose=0, return_dict=True) for n in (2, 4, 8)]
    quarters, halves, whole = (log.get("loss", 0.0) for log in logs)
    # Compare differences, because a penalty on weights adds the same to all losses.
    grows = abs(whole - halves) > 1e-3 * abs(whole)
    return grows and math.isclose(whole - halves, 2 * (halves - quarters), rel_tol=1e-2)


def planned_steps(
    asked: Steps, plan: Plan, model: Any, training: Training
) -> tuple[int, tuple[Note, ...]]:
    """Return the steps per execution of a training run, and a note if kbatch cannot choose them."""
    built = int(model.steps_per_execution)
    if asked != "auto" or built > 1:  # A number that `build` sets is not changed.
        return (asked if isinstance(asked, int) and built == 1 else built), ()
    reason = why_single_step(model, training.callbacks)
    if reason is None:
        if training.epoch_steps is None or replica_count(model) > 1:
            return 1, ()
        if plan.step_s is not None:
            fixed_s, example_s = plan.step_s
            batch_size = training.batch_size
            parts = -(-batch_size // micro_batch_size(plan, ModelFacts(model), batch_size))
            return steps_within(parts * fixed_s + batch_size * example_s, training), ()
        reason = "no step could be timed separately from the data"
    return 1, (Note.of("one_step_an_execution", reason=reason),)


def expected_seconds(
    plan: Plan,
    batch_sizes: Sequence[int],
    *,
    epochs: int,
    examples: int,
    validated: int,
    steps_per_epoch: int | None,
) -> dict[int, tuple[float, float]]:
    """Return the expected seconds of the train steps and of a whole training run, by batch size.

    The plan must have a step time. `validated` is the number of validation examples.
    """
    assert plan.step_s is not None
    fixed_s, example_s = plan.step_s
    seconds = {}
    for size in batch_sizes:
        steps = steps_per_epoch or -(-examples // size)
        parts = -(-size // min(size, plan.micro_batch_size or size))
        trained = steps * size if steps_per_epoch else examples
        steps_s = epochs * (steps * parts * fixed_s + trained * example_s)
        others_s = _PER_RUN_S + epochs * (_PER_EPOCH_S + _VALIDATION_SHARE * validated * example_s)
        seconds[size] = steps_s, steps_s + others_s
    return seconds


def _policy(
    updates_of: Callable[[str], Updates], model_of: Build, hypermodel: Any, known: Plan | None
) -> tuple[str | None, tuple[Note, ...]]:
    """Choose the dtype policy of all trials: mixed_float16, unless a model cannot train under it.

    Return the policy, or None if it is a hyperparameter, and notes on the choice.
    """
    if policies := hypermodel.dtype_policies:
        return (policies[0] if len(policies) == 1 else None), ()
    if known is not None:
        return known.dtype_policy, tuple(note for note in known.notes if note.code in ON_POLICY)
    try:
        if replica_count(model_of(HALF)) > 1:
            raise PolicyUnsupported(
                "Keras checks only the first replica for overflows, and an overflow on another "
                "replica turns the weights into NaN"
            )
        full, timed = functools.partial(updates_of, "float32"), not gpu_visible()
        times = check_float16(updates_of(HALF), full, hypermodel.batch_sizes, timed=timed)
    except Exception as error:  # Layers, losses and `build` may raise anything under float16.
        if ran_out_of_memory(error, smaller_worked=True) and not device_is_lost(error):
            return HALF, ()  # A trial may fit, because it has one model and smaller micro-batches.
        if not may_be_from_float16(error):
            raise
        if not isinstance(error, PolicyUnsupported):
            try:
                updates_of("float32").step_s(FIRST_ROWS)
            except Exception:  # The policy was not the cause.
                raise error from None
        note = float32_note(failure_text(error))
        warnings.warn(note, stacklevel=2)
        return "float32", (note,)
    ratio = "" if times is None else f"{format_number(times, 2)} times as long"
    if times is not None and times > TOO_SLOW:
        return "float32", (float32_note(f"float16 updates take {ratio} on this processor"),)
    slow = Note.of("half_slower", policy=HALF, ratio=ratio)
    return HALF, (slow,) if (times or 0) >= _NOTED_RATIO else ()


def may_be_from_float16(error: BaseException) -> bool:
    """Return whether training may have failed with this error because it computes in float16."""
    others = (InputError, RecordError, DataEnded, keras_tuner.errors.FatalError)
    by_device = ran_out_of_memory(error, smaller_worked=True) or device_is_lost(error)
    return isinstance(error, Exception) and not (isinstance(error, others) or by_device)


def float32_note(reason: str) -> Note:
    """Return the note on why a search does not train under mixed_float16."""
    reason = reason.removeprefix("PolicyUnsupported: ").strip().rstrip(".")
    return Note.of("float32_instead", policy=HALF, reason=reason)


def _chooses_steps(model: Any, hypermodel: Any) -> bool:
    """Return whether kbatch may choose the steps per execution of a model."""
    single = int(model.steps_per_execution) == 1 and replica_count(model) == 1
    return hypermodel.steps_per_execution == "auto" and single and why_single_step(model) is None


def _step_s(
    updates: Callable[[], Updates], model: Any, most: int | None, hypermodel: Any
) -> tuple[float, float] | None:
    """Return the fixed seconds of a step and the seconds per example, or None if not needed."""
    if not _chooses_steps(model, hypermodel):
        return None
    try:
        # More rows may not fit, because nothing is cut yet.
        most, compiled = min(most or TIMED_ROWS, hypermodel.batch_sizes[-1]), is_compiled(model)
        # XLA compiles the two sizes for training too.
        ends = (hypermodel.batch_sizes[0], most) if compiled else (FIRST_ROWS, TIMED_ROWS)
        return timed_line(updates(), sorted({min(n, most) for n in ends}), compiled=compiled)
    except Exception:  # Training will raise it again, and the trial will record it.
        return None


# Rounds in which the sizes are timed again if the largest was not slower than the smallest.
_TIMED_AGAIN = 3


def timed_line(timed: Any, ends: Sequence[int], *, compiled: bool) -> tuple[float, float]:
    """Time updates, and return the seconds of a step without examples, and of each example."""
    for rows in ends:
        if rows not in timed.seconds:
            timed.step_s(rows)
    # Larger sizes that were timed before show the slope better, but XLA did not compile them all.
    sizes = ends if compiled else timed.seconds
    step_s = _line({rows: timed.seconds[rows] for rows in sizes})
    for _ in range(_TIMED_AGAIN):  # Other work on the machine may have slowed the smallest size.
        if step_s[1] == 0 and len(sizes) > 1:
            for rows in ends:
                timed.step_s(rows)
            step_s = _line({rows: timed.seconds[rows] for rows in sizes})
    return step_s


def _line(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Fit a line to step times by rows. Return the fixed seconds and the seconds per example."""
    (few, few_s), (many, many_s) = min(seconds.items()), max(seconds.items())
    example_s = max(0.0, many_s - few_s) / max(1, many - few)
    return max(0.0, few_s - few * example_s), example_s


def _most_that_fit(
    updates: Updates, facts: ModelFacts, hypermodel: Any, build_elsewhere: Build
) -> tuple[int, Literal["cut", "fits", "own_step"], Note | None]:
    """Return how many examples fit at once, the `reason` of the plan, and perhaps a note."""
    replicas, own_step = facts.replicas, facts.own_step
    rows = facts.rows(hypermodel.batch_sizes[-1])
    if _surely_fits(updates, rows, hypermodel.memory_limit_bytes):
        return rows, "own_step" if own_step else "fits", None
    policy = facts.dtype_policy
    workload = Workload(
        functools.partial(build_elsewhere, policy),
        updates.run.data,
        policy,
        accumulate_below=0 if own_step else rows,
        moments_every=MOMENTS_EVERY,
        replicas=replicas,
    )
    with open_probes(
        workload,
        memory_limit_bytes=hypermodel.memory_limit_bytes,
        model=lambda: updates.model,
        why_here=None if replicas == 1 else "replicas",
    ) as probes:
        # The answer is not confirmed: if memory runs out later, the plan is halved.
        experiment = MaxBatchExperiment(probes, MEMORY_WINDOW, rows)
        largest, _ = experiment.largest() or experiment.search()
    most = experiment.fitting(largest)
    if own_step or not experiment.is_bound(most) or most >= rows:
        return most, "own_step" if own_step else "fits", None
    shared = (f" {note}" for note in experiment.facts.notes if note.code == "gpu_shared")
    return most, "cut", Note.of("cut_to_fit", size=most, more=next(shared, ""))


def _surely_fits(updates: Updates, rows: int, limit_bytes: int | None) -> bool:
    """Return whether the peaks of small batches show that this number of rows surely fits."""
    facts, peaks = updates.run.facts(limit_bytes), dict[int, float]()
    most = _SURE_SHARE * facts.limit_bytes
    expected: float | None = 2 * facts.variables_bytes  # Gradients take at most as much again.
    few, many = min(FIRST_ROWS, rows), min(TIMED_ROWS, rows)
    for size, larger in ((few, many), (many, rows)):
        if expected is None or expected > most or (peak := updates.peak_bytes(size)) is None:
            return False
        # XLA does not compile the smallest batch, so its peak shows nothing about compiled steps.
        peaks = {size: peak} if is_compiled(updates.model) else peaks | {size: peak}
        expected = expected_bytes(peaks, larger, facts.held_bytes)
    return expected is not None and expected <= most
