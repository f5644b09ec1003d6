"""Probes of memory: a load run at one batch size, in a worker process or in this one."""

import contextlib
import functools
import gc
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from kbatch.device.allocator_log import FreeMemory, free_memory
from kbatch.device.device_memory import (
    DeviceMemory,
    gpu_visible,
    limit_gpu,
    limited_cpu,
    other_processes,
    set_limit_bytes,
    worker_device,
    workers_on_device,
)
from kbatch.device.failures import device_is_lost, ran_out_of_memory
from kbatch.device.host_memory import available_bytes
from kbatch.device.worker import Worker, WorkerDied
from kbatch.document.where_measured import neighbours_text
from kbatch.errors import DeviceLostError
from kbatch.memory.workload import Load, Run
from kbatch.records.usage import GpuProcess
from kbatch.training.kept_state import kept_state

# Of what the host and its control group leave; the rest is for everything else.
_SHARE_OF_HOST = 0.5
_BESIDE_THEM = " Memory and speed were measured beside that: measure again on a free GPU."


class Reading(NamedTuple):
    """What one probe showed.

    Attributes:
        peak_bytes: Most bytes held at once in the steps after the first, in all of them where the
            first was not told apart; None where memory ran out.
        rows: Examples that the batch really had.
        duration_s: Seconds that it took.
        free: What was free when memory ran out, None where the allocator did not tell.
        died: How the worker process ended of it, None where it did not.
        lost: Whether the device can run nothing more in the process that ran it.
        step_s: Seconds of a train step after the first, None where none was timed.
        first_step_bytes: Most bytes held at once in the first step, which also compiles and tries
            algorithms; None where it was not told apart.
        stopped_after: Train steps after which it ended since they were slow, or None.
    """

    peak_bytes: int | None
    rows: int
    duration_s: float
    free: FreeMemory | None = None
    died: WorkerDied | None = None
    lost: bool = False
    step_s: float | None = None
    first_step_bytes: int | None = None
    stopped_after: int | None = None

    def bytes_below(self, limit_bytes: float) -> int | None:
        """Return the bytes that decide: those of later steps, if the first one fits too.

        Args:
            limit_bytes: Memory that there is.
        """
        peak, first = self.peak_bytes, self.first_step_bytes
        return max(peak, first) if peak and first and first > limit_bytes else peak


class LoadFacts(NamedTuple):
    """What is known of a load before it runs.

    Attributes:
        device: What runs it.
        limit_bytes: Memory that it may take.
        training: Whether it trains.
        dtype_policy: What it runs under.
        variables_bytes: What its variables take.
        held_bytes: What is held before it runs: in a process with other models, theirs too.
        examples: How many examples its data have, None if unknown.
        notes: What a reader must know.
        other_processes: Who else holds memory of the GPU.
    """

    device: str
    limit_bytes: int
    training: bool
    dtype_policy: str
    variables_bytes: int
    held_bytes: int
    examples: int | None
    notes: tuple[str, ...]
    other_processes: tuple[GpuProcess, ...] = ()


class Probes(Protocol):
    """Where probes run.

    Attributes:
        isolated: Whether a batch far too large can end no process but theirs.
    """

    isolated: bool

    @property
    def facts(self) -> LoadFacts:
        """What is known of the load."""
        ...

    def read(self, batch_size: int) -> Reading:
        """Runs one batch size."""
        ...

    def renew(self) -> bool:
        """Starts afresh; False where that cannot be."""
        ...


class WorkerProbes:
    """Probes in a worker process, which may die of them.

    On a CPU the worker's allocator has the limit, and so runs out as a GPU's does.

    Args:
        load: What to run.
        memory_limit_bytes: Memory that it may take; None for what the device has, on a CPU half
            of what the host leaves.

    Attributes:
        limit_bytes: Limit of a CPU's worker.
        isolated: True: the worker may die of a probe.
    """

    isolated = True

    def __init__(self, load: Load, memory_limit_bytes: int | None):
        if memory_limit_bytes is None:  # The worker knows nothing of a limit set here.
            memory_limit_bytes = set_limit_bytes()
        self.limit_bytes = memory_limit_bytes or _host_bytes()
        # The level at which the allocator tells its free blocks when it fails.
        environment = {"TF_CPP_MIN_LOG_LEVEL": "0", **worker_device()}
        if not gpu_visible():  # Beside a GPU the host only holds the batches on their way.
            environment |= limited_cpu(self.limit_bytes)
        self._worker = Worker(environment, functools.partial(_start, load, memory_limit_bytes))

    def close(self) -> None:
        """Ends the worker."""
        self._worker.close()

    @property
    def facts(self) -> LoadFacts:
        """What the worker knows of the load.

        Raises:
            MemoryError: If the weights do not fit.
        """
        try:
            return self._worker.call(_Subject.worker_facts, self.limit_bytes)
        except Exception as error:
            if ran_out_of_memory(error):
                raise MemoryError(str(error)) from error
            raise

    def read(self, batch_size: int) -> Reading:
        """Runs one batch size."""
        started_s = time.perf_counter()
        before = self._worker.output
        try:
            reading = self._worker.call(_Subject.read, batch_size)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            died = error if isinstance(error, WorkerDied) else None
            reading = Reading(None, batch_size, time.perf_counter() - started_s, died=died)
        if reading.peak_bytes is None:
            # A fresh process begins its output anew.
            reading = reading._replace(free=free_memory(self._worker.output.removeprefix(before)))
        if reading.lost:
            self._worker.restart()
        return reading

    def renew(self) -> bool:
        """Ends the process: the next probe runs in a fresh one."""
        self._worker.restart()
        return True


