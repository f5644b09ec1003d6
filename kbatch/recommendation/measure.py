"""Measure the limits of the batch size, one after the other, within a time budget."""

import contextlib
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import keras_tuner
import numpy as np
import tensorflow as tf

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, powers_of_two
from kbatch.analysis.noise_scale import MOMENT_METRICS
from kbatch.device.failures import MEMORY_ERRORS, ran_out_of_memory, refusal
from kbatch.device.machine import read_environment
from kbatch.device.memory import check_memory_limit
from kbatch.errors import DataEnded, InputError
from kbatch.input_pipeline.measure import profile_input_pipeline
from kbatch.input_pipeline.result import InputPipelineProfile
from kbatch.library_internals import rate_of
from kbatch.memory.find import MemoryPass, memory_pass
from kbatch.memory.probe import no_example_fits, open_probes
from kbatch.memory.search import MEMORY_WINDOW
from kbatch.memory.workload import Workload
from kbatch.page.numbers import format_number, pluralize
from kbatch.progress import MeasuringProgress
from kbatch.recommendation import BUDGET_S
from kbatch.recommendation.result import (
    LIMIT_NAMES,
    Limit,
    PilotRecord,
    Recommendation,
    most_at_once,
    useful_stretches,
)
from kbatch.records.notes import Note
from kbatch.search import BASE_BATCH_SIZE
from kbatch.throughput.measure import timed_updates
from kbatch.throughput.result import fastest_ways
from kbatch.timing import TimingPlan, check_seconds
from kbatch.training.accumulation import Accumulation, sum_sparse_gradients
from kbatch.training.accumulation.parts_check import parts_note, rows_to_compare
from kbatch.training.build_function import BuildFunction, model_builder
from kbatch.training.data.forms import arrays_of, gives_batches
from kbatch.training.data.training_data import TrainingData
from kbatch.training.dtype_policy import global_policy
from kbatch.training.learning_rate import Schedule, automatic_rule, peak_learning_rate
from kbatch.training.model import inner_optimizers, updates_made, user_step
from kbatch.training.state import check_seed, kept_state, seeded
from kbatch.training.step_call import check_one_device

_SMALLEST, _LARGEST = 8, 2048
# Ratio of two neighbouring sizes whose memory is measured.
_GROWTH = 4


