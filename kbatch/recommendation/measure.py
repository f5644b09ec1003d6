"""The recommendation: the limits of the batch size are measured, and the size follows from them.

Everything is measured within one budget of time.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import keras
import keras_tuner
import numpy as np

from kbatch.analysis.batch_sizes import check_batch_sizes, check_size, powers_of_two
from kbatch.analysis.learning_rate import check_rule
from kbatch.device.environment import read_environment
from kbatch.device.memory import check_memory_limit, gpu_visible
from kbatch.document.numbers import format_number
from kbatch.errors import InputError
from kbatch.input_pipeline.measure import profile_input_pipeline
from kbatch.input_pipeline.record import InputPipelineProfile
from kbatch.library_internals import rate_of
from kbatch.memory.find import data_source, probe_max_batch
from kbatch.memory.probe import Probes, Reading, WorkloadFacts, open_probes
from kbatch.memory.record import MaxBatchSizeResult
from kbatch.memory.search import MEMORY_WINDOW, check_window
from kbatch.memory.workload import STEPS, Workload
from kbatch.recommendation import BASE_BATCH_SIZE, BUDGET_S
from kbatch.recommendation.budget import Budget, reason_of
from kbatch.recommendation.choice import CandidateSearch, decide, trained_runs
from kbatch.recommendation.limits import INPUT, MEMORY, NOISE, OTHER_SIZES, SATURATION, TimeInFit
from kbatch.recommendation.pilot import run_pilot, run_size_check, time_fit
from kbatch.recommendation.pilot_record import FitTime, PilotRecord, SizeCheck, fit_lines
from kbatch.recommendation.record import Recommendation
from kbatch.throughput.record import TimedRounds
from kbatch.throughput.update_timing import time_updates
from kbatch.timing.rounds import check_seconds
from kbatch.training.accumulation import sum_sparse_gradients
from kbatch.training.accumulation.parts_check import PartsChecks
from kbatch.training.build_function import BuildFunction, model_builder
from kbatch.training.data.forms import FitData, arrays_of, gives_batches
from kbatch.training.data.model_inputs import refusals_told
from kbatch.training.data.sample_rows import SampleRows, Source, rows_for
from kbatch.training.learning_rate import Schedule, current_learning_rate
from kbatch.training.model import replica_count, user_step
from kbatch.training.state import check_seed, inner_optimizers, kept_state

_SMALLEST, _LARGEST = 8, 2048
# Of the budget, where memory is measured last; and seconds that its process may take to start.
_MEMORY_SHARE, _WORKER_S = 0.2, 20.0


def recommend(
    build: "BuildFunction | keras_tuner.HyperModel | keras.Model",
    x: Any,
    y: Any = None,
    *,
    batch_sizes: Iterable[int] | None = None,
    base_batch_size: int = BASE_BATCH_SIZE,
    learning_rate_scaling: Literal["auto", "linear", "sqrt"] | None = "auto",
    validation_data: Any = None,
    epochs: int | None = None,
    memory_limit_bytes: int | None = None,
    memory_window: tuple[float, float] = MEMORY_WINDOW,
    budget_s: float = BUDGET_S,
    seed: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Recommendation:
    """Recommend a batch size, a micro-batch size and a learning rate, and say why.

    Four limits are measured: how many examples fit in memory at once, from how many on the device
    is saturated, beyond how many the gradient noise wastes them, and what the input pipeline
    delivers. A pilot at the base batch size sets a target loss; the sizes that may reach it sooner
    are trained to it too while the budget lasts. The answer is the size with the least expected
    time, updates times the time of an update in `fit`, of those that reached the loss. Sizes that
    may be faster are named beside it. What is not known is None, with the reason in `unknown`.

    Example:

    >>> recommendation = kbatch.recommend(build, x, y)
    >>> print(recommendation)  # a page: the answer, why, and how sure
    >>> recommendation.batch_size, recommendation.micro_batch_size, recommendation.learning_rate
    >>> kbatch.plot_limits(recommendation).figure.savefig("limits.png")

    Args:
        build: As in `find_max_batch_size`, and so are `x` and `y`.
        x: Inputs.
        y: Targets of arrays.
        batch_sizes: Sizes to choose from beside `base_batch_size`, ascending; None for the powers
            of two from 8 to 2,048 that the data fill.
        base_batch_size: Batch size that the model's learning rate suits; the pilot trains at it.
        learning_rate_scaling: How the learning rate follows the batch size: `"linear"`, `"sqrt"`,
            None (it does not), or `"auto"` for linear under SGD and sqrt under any other
            optimizer.
        validation_data: What `fit` takes. The pilot ends when the loss on it no longer falls. None
            to hold out a fifth of arrays; a dataset without it is trained on for the time given.
        epochs: Most passes over the data in the pilot; None for no limit but time.
        memory_limit_bytes: As in `find_max_batch_size`.
        memory_window: Lower and upper share of that limit which a batch may fill.
        budget_s: Seconds for the whole call, starting processes and building graphs included;
            each measurement receives a part of what is left. From 20 s on the call ends within
            1.5 times the budget.
        seed: Seed of weights and order in the pilot and at other sizes, None for one that is
            drawn and recorded.
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
        data=FitData(x, y, validation_data=validation_data),
        source=data_source(x, y),
        base_batch_size=check_size(base_batch_size, "base_batch_size"),
        epochs=None if epochs is None else check_size(epochs, "epochs", unit=""),
        memory_limit_bytes=check_memory_limit(memory_limit_bytes),
        memory_window=check_window(memory_window),
        budget=Budget(budget_s, on_progress=on_progress),
        checks=PartsChecks(),
        # Drawn where none is given: all sizes hold out the same part.
        seed=int(np.random.default_rng().integers(2**31)) if given_seed is None else given_seed,
    )
    if learning_rate_scaling != "auto":
        check_rule(learning_rate_scaling, "learning_rate_scaling")
    asked = None if batch_sizes is None else check_batch_sizes(batch_sizes)
    if not gives_batches(x):
        arrays_of(task.data)  # Rows that do not fit each other are refused at once.
    if isinstance(task.source, SampleRows):
        _sizes(asked, task.source.examples)  # A dataset tells its examples to a model only.
    return _measured(task, asked, learning_rate_scaling)


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