class ProcessProbes:
    """Probes in this process: a GPU that it holds already leaves nothing to another one.

    Args:
        run: What to run.
        memory_limit_bytes: Memory that it may take; None for what the device has.
        note: Why it runs here, and what that risks.

    Attributes:
        isolated: False: this process would end with them.
    """

    isolated = False

    def __init__(self, run: Run, memory_limit_bytes: int | None, note: str):
        self._subject = _Subject(run, DeviceMemory())
        device = self._subject.memory.limit_bytes
        if device is None:
            self._limit_bytes = memory_limit_bytes or _host_bytes()
        else:
            self._limit_bytes = min(device, memory_limit_bytes or device)
        self._note = note

    @property
    def facts(self) -> LoadFacts:
        """What is known of the load."""
        found = self._subject.facts(self._limit_bytes)
        return found._replace(notes=(self._note, *found.notes))

    def read(self, batch_size: int) -> Reading:
        """Runs one batch size; the model is put back as it was.

        Raises:
            DeviceLostError: If the device runs nothing more in this process.
        """
        model: Any = self._subject.run.model
        step, function = vars(model).get("train_step"), model.train_function
        try:
            with kept_state(model):
                reading = self._subject.read(batch_size)
                if function is None and vars(model).get("train_step") is step:
                    function = model.train_function  # Whoever trains the model need not trace it.
        finally:
            model.train_function = function
        if reading.lost:
            raise DeviceLostError()
        return reading

    def renew(self) -> bool:
        """Cannot start afresh."""
        return False


@contextlib.contextmanager
def worker_probes(load: Load, memory_limit_bytes: int | None) -> Iterator[WorkerProbes]:
    """Opens probes in a worker process, and ends it."""
    probes = WorkerProbes(load, memory_limit_bytes)
    try:
        yield probes
    finally:
        probes.close()


class _Subject:
    """A load and the memory that it takes, in the process that runs it."""

    def __init__(self, run: Run, memory: DeviceMemory):
        self.run = run
        self.memory = memory
        self._smallest_that_ran: int | None = None

    def worker_facts(self, limit_bytes: int) -> LoadFacts:
        """Read the load's facts where the device may know the limit better."""
        return self.facts(self.memory.limit_bytes or limit_bytes)

    def facts(self, limit_bytes: int) -> LoadFacts:
        run, others = self.run, other_processes()
        beside = neighbours_text(others) + _BESIDE_THEM if others else None
        return LoadFacts(
            self.memory.device,
            limit_bytes,
            run.training,
            run.model.dtype_policy.name,
            run.variables_bytes,
            max(self.memory.held_bytes, run.variables_bytes),
            run.examples,
            tuple(note for note in (run.note, beside) if note is not None),
            others,
        )

    def read(self, batch_size: int) -> Reading:
        gc.collect()
        self.memory.reset()
        started_s = time.perf_counter()
        peak, rows, step_s, stopped_after, lost = None, batch_size, None, None, False
        peaks: list[int] = []

        def keep_peak() -> None:
            # A CPU's plain allocator does not count small blocks: what is held for sure is less.
            held = max(self.memory.peak_bytes, self.run.variables_bytes, 1)
            peaks.append(held + self.run.left_out_bytes(batch_size))
            self.memory.reset()

        try:
            rows = self.run.run(batch_size, keep_peak)
            step_s, stopped_after = self.run.step_s, self.run.stopped_after
            keep_peak()
            peak = peaks[-1]
            self._smallest_that_ran = min(rows, self._smallest_that_ran or rows)
        except Exception as error:
            smaller = self._smallest_that_ran
            worked = smaller is not None and smaller < batch_size
            if not ran_out_of_memory(error, smaller_worked=worked):
                raise
            lost = device_is_lost(error)
        duration_s = time.perf_counter() - started_s
        first = peaks[0] if len(peaks) > 1 else None
        return Reading(
            peak,
            rows,
            duration_s,
            lost=lost,
            step_s=step_s,
            first_step_bytes=first,
            stopped_after=stopped_after,
        )


def _start(load: Load, memory_limit_bytes: int | None) -> _Subject:
    if memory_limit_bytes is not None:
        limit_gpu(memory_limit_bytes)
    memory = DeviceMemory()
    return _Subject(load.start(), memory)


def _host_bytes() -> int:
    """Tells how many bytes of the host a load may take beside other workers of a search."""
    return int(_SHARE_OF_HOST * available_bytes() / (workers_on_device() or 1))
