"""The limits of the batch size, measured one after the other within one budget of time."""

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
# From one size whose memory is measured to the next.
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
    """Measure what limits the batch size, and name one to start with and those to search.

    Four limits are measured: how many examples fit in memory at once, beyond how many the gradient
    noise wastes them, from how many on the device is saturated, and what the input pipeline
    delivers. Updates are timed as a search runs them, several an execution where that is faster.
    The size to start with is where they let expect the shortest way to a goal. Which size trains
    best, and at which learning rate, a search answers. What is not known is None, with the reason
    in `unknown`.

    Example:

    >>> recommendation = kbatch.recommend(build, x, y)
    >>> print(recommendation)  # a size to start with, which limit binds, and the sizes to search
    >>> recommendation.batch_size, recommendation.learning_rate, recommendation.batch_sizes
    >>> kbatch.plot_limits(recommendation).figure.savefig("limits.png")

    Args:
        build: As in `find_max_batch_size`, and so are `x` and `y`.
        x: Inputs.
        y: Targets of arrays.
        batch_sizes: Sizes to time beside `base_batch_size`, ascending; None for the powers of two
            from 8 to 2,048 that the data fill.
        base_batch_size: Batch size that the model's learning rate suits; the pilot that measures
            the gradient noise trains at it.
        memory_limit_bytes: As in `find_max_batch_size`.
        time_budget_s: Seconds for the whole call, starting a process and building graphs included;
            each measurement receives a part of what is left.
        seed: Seed of weights and order in the pilot, None for one that is drawn and recorded.
        verbose: As in `find_max_batch_size`; the bar shows how much of the time is spent.

    Raises:
        InputError: If the data cannot be batched, do not fit the model, or have fewer than two
            examples.
        OutOfMemoryError: If the weights or one example do not fit; it names the bytes needed and
            the limit.
        TypeError: If `build` cannot build, or a size is no integer.
        ValueError: If the model is not compiled, or an argument cannot be used.
    """
    if (seed := check_seed(seed)) is None:
        seed = int(np.random.default_rng().integers(2**31))
    check_seconds(time_budget_s=time_budget_s)
    base = check_size(base_batch_size, "base_batch_size")
    limit_bytes = check_memory_limit(memory_limit_bytes)
    asked = None if batch_sizes is None else check_batch_sizes(batch_sizes)
    builder, data = model_builder(build), TrainingData(x, y)
    data.check()
    if not gives_batches(x):  # Rows that do not fit each other are refused at once.
        _sizes(asked, arrays_of(x, y)[1])
    progress = MeasuringProgress("limits", verbose, time_budget_s=time_budget_s)
    ends_s = time.perf_counter() + time_budget_s
    unknown: dict[Limit, Note] = {}

    def begin(limit: Limit) -> float:
        """Announce a measurement, and return its share of the seconds that are left."""
        progress.say(f"measuring {LIMIT_NAMES[limit]}")
        later = list(_SHARES.values())[list(_SHARES).index(limit) :]
        left_s = ends_s - time.perf_counter()
        return max(left_s * later[0] / sum(later), _LEAST_SHARE * time_budget_s)

    load = Workload(builder, data, global_policy())
    with progress, _refusals_explained():
        # First, since a worker process measures it, and a GPU has to be free for that.
        memory = _memory(
            load, asked, limit_bytes=limit_bytes, budget_s=begin("memory"), say=progress.say
        )
        assert memory.limit_bytes is not None  # It was probed.
        fits = most_at_once(memory.records, memory.limit_bytes)
        with seeded(seed):
            run = load.start()
            model, examples = run.model, run.examples
            check_one_device(model)
            sizes = _sizes(asked, examples)
            if fits is not None and fits < sizes[0]:  # What they go through in parts of.
                sizes = (*powers_of_two(1, fits), *sizes)
            if examples is None or base <= examples:
                sizes = tuple(sorted({*sizes, base}))  # The pilot trains at it.
            pilot, part_s = None, begin("noise")
            with reason_kept("noise", unknown):
                given = {"batch_size": base, "at_once": fits, "budget_s": part_s, "seed": seed}
                pilot = run_pilot(model, data, **given)
        pipeline = parts = None
        with kept_state(model):
            sum_sparse_gradients(model)  # As a search trains.
            fitting = [size for size in sizes if fits is None or size <= fits]
            timing = TimingPlan(begin("saturation"), needed_calls=12, block_s=0.03, precision=0.02)
            updates = timed_updates(
                model,
                functools.partial(data.sample, model=model),
                sorted(fitting, key=lambda size: (size != base, size)),  # That one for sure.
                timing,
                examples=examples,
                execution_s=timing.block_s,  # Which hides most of what starting it takes.
                chosen=False,
                progress=progress,
            )
            timings = {one.batch_size: one.median_s for one in fastest_ways(updates)}
            # Larger ones go through in parts, unless the model has a step of its own.
            cut = sizes[len(fitting) :] if timings and user_step(model) is None else ()
            if pilot is not None or cut:
                parts = parts_note(model, data.sample(rows_to_compare(fits), model, fewest=1))
            if timings:
                part_s = begin("input")
                with reason_kept("input", unknown):
                    if time.perf_counter() >= ends_s:
                        raise InputError("`time_budget_s` was spent on the other limits")
                    compiling_s = max(one.first_call_s or 0.0 for one in updates)
                    given = {"base": base, "compiling_s": compiling_s, "seed": seed}
                    pipeline = _input(model, data, timings, budget_s=part_s, **given)
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


