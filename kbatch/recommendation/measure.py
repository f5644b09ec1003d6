"""The limits of the batch size, measured one after the other within one budget of time."""

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import keras_tuner
import numpy as np

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, powers_of_two
from kbatch.device.environment import read_environment
from kbatch.device.failures import ran_out_of_memory
from kbatch.device.memory import check_memory_limit, gpu_visible
from kbatch.errors import InputError
from kbatch.input_pipeline.measure import profile_input_pipeline
from kbatch.input_pipeline.result import InputPipelineProfile
from kbatch.library_internals import rate_of
from kbatch.memory.find import data_source, probe_max_batch
from kbatch.memory.probe import Probes, Reading, open_probes
from kbatch.memory.result import MaxBatchSizeResult
from kbatch.memory.search import MEMORY_WINDOW
from kbatch.memory.workload import STEPS, Workload
from kbatch.page.numbers import format_number, pluralize
from kbatch.recommendation import BUDGET_S
from kbatch.recommendation.limits import INPUT, MEMORY, NOISE, SATURATION
from kbatch.recommendation.pilot import run_pilot, searched_batches
from kbatch.recommendation.result import PilotRecord, Recommendation
from kbatch.records.notes import Note
from kbatch.search import BASE_BATCH_SIZE
from kbatch.throughput.result import TimedUpdate
from kbatch.throughput.updates import time_updates
from kbatch.timing.rounds import check_seconds
from kbatch.training.accumulation import sum_sparse_gradients
from kbatch.training.accumulation.parts_check import sampled_parts_note
from kbatch.training.build_function import BuildFunction, model_builder
from kbatch.training.data.forms import FitData, arrays_of, gives_batches
from kbatch.training.data.model_inputs import refusals_told
from kbatch.training.data.sample_rows import DataEnded, SampleRows, Source, rows_for
from kbatch.training.learning_rate import Schedule, peak_learning_rate
from kbatch.training.model import replica_count, user_step
from kbatch.training.state import check_seed, inner_optimizers, kept_state

_SMALLEST, _LARGEST = 8, 2048