def recommend(
    build: "BuildFunction | keras_tuner.HyperModel | keras.Model",
    x: Any,
    y: Any = None,
    *,
    batch_sizes: Iterable[int] | None = None,
    base_batch_size: int = BASE_BATCH_SIZE,
    memory_limit_bytes: int | None = None,
    time_budget_s: float = BUDGET_S,
    seed: int | None = None,
    verbose: int | str = "auto",
) -> Recommendation:
    """Measure the limits of the batch size, and recommend a size to start with.

    kbatch measures four limits: the number of examples that fit in memory at once, the batch size
    that saturates the device, the batch size above which gradient noise is so small that more
    examples are wasted, and the examples/s of the input pipeline. The recommended size is expected
    to reach a goal in the shortest time. The recommendation also names the sizes that a search
    should compare. Only a search tells which size and learning rate train best. If a limit could
    not be measured, `Recommendation.unknown` gives the reason.

    Example:

    >>> recommendation = kbatch.recommend(build, x, y)
    >>> print(recommendation)  # a size to start with, its limit, and the sizes to search
    >>> recommendation.batch_size, recommendation.learning_rate, recommendation.batch_sizes
    >>> kbatch.plot_limits(recommendation).figure.savefig("limits.png")

    Args:
        build: As in `find_max_batch_size`.
        x: Inputs, as in `find_max_batch_size`.
        y: Targets, if `x` is an array. Default: None.
        batch_sizes: Iterable of integers, ascending, the sizes to time. kbatch adds
            `base_batch_size`. Default: powers of two from 8 to 2,048, up to the number of examples.
        base_batch_size: Integer, the batch size that the model's learning rate is made for. kbatch
            trains a pilot at this size to measure the gradient noise. Default: 32.
        memory_limit_bytes: As in `find_max_batch_size`.
        time_budget_s: Float, seconds for the whole call, including the start of a process and the
            tracing of graphs. Default: 30.
        seed: Integer, seed of the weights and of the order of the data in the pilot. If None,
            kbatch draws a seed and records it.
        verbose: As in `find_max_batch_size`. The bar shows how much of the time is spent.

    Returns:
        A `Recommendation`.

    Raises:
        InputError: If the data cannot be batched, do not match the model, or have fewer than two
            examples.
        OutOfMemoryError: If the weights or one example do not fit in memory. The message names the
            bytes needed and the limit.
        TypeError: If `build` cannot build a model, or a size is not an integer.
        ValueError: If the model is not compiled, or an argument cannot be used.
    """
    if (seed := check_seed(seed)) is None:
        seed = int(np.random.default_rng().integers(2**31))
    check_seconds(time_budget_s=time_budget_s)
    base = check_size(base_batch_size, "base_batch_size")
    limit_bytes = check_memory_limit(memory_limit_bytes)
    requested = None if batch_sizes is None else check_batch_sizes(batch_sizes)
    builder, data = model_builder(build), TrainingData(x, y)
    data.check()
    if not gives_batches(x):  # Arrays are checked before anything is measured.
        _sizes(requested, arrays_of(x, y)[1])
    progress = MeasuringProgress("limits", verbose, time_budget_s=time_budget_s)
    ends_s = time.perf_counter() + time_budget_s
    unknown: dict[Limit, Note] = {}

    def begin(limit: Limit) -> float:
        """Print which limit is measured, and return its share of the seconds that are left."""
        progress.say(f"measuring {LIMIT_NAMES[limit]}")
        later = list(_SHARES.values())[list(_SHARES).index(limit) :]
        left_s = ends_s - time.perf_counter()
        return max(left_s * later[0] / sum(later), _LEAST_SHARE * time_budget_s)

    workload = Workload(builder, data, global_policy())
    with progress, _refusals_explained():
        # Memory comes first, because its worker process needs a GPU that is free.
        memory = _memory(
            workload, requested, limit_bytes=limit_bytes, budget_s=begin("memory"), say=progress.say
        )
        assert memory.limit_bytes is not None
        at_once = most_at_once(memory.records, memory.limit_bytes)
        with seeded(seed):
            run = workload.start()
            model, examples = run.model, run.examples
            check_one_device(model)
            sizes = _sizes(requested, examples)
            # If all sizes need micro-batches, the possible sizes of micro-batches are timed too.
            if at_once is not None and at_once < sizes[0]:
                sizes = (*powers_of_two(1, at_once), *sizes)
            if examples is None or base <= examples:
                sizes = tuple(sorted({*sizes, base}))
            pilot, part_s = None, begin("noise")
            with reason_kept("noise", unknown):
                pilot = run_pilot(
                    model, data, batch_size=base, at_once=at_once, budget_s=part_s, seed=seed
                )
        pipeline = parts = None
        with kept_state(model):
            sum_sparse_gradients(model)  # A search does this too.
            fitting = [size for size in sizes if at_once is None or size <= at_once]
            timing = TimingPlan(begin("saturation"), needed_calls=12, block_s=0.03, precision=0.02)
            updates = timed_updates(
                model,
                functools.partial(data.sample, model=model),
                sorted(fitting, key=lambda size: (size != base, size)),  # The base size is first.
                timing,
                examples=examples,
                execution_s=timing.block_s,
                chosen=False,
                progress=progress,
            )
            timings = {update.batch_size: update.median_s for update in fastest_ways(updates)}
            # Larger sizes train in micro-batches, unless the model has its own `train_step`.
            cut = sizes[len(fitting) :] if timings and user_step(model) is None else ()
            if pilot is not None or cut:
                parts = parts_note(model, data.sample(rows_to_compare(at_once), model, fewest=1))
            if timings:
                part_s = begin("input")
                with reason_kept("input", unknown):
                    if time.perf_counter() >= ends_s:
                        raise InputError("`time_budget_s` was used up before this measurement")
                    compiling_s = max(update.first_call_s or 0.0 for update in updates)
                    arguments = {"base": base, "compiling_s": compiling_s, "seed": seed}
                    pipeline = _input(model, data, timings, budget_s=part_s, **arguments)
            else:
                unknown["saturation"] = Note.of("nothing_ran")
    optimizer = inner_optimizers(model)[0]
    return Recommendation(
        model_name=model.name,
        optimizer=type(optimizer).__name__,
        dtype_policy=model.dtype_policy.name,
        base_batch_size=base,
        base_learning_rate=peak_learning_rate(optimizer),
        scheduled=isinstance(rate_of(optimizer), Schedule),
        learning_rate_rule=automatic_rule(optimizer),
        updates=updates,
        cut=cut,
        memory=memory.records,
        memory_limit_bytes=memory.limit_bytes,
        pilot=pilot,
        pipeline=pipeline,
        unknown=unknown,
        time_budget_s=time_budget_s,
        noted=(*memory.notes, *([] if parts is None else [parts])),
        environment=read_environment(),
    )


