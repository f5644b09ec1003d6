"""The largest batch that fits in memory, and the memory of given sizes, found by running them."""

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
from kbatch.memory.workload import Workload
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
    """Find the largest batch whose memory lies in a window below the limit.

    Real train steps run in a worker process, five at each size, and TensorFlow's allocator reports
    their peak. The answer is run again in a fresh process and after other sizes. On a CPU the
    worker's allocator gets the limit, and runs out as a GPU's does.

    Example:

    >>> found = kbatch.find_max_batch_size(build, x, y, memory_limit_bytes=2 * 2**30)
    >>> found.max_batch_size, found.powers_of_two(16)

    Args:
        build: A function that returns a compiled model, without argument or with keras-tuner's
            `hp`, a `HyperModel`, or a compiled model, which stays as it is.
        x: Inputs: arrays of shape (examples, ...), a `tf.data.Dataset`, batched or not, a
            `PyDataset`, or a function `batch_size -> tf.data.Dataset`.
        y: Targets of arrays. A dataset may have sample weights too: (x, y, sample_weight).
        memory_window: Lower and upper share of the limit that is aimed at.
        memory_limit_bytes: Memory that may be taken. None for what TensorFlow has of the GPU, on a
            CPU half of what the host and its control group leave.
        max_batch_size: Largest size to try, None for that of the data set.
        training: Whether to run train steps, or predictions.
        longest_example: One example, (x, y) or x alone, without a batch axis, to use instead of
            rows of the data, where examples differ in length.
        verbose: 0 for no output, 1 for a line that changes in a terminal or a notebook, or lines in
            a log, 2 for lines everywhere. Default: `"auto"`, which is 1.

    Raises:
        InputError: If the data cannot be batched or have fewer than two examples.
        OutOfMemoryError: If one example does not fit; it names the weights and the limit, and the
            bytes needed where it ran.
        TypeError: If `build` cannot build, or a bound is no integer.
        ValueError: If the window or a bound cannot be used.
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
    whole = longest_example is None
    data = TrainingData(x, y) if whole else TrainingData.of_example(longest_example)
    data.check()
    workload = Workload(model_builder(build), data, global_policy(), training=training)
    with progress:
        progress.say("starting a worker process")
        with open_probes(workload, memory_limit_bytes=limit_bytes) as probes:
            window = low, high
            return probe_max_batch(
                probes, memory_window=window, max_batch_size=cap, say=progress.say
            )


# How often an answer that its confirmation refuted is looked for again.
_MOST_CONFIRMATIONS = 4


def probe_max_batch(
    probes: Probes,
    *,
    memory_window: tuple[float, float],
    max_batch_size: int | None,
    say: Callable[[str], None] = lambda line: None,
) -> MaxBatchSizeResult:
    """Search with real probes, and run the answer again."""
    experiment = MaxBatchExperiment(probes, memory_window, max_batch_size, say)
    (found, reason), refuted, noted = experiment.search(), 0, ()
    while found and not experiment.confirmed(found):
        (found, reason), refuted = experiment.search(), refuted + 1
        if refuted == _MOST_CONFIRMATIONS:
            noted = (Note.of("peaks_differ", refuted=refuted),)
            break
    size, facts, free = experiment.fitting(found), experiment.facts, experiment.free
    return MaxBatchSizeResult(
        max_batch_size=size,
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
        noted=(*facts.notes, *noted),
        environment=read_environment(),
    )


class MemoryPass(NamedTuple):
    """The memory of some sizes; empty without probes."""

    records: tuple[MemoryRecord, ...] = ()  # One a batch size.
    limit_bytes: int | None = None  # What the probes could take.
    notes: tuple[Note, ...] = ()

    def refusal(self, dtype_policy: str | None, batch_size: int) -> Note | None:
        """Return why a size is not to be run again; None where nothing speaks against it."""
        for record in self.records:
            if (record.dtype_policy, record.batch_size) == (dtype_policy, batch_size):
                return record.refusal
        return None

    def largest_sure(self, dtype_policy: str | None) -> float:
        """Return the size that the probes show to fit for sure, although it was not probed."""
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
    clock: Callable[[], float] = time.perf_counter,
) -> MemoryPass:
    """Probe ascending sizes as long as the next one is expected to fit, and say what each took."""
    facts, began_s = probes.facts(), clock()
    limit_bytes, most_bytes = facts.limit_bytes, MEMORY_WINDOW[1] * facts.limit_bytes
    records: list[MemoryRecord] = []
    measured: dict[int, float] = {}
    ended: Note | None = None  # Why no larger size is run.
    for size in batch_sizes:
        expected = expected_bytes(measured, size, facts.held_bytes)
        # One size does not show the fixed part of the memory: a worker may run out of it.
        known = len(measured) > 1 or not probes.isolated
        reason, guarded = ended, True
        if reason is None and known and expected is not None and expected > most_bytes:
            needs, limit = memory_text(expected), memory_text(limit_bytes)
            share = MEMORY_WINDOW[1]
            reason = Note.of("memory_expected", expected=needs, share=share, limit=limit)
        # A line takes two sizes, however busy the machine is.
        if reason is None and len(measured) > 1 and clock() - began_s >= time_budget_s:
            reason, guarded = Note.of("memory_time_spent"), False
        peak, outcome = None, "not_run"
        if reason is None:
            reading = probes.read(size)
            if reading.rows < size:
                reason = ended = Note.of("data_gave_fewer", rows=reading.rows)
            elif (peak := reading.bytes_below(limit_bytes)) is None:
                outcome, ended = "out_of_memory", Note.of("memory_ran_out_at", size=size)
            else:
                outcome, measured[size] = "fits", peak
        guarded = guarded and reason is not None
        records.append(MemoryRecord(dtype_policy, size, outcome, reason, peak, guarded))
        found = reason or (Note.of("out_of_memory") if peak is None else memory_text(peak))
        say(f"memory of batch {size} under {dtype_policy}: {found}")
    return MemoryPass(tuple(records), limit_bytes, facts.notes)
