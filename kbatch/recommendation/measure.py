"""The measurements behind a recommendation, within one budget of time."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import keras

from kbatch.analysis.next_size import forecast_updates
from kbatch.device.failures import ran_out_of_memory
from kbatch.document.numbers import counted, readable
from kbatch.errors import InputError
from kbatch.input_pipeline.measure import profile_input_pipeline
from kbatch.input_pipeline.record import InputPipelineProfile
from kbatch.memory.find import probe_max_batch
from kbatch.memory.probe import LoadFacts, Probes, Reading, search_in_place
from kbatch.memory.record import MaxBatchSizeResult
from kbatch.memory.workload import STEPS, Load
from kbatch.recommendation.choice import TimeInFit, TrainedRuns, promising_sizes
from kbatch.recommendation.fit_overhead import time_fit
from kbatch.recommendation.limits import INPUT, MEMORY, NOISE, SATURATION
from kbatch.recommendation.pilot import CheckPlan, PilotPlan, run_pilot, run_size_check
from kbatch.recommendation.pilot_record import FitTime, PilotRecord, SizeCheck
from kbatch.recommendation.record import OTHER_SIZES, trained_runs
from kbatch.throughput.record import TimedRounds
from kbatch.throughput.update_timing import UpdateTimes, time_updates
from kbatch.training.accumulation.parts_check import PartsChecks
from kbatch.training.accumulation.whole_batch_moments import uncut_part
from kbatch.training.data.forms import FitData
from kbatch.training.data.model_inputs import REFUSALS, refusal_text
from kbatch.training.data.sample_rows import DataEnded, SampleRows, Source
from kbatch.training.state import kept_state

_LINES = {
    MEMORY: "memory: how many examples fit at once",
    SATURATION: "hardware saturation: the time of an update by batch size",
    NOISE: "gradient noise: a pilot",
    INPUT: "input pipeline: what it delivers",
    OTHER_SIZES: f"{OTHER_SIZES}: short trainings to the pilot's loss",
}

Result = TypeVar("Result")


class Ledger:
    """What each measurement took, and why one told nothing.

    Args:
        on_progress: Receives a line before each measurement, or None.

    Attributes:
        durations_s: Seconds of each measurement, by its name.
        unknown: Why a limit could not be measured, by its name.
    """

    def __init__(self, on_progress: Callable[[str], None] | None):
        self.durations_s: dict[str, float] = {}
        self.unknown: dict[str, str] = {}
        self._tell = on_progress or (lambda line: None)

    def run(self, limit: str, measure: Callable[[], Result]) -> Result:
        """Make a measurement whose errors are the user's to mend."""
        self._tell(_LINES[limit])
        began_s = time.perf_counter()
        try:
            return measure()
        finally:
            self.durations_s[limit] = time.perf_counter() - began_s

    def try_run(self, limit: str, measure: Callable[[], Result]) -> Result | None:
        """Make a measurement; that data or memory do not allow it is a result."""
        try:
            return self.run(limit, measure)
        except Exception as error:
            reason = reason_of(error)
            if reason is None:
                raise
            self.unknown[limit] = reason
            return None


def reason_of(error: Exception) -> str | None:
    """Describe why a measurement told nothing, in a clause."""
    if isinstance(error, InputError):
        return _as_reason(str(error))
    if isinstance(error, DataEnded):
        return f"the data ended after {counted(error.rows, 'example')} of a batch"
    return "it ran out of memory" if ran_out_of_memory(error) else None


def _as_reason(message: str) -> str:
    """Make a clause of an error's message."""
    text = message.strip().rstrip(".")
    return text[:1].lower() + text[1:]


# In the order in which they are made. What one leaves over, the later ones share.
_WEIGHTS = {MEMORY: 0.15, NOISE: 0.2, SATURATION: 0.15, INPUT: 0.1, OTHER_SIZES: 0.45}
# A training that was expected to end in time may take this share of the budget more.
_GRACE = 0.2


class BudgetClock:
    """The seconds of a whole call, starting processes and building graphs included.

    Args:
        budget_s: Seconds to spend.
        now: Returns the time, in seconds.

    Attributes:
        reserved_s: Seconds that are kept for what comes last.
    """

    def __init__(self, budget_s: float, now: Callable[[], float] = time.perf_counter):
        self.budget_s = budget_s
        self.reserved_s = 0.0
        self._now = now
        self._began_s = now()

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return max(0.0, self._began_s + self.budget_s - self.reserved_s - self._now())

    @property
    def most_s(self) -> float:
        """Seconds after which a training that has begun is ended."""
        return self.left_s + _GRACE * self.budget_s

    def part_s(self, measurement: str) -> float:
        """Return the seconds of a measurement: its share of what is left."""
        names = list(_WEIGHTS)
        later = names[names.index(measurement) :]
        return self.left_s * _WEIGHTS[measurement] / sum(_WEIGHTS[name] for name in later)