def _sizes(asked: tuple[int, ...] | None, examples: int | None) -> tuple[int, ...]:
    """Return the sizes to time, which the data must fill."""
    if asked is None:
        largest = min(_LARGEST, examples or _LARGEST)
        return powers_of_two(1 if largest < _SMALLEST else _SMALLEST, largest)
    if examples is not None and asked[-1] > examples:
        raise InputError(
            "A batch cannot be larger than the data set: leave the sizes above "
            f"{examples} out of `batch_sizes`. Received: batch_sizes={asked}."
        )
    return asked


# In the order in which they are measured: the share of the budget of each. What one leaves over,
# the later ones share.
_SHARES: Mapping[Limit, float] = {"memory": 0.3, "noise": 0.3, "saturation": 0.25, "input": 0.15}
# Of the budget, for each measurement, however late it is.
_LEAST_SHARE = 0.05


@contextlib.contextmanager
def _refusals_explained() -> Iterator[None]:
    """Say what to mend where an operation refuses the data at any batch size, as a search does."""
    try:
        yield
    except tf.errors.OpError as error:
        if (said := refusal(error)) is not None:
            raise InputError(said) from error
        raise


@contextlib.contextmanager
def reason_kept(limit: Limit, unknown: dict[Limit, Note]) -> Iterator[None]:
    """Make a measurement; that data or memory do not allow it is a result."""
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
    load: Workload,
    asked: tuple[int, ...] | None,
    *,
    limit_bytes: int | None,
    budget_s: float,
    say: Callable[[str], None],
) -> MemoryPass:
    """Measure the memory of some sizes, as far as limit and time allow."""
    ends_s = time.perf_counter() + budget_s
    with open_probes(load, memory_limit_bytes=limit_bytes) as probes:
        facts = probes.facts()
        if facts.examples == 1:
            raise InputError("The data have one example: give more rows. Received: 1 example.")
        last = _sizes(asked, facts.examples)[-1]
        sizes = {1, *(min(_SMALLEST * _GROWTH**k, last) for k in range(last.bit_length()))}
        given = {"dtype_policy": facts.dtype_policy, "say": say}
        given["time_budget_s"] = ends_s - time.perf_counter()  # After the start of the process.
        found = memory_pass(probes, sorted(sizes), **given)
        ran = sum(one.peak_bytes is not None for one in found.records)
        if ran == 1 < len(found.records):  # The step to the second was too large for a line.
            found = memory_pass(probes, sorted({2, *sizes}), **given)
        one_bytes = found.records[0].peak_bytes
        if one_bytes is None or one_bytes > MEMORY_WINDOW[1] * facts.limit_bytes:
            raise no_example_fits(facts, MEMORY_WINDOW, one_bytes, None)
        return found


# Updates of a stretch, at the most.
_MOST_UPDATES = 10
_STRETCHES_IN_BUDGET = 50
# Fewer stretches do not show whether the later half brought little.
_FEWEST_TRAINED = 24


