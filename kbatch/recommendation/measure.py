"""The measurements behind a recommendation, within one budget of time."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import keras

from kbatch.device.failures import ran_out_of_memory
from kbatch.document.numbers import format_number, pluralize
from kbatch.errors import InputError
from kbatch.input_pipeline.measure import profile_input_pipeline
from kbatch.input_pipeline.record import InputPipelineProfile
from kbatch.memory.find import probe_max_batch
from kbatch.memory.probe import Probes, Reading, WorkloadFacts, open_probes
from kbatch.memory.record import MaxBatchSizeResult
from kbatch.memory.workload import STEPS, Workload
from kbatch.recommendation.choice import CandidateSearch
from kbatch.recommendation.limits import INPUT, MEMORY, NOISE, OTHER_SIZES, SATURATION, TimeInFit
from kbatch.recommendation.pilot import run_pilot, run_size_check, time_fit
from kbatch.recommendation.pilot_record import FitTime, PilotRecord, SizeCheck
from kbatch.throughput.record import TimedRounds
from kbatch.throughput.update_timing import UpdateTimes, time_updates
from kbatch.training.accumulation.parts_check import PartsChecks
from kbatch.training.accumulation.whole_batch import OWN_STEP_NOTE
from kbatch.training.data.forms import FitData
from kbatch.training.data.model_inputs import REFUSALS, refusal_text
from kbatch.training.data.sample_rows import DataEnded, SampleRows, Source
from kbatch.training.model import user_step
from kbatch.training.state import kept_state

# The line before each measurement, in the order in which they are made, and its share of the
# budget: what one leaves over, the later ones share.
_MEASUREMENTS = {
    MEMORY: ("memory: how many examples fit at once", 0.15),
    NOISE: ("gradient noise: a pilot", 0.2),
    SATURATION: ("hardware saturation: the time of an update by batch size", 0.15),
    INPUT: ("input pipeline: what it delivers", 0.1),
    OTHER_SIZES: (f"{OTHER_SIZES}: short trainings to the pilot's loss", 0.45),
}
# Of the budget, to time the sizes, however late it is: without it nothing can be compared.
_LEAST_TIMING = 0.04
# A training that was expected to end in time may take this share of the budget more.
_GRACE = 0.2
# The call ends within so many budgets.
MOST_SPENT = 1.5
# `fit` is timed at the base size or above, and at this part of it.
_APART = 8
# Steps that measuring the data and `fit` makes, however short its time.
_FEWEST_STEPS, _MUCH_LONGER = 100, 1.5
# From one batch to the next one while the time of an example is looked for.
_GROWTH = 8

Result = TypeVar("Result")


class Ledger:
    """What each measurement took, by its name, and why one failed."""

    def __init__(self, on_progress: Callable[[str], None] | None):
        self.durations_s: dict[str, float] = {}
        self.unknown: dict[str, str] = {}
        self._tell = on_progress or (lambda line: None)

    def run(self, limit: str, measure: Callable[[], Result]) -> Result:
        """Make a measurement whose errors are the user's to mend."""
        self._tell(_MEASUREMENTS[limit][0])
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
    """Describe why a measurement failed, in a clause."""
    if isinstance(error, InputError):
        text = str(error).strip().rstrip(".")
        return text[:1].lower() + text[1:]
    if isinstance(error, DataEnded):
        return f"the data ended after {pluralize(error.rows, 'example')} of a batch"
    return "it ran out of memory" if ran_out_of_memory(error) else None


class BudgetClock:
    """The seconds of a whole call, starting processes and building graphs included."""

    def __init__(self, budget_s: float, now: Callable[[], float] | None = None):
        self.budget_s = budget_s
        self.reserved_s = 0.0  # For what comes last.
        self._now = now or time.perf_counter  # As the measurements read it, also from a fake.
        self._began_s = self._now()

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return max(0.0, self._began_s + self.budget_s - self.reserved_s - self._now())

    def holds(self, seconds: float, *, share: float) -> bool:
        """Return whether something would end within a share of the budget, spent already or not."""
        return self._now() + seconds <= self._began_s + share * self.budget_s

    @property
    def most_s(self) -> float:
        """Seconds after which a training that has begun is ended."""
        return self.left_s + _GRACE * self.budget_s

    def part_s(self, measurement: str) -> float:
        """Return the seconds of a measurement: its share of what is left."""
        names = list(_MEASUREMENTS)
        later = names[names.index(measurement) :]
        share = _MEASUREMENTS[measurement][1] / sum(_MEASUREMENTS[name][1] for name in later)
        least_s = _LEAST_TIMING * self.budget_s if measurement == SATURATION else 0.0
        return max(self.left_s * share, least_s if self.holds(least_s, share=MOST_SPENT) else 0.0)


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
    clock: BudgetClock
    checks: PartsChecks
    seed: int

    @property
    def load(self) -> Workload:
        """What the device has to hold."""
        return Workload(self.build, self.source, keras.config.dtype_policy().name)

    def kept(self) -> contextlib.AbstractContextManager[Any]:
        """Put a model of the user's back as it was."""
        return kept_state(self.build()) if self.is_given else contextlib.nullcontext()

    @contextlib.contextmanager
    def refusals_told(self) -> Iterator[None]:
        """Turn what a model says of data that do not suit it into what to give instead."""
        try:
            yield
        except (ValueError, TypeError, *REFUSALS) as error:
            told = refusal_text(error, model=self.build, source=self.source)
            if told is None:
                raise
            raise InputError(told) from error


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
    allowed: dict[str, Any] = {"budget_s": task.clock.part_s(NOISE), "epochs": task.epochs}
    with task.kept():
        return run_pilot(task.build, task.data, batch_size=size, seed=task.seed, **allowed)


