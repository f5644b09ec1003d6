"""The measurements behind a recommendation: one for each limit of the batch size."""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from kbatch.analysis.binding_limit import INPUT, MEMORY, NOISE, SATURATION
from kbatch.analysis.size_costs import TimedRounds
from kbatch.instruments.failures import failure_status
from kbatch.profiling.fit_times import time_fit
from kbatch.profiling.input_pipeline import profile_input_pipeline
from kbatch.profiling.loads import DataEnded, Load, Source
from kbatch.profiling.max_batch_probing import probe_max_batch
from kbatch.profiling.pilot import PilotPlan, run_pilot
from kbatch.profiling.probe_places import search_in_place
from kbatch.profiling.timed_updates import UpdateTimes, time_updates
from kbatch.records.fit_time import FitTime
from kbatch.records.input_pipeline import InputPipelineProfile
from kbatch.records.max_batch import MaxBatchSizeResult, ProbeRecord
from kbatch.records.pilot import PilotRecord
from kbatch.reporting.number_text import counted
from kbatch.training.data import FitData
from kbatch.training.errors import InputError
from kbatch.training.kept_state import kept_state

TRAINED = "other batch sizes"
# Parts of the budget; what one leaves over is not spent.
_SHARES = {MEMORY: 0.1, SATURATION: 0.25, NOISE: 0.25, INPUT: 0.1, TRAINED: 0.3}
# The first runs of a worker trace and compile.
_SHORTEST_SEARCH_S = 60.0
_LINES = {
    MEMORY: "memory: how many examples fit at once",
    SATURATION: "hardware saturation: the time of an update by batch size",
    NOISE: "gradient noise: a pilot",
    INPUT: "input pipeline: what it delivers",
    TRAINED: "other batch sizes: short trainings to the pilot's loss",
}

Result = TypeVar("Result")


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
        budget_s: Seconds to spend.
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
    budget_s: float
    seed: int

    def part_s(self, limit: str) -> float:
        """Seconds for one limit."""
        return _SHARES[limit] * self.budget_s


class Ledger:
    """What each measurement took, and why one told nothing.

    Args:
        on_progress: Receives a line before each measurement, or None.

    Attributes:
        durations_s: Seconds of each measurement, by the name of the limit or `TRAINED`.
        unknown: Why a limit could not be measured, by its name.
    """

    def __init__(self, on_progress: Callable[[str], None] | None):
        self.durations_s: dict[str, float] = {}
        self.unknown: dict[str, str] = {}
        self._tell = on_progress or (lambda line: None)

    def run(self, limit: str, measure: Callable[[], Result]) -> Result:
        """Makes a measurement whose errors are the user's to mend."""
        self._tell(_LINES[limit])
        began_s = time.perf_counter()
        try:
            return measure()
        finally:
            self.durations_s[limit] = time.perf_counter() - began_s

    def try_run(self, limit: str, measure: Callable[[], Result]) -> Result | None:
        """Makes a measurement; that data or memory do not allow it is a result."""
        try:
            return self.run(limit, measure)
        except Exception as error:
            reason = reason_of(error)
            if reason is None:
                raise
            self.unknown[limit] = reason
            return None


def reason_of(error: Exception) -> str | None:
    """Says why a measurement told nothing, in a clause.

    Args:
        error: What it raised.

    Returns:
        The reason; None for an error that is neither of the data nor of memory.
    """
    if isinstance(error, InputError):
        return _as_reason(str(error))
    if isinstance(error, DataEnded):
        return f"the data ended after {counted(error.rows, 'example')} of a batch"
    return "it ran out of memory" if failure_status(error) == "out_of_memory" else None


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


class InputFound(NamedTuple):
    """What the data cost.

    Attributes:
        pipeline: What the input pipeline delivers at the largest of the sizes.
        fit_times: What `fit` takes, at each of them.
    """

    pipeline: InputPipelineProfile
    fit_times: tuple[FitTime, ...]