def _measured(task: "Task", asked: tuple[int, ...] | None, scaling: str | None) -> Recommendation:
    largest, budget, base = asked[-1] if asked else _LARGEST, task.budget, task.base_batch_size
    # A GPU has to be free for the worker process, and a limit that was asked for comes first. Else
    # it is last: on a CPU the time of an update ends the sizes long before memory does.
    memory = None
    if gpu_visible() or task.memory_limit_bytes is not None:
        memory = budget.run(MEMORY, lambda: measure_memory(task, largest=largest))
    else:
        budget.reserved_s = _MEMORY_SHARE * budget.budget_s
    with refusals_told(task.build, task.source):
        model: Any = task.load.start().model
        if replica_count(model) > 1:
            raise InputError(
                "Limits are measured on one device: build the model outside of "
                f"`strategy.scope()`. Received: a model on {replica_count(model)} replicas."
            )
        source = task.source
        rows = rows_for(source, model)
        examples = rows.examples if isinstance(rows, SampleRows) else None
        sizes = _sizes(asked, examples)
        if examples == 1:
            raise InputError("The data have one example: give more rows. Received: 1 example.")
        if examples is None or base <= examples:
            sizes = tuple(sorted({*sizes, base}))  # The pilot trains at it.
        pilot = budget.try_run(NOISE, lambda: measure_noise(task))
        with kept_state(model):
            sum_sparse_gradients(model)  # As the sizes are trained.
            model.make_train_function()  # All that is timed shares its graphs.
            timings, notes = budget.run(
                SATURATION,
                lambda: time_updates(
                    model,
                    source,
                    batch_sizes=sizes,
                    largest_whole=memory and memory.fits,
                    budget_s=budget.part_s(SATURATION),
                    first=base,
                    checks=task.checks,
                ),
            )
            given = None
            if timings:
                given = budget.try_run(INPUT, lambda: measure_input(task, model, timings))
            pipeline, fit_times = given or (None, ())
    optimizer = inner_optimizers(model)[0]
    rule = scaling
    if scaling == "auto":
        rule = "linear" if isinstance(optimizer, keras.optimizers.SGD) else "sqrt"
    in_fit = fit_lines(fit_times, pipeline).line
    runs = budget.run(
        OTHER_SIZES, lambda: train_sizes(task, pilot, timings=timings, in_fit=in_fit, rule=rule)
    )
    budget.reserved_s, checks = 0.0, runs.checks
    if memory is None and not budget.holds(_WORKER_S):
        reason = "its process takes long to start: give a larger `budget_s`"
        memory = MemoryFound(None, None, reason)
    elif memory is None:
        memory = budget.run(MEMORY, lambda: measure_memory(task, largest=largest))
    not_timed = None if timings else "not even the smallest batch size could be run"
    if memory.result is not None:  # Sizes that ran while nothing else held memory may not fit.
        most = memory.result.max_batch_size
        timings = tuple(timed for timed in timings if timed.micro_batch_size <= most)
        checks = tuple(check for check in checks if check.micro_batch_size <= most)
    reasons = {MEMORY: memory.reason, SATURATION: not_timed, OTHER_SIZES: runs.ended}
    return Recommendation(
        model_name=model.name,
        optimizer=type(optimizer).__name__,
        dtype_policy=model.dtype_policy.name,
        base_batch_size=base,
        base_learning_rate=current_learning_rate(optimizer),
        scheduled=isinstance(rate_of(optimizer), Schedule),
        learning_rate_rule=rule,
        examples=examples,
        timings=timings,
        memory=memory.result,
        pilot=pilot,
        pipeline=pipeline,
        unknown=budget.unknown | {name: why for name, why in reasons.items() if why},
        durations_s=budget.durations_s,
        budget_s=budget.budget_s,
        notes=(*memory.notes, *notes, *(pilot_notes(task, model, pilot) if pilot else ())),
        environment=read_environment(),
        checks=checks,
        fit_times=fit_times,
        decision=decide(
            trained_runs(timings, in_fit=in_fit, pilot=pilot, checks=checks),
            base_batch_size=base,
            rule=rule,
            missing=pilot.missing if pilot else None,
            budget_s=budget.budget_s,
            short_s=runs.short_s,
        ),
    )