def pilot_notes(task: Task, model: keras.Model, pilot: PilotRecord) -> tuple[str, ...]:
    """Say what the pilot trains differently than a whole batch would."""
    if user_step(model) is not None:
        return (OWN_STEP_NOTE,)
    difference = task.checks.find(model, task.source).note
    size = pilot.micro_batch_size
    return () if difference is None else (f"The pilot trains in parts of {size:,}. {difference}",)


def measure_input(
    task: Task, model: keras.Model, *, timings: Sequence[TimedRounds]
) -> tuple[InputPipelineProfile | None, tuple[FitTime, ...]]:
    """Measure what the pipeline of a dataset delivers, and what `fit` takes at some batch sizes."""
    sizes = sizes_to_time(timings, task.base_batch_size)
    part_s = task.clock.part_s(INPUT)
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
    window, notes = task.memory_window, ()
    try:
        with (
            task.refusals_told(),
            open_probes(
                task.load, memory_limit_bytes=task.memory_limit_bytes, memory_window=window
            ) as probes,
        ):
            notes = probes.facts.notes
            found = probe_max_batch(
                _TimeLimitedProbes(probes, task),
                memory_window=window,
                max_batch_size=largest,
                confirm=False,
            )
    except _TimeSpentError as spent:
        return MemoryFound(
            None,
            max(spent.fits, task.base_batch_size),  # The user trains at it.
            f"its search did not end in its part of `budget_s`; {spent.fits:,} examples fit",
            notes,
        )
    return MemoryFound(found, found.max_batch_size, None, notes)


class _TimeSpentError(Exception):
    """The time for a search is spent."""

    def __init__(self, fits: int):
        super().__init__(fits)
        self.fits = fits


class _TimeLimitedProbes:
    """Probes of which, after the first, none is begun that would not end in time."""

    # Their part of the budget begins after the first: starting a process is worth some probes.
    # The base batch size is probed before any larger one, for the seconds of an example.

    def __init__(self, probes: Probes, task: Task):
        self.isolated = probes.isolated
        self._probes, self._task = probes, task
        self._until_s, self._fits = 0.0, 0
        self._example_s: float | None = None

    @property
    def facts(self) -> WorkloadFacts:
        return self._probes.facts

    def renew(self) -> bool:
        return self._probes.renew()

    def read(self, batch_size: int) -> Reading:
        clock = self._task.clock
        if not self._fits:
            reading = self._read(batch_size)
            self._until_s = clock.left_s - clock.part_s(MEMORY)
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
        example_s, left_s = self._example_s, self._task.clock.left_s
        return example_s is not None and left_s - batch_size * example_s >= self._until_s

    def _read(self, batch_size: int) -> Reading:
        if self._example_s is not None and not self._ends_in_time(batch_size):
            raise _TimeSpentError(self._fits)
        reading = self._probes.read(batch_size)
        limit_bytes = self.facts.limit_bytes
        needed = reading.bytes_below(limit_bytes)
        if needed is not None and needed <= self._task.memory_window[1] * limit_bytes:
            self._fits = max(self._fits, reading.rows)
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
    clock = task.clock
    while (plan := search.ask(left_s=clock.left_s, most_s=clock.most_s)) is not None:
        failure = None
        try:
            with task.kept():
                check = run(task.build, task.data, plan=plan)
        except Exception as error:
            failure = reason_of(error)
            if failure is None:
                raise
            sizes = plan.batch_size, plan.micro_batch_size
            check = SizeCheck(*sizes, None, 0, None, 0.0, "failed")
        search.tell(check, left_s=clock.left_s, failure=failure)
    return search