def run_pilot(
    model: Any,
    data: TrainingData,
    *,
    batch_size: int,
    at_once: int | None = None,  # Examples that memory holds.
    budget_s: float,
    seed: int,
) -> PilotRecord:
    """Train until the later half of the updates brought little, or the time is spent.

    The model is put back as it was.
    """
    if batch_size < 2:
        raise InputError(
            "A pilot measures the noise between the parts of a batch: give a "
            "`base_batch_size` of two examples at least, and the learning rate that suits it. "
            f"Received: base_batch_size={batch_size}."
        )
    if user_step(model) is not None:
        raise InputError("The model has a `train_step` of its own, which trains a batch whole.")
    ends_s = time.perf_counter() + budget_s
    dataset = data.batches(batch_size, model, seed=seed).dataset
    if 0 <= (count := int(dataset.cardinality())) < 2:
        raise InputError(
            "A pilot needs data for two updates at least: give more examples, or a smaller "
            f"`base_batch_size`. Received: {count} batches of {batch_size} examples."
        )
    watch = _Stretches(ends_s=ends_s, budget_s=budget_s)
    with kept_state(model):
        # What looks at a batch as a whole is measured in parts, and said to be.
        half = (batch_size + 1) // 2
        Accumulation(min(half, at_once or half), moments_every=1).apply(model)
        # All of it is one epoch to Keras: starting one takes as long as tens of updates.
        fit: Any = inspect.unwrap(type(model).fit)  # A tracker, such as MLflow's, may wrap it.
        steps = {"steps_per_epoch": 2**31, "callbacks": [watch]}
        fit(model, dataset.repeat(), verbose=0, shuffle=False, **steps)
    updates, losses, variances, squared_norms = zip(*watch.stretches, strict=True)
    if any(map(math.isnan, losses)):
        raise InputError(
            f"The pilot's loss became NaN within {pluralize(sum(updates), 'update')}: look for "
            "values in the data that are not finite, or give the model a smaller learning rate"
        )
    return PilotRecord(batch_size, updates, losses, variances, squared_norms, seed)


class _Stretches(keras.callbacks.Callback):
    """Reads loss and moments of the gradient after some updates each, and ends the pilot."""

    def __init__(self, *, ends_s: float, budget_s: float):
        super().__init__()
        self.stretches: list[tuple[int, float, float | None, float | None]] = []
        self._ends_s, self._budget_s = ends_s, budget_s
        self._made = self._counted = 0
        self._read_s: float | None = None

    def on_train_begin(self, logs: Any = None):
        self._counted = updates_made(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None):
        now_s, model = time.perf_counter(), self.model
        assert model is not None
        if self._read_s is None:
            # What came before traced and compiled: half of the time is left in any case.
            self._read_s = now_s
            self._ends_s = max(self._ends_s, now_s + self._budget_s / 2)
        # One call of the train step may make several updates, and skip some that overflowed.
        self._made += model.steps_per_execution
        spent = now_s > self._ends_s
        long = now_s - self._read_s >= self._budget_s / _STRETCHES_IN_BUDGET
        if not (spent or long or self._made >= _MOST_UPDATES):
            return
        names = ("loss", *MOMENT_METRICS)
        loss, variance, squared_norm = (_finite((logs or {}).get(name)) for name in names)
        made = updates_made(model)
        number = math.nan if loss is None else loss
        self.stretches.append((made - self._counted, number, variance, squared_norm))
        model.reset_metrics()
        self._made, self._counted, self._read_s = 0, made, time.perf_counter()
        losses = [stretch[1] for stretch in self.stretches]
        enough = loss is None or len(losses) >= max(_FEWEST_TRAINED, 2 * useful_stretches(losses))
        model.stop_training = enough or spent


def _finite(value: Any) -> float | None:
    number = math.nan if value is None else float(np.asarray(value))
    return number if math.isfinite(number) else None


# The pipeline is read in batches of at most so many times the base size.
_MOST_LARGER = 8
# Steps that measuring it makes, however short its time, and how much longer than that it may take.
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
    """Measure what the data deliver in a search, in batches of a size near the base size."""
    size = max((size for size in times_s if size <= _MOST_LARGER * base), default=max(times_s))
    if (least_s := compiling_s + _FEWEST_STEPS * times_s[size]) > _MUCH_LONGER * budget_s:
        raise InputError(
            f"it takes {format_number(least_s, 2)} s at least, and its part of `time_budget_s` was "
            f"{format_number(budget_s, 2)} s"
        )
    dataset = data.batches(size, model, seed=seed).dataset
    # In epochs without end: else the starts of short ones count as waits for data.
    return profile_input_pipeline(
        model, dataset.repeat(), time_budget_s=budget_s, remedies=False, verbose=0
    )
