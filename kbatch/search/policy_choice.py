"""Which dtype policy a search trains under where none is given: mixed_float16, if that pays."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from kbatch.memory.workload import Run
from kbatch.records.machine import SHORTEST_S
from kbatch.search.steps_per_execution import endless
from kbatch.training.dtype_policy import (
    PolicyUnsupported,
    check_loss_is_scaled,
    dtype_policy_scope,
    overflows,
    skips_all_updates,
)
from kbatch.training.model import wait_for
from kbatch.training.state import kept_state

HALF = "mixed_float16"
TOO_SLOW = 2.0
# Examples of the steps by which policies are timed, fewer than of a batch where they take long. A
# few tell of a processor that takes so long for float16 that more would take minutes.
FEW, SOME = 2, 32
_LONG_S, _LONGEST_S = 0.03, 0.2
_ROUNDS_AHEAD, _MOST_ROUNDS = 2, 5
# A loss scale is halved with each update that overflows: so often it may be too large at first.
_MOST_TRIES = 20
# Updates that are timed at once, fewer where they take long.
_TIMED, _ENOUGH_S = 4, 0.1


class Updates:
    """Updates of a model on rows of its data, which leave nothing of it changed but its graph.

    They are made without `fit`, which opens two iterators and takes longer than a few small steps.
    """

    def __init__(self, run: Run):
        self.model, self._data, self._examples = run.model, run.data, run.examples
        # What is traced here serves whoever trains the model.
        self.model.make_train_function()
        # By rows, of each an endless iterator of one batch, by which an update was made.
        self._batches: dict[int, Any] = {}

    def step_s(self, rows: int) -> float:
        """Time an update on so many rows, after a first one that may be traced."""
        with self._kept() as function:
            if rows not in self._batches:
                wait_for(function(self._one_batch(rows)))
            batches = self._batches[rows]
            begun_s, taken_s, timed = time.perf_counter(), 0.0, 0
            while timed < _TIMED and taken_s < _ENOUGH_S:
                wait_for(function(batches))
                taken_s, timed = time.perf_counter() - begun_s, timed + 1
            return max(SHORTEST_S, taken_s / timed)

    def check(self, rows: int, largest_batch_size: int) -> None:
        """See that an epoch makes an update, which overflows of float16 may delay."""
        with self._kept() as function:
            batches, tries = self._one_batch(rows), 0
            while not tries or skips_all_updates(self.model):
                if tries == _MOST_TRIES:
                    raise PolicyUnsupported("the gradients of every batch overflowed in float16")
                wait_for(function(batches))
                tries += 1
            check_loss_is_scaled(self.model)
            overflowed = overflows(self.model)
        known = self._examples
        if known is not None and overflowed * largest_batch_size >= known:
            raise PolicyUnsupported(f"the first {overflowed} batches overflowed in float16")

    @contextlib.contextmanager
    def _kept(self) -> Iterator[Callable[[Any], Any]]:
        function = self.model.train_function
        with dtype_policy_scope(self.model.dtype_policy.name), kept_state(self.model):
            yield function

    def _one_batch(self, rows: int) -> Any:
        """Return an endless iterator of one batch; to make one takes as long as some updates."""
        if rows not in self._batches:
            strategy = self.model.distribute_strategy
            count = rows * strategy.num_replicas_in_sync
            given = self._data.repeated(count, self.model)
            # The graph of training takes it, as its spec is that of all batches.
            batches = endless(next(iter(given)), given.element_spec)
            if strategy.num_replicas_in_sync > 1:
                batches = strategy.experimental_distribute_dataset(batches)
            self._batches[rows] = iter(batches)
        return self._batches[rows]


def slowdown(
    half_s: Callable[[int], float], full_s: Callable[[int], float], batch_size: int
) -> float:
    """Return how many times as long an update takes under mixed_float16, timed in turns.

    `half_s` and `full_s` return the seconds of an update on so many rows under the two policies.
    """
    few_s = half_s(FEW)
    if few_s > max(_LONG_S, TOO_SLOW * (few_full_s := full_s(FEW))):
        return few_s / few_full_s
    most = SOME * _LONGEST_S / half_s(min(batch_size, SOME))
    rows = min(batch_size, max(SOME, int(most)))
    ratios: list[float] = []
    ahead = 0  # Rounds that say so, less those that do not.
    while abs(ahead) < _ROUNDS_AHEAD and len(ratios) < _MOST_ROUNDS:
        ratios.append(half_s(rows) / full_s(rows))
        ahead += 1 if ratios[-1] > TOO_SLOW else -1
    return statistics.median(ratios)
