"""How many examples fit at once: the first measurement of a recommendation."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import keras

from kbatch.errors import InputError
from kbatch.memory.max_batch_probing import probe_max_batch
from kbatch.memory.max_batch_record import MaxBatchSizeResult
from kbatch.memory.memory_probes import LoadFacts, Probes, Reading
from kbatch.memory.probe_places import search_in_place
from kbatch.memory.workload import STEPS, Load
from kbatch.recommendation.limits import MEMORY
from kbatch.recommendation.recommendation_task import Task
from kbatch.training.data.data_refusal import REFUSALS, refusal_text

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

    Args:
        task: What is to be trained.
        largest: Largest batch size to try, in examples.

    Raises:
        InputError: If the data have one example, or no train step can run on them.
        OutOfMemoryError: If the weights or one example do not fit.
        ValueError: If the model is not compiled, or refuses the data for a reason of its own.
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
    """Turn what a model says of data that do not suit it into an error that says what to give.

    Raises:
        InputError: If no train step can run on the data.
    """
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
