"""The first updates of a search: what they take, and whether mixed_float16 pays by them.

A plan follows from them. They are made on rows of the data and without `fit`, which takes longer
than some small steps, and leave nothing of a model changed but its graph, by which it then trains.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kbatch.device.failures import MEMORY_ERRORS, device_is_lost, ran_out_of_memory
from kbatch.errors import DataEnded, DeviceLostError, PolicyUnsupported
from kbatch.memory.workload import Workload
from kbatch.page.numbers import format_number
from kbatch.records.machine import SHORTEST_S
from kbatch.training.data.batches import of_any_length
from kbatch.training.data.training_data import TrainingData
from kbatch.training.dtype_policy import (
    check_loss_is_scaled,
    dtype_policy_scope,
    overflows,
    skips_all_updates,
)
from kbatch.training.model import replica_count
from kbatch.training.state import kept_state
from kbatch.training.step_call import StepCall
from kbatch.training.steps_per_execution import set_steps

# Examples of an update. The first updates have few: a processor that is slow in float16 would take
# minutes for more.
FEW, SOME = 2, 32
# Each update that overflows halves the loss scale; it may be too large at first this many times.
_MOST_TRIES = 20
# How many updates are timed together, where one takes no longer than these seconds.
_TOGETHER, _TOGETHER_S = 8, 0.05
# One that takes longer, but not that long, may have been disturbed: so often it is made again.
_AGAIN, _SURELY_LONG_S = 3, 0.5
HALF = "mixed_float16"
TOO_SLOW = 2.0  # Times as long as in float32, on a processor.
# Seconds of updates: fewer examples are timed where they take longer.
_LONG_S, _LONGEST_S = 0.03, 0.2
_ROUNDS_AHEAD, _MOST_ROUNDS = 2, 5


class Updates:
    """Updates of a model on rows of its data."""

    def __init__(self, model: Any, data: TrainingData, *, counted: bool = False):
        self.model, self._replicas = model, replica_count(model)
        policy = model.dtype_policy.name
        self.run = Workload(lambda: model, data, policy, replicas=self._replicas).start()
        self.seconds: dict[int, float] = {}  # Of a step, by rows.
        self._peak_bytes: dict[int, int] = {}  # By rows.
        # How often the loss scale was halved before an update, by rows; None where it never made
        # one.
        self._overflows: dict[int, int | None] = {}
        self._batches: dict[int, Any] = {}  # Endless iterators of one batch, by rows.
        if counted:  # How many steps an execution runs is chosen later.
            set_steps(model, int(model.steps_per_execution))
        model.make_train_function()  # What is traced here serves whoever trains the model.

    def step_s(self, rows: int) -> float:
        """Time an update on so many rows, after a first one that may be traced."""
        model = self.model
        with dtype_policy_scope(model.dtype_policy.name), kept_state(model) as state:
            step = StepCall(model, state)
            if rows not in self._overflows:
                self._begin(rows, step)
            batches = self._batches[rows]
            self.run.memory.reset()
            step_s = _execution_s(step, batches)
            for _ in range(_AGAIN):
                if _TOGETHER_S / 2 < step_s < _SURELY_LONG_S:
                    step_s = min(step_s, _execution_s(step, batches))
            together = min(_TOGETHER, int(_TOGETHER_S / step_s))
            if together > 1:
                step_s = min(step_s, _execution_s(step, batches, together) / together)
            peak = max(self.run.memory.peak_bytes, self.run.variables_bytes(), 1)
            self._peak_bytes[rows] = max(peak, self._peak_bytes.get(rows, 0))
        self.seconds[rows] = min(step_s, self.seconds.get(rows, step_s))
        return step_s

    def peak_bytes(self, rows: int) -> int | None:
        """Return the most memory that updates on so many rows take, None where it ran out."""
        try:
            if rows not in self._peak_bytes:
                self.step_s(rows)
        except DataEnded:  # A data function has fewer.
            return None
        except MEMORY_ERRORS as error:
            if not ran_out_of_memory(error, smaller_worked=bool(self._peak_bytes)):
                raise
            # XLA on a CPU frees the weights that it was to update where it runs out.
            freed = self.run.memory.device == "CPU:0" and bool(self.model.jit_compile)
            if freed or device_is_lost(error):
                raise DeviceLostError() from error
            return None
        return self._peak_bytes[rows]

    def check(self, rows: int, largest_batch_size: int) -> None:
        """Check that an epoch makes an update, which overflows of float16 may delay."""
        if rows not in self._overflows:
            self.step_s(rows)
        known, found = self.run.examples, self._overflows[rows]
        if found is None:
            raise PolicyUnsupported("the gradients of every batch overflowed in float16")
        if known is not None and found * largest_batch_size >= known:
            raise PolicyUnsupported(f"the first {found} batches overflowed in float16")

    def _begin(self, rows: int, step: StepCall) -> None:
        """Make the first update on so many rows, and others as long as they overflow."""
        strategy = self.model.distribute_strategy
        batch = self.run.data.sample(rows * self._replicas, self.model, fewest=1)
        with tf.device("CPU:0"):  # Whatever device holds the batch.
            batches = tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(batch)).repeat()
        # The graph of training takes it, as its spec is that of all batches.
        spec = tf.nest.map_structure(of_any_length, batches.element_spec)
        variant = tf.data.experimental.to_variant(batches)
        batches = tf.data.experimental.from_variant(variant, spec)
        if self._replicas > 1:
            batches = strategy.experimental_distribute_dataset(batches)
        self._batches[rows] = iter(batches)
        tries = 0
        while not tries or (tries < _MOST_TRIES and skips_all_updates(self.model)):
            step.execute(self._batches[rows], 1)
            tries += 1
        check_loss_is_scaled(self.model)
        failed = skips_all_updates(self.model)
        self._overflows[rows] = None if failed else overflows(self.model)


def _execution_s(step: StepCall, batches: Any, steps: int = 1) -> float:
    """Return the seconds of some steps, run as one execution where the model can."""
    begun_s = time.perf_counter()
    step.execute(batches, steps)
    return max(SHORTEST_S, time.perf_counter() - begun_s)


def check_half(half: Updates, full: Updates | None, batch_sizes: Sequence[int]) -> str | None:
    """Return why a search takes too long under mixed_float16, None where it does not.

    `full` makes the updates in float32 on a processor; a GPU is never asked how long they take.

    Raises:
        PolicyUnsupported: If a trial could not train.
    """
    largest = batch_sizes[-1]
    half.check(FEW, largest)
    if full is not None:
        found = slowdown(half.step_s, full.step_s, batch_sizes[len(batch_sizes) // 2])
        if found > TOO_SLOW:
            return f"an update takes {format_number(found, 2)} times as long on this processor"
    # A loss that is a sum overflows with more examples.
    half.check(min(SOME, largest), largest)
    return None


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