def recommend(
    build: "BuildFunction | keras_tuner.HyperModel | keras.Model",
    x: Any,
    y: Any = None,
    *,
    batch_sizes: Iterable[int] | None = None,
    base_batch_size: int = BASE_BATCH_SIZE,
    memory_limit_bytes: int | None = None,
    budget_s: float = BUDGET_S,
    seed: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Recommendation:
    """Measure what limits the batch size, and name one to start with and those to search.

    Four limits are measured: how many examples fit in memory at once, beyond how many the gradient
    noise wastes them, from how many on the device is saturated, and what the input pipeline
    delivers. The size to start with is where they let expect the shortest way to a goal. Which
    size trains best, and at which learning rate, a search answers. What is not known is None, with
    the reason in `unknown`.

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
        budget_s: Seconds for the whole call, starting a process and building graphs included;
            each measurement receives a part of what is left.
        seed: Seed of weights and order in the pilot, None for one that is drawn and recorded.
        on_progress: Receives a line before each measurement.

    Raises:
        InputError: If the data cannot be batched, do not fit the model, or have fewer than two
            examples.
        OutOfMemoryError: If the weights or one example do not fit; it names the bytes needed and
            the limit.
        TypeError: If `build` cannot build, or a size is no integer.
        ValueError: If the model is not compiled, or an argument cannot be used.
    """
    given_seed = check_seed(seed)
    check_seconds(budget_s=budget_s)
    task = Task(
        build=model_builder(build),
        is_given=isinstance(build, keras.Model),
        data=FitData(x, y),
        source=data_source(x, y),
        base_batch_size=check_size(base_batch_size, "base_batch_size"),
        memory_limit_bytes=check_memory_limit(memory_limit_bytes),
        budget=Budget(budget_s, on_progress),
        seed=int(np.random.default_rng().integers(2**31)) if given_seed is None else given_seed,
    )
    asked = None if batch_sizes is None else check_batch_sizes(batch_sizes)
    if not gives_batches(x):
        arrays_of(task.data)  # Rows that do not fit each other are refused at once.
    if isinstance(task.source, SampleRows):
        _sizes(asked, task.source.examples)  # A dataset tells its examples to a model only.
    return _measured(task, asked)


def _sizes(asked: tuple[int, ...] | None, examples: int | None) -> tuple[int, ...]:
    if asked is None:
        largest = min(_LARGEST, examples or _LARGEST)
        return powers_of_two(1 if largest < _SMALLEST else _SMALLEST, largest)
    if examples is not None and asked[-1] > examples:
        raise InputError(
            "A batch cannot be larger than the data set: leave the sizes above "
            f"{examples} out of `batch_sizes`. Received: batch_sizes={asked}."
        )
    return asked


def _measured(task: "Task", asked: tuple[int, ...] | None) -> Recommendation:
    budget, base, source = task.budget, task.base_batch_size, task.source
    # First, since a worker process measures it, and a GPU has to be free for that.
    largest = asked[-1] if asked else _LARGEST
    memory, fits, memory_notes = budget.run(MEMORY, lambda: measure_memory(task, largest=largest))
    with refusals_told(task.build, source):
        model: Any = task.load.start().model
        if replica_count(model) > 1:
            raise InputError(
                "Limits are measured on one device: build the model outside of "
                f"`strategy.scope()`. Received: a model on {replica_count(model)} replicas."
            )
        rows = rows_for(source, model)
        examples = rows.examples if isinstance(rows, SampleRows) else None
        sizes = _sizes(asked, examples)
        if examples == 1:
            raise InputError("The data have one example: give more rows. Received: 1 example.")
        if examples is None or base <= examples:
            sizes = tuple(sorted({*sizes, base}))  # The pilot trains at it.
        pilot = budget.try_run(NOISE, lambda: measure_noise(task, model))
        with kept_state(model):
            sum_sparse_gradients(model)  # As a search trains.
            model.make_train_function()  # All that is timed shares its graphs.
            updates = budget.run(
                SATURATION,
                lambda: time_updates(
                    model,
                    source,
                    batch_sizes=sizes,
                    largest_whole=fits,
                    budget_s=budget.part_s(SATURATION),
                    first=base,
                ),
            )
            pipeline, timings = None, [update for update in updates if update.measured]
            if timings:
                pipeline = budget.try_run(INPUT, lambda: measure_input(task, model, timings))
            else:
                budget.unknown[SATURATION] = "not even the smallest batch size could be run"
        parts = None
        if pilot is not None or any(timed.accumulated for timed in timings):
            parts = sampled_parts_note(model, source, fits)
    optimizer = inner_optimizers(model)[0]
    return Recommendation(
        model_name=model.name,
        optimizer=type(optimizer).__name__,
        dtype_policy=model.dtype_policy.name,
        base_batch_size=base,
        base_learning_rate=peak_learning_rate(optimizer),
        scheduled=isinstance(rate_of(optimizer), Schedule),
        learning_rate_rule="linear" if isinstance(optimizer, keras.optimizers.SGD) else "sqrt",
        examples=examples,
        updates=updates,
        memory=memory,
        pilot=pilot,
        pipeline=pipeline,
        unknown=budget.unknown,
        durations_s=budget.durations_s,
        budget_s=budget.budget_s,
        noted=(*memory_notes, *filter(None, [parts])),
        environment=read_environment(),
    )


# In the order in which they are measured: the line before each, and its share of the budget. What
# one leaves over, the later ones share.
_MEASUREMENTS = {
    MEMORY: ("memory: how many examples fit at once", 0.3),
    NOISE: ("gradient noise: a pilot", 0.3),
    SATURATION: ("hardware saturation: the time of an update by batch size", 0.25),
    INPUT: ("input pipeline: what it delivers", 0.15),
}
# Of the budget, for each measurement, however late it is.
_LEAST_SHARE = 0.05

Result = TypeVar("Result")


class Budget:
    """The seconds of the call, shared out among its measurements, and what became of each."""

    def __init__(self, budget_s: float, on_progress: Callable[[str], None] | None = None):
        self.budget_s = budget_s
        self.durations_s: dict[str, float] = {}  # That each measurement took.
        self.unknown: dict[str, str] = {}  # Why a measurement failed.
        self._say = on_progress or (lambda line: None)
        self._began_s = time.perf_counter()

    def run(self, name: str, measure: Callable[[], Result]) -> Result:
        """Make a measurement whose errors are the user's to mend."""
        self._say(_MEASUREMENTS[name][0])
        began_s = time.perf_counter()
        try:
            return measure()
        finally:
            self.durations_s[name] = time.perf_counter() - began_s

    def try_run(self, name: str, measure: Callable[[], Result]) -> Result | None:
        """Make a measurement; that data or memory do not allow it is a result."""
        try:
            return self.run(name, measure)
        except InputError as error:
            text = str(error).strip().rstrip(".")
            reason = text[:1].lower() + text[1:]
        except DataEnded as error:
            reason = f"the data ended after {pluralize(error.rows, 'example')} of a batch"
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            reason = "it ran out of memory"
        self.unknown[name] = reason
        return None

    @property
    def left_s(self) -> float:
        return max(0.0, self._began_s + self.budget_s - time.perf_counter())

    def part_s(self, name: str) -> float:
        """Return the seconds of a measurement: its share of what is left."""
        shares = {each: share for each, (_, share) in _MEASUREMENTS.items()}
        names = list(shares)
        later = sum(shares[each] for each in names[names.index(name) :])
        return max(self.left_s * shares[name] / later, _LEAST_SHARE * self.budget_s)


class Task(NamedTuple):
    """What `recommend` was asked, and what may be spent on it."""

    build: Callable[[], keras.Model]
    is_given: bool  # A model of the user's, which stays as it is.
    data: FitData
    source: Source  # The same data for probes.
    base_batch_size: int
    memory_limit_bytes: int | None
    budget: Budget
    seed: int

    @property
    def load(self) -> Workload:
        return Workload(self.build, self.source, keras.config.dtype_policy().name)


def measure_noise(task: Task, model: keras.Model) -> PilotRecord:
    size = task.base_batch_size
    if size < 2:
        raise InputError(
            "A pilot measures the noise between the two halves of a batch: give a "
            "`base_batch_size` of two examples at least, and the learning rate that suits it. "
            f"Received: base_batch_size={size}."
        )
    if user_step(model) is not None:
        raise InputError("The model has a `train_step` of its own, which trains a batch whole.")
    with kept_state(task.build()) if task.is_given else contextlib.nullcontext():
        return run_pilot(
            task.build,
            task.data,
            batch_size=size,
            budget_s=task.budget.part_s(NOISE),
            seed=task.seed,
        )


# The pipeline is read in batches of at most so many times the base size.
_MOST_LARGER = 8
# Steps that measuring it makes, however short its time, and how much longer than that it may take.
_FEWEST_STEPS, _MUCH_LONGER = 30, 1.5


def measure_input(
    task: Task, model: keras.Model, timings: Sequence[TimedUpdate]
) -> InputPipelineProfile:
    """Measure what the data deliver in a search, at the largest batch size near the base one."""
    part_s = task.budget.part_s(INPUT)
    whole = [timed for timed in timings if not timed.accumulated]
    near = [t for t in whole if t.batch_size <= _MOST_LARGER * task.base_batch_size]
    timed = (near or whole or list(timings))[-1]
    if (least_s := _FEWEST_STEPS * timed.median_s) > _MUCH_LONGER * part_s:
        raise InputError(
            f"it takes {format_number(least_s, 2)} s at least, and its part of `budget_s` was "
            f"{format_number(part_s, 2)} s"
        )
    size = timed.micro_batch_size
    dataset = searched_batches(task.data, model, batch_size=size, seed=task.seed)
    # In epochs without end: else the starts of short ones count as waits for data.
    return profile_input_pipeline(model, dataset.repeat(), budget_s=part_s, remedies=False)


# From one batch to the next one while the time of an example is looked for.
_GROWTH = 8


def measure_memory(
    task: Task, *, largest: int
) -> tuple[MaxBatchSizeResult | None, int | None, tuple[Note, ...]]:
    """Search for the largest batch that fits, as far as its part of the budget goes.

    Returns the search, how many examples may go through the device at once, and notes.
    """
    limit_bytes, window = task.memory_limit_bytes, MEMORY_WINDOW
    with (
        refusals_told(task.build, task.source),
        open_probes(task.load, memory_limit_bytes=limit_bytes, memory_window=window) as probes,
    ):
        limited = TimeLimitedProbes(probes, task)
        try:
            found = probe_max_batch(
                limited, memory_window=window, max_batch_size=largest, confirm=False
            )
        except TimeSpentError:
            task.budget.unknown[MEMORY] = (
                f"its search did not end in its part of `budget_s`; {limited.fits:,} examples fit"
            )
            # On a CPU the time of an update ends the sizes long before memory does.
            bounded = gpu_visible() or limit_bytes is not None
            fits = max(limited.fits, task.base_batch_size) if bounded else None
            return None, fits, probes.facts.notes
        return found, found.max_batch_size, probes.facts.notes


class TimeSpentError(Exception):
    """The time for a search is spent."""


class TimeLimitedProbes:
    """Probes of which, after the first, none is begun that would not end in time."""

    def __init__(self, probes: Probes, task: Task):
        self.isolated, self.facts, self.renew = probes.isolated, probes.facts, probes.renew
        self.fits = 0
        self._probes, self._budget = probes, task.budget
        self._largest, self._example_s, self._until_s = 0, 0.0, 0.0

    def read(self, batch_size: int) -> Reading:
        # A far larger batch is come to in steps: what a call costs beside its examples counts less
        # and less in the seconds of an example.
        while self._largest and batch_size > _GROWTH * self._largest:
            self._read(_GROWTH * self._largest)
        return self._read(batch_size)

    def _read(self, batch_size: int) -> Reading:
        if self._largest and self._budget.left_s < self._until_s + batch_size * self._example_s:
            raise TimeSpentError
        reading = self._probes.read(batch_size)
        if not self._largest:
            # Its part of the budget begins now: a process that was started is worth some probes.
            self._until_s = self._budget.left_s - self._budget.part_s(MEMORY)
        if batch_size > self._largest:
            # The steps alone, where they were timed: graphs are built once.
            seconds = STEPS * reading.step_s if reading.step_s else reading.duration_s
            self._largest, self._example_s = batch_size, seconds / batch_size
        needed = reading.bytes_below(self.facts.limit_bytes)
        if needed is not None and needed <= MEMORY_WINDOW[1] * self.facts.limit_bytes:
            self.fits = max(self.fits, reading.rows)
        return reading
