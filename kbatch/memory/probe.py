"""Probes of memory: a load run at one batch size, in a worker process or in this one."""

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import keras

from kbatch.device.failures import device_is_lost, ran_out_of_memory
from kbatch.device.host_memory import available_bytes
from kbatch.device.memory import (
    DeviceMemory,
    FreeMemory,
    free_memory,
    gpu_in_use,
    gpu_visible,
    limit_gpu,
    limited_cpu,
    other_processes,
    set_limit_bytes,
    worker_device,
    workers_on_device,
)
from kbatch.device.worker import UnsendableError, Worker, WorkerDied
from kbatch.document.numbers import memory_text
from kbatch.document.section import neighbours_text
from kbatch.errors import DeviceLostError, InputError, OutOfMemoryError
from kbatch.memory.workload import Load, Run
from kbatch.records.usage import GpuProcess
from kbatch.training.state import kept_state

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
        lost: Whether nothing more may run in the process that ran it.
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
        """Return the bytes that decide: those of later steps, if the first one fits too."""
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
        """Run one batch size."""
        ...

    def renew(self) -> bool:
        """Start afresh; False where that cannot be."""
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
        # Of all its processes: in a fresh one no smaller size has run.
        self._smallest_that_ran: int | None = None

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    @property
    def facts(self) -> LoadFacts:
        """What the worker knows of the load."""
        try:
            return self._worker.call(_Subject.worker_facts, self.limit_bytes)
        except Exception as error:
            if ran_out_of_memory(error):
                raise MemoryError(str(error)) from error
            raise

    def read(self, batch_size: int) -> Reading:
        """Run one batch size."""
        started_s = time.perf_counter()
        before = self._worker.output
        try:
            reading = self._worker.call(_Subject.read, batch_size)
        except Exception as error:
            smallest = self._smallest_that_ran
            worked = smallest is not None and smallest < batch_size
            if not ran_out_of_memory(error, smaller_worked=worked):
                raise
            died = error if isinstance(error, WorkerDied) else None
            reading = Reading(None, batch_size, time.perf_counter() - started_s, died=died)
        if reading.peak_bytes is None:
            # A fresh process begins its output again.
            reading = reading._replace(free=free_memory(self._worker.output.removeprefix(before)))
        else:
            self._smallest_that_ran = min(reading.rows, self._smallest_that_ran or reading.rows)
        if reading.lost:
            self._worker.restart()
        return reading

    def renew(self) -> bool:
        """End the process: the next probe runs in a fresh one."""
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
        """Run one batch size; the model is put back as it was."""
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
    """Open probes in a worker process, and end it."""
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
            lost = device_is_lost(error) or self._xla_freed_weights()
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

    def _xla_freed_weights(self) -> bool:
        """Return whether XLA ran out on a CPU: it frees the weights that it was to update.

        They stay in use, and whatever is allocated next is written over them.
        """
        model: Any = self.run.model
        return self.memory.device == "CPU:0" and self.run.training and bool(model.jit_compile)


def _start(load: Load, memory_limit_bytes: int | None) -> _Subject:
    if memory_limit_bytes is not None:
        limit_gpu(memory_limit_bytes)
    memory = DeviceMemory()
    return _Subject(load.start(), memory)


def _host_bytes() -> int:
    """Return how many bytes of the host a load may take beside other workers of a search."""
    return int(_SHARE_OF_HOST * available_bytes() / (workers_on_device() or 1))


_GPU_IN_USE = (
    "Measured in this process, which holds the GPU already, and so not confirmed in a fresh one. "
    "A model, a tensor or a `tf.data.Dataset` made here takes the GPU: for a measurement in a "
    "process of its own give a build function, and arrays or a function `batch_size -> Dataset`, "
    "before anything else uses TensorFlow."
)
# Why the probes of a model on several replicas run here: its strategy holds their devices.
OF_SEVERAL_REPLICAS = (
    "Measured in this process, on as many replicas as train: a batch far too large may end this "
    "process, and the answer is not confirmed in a fresh one."
)
_NOT_SENDABLE = (
    "Measured in this process, since the build function or the data cannot be sent to a worker "
    "process: a batch far too large may end this process, small blocks of memory are not counted "
    "on a CPU, and the answer is not confirmed in a fresh process."
)

Result = TypeVar("Result")
Search = Callable[[Probes], Result]


def search_in_place(
    load: Load,
    search: Search[Result],
    *,
    memory_limit_bytes: int | None,
    memory_window: tuple[float, float],
    model: Callable[[], keras.Model] | None = None,
    here_since: str | None = None,
) -> Result:
    """Search in a worker process, or here if this one holds the GPU or the load cannot be sent."""
    here = load if model is None else dataclasses.replace(load, build=model)
    note = here_since or (_GPU_IN_USE if gpu_in_use() else None)
    if note is not None:
        return search(ProcessProbes(here.start(), memory_limit_bytes, note))
    try:
        return _in_worker(load, search, memory_limit_bytes, memory_window)
    except UnsendableError:
        return search(ProcessProbes(here.start(), memory_limit_bytes, _NOT_SENDABLE))


