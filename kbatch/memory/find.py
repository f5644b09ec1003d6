"""Measure which batch sizes fit in memory by running them."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import keras_tuner

from kbatch.analysis.batch_sizes import check_size
from kbatch.device.machine import read_environment
from kbatch.device.memory import check_memory_limit
from kbatch.memory.probe import MaxBatchExperiment, Probes, open_probes
from kbatch.memory.result import MaxBatchSizeResult, MemoryRecord, ProbeRecord, peaks_under
from kbatch.memory.search import MEMORY_WINDOW, SURE_SHARE, expected_bytes, fit_memory
from kbatch.memory.workload import Reading, Workload
from kbatch.page.numbers import memory_text
from kbatch.progress import MeasuringProgress
from kbatch.records.notes import Note
from kbatch.training.build_function import BuildFunction, model_builder
from kbatch.training.data.training_data import TrainingData
from kbatch.training.dtype_policy import global_policy


def find_max_batch_size(
    build: "BuildFunction | keras_tuner.HyperModel | keras.Model",
    x: Any,
    y: Any = None,
    *,
    memory_window: tuple[float, float] = MEMORY_WINDOW,
    memory_limit_bytes: int | None = None,
    max_batch_size: int | None = None,
    training: bool = True,
    longest_example: Any = None,
    verbose: int | str = "auto",
) -> MaxBatchSizeResult:
    """Find the largest batch size that fits in memory.

    A worker process runs five real train steps at each size, and TensorFlow's allocator reports
    their peak memory. The search ends when the peak is inside `memory_window`. kbatch then runs the
    size again, in a new process and after other sizes, to confirm that it fits. On a CPU, the
    worker's allocator gets the same limit, so that it runs out of memory as a GPU does.

    Example:

    >>> result = kbatch.find_max_batch_size(build, x, y, memory_limit_bytes=2 * 2**30)
    >>> result.max_batch_size, result.powers_of_two(16)

    Args:
        build: A function that returns a compiled model (it may take keras-tuner's `hp`), a
            `HyperModel`, or a compiled model, which is not changed.
        x: Inputs: arrays of shape (examples, ...), a `tf.data.Dataset`, batched or not, a
            `PyDataset`, or a function `batch_size -> tf.data.Dataset`.
        y: Targets, if `x` is arrays. A dataset yields (x, y) or (x, y, sample_weight).
        memory_window: Two floats, the share of the limit to fill: (low, high). Default: (0.8, 0.9).
        memory_limit_bytes: Integer. Memory that the model may use, in bytes. If None, all that
            TensorFlow can have of the GPU; on a CPU, half of the memory that is free.
        max_batch_size: Integer. Largest size to try. If None, the number of examples in the data.
        training: Boolean. If True, run train steps. If False, run predictions. Default: True.
        longest_example: One example, (x, y) or x alone, without a batch axis, to use instead of
            rows of the data. Give the longest one if examples differ in length. Default: None.
        verbose: 0, 1 or 2. 0 prints nothing. 1 shows one line that changes in a terminal or a
            notebook, and lines in a log. 2 prints lines everywhere. Default: `"auto"`, which is 1.

    Returns:
        A `MaxBatchSizeResult`: the size, its peak memory, and every size that was run.

    Raises:
        InputError: If the data cannot be batched or have fewer than two examples.
        OutOfMemoryError: If one example does not fit. See its `needed_bytes` and `limit_bytes`.
        TypeError: If `build` is not one of the above, or a limit is not an integer.
        ValueError: If the window or a limit is out of range.
    """
    try:
        low, high = map(float, memory_window)
        if not 0 < low < high <= 1:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            "`memory_window` must be (low, high) with 0 < low < high <= 1. "
            f"Received: memory_window={memory_window}."
        ) from None
    cap = None if max_batch_size is None else check_size(max_batch_size, "max_batch_size")
    limit_bytes = check_memory_limit(memory_limit_bytes)
    progress = MeasuringProgress("memory", verbose)
    if longest_example is None:
        data = TrainingData(x, y)
    else:
        data = TrainingData.of_example(longest_example)
    data.check()
    workload = Workload(model_builder(build), data, global_policy(), training=training)
    with progress:
        progress.say("starting a worker process")
        with open_probes(workload, memory_limit_bytes=limit_bytes) as probes:
            return probe_max_batch(
                probes, memory_window=(low, high), max_batch_size=cap, say=progress.say
            )


# The search is repeated at most this often if the answer is not confirmed.
_MOST_REPEATS = 4


def probe_max_batch(
    probes: Probes,
    *,
    memory_window: tuple[float, float],
    max_batch_size: int | None,
    say: Callable[[str], None] = lambda line: None,
) -> MaxBatchSizeResult:
    """Search for the largest batch size, and run the answer again to confirm it."""
    experiment = MaxBatchExperiment(probes, memory_window, max_batch_size, say)
    (size, reason), repeats, notes = experiment.search(), 0, ()
    while size and not experiment.confirmed(size):
        (size, reason), repeats = experiment.search(), repeats + 1
        if repeats == _MOST_REPEATS:
            notes = (Note.of("peaks_differ", refuted=repeats),)
            break
    facts, free = experiment.facts, experiment.free
    return MaxBatchSizeResult(
        max_batch_size=experiment.fitting(size),
        reason=reason,
        limit_bytes=facts.limit_bytes,
        memory_window=memory_window,
        training=facts.training,
        device=facts.device,
        dtype_policy=facts.dtype_policy,
        weights_bytes=facts.variables_bytes,
        probes=tuple(ProbeRecord(*run) for run in experiment.runs),
        requested_block_bytes=free.requested_bytes if free else None,
        free_bytes=free.free_bytes if free else None,
        largest_free_block_bytes=free.largest_block_bytes if free else None,
        noted=(*facts.notes, *notes),
        environment=read_environment(),
    )


class MemoryPass(NamedTuple):
    """The measured memory of several batch sizes; empty if memory was not measured."""

    records: tuple[MemoryRecord, ...] = ()  # One for each batch size.
    limit_bytes: int | None = None
    notes: tuple[Note, ...] = ()

    def refusal(self, dtype_policy: str | None, batch_size: int) -> Note | None:
        """Return why a size must not be run, or None if it may run."""
        setting = dtype_policy, batch_size
        records = (r for r in self.records if (r.dtype_policy, r.batch_size) == setting)
        return next((record.refusal for record in records), None)

    def largest_sure(self, dtype_policy: str | None) -> float:
        """Return the largest size that certainly fits by the fitted line, probed or not."""
        fit = fit_memory(peaks_under(dtype_policy, self.records))
        if fit is None or self.limit_bytes is None:
            return 0.0
        return fit.largest_within(SURE_SHARE * self.limit_bytes)


def memory_pass(
    probes: Probes,
    batch_sizes: Sequence[int],
    *,
    dtype_policy: str,
    time_budget_s: float,
    say: Callable[[str], None],
    fewest: int = 2,  # Sizes to measure even if that takes longer. A line needs two.
    clock: Callable[[], float] = time.perf_counter,
) -> MemoryPass:
    """Probe sizes in ascending order until the next one is expected not to fit."""
    facts, began_s = probes.facts(), clock()
    limit_bytes, share = facts.limit_bytes, MEMORY_WINDOW[1]
    records: list[MemoryRecord] = []
    measured: dict[int, float] = {}
    ended: Note | None = None  # Why no larger size is run.
    last = Reading(None, 1)
    for size in batch_sizes:
        expected = expected_bytes(measured, size, facts.held_bytes)
        # The estimate from one size is poor. A worker process can try, even if memory runs out.
        enough = len(measured) >= fewest
        trusted = enough or not probes.isolated
        reason, guarded = ended, True
        if reason is None and trusted and expected is not None and expected > share * limit_bytes:
            needs, limit = memory_text(expected), memory_text(limit_bytes)
            reason = Note.of("memory_expected", expected=needs, share=share, limit=limit)
        late = enough and clock() - began_s + last.expected_s(size) > time_budget_s
        if reason is None and late:
            reason, guarded = Note.of("memory_time_spent"), False
        peak, outcome = None, "not_run"
        try:
            last = probes.read(size) if reason is None else last
        except TimeoutError:  # The other sizes are late too.
            reason, guarded, fewest, time_budget_s = Note.of("memory_time_spent"), False, 0, -1.0
        if reason is None:
            if last.rows < size:
                reason = ended = Note.of("data_gave_fewer", rows=last.rows)
            elif (peak := last.bytes_below(limit_bytes)) is None:
                outcome, ended = "out_of_memory", Note.of("memory_ran_out_at", size=size)
            else:
                outcome, measured[size] = "fits", peak
        guarded = guarded and reason is not None
        records.append(MemoryRecord(dtype_policy, size, outcome, reason, peak, guarded))
        text = reason or (Note.of("out_of_memory") if peak is None else memory_text(peak))
        say(f"memory of batch {size} under {dtype_policy}: {text}")
    return MemoryPass(tuple(records), limit_bytes, facts.notes)