# `fit` is timed at the base size or above, and at this part of it.
_APART = 8
# Steps that measuring the data and `fit` makes, however short its time.
_FEWEST_STEPS, _MUCH_LONGER = 100, 1.5
# From one batch to the next one while the time of an example is looked for.
_GROWTH = 8


class Task(NamedTuple):
    """What is to be trained, as `recommend` was asked, and what may be spent on it."""

    build: Callable[[], keras.Model]
    is_given: bool  # A model of the user's, which stays as it is.
    data: FitData
    source: Source  # The same data for probes.
    base_batch_size: int
    epochs: int | None
    memory_limit_bytes: int | None
    memory_window: tuple[float, float]
    budget: Budget
    checks: PartsChecks
    seed: int

    @property
    def load(self) -> Workload:
        return Workload(self.build, self.source, keras.config.dtype_policy().name)

    def kept(self) -> contextlib.AbstractContextManager[Any]:
        """Put a model of the user's back as it was."""
        return kept_state(self.build()) if self.is_given else contextlib.nullcontext()


def measure_noise(task: Task) -> PilotRecord:
    size = task.base_batch_size
    if size < 2:
        raise InputError(
            "A pilot measures the noise between the micro-batches of a batch: give a "
            "`base_batch_size` of two examples at least, and the learning rate that suits it. "
            f"Received: base_batch_size={size}."
        )
    with task.kept():
        return run_pilot(
            task.build,
            task.data,
            batch_size=size,
            budget_s=task.budget.part_s(NOISE),
            epochs=task.epochs,
            seed=task.seed,
        )


def pilot_notes(task: Task, model: keras.Model, pilot: PilotRecord) -> tuple[str, ...]:
    """Say what the pilot trains differently than a whole batch would."""
    if user_step(model) is not None:
        return ("The noise scale was not measured: the model has its own `train_step`.",)
    difference = task.checks.find(model, task.source).note
    size = pilot.micro_batch_size
    return () if difference is None else (f"The pilot trains in parts of {size:,}. {difference}",)


def measure_input(
    task: Task, model: keras.Model, timings: Sequence[TimedRounds]
) -> tuple[InputPipelineProfile | None, tuple[FitTime, ...]]:
    """Measure what the pipeline of a dataset delivers, and what `fit` takes at some batch sizes."""
    sizes = sizes_to_time(timings, task.base_batch_size)
    part_s = task.budget.part_s(INPUT)
    least_s = _FEWEST_STEPS * max(t.median_s for t in timings if t.batch_size in sizes)
    if least_s > _MUCH_LONGER * part_s:
        raise InputError(
            f"measuring `fit` takes {format_number(least_s, 2)} s at least, and its part of "
            f"`budget_s` was {format_number(part_s, 2)} s"
        )
    profile = None
    if not isinstance(task.source, SampleRows):
        part_s /= 2
        profile = profile_input_pipeline(
            model, task.data.x, batch_size=sizes[-1], budget_s=part_s, remedies=False
        )
    return profile, time_fit(model, task.data, source=task.source, sizes=sizes, budget_s=part_s)