def _sizes(requested: tuple[int, ...] | None, examples: int | None) -> tuple[int, ...]:
    """Return the sizes to time, none larger than the data."""
    if requested is None:
        largest = min(_LARGEST, examples or _LARGEST)
        return powers_of_two(1 if largest < _SMALLEST else _SMALLEST, largest)
    if examples is not None and requested[-1] > examples:
        raise InputError(
            f"`batch_sizes` must be at most the number of examples, {examples}: leave out the "
            f"larger sizes. Received: batch_sizes={requested}."
        )
    return requested


# Shares of the time budget, in the order of the measurements. Unused time goes to later ones.
_SHARES: Mapping[Limit, float] = {"memory": 0.3, "noise": 0.3, "saturation": 0.25, "input": 0.15}
# Each measurement gets at least this share of the budget, even if the budget is spent.
_LEAST_SHARE = 0.05


@contextlib.contextmanager
def _refusals_explained() -> Iterator[None]:
    """If TensorFlow refuses the data at every batch size, raise an error that says what to fix."""
    try:
        yield
    except tf.errors.OpError as error:
        if (message := refusal(error)) is not None:
            raise InputError(message) from error
        raise


@contextlib.contextmanager
def reason_kept(limit: Limit, unknown: dict[Limit, Note]) -> Iterator[None]:
    """If data or memory do not allow a measurement, store the reason in `unknown` and continue."""
    try:
        yield
    except InputError as error:
        text = str(error).strip().rstrip(".")
        unknown[limit] = Note.of("cannot_measure", error=text[:1].lower() + text[1:])
    except DataEnded as error:
        rows = pluralize(error.rows, "example")
        unknown[limit] = Note.of("data_ended", rows=rows)
    except MEMORY_ERRORS as error:
        if not ran_out_of_memory(error):
            raise
        unknown[limit] = Note.of("ran_out_of_memory")


def _memory(
    workload: Workload,
    requested: tuple[int, ...] | None,
    *,
    limit_bytes: int | None,
    budget_s: float,
    say: Callable[[str], None],
) -> MemoryPass:
    """Measure the memory of some sizes, as far as limit and time allow."""
    ends_s = time.perf_counter() + budget_s
    with open_probes(workload, memory_limit_bytes=limit_bytes) as probes:
        facts = probes.facts()
        if facts.examples == 1:
            raise InputError("The data must have at least two examples. Received: 1 example.")
        last = _sizes(requested, facts.examples)[-1]
        sizes = {1, *(min(_SMALLEST * _GROWTH**k, last) for k in range(last.bit_length()))}
        measure = functools.partial(memory_pass, probes, dtype_policy=facts.dtype_policy, say=say)
        left_s = ends_s - time.perf_counter()  # Without the start of the process.
        memory = measure(sorted(sizes), time_budget_s=left_s)
        ran = sum(record.peak_bytes is not None for record in memory.records)
        # A line needs two sizes. If the second size did not fit, a size of 2 is measured as well.
        if ran == 1 < len(memory.records):
            memory = measure(sorted({2, *sizes}), time_budget_s=left_s)
        example_bytes = memory.records[0].peak_bytes
        if example_bytes is None or example_bytes > MEMORY_WINDOW[1] * facts.limit_bytes:
            raise no_example_fits(facts, MEMORY_WINDOW, example_bytes, None)
        return memory


# A stretch has at most this many updates.
_MOST_UPDATES = 10
_STRETCHES_IN_BUDGET = 50
# Fewer stretches do not show whether the later half reduced the loss.
_FEWEST_TRAINED = 24


