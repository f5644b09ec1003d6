"""How many examples fit at once: the first measurement of a recommendation."""

import functools
from typing import NamedTuple

import keras

from kbatch.analysis.binding_limit import MEMORY
from kbatch.profiling.data_refusal import REFUSALS, refusal_text
from kbatch.profiling.loads import Load
from kbatch.profiling.max_batch_probing import probe_max_batch
from kbatch.profiling.probe_places import search_in_place
from kbatch.records.max_batch import MaxBatchSizeResult, ProbeRecord
from kbatch.training.errors import InputError
from kbatch.tuning.recommendation_task import Task

# Slow probes may take as long, but no longer than the whole budget.
_SLOW_SEARCH_S = 60.0


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


def measure_memory(task: Task, *, smallest: int, largest: int) -> MemoryFound:
    """Searches for the largest batch that fits.

    Args:
        task: What is to be trained.
        smallest: Smallest batch size of interest, in examples: the search goes on in any case until
            it is known whether that fits.
        largest: Largest batch size to try, in examples.

    Raises:
        InputError: If the data have one example, or no train step can run on them.
        OutOfMemoryError: If the weights or one example do not fit.
        ValueError: If the model is not compiled, or refuses the data for a reason of its own.
    """
    budget_s = max(task.part_s(MEMORY), min(_SLOW_SEARCH_S, task.budget_s))
    watch = _Watch(budget_s, least=smallest)
    search = functools.partial(
        probe_max_batch,
        memory_window=task.memory_window,
        max_batch_size=largest,
        confirm=False,
        before_probe=watch.check,
        on_probe=watch.add,
    )
    try:
        found = search_in_place(
            Load(task.build, task.source, keras.config.dtype_policy().name),
            search,
            memory_limit_bytes=task.memory_limit_bytes,
            memory_window=task.memory_window,
        )
    except (ValueError, TypeError, *REFUSALS) as error:
        told = refusal_text(error, model=task.build, source=task.source)
        if told is None:
            raise
        raise InputError(told) from error
    except _TimeSpentError:
        return MemoryFound(
            None,
            watch.fits,
            f"its search did not end in {watch.seconds:.0f} s; {watch.fits:,} examples fit",
        )
    return MemoryFound(found, found.max_batch_size, None)


class _TimeSpentError(Exception):
    """The time for a search is spent."""


class _Watch:
    """Ends a search whose probes take too long; the first one, which traces, does not count."""

    def __init__(self, budget_s: float, *, least: int):
        self.seconds = 0.0
        self.fits = 0
        self._budget_s = budget_s
        self._least = least
        self._traced = False

    def add(self, probe: ProbeRecord) -> None:
        self.seconds += probe.duration_s if self._traced else 0.0
        self._traced = True
        if probe.outcome == "fits":
            self.fits = max(self.fits, probe.batch_size)

    def check(self) -> None:
        if self.seconds > self._budget_s and self.fits >= self._least:
            raise _TimeSpentError