def sizes_to_time(timings: Sequence[TimedRounds], base_batch_size: int) -> tuple[int, ...]:
    """Choose two batch sizes to time `fit` at."""
    whole = [t.batch_size for t in timings if t.micro_batch_size == t.batch_size]
    near = [size for size in whole if size <= _APART * base_batch_size]
    largest = max(near, default=base_batch_size)
    return (largest // _APART, largest) if largest >= _APART else (largest,)


class MemoryFound(NamedTuple):
    """How many examples fit at once, at the least, or why that is not known."""

    result: MaxBatchSizeResult | None
    fits: int | None
    reason: str | None
    notes: tuple[str, ...] = ()  # What a reader must know, as of a GPU that was in use.


def measure_memory(task: Task, *, largest: int) -> MemoryFound:
    """Search for the largest batch that fits, as far as its part of the budget goes."""
    window, limit_bytes = task.memory_window, task.memory_limit_bytes
    with (
        refusals_told(task.build, task.source),
        open_probes(task.load, memory_limit_bytes=limit_bytes, memory_window=window) as probes,
    ):
        notes, limited = probes.facts.notes, _TimeLimitedProbes(probes, task)
        try:
            found = probe_max_batch(
                limited, memory_window=window, max_batch_size=largest, confirm=False
            )
        except _TimeSpentError:
            fits = max(limited.fits, task.base_batch_size)  # The user trains at it.
            why = f"its search did not end in its part of `budget_s`; {limited.fits:,} examples fit"
            return MemoryFound(None, fits, why, notes)
    return MemoryFound(found, found.max_batch_size, None, notes)


class _TimeSpentError(Exception):
    """The time for a search is spent."""


class _TimeLimitedProbes:
    """Probes of which, after the first, none is begun that would not end in time."""

    # Their part of the budget begins after the first: starting a process is worth some probes.
    # The base batch size is probed before any larger one, for the seconds of an example.

    def __init__(self, probes: Probes, task: Task):
        self.isolated = probes.isolated
        self._probes, self._task = probes, task
        self._until_s, self.fits = 0.0, 0
        self._example_s: float | None = None

    @property
    def facts(self) -> WorkloadFacts:
        return self._probes.facts

    def renew(self) -> bool:
        return self._probes.renew()

    def read(self, batch_size: int) -> Reading:
        if not self.fits:
            reading = self._read(batch_size)
            self._until_s = self._task.budget.left_s - self._task.budget.part_s(MEMORY)
            return reading
        known = self._task.base_batch_size
        while known < batch_size and not self._ends_in_time(batch_size):
            # What a call costs beside its examples counts less and less.
            found = self._read(known)
            # The steps alone, where they were timed: graphs are built once.
            seconds = STEPS * found.step_s if found.step_s else found.duration_s
            self._example_s = seconds / known
            known *= _GROWTH
        return self._read(batch_size)

    def _ends_in_time(self, batch_size: int) -> bool:
        """Return whether the time that is left holds a batch, by the last one that was read."""
        example_s, left_s = self._example_s, self._task.budget.left_s
        return example_s is not None and left_s - batch_size * example_s >= self._until_s

    def _read(self, batch_size: int) -> Reading:
        if self._example_s is not None and not self._ends_in_time(batch_size):
            raise _TimeSpentError
        reading = self._probes.read(batch_size)
        limit_bytes = self.facts.limit_bytes
        needed = reading.bytes_below(limit_bytes)
        if needed is not None and needed <= self._task.memory_window[1] * limit_bytes:
            self.fits = max(self.fits, reading.rows)
        return reading


def train_sizes(
    task: Task,
    pilot: PilotRecord | None,
    *,
    timings: Sequence[TimedRounds],
    in_fit: TimeInFit | None,
    rule: str | None,
    run: Callable[..., SizeCheck] = run_size_check,
) -> CandidateSearch:
    """Train sizes to the loss that the pilot reached, while one may be better and time is left."""
    search = CandidateSearch(
        timings, in_fit=in_fit, pilot=pilot, base_batch_size=task.base_batch_size, rule=rule
    )
    budget = task.budget
    while (plan := search.ask(left_s=budget.left_s, most_s=budget.most_s)) is not None:
        failure = None
        try:
            with task.kept():
                check = run(task.build, task.data, plan=plan)
        except Exception as error:
            failure = reason_of(error)
            sizes = plan.batch_size, plan.micro_batch_size
            check = SizeCheck(*sizes, None, 0, None, 0.0, "failed")
        search.tell(check, left_s=budget.left_s, failure=failure)
    return search