class Task(NamedTuple):
    """What is to be trained, and what may be spent on it.

    Attributes:
        build: Builds the model.
        is_given: Whether it gives a model of the user's, which stays as it is.
        data: Arguments of `fit`.
        source: The same data for probes.
        base_batch_size: Batch size that the learning rate suits, in examples.
        epochs: Most passes over the data in the pilot, None for no limit.
        memory_limit_bytes: Memory that may be taken, None for what the device has.
        memory_window: Lower and upper share of it that a batch may fill.
        clock: The seconds that are left.
        checks: Compare parts of a batch with the whole, once.
        seed: Seed of the pilot and of other sizes.
    """

    build: Callable[[], keras.Model]
    is_given: bool
    data: FitData
    source: Source
    base_batch_size: int
    epochs: int | None
    memory_limit_bytes: int | None
    memory_window: tuple[float, float]
    clock: BudgetClock
    checks: PartsChecks
    seed: int


# `fit` is timed at the base size or above, and at this part of it.
_APART = 8
# Steps that measuring the data and `fit` makes, however short its time.
_FEWEST_STEPS, _MUCH_LONGER = 100, 1.5


class InputFound(NamedTuple):
    """What the data cost.

    Attributes:
        pipeline: What the input pipeline delivers at the largest of the sizes; None for arrays,
            of which `fit` shows it.
        fit_times: What `fit` takes, at each of them.
    """

    pipeline: InputPipelineProfile | None
    fit_times: tuple[FitTime, ...]


def measure_updates(
    task: Task, model: keras.Model, *, batch_sizes: Sequence[int], fits: int | None
) -> UpdateTimes:
    """Time updates of the batch sizes, whole up to the examples that fit."""
    return time_updates(
        model,
        task.source,
        batch_sizes=batch_sizes,
        largest_whole=fits,
        budget_s=task.clock.part_s(SATURATION),
        first=task.base_batch_size,
        checks=task.checks,
    )


def measure_noise(task: Task) -> PilotRecord:
    """Run the pilot."""
    size = task.base_batch_size
    if size < 2:
        raise InputError(
            "A pilot measures the noise between the micro-batches of a batch: give a "
            "`base_batch_size` of two examples at least, and the learning rate that suits it. "
            f"Received: base_batch_size={size}."
        )
    plan = PilotPlan(
        size,
        budget_s=task.clock.part_s(NOISE),
        epochs=task.epochs,
        seed=task.seed,
    )
    with kept_state(task.build()) if task.is_given else contextlib.nullcontext():
        return run_pilot(task.build, task.data, plan=plan)


def pilot_notes(task: Task, model: keras.Model, pilot: PilotRecord) -> tuple[str, ...]:
    """Say what the pilot trains differently than a whole batch would.

    Layers and losses of Keras are known, the user's own are compared on the data.
    """
    layers: Any = model._flatten_layers()
    own = any(not type(layer).__module__.startswith("keras.") for layer in layers)
    if not own and uncut_part(model) is None:
        return ()
    difference = task.checks.difference(model, task.source)
    size = pilot.micro_batch_size
    return () if difference is None else (f"The pilot trains in parts of {size:,}. {difference}",)


def measure_input(task: Task, model: keras.Model, *, timings: Sequence[TimedRounds]) -> InputFound:
    """Measure what `fit` takes at some batch sizes, and what the input pipeline delivers."""
    sizes = sizes_to_time(timings, task.base_batch_size)
    part_s = task.clock.part_s(INPUT)
    least_s = _FEWEST_STEPS * max(t.median_s for t in timings if t.batch_size in sizes)
    if least_s > _MUCH_LONGER * part_s:
        raise InputError(
            f"measuring `fit` takes {readable(least_s, 2)} s at least, and its part of `budget_s` "
            f"was {readable(part_s, 2)} s"
        )
    profile = None
    if not isinstance(task.source, SampleRows):
        part_s /= 2
        profile = profile_input_pipeline(
            model, task.data.x, batch_size=sizes[-1], budget_s=part_s, remedies=False
        )
    times = time_fit(model, task.data, source=task.source, sizes=sizes, budget_s=part_s)
    return InputFound(profile, times)