def _in_worker(
    load: Load,
    search: Search[Result],
    memory_limit_bytes: int | None,
    memory_window: tuple[float, float],
) -> Result:
    with worker_probes(load, memory_limit_bytes) as probes:
        try:
            return search(probes)
        except MemoryError as error:
            refusal = error
    if getattr(refusal, "needed_bytes", None) is not None:
        raise refusal
    # What a GPU has is known by the worker alone.
    limit_bytes = memory_limit_bytes if gpu_visible() else probes.limit_bytes
    raise _refusal_with_bytes(load, limit_bytes, memory_window, _death(refusal)) from refusal


def _refusal_with_bytes(
    load: Load,
    limit_bytes: int | None,
    memory_window: tuple[float, float],
    died: WorkerDied | None,
) -> Exception:
    """Run one example with all the memory that there is, to tell what it needs."""
    with worker_probes(load, None if gpu_visible() else available_bytes()) as probes:
        try:
            found = probes.facts
        except MemoryError as error:
            return weights_do_not_fit(limit_bytes, _death(error) or died)
        if limit_bytes is None:
            limit_bytes = found.limit_bytes
        facts = found._replace(limit_bytes=limit_bytes)
        if facts.variables_bytes > limit_bytes:
            return limit_below_weights(limit_bytes, facts.variables_bytes)
        one = probes.read(1)
        return no_example_fits(facts, memory_window, one.peak_bytes, one.died or died)


def _death(error: MemoryError) -> WorkerDied | None:
    return error.__cause__ if isinstance(error.__cause__, WorkerDied) else None


def check_facts(facts: LoadFacts) -> LoadFacts:
    """Check that the weights fit and that there is a second size to try."""
    if facts.variables_bytes > facts.limit_bytes:
        raise limit_below_weights(facts.limit_bytes, facts.variables_bytes)
    if facts.examples == 1:
        raise InputError(
            "The data have one example, and a second size must be tried: give more rows, or "
            "`longest_example=(x, y)`. Received: 1 example."
        )
    return facts


def limit_below_weights(limit_bytes: int, variables_bytes: int) -> OutOfMemoryError:
    """Describe that not even the weights fit."""
    return _refusal(
        "The memory limit is below the weights of the model, with what the optimizer keeps of "
        "them: give a larger `memory_limit_bytes` or a smaller model. "
        f"Received: a limit of {memory_text(limit_bytes)}, weights of "
        f"{memory_text(variables_bytes)}.",
        variables_bytes,
        limit_bytes,
    )


def weights_alone_do_not_fit(limit_bytes: int | None, weights_bytes: int) -> OutOfMemoryError:
    """Describe that a model that is to predict does not fit."""
    limit = "all of the device" if limit_bytes is None else memory_text(limit_bytes)
    return _refusal(
        "Not even the weights of the model fit in memory: give a larger `memory_limit_bytes`, or a "
        f"smaller model. Received: a limit of {limit}, weights of {memory_text(weights_bytes)}.",
        weights_bytes,
        limit_bytes or 0,
    )


def weights_do_not_fit(limit_bytes: int | None, died: WorkerDied | None = None) -> OutOfMemoryError:
    """Describe that the model could not even be built with all the memory that there is."""
    limit = "all of the device" if limit_bytes is None else memory_text(limit_bytes)
    return _with_end_of_worker(
        died,
        "The model could not be built: its weights, with what the optimizer keeps of them, need "
        "more memory than there is. Use a smaller model or more memory. "
        f"Received: a limit of {limit}.",
        None,
        limit_bytes or 0,
    )


def no_example_fits(
    facts: LoadFacts,
    memory_window: tuple[float, float],
    needed_bytes: float | None,
    died: WorkerDied | None = None,
) -> OutOfMemoryError:
    """Describe what one example needs."""
    limit = memory_text(facts.limit_bytes)
    needs = "more than that" if needed_bytes is None else memory_text(needed_bytes)
    return _with_end_of_worker(
        died,
        f"One example does not fit: with the weights it needs {needs}, and the memory window ends "
        f"at {memory_window[1]:.0%} of {limit}. The weights, with what the optimizer keeps of "
        f"them, are {memory_text(facts.variables_bytes)}. Use a smaller model, shorter examples, "
        "`mixed_float16`, or more memory.",
        None if needed_bytes is None else int(needed_bytes),
        facts.limit_bytes,
    )


def _with_end_of_worker(
    died: WorkerDied | None, message: str, needed_bytes: int | None, limit_bytes: int
) -> OutOfMemoryError:
    """Add how the worker process ended: a crash leaves what want of memory leaves."""
    if died is None:
        return _refusal(message, needed_bytes, limit_bytes)
    error = _refusal(
        f"{message} It was found so because the worker process ended with status "
        f"{died.exit_code}, which a crash of another kind leaves as well.",
        needed_bytes,
        limit_bytes,
    )
    error.__cause__ = died
    error.add_note(f"The end of what the worker process wrote:\n{died.tail}")
    return error


def _refusal(message: str, needed_bytes: int | None, limit_bytes: int) -> OutOfMemoryError:
    """Add who else holds memory of the GPUs: it is the cause where a model fits on an empty one."""
    beside = neighbours_text(other_processes(on_any_gpu=True))
    return OutOfMemoryError(f"{message} {beside}".strip(), needed_bytes, limit_bytes)