def measure_memory(task: Task, largest: int) -> MemoryFound:
    """Searches for the largest batch that fits, no further than the largest of interest.

    Raises:
        InputError: If the data have one example, or no train step can run on them.
        OutOfMemoryError: If the weights or one example do not fit.
    """
    load = Load(task.build, task.source, keras.config.dtype_policy().name)
    watch = _Watch(max(_SHORTEST_SEARCH_S, task.part_s(MEMORY)))
    search = functools.partial(
        probe_max_batch,
        memory_window=task.memory_window,
        max_batch_size=largest,
        confirm=False,
        on_probe=watch,
    )
    try:
        found = search_in_place(
            load,
            search,
            memory_limit_bytes=task.memory_limit_bytes,
            memory_window=task.memory_window,
        )
    except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
        raise InputError(
            "A train step must run on the data: give inputs that the model takes, and targets that "
            f"its loss takes. Received: {_told(error)}"
        ) from error
    except _TimeSpentError:
        return MemoryFound(
            None,
            watch.fits,
            f"its search did not end in {watch.seconds:.0f} s; {watch.fits:,} examples fit",
        )
    return MemoryFound(found, found.max_batch_size, None)


def measure_updates(
    task: Task, model: keras.Model, batch_sizes: Sequence[int], fits: int | None
) -> UpdateTimes:
    """Times updates of the batch sizes."""
    return time_updates(
        model, task.source, batch_sizes, largest_whole=fits, budget_s=task.part_s(SATURATION)
    )


def measure_noise(task: Task, timings: Sequence[TimedRounds]) -> PilotRecord:
    """Runs the pilot.

    Raises:
        InputError: If the data are too few.
    """
    size = task.base_batch_size
    if size < 2:
        raise InputError(
            "A pilot measures the noise between the micro-batches of a batch: give a "
            "`base_batch_size` of two examples at least, and the learning rate that suits it. "
            f"Received: base_batch_size={size}."
        )
    near = [min(t.durations_s) / t.batch_size for t in timings if t.batch_size <= size]
    plan = PilotPlan(
        size,
        budget_s=task.part_s(NOISE),
        epochs=task.epochs,
        update_s=min(near) * size if near else None,
        seed=task.seed,
    )
    with kept_state(task.build()) if task.is_given else contextlib.nullcontext():
        return run_pilot(task.build, task.data, plan)


def measure_input(task: Task, model: keras.Model, batch_sizes: Sequence[int]) -> InputFound:
    """Measures what `fit` takes at some batch sizes, and what the input pipeline delivers.

    Args:
        task: What is to be trained.
        model: A compiled, built model, which stays as it is.
        batch_sizes: In examples, ascending; the pipeline is measured at the last one.

    Raises:
        InputError: If the data cannot be read again and again.
    """
    data: Any = task.data.x if task.data.y is None else (task.data.x, task.data.y)
    budget_s = task.part_s(INPUT) / 2
    profile = profile_input_pipeline(
        model, data, batch_size=batch_sizes[-1], budget_s=budget_s, remedies=False
    )
    times = time_fit(model, task.data, task.source, tuple(batch_sizes), budget_s=budget_s)
    return InputFound(profile, times)


class _TimeSpentError(Exception):
    """The time for a search is spent."""


class _Watch:
    """Ends a search whose probes take too long."""

    def __init__(self, budget_s: float):
        self.seconds = 0.0
        self.fits: int | None = None
        self._budget_s = budget_s

    def __call__(self, probe: ProbeRecord) -> None:
        self.seconds += probe.duration_s
        if probe.outcome == "fits":
            self.fits = max(self.fits or 0, probe.batch_size)
        if self.seconds > self._budget_s and self.fits is not None:
            raise _TimeSpentError


def _told(error: Exception) -> str:
    """Finds what TensorFlow's error tells, behind the places in its graph."""
    places = ("File ", "Detected at", "Graph execution", "[[", "Original stack", "Node:")
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(places)]
    return told[-1][:200] if told else type(error).__name__


def _as_reason(message: str) -> str:
    """Makes a clause of an error's message."""
    text = message.strip().rstrip(".")
    return text[:1].lower() + text[1:]