def sizes_to_time(timings: Sequence[TimedRounds], base_batch_size: int) -> tuple[int, ...]:
    """Choose two batch sizes to time `fit` at."""
    whole = sorted(t.batch_size for t in timings if t.micro_batch_size == t.batch_size)
    near = [size for size in whole if size <= _APART * base_batch_size]
    largest = max(near, default=base_batch_size)
    return (largest // _APART, largest) if largest >= _APART else (largest,)


# From one batch to the next one while the time of an example is looked for.
_GROWTH = 8


class MemoryFound(NamedTuple):
    """How many examples fit at once.

    Attributes:
        result: The search, None where it did not end in its time.
        fits: Examples that fit, at the least; None where nothing was run.
        reason: Why there is no result, None where there is one.
    """

    result: MaxBatchSizeResult | None
    fits: int | None
    reason: str | None


def measure_memory(task: Task, *, largest: int) -> MemoryFound:
    """Search for the largest batch that fits, as far as its part of the budget goes.

    Where it ends before, the base batch size is taken to fit: the user trains at it.
    """

    def search(probes: Probes) -> MaxBatchSizeResult:
        return probe_max_batch(
            _Bounded(probes, task),
            memory_window=task.memory_window,
            max_batch_size=largest,
            confirm=False,
        )

    try:
        with refusals_told(task):
            found = search_in_place(
                Load(task.build, task.source, keras.config.dtype_policy().name),
                search,
                memory_limit_bytes=task.memory_limit_bytes,
                memory_window=task.memory_window,
            )
    except _TimeSpentError as spent:
        return MemoryFound(
            None,
            max(spent.fits, task.base_batch_size),
            f"its search did not end in its part of `budget_s`; {spent.fits:,} examples fit",
        )
    return MemoryFound(found, found.max_batch_size, None)


@contextlib.contextmanager
def refusals_told(task: Task) -> Iterator[None]:
    """Turn what a model says of data that do not suit it into an error that says what to give."""
    try:
        yield
    except (ValueError, TypeError, *REFUSALS) as error:
        told = refusal_text(error, model=task.build, source=task.source)
        if told is None:
            raise
        raise InputError(told) from error


class _TimeSpentError(Exception):
    """The time for a search is spent."""

    def __init__(self, fits: int):
        super().__init__(fits)
        self.fits = fits


class _Bounded:
    """Probes of which, after the first, none is begun that would not end in time."""

    # Their part of the budget begins after the first: starting a process is worth some probes.
    # The base batch size is probed before any larger one, for the seconds of an example.

    def __init__(self, probes: Probes, task: Task):
        self.isolated = probes.isolated
        self._probes = probes
        self._task = task
        self._until_s = 0.0
        self._fits = 0
        self._example_s: float | None = None

    @property
    def facts(self) -> LoadFacts:
        return self._probes.facts

    def renew(self) -> bool:
        return self._probes.renew()

    def read(self, batch_size: int) -> Reading:
        known = self._task.base_batch_size
        while self._fits and known < batch_size and not self._holds(batch_size):
            # What a call costs beside its examples counts less and less.
            self._check(known)
            found = self._read(known)
            # The steps alone, where they were timed: graphs are built once.
            seconds = STEPS * found.step_s if found.step_s else found.duration_s
            self._example_s = seconds / known
            known *= _GROWTH
        if self._fits:
            self._check(batch_size)
            return self._read(batch_size)
        reading = self._read(batch_size)
        clock = self._task.clock
        self._until_s = clock.left_s - clock.part_s(MEMORY)
        return reading

    def _check(self, batch_size: int) -> None:
        if self._example_s is not None and not self._holds(batch_size):
            raise _TimeSpentError(self._fits)

    def _holds(self, batch_size: int) -> bool:
        """Return whether the time that is left holds a batch, by the last one that was read."""
        if self._example_s is None:
            return False
        return self._task.clock.left_s - batch_size * self._example_s >= self._until_s

    def _read(self, batch_size: int) -> Reading:
        reading = self._probes.read(batch_size)
        limit_bytes = self.facts.limit_bytes
        needed = reading.bytes_below(limit_bytes)
        if needed is not None and needed <= self._task.memory_window[1] * limit_bytes:
            self._fits = max(self._fits, reading.rows)
        return reading


# A run that has cost this much more than the best one has lost, as in a search by goodput.
_LOST = 1.3
_STRETCHES = 30


class Trainings(NamedTuple):
    """The trainings at other sizes.

    Attributes:
        checks: The runs.
        ended: Why they ended before the best size was found, None if they did not.
        short_s: Seconds that the budget lacked for the sizes that may be faster, by the size.
    """

    checks: tuple[SizeCheck, ...] = ()
    ended: str | None = None
    short_s: Mapping[int, float] = MappingProxyType({})


def train_sizes(
    task: Task,
    pilot: PilotRecord | None,
    *,
    timings: Sequence[TimedRounds],
    in_fit: TimeInFit | None,
    rule: str | None,
    run: Callable[..., SizeCheck] = run_size_check,
) -> Trainings:
    """Train sizes to the loss that the pilot reached, while one may be better and time is left.

    Of the sizes that can finish in the time left, the one with the largest expected gain is next.
    """
    checks: tuple[SizeCheck, ...] = ()
    failures: list[str] = []
    build_s = (pilot and pilot.build_s) or 0.0
    while True:
        found = trained_runs(timings, in_fit=in_fit, pilot=pilot, checks=checks)
        if pilot is None or pilot.missing is not None or not found.tried:
            return Trainings(ended="the pilot reached no loss that other sizes could be trained to")
        needed_s = {
            size: build_s + _training_s(found, pilot, size) for size in promising_sizes(found)
        }
        left_s = task.clock.left_s
        size = next((size for size, seconds in needed_s.items() if seconds <= left_s), None)
        if size is None:
            short = [
                f"batch size {size:,} would need about {readable(seconds, 2)} s and "
                f"{readable(left_s, 2)} s of `budget_s` were left"
                for size, seconds in list(needed_s.items())[:1]
            ]
            short_s = {size: seconds - left_s for size, seconds in needed_s.items()}
            return Trainings(checks, "; ".join([*failures, *short]) or None, short_s)
        plan = _plan(task, found, pilot, batch_size=size, rule=rule)
        try:
            with kept_state(task.build()) if task.is_given else contextlib.nullcontext():
                check = run(task.build, task.data, plan=plan)
        except Exception as error:
            reason = reason_of(error)
            if reason is None:
                raise
            failures.append(f"at batch size {size:,} {reason}")
            check = SizeCheck(size, plan.micro_batch_size, None, 0, None, 0.0, "failed")
        # The pilot may have been built while something else ran beside it.
        build_s = min(build_s, max(0.0, left_s - task.clock.left_s - check.trained_s))
        checks = (*checks, check)


def _training_s(found: TrainedRuns, pilot: PilotRecord, batch_size: int) -> float:
    """Estimate the seconds of a run after its first update, looks at the held-out loss included."""
    looks_s = pilot.look_s or 0.0
    # What an update of the pilot took beside its train step; a run starts no epochs.
    step_s = {way.batch_size: way.time_s for way in found.ways.values()}
    pilot_s = (pilot.trained_s or 0.0) - looks_s * len(pilot.stretches)
    base_s = step_s.get(pilot.batch_size, 0.0)
    beside_s = max(0.0, pilot_s / pilot.updates - base_s) if pilot.trained_s else 0.0
    update_s = step_s[batch_size] + beside_s
    return _updates(found, pilot, batch_size) * update_s + _STRETCHES * looks_s


def _updates(found: TrainedRuns, pilot: PilotRecord, batch_size: int) -> float:
    forecast = forecast_updates(found.costs, found.tried)
    return forecast.updates[batch_size] if forecast else pilot.updates_to_target


def _plan(
    task: Task, found: TrainedRuns, pilot: PilotRecord, *, batch_size: int, rule: str | None
) -> CheckPlan:
    update_s = found.costs.update_costs[batch_size]
    least_s = min(run.cost for run in found.tried if run.cost is not None)
    return CheckPlan(
        batch_size=batch_size,
        micro_batch_size=found.ways[batch_size].micro_batch_size,
        base_batch_size=task.base_batch_size,
        rule=rule,
        target=pilot.target or 0.0,
        held_out=pilot.has_held_out,
        stretch=max(1, round(_updates(found, pilot, batch_size) / _STRETCHES)),
        most_updates=max(1, round(_LOST * least_s / update_s)),
        budget_s=task.clock.most_s,
        seed=task.seed,
    )