def run_pilot(
    model: Any,
    data: TrainingData,
    *,
    batch_size: int,
    at_once: int | None = None,  # Most examples that fit in memory.
    budget_s: float,
    seed: int,
) -> PilotRecord:
    """Train until the later half of the updates hardly reduced the loss, or the time is spent.

    The state of the model is restored afterwards.
    """
    if batch_size < 2:
        raise InputError(
            "`base_batch_size` must be at least 2, because kbatch measures gradient noise with the "
            f"two halves of each batch. Received: base_batch_size={batch_size}."
        )
    if user_step(model) is not None:
        raise InputError("The model has its own `train_step`, so kbatch cannot split its batches")
    ends_s = time.perf_counter() + budget_s
    dataset = data.batches(batch_size, model, seed=seed).dataset
    if 0 <= (count := int(dataset.cardinality())) < 2:
        raise InputError(
            "Measuring the gradient noise needs data for at least two updates: give more examples, "
            f"or a smaller `base_batch_size`. Received: {count} batches of {batch_size} examples."
        )
    callback = _Stretches(ends_s=ends_s, budget_s=budget_s)
    with kept_state(model):
        # A layer that uses the whole batch, such as BatchNormalization, sees half of it. A note of
        # `recommend` says so.
        half = (batch_size + 1) // 2
        Accumulation(min(half, at_once or half), moments_every=1).apply(model)
        # Keras trains one long epoch, because the start of an epoch takes as long as many updates.
        fit: Any = inspect.unwrap(type(model).fit)  # A tracker such as MLflow may wrap `fit`.
        steps = {"steps_per_epoch": 2**31, "callbacks": [callback]}
        fit(model, dataset.repeat(), verbose=0, shuffle=False, **steps)
    updates, losses, variances, squared_norms = zip(*callback.stretches, strict=True)
    if any(map(math.isnan, losses)):
        raise InputError(
            f"The loss became NaN within {pluralize(sum(updates), 'update')}: look for values in "
            "the data that are not finite, or give the model a smaller learning rate"
        )
    return PilotRecord(batch_size, updates, losses, variances, squared_norms, seed)


class _Stretches(keras.callbacks.Callback):
    """Records loss and moments of the gradient after every few updates, and ends the pilot."""

    def __init__(self, *, ends_s: float, budget_s: float):
        super().__init__()
        self.stretches: list[tuple[int, float, float | None, float | None]] = []
        self._ends_s, self._budget_s = ends_s, budget_s
        self._steps = self._updates_before = 0
        self._began_s: float | None = None

    def on_train_begin(self, logs: Any = None):
        self._updates_before = updates_made(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None):
        now_s, model = time.perf_counter(), self.model
        assert model is not None
        if self._began_s is None:
            # The first call compiled the step. At least half of the time is left for the others.
            self._began_s = now_s
            self._ends_s = max(self._ends_s, now_s + self._budget_s / 2)
        self._steps += model.steps_per_execution
        is_spent = now_s > self._ends_s
        is_long = now_s - self._began_s >= self._budget_s / _STRETCHES_IN_BUDGET
        if not (is_spent or is_long or self._steps >= _MOST_UPDATES):
            return
        names = ("loss", *MOMENT_METRICS)
        loss, variance, squared_norm = (_finite((logs or {}).get(name)) for name in names)
        # Fewer than the steps if the optimizer skipped updates that overflowed.
        updates = updates_made(model) - self._updates_before
        self.stretches.append((updates, math.nan if loss is None else loss, variance, squared_norm))
        model.reset_metrics()
        self._steps, self._began_s = 0, time.perf_counter()
        self._updates_before += updates
        losses = [stretch[1] for stretch in self.stretches]
        fewest = max(_FEWEST_TRAINED, 2 * useful_stretches(losses))
        model.stop_training = loss is None or len(losses) >= fewest or is_spent


def _finite(value: Any) -> float | None:
    number = math.nan if value is None else float(np.asarray(value))
    return number if math.isfinite(number) else None


# The pipeline is read in batches of at most this multiple of the base size.
_MOST_LARGER = 8
# Measuring the pipeline needs at least this many steps. If they would take longer than this many
# times the time that is left for it, it is not measured.
_FEWEST_STEPS, _MUCH_LONGER = 30, 1.5


def _input(
    model: keras.Model,
    data: TrainingData,
    times_s: Mapping[int, float],
    *,
    base: int,
    compiling_s: float,
    budget_s: float,
    seed: int,
) -> InputPipelineProfile:
    """Measure the input pipeline of a search, with a batch size near the base size."""
    size = max((size for size in times_s if size <= _MOST_LARGER * base), default=max(times_s))
    if (least_s := compiling_s + _FEWEST_STEPS * times_s[size]) > _MUCH_LONGER * budget_s:
        raise InputError(
            f"{format_number(budget_s, 2)} s of `time_budget_s` were left for this measurement, "
            f"which takes at least {format_number(least_s, 2)} s"
        )
    dataset = data.batches(size, model, seed=seed).dataset
    # Repeated, because the start of a short epoch would count as waiting for data.
    return profile_input_pipeline(
        model, dataset.repeat(), time_budget_s=budget_s, remedies=False, verbose=0
    )
