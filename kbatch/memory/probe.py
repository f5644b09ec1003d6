"""Memory probes: run a workload at one batch size, in a worker process or in this one.

`MaxBatchExperiment` uses them to search for the largest batch.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from kbatch.device import memory as device_memory
from kbatch.device.failures import MEMORY_ERRORS, device_is_lost, ran_out_of_memory
from kbatch.device.worker import Worker
from kbatch.errors import DeviceLostError, InputError, OutOfMemoryError, UnsendableError, WorkerDied
from kbatch.library_internals import fail_at_once_without_memory
from kbatch.memory.search import MaxBatchAnswer, MaxBatchSearch, Outcome, Purpose
from kbatch.memory.workload import Reading, Run, Workload, WorkloadFacts
from kbatch.page.numbers import memory_text
from kbatch.records.notes import Note
from kbatch.training.state import kept_state


class WorkerProbes(contextlib.AbstractContextManager["WorkerProbes"]):
    """Probes in a worker process, which a batch that is too large may kill."""

    isolated = True  # A batch that is too large cannot end this process.

    def __init__(self, workload: Workload, memory_limit_bytes: int | None, ends_s: float):
        # A limit that was set in this process must be passed on to the worker.
        limit_bytes = memory_limit_bytes or device_memory.set_limit_bytes()
        # At this level the allocator logs its free blocks when it fails.
        environment = {"TF_CPP_MIN_LOG_LEVEL": "0", **device_memory.worker_device()}
        if not device_memory.gpu_visible():  # With a GPU, host memory is not what limits a batch.
            limit_bytes = limit_bytes or device_memory.host_limit_bytes()
            environment |= device_memory.limited_cpu(limit_bytes)
        self.limit_bytes = limit_bytes  # None if only the worker can read it.
        self._worker = Worker(environment, functools.partial(_start, workload, limit_bytes))
        self._worker.ends_s = ends_s
        self._facts: Any = None
        # This stays when the worker restarts: a size that ran in an earlier process counts.
        self._smallest_that_ran: float = math.inf
        self._ran_out = False  # Whether memory ran out in the present process.

    def __exit__(self, *error: object) -> None:
        self._worker.close()

    def facts(self) -> WorkloadFacts:
        try:
            self._facts = self._facts or self._worker.call(Run.facts, self.limit_bytes)
        except MEMORY_ERRORS as error:
            if not ran_out_of_memory(error):
                raise
            limit = self.limit_bytes
            limit_text = "the whole device" if limit is None else memory_text(limit)
            raise _out_of_memory(
                "The model could not be built, because its weights and the optimizer's variables "
                "do not fit in memory: use a smaller model or more memory. `nvidia-smi` shows "
                f"which processes use a GPU's memory. Received: a limit of {limit_text}.",
                died=error if isinstance(error, WorkerDied) else None,
                limit_bytes=limit,
            ) from error
        return self._facts

    def read(self, batch_size: int) -> Reading:
        started_s, before = time.perf_counter(), self._worker.read_output()
        worked = self._smallest_that_ran < batch_size
        try:
            reading = self._worker.call(Run.read, batch_size, worked)
        except MEMORY_ERRORS as error:
            if device_is_lost(error) and self._ran_out:  # An earlier size broke this process.
                self.renew()
                return self.read(batch_size)
            if not ran_out_of_memory(error, smaller_worked=worked):
                raise
            died = error if isinstance(error, WorkerDied) else None
            reading = Reading(None, batch_size, time.perf_counter() - started_s, died=died)
        if reading.peak_bytes is None:
            self._ran_out = reading.died is None
            # A restarted worker writes its output from the beginning.
            output = self._worker.read_output().removeprefix(before)
            reading = reading._replace(free=device_memory.free_memory(output))
        else:
            self._smallest_that_ran = min(reading.rows, self._smallest_that_ran)
        if reading.lost:
            self.renew()
        return reading

    def renew(self) -> bool:
        """Restart the worker, and return True. Probes in this process return False."""
        self._worker.restart()
        self._ran_out = False
        return True


class ProcessProbes:
    """Probes in this process. `why_here` is the reason that the note "measured_here" gives."""

    isolated = False

    def __init__(self, run: Run, memory_limit_bytes: int | None, why_here: str | None):
        self._run, self._limit_bytes, self._why_here = run, memory_limit_bytes, why_here
        self._smallest_that_ran: float = math.inf

    def facts(self) -> WorkloadFacts:
        facts = self._run.facts(self._limit_bytes)
        notes = (Note.of("measured_here", why=self._why_here),) if self._why_here else ()
        return facts._replace(notes=(*notes, *facts.notes))

    def read(self, batch_size: int) -> Reading:
        """Run one batch size, and restore the model's state."""
        model = self._run.model
        step, function = vars(model).get("train_step"), model.train_function
        try:
            with kept_state(model):
                reading = self._run.read(batch_size, self._smallest_that_ran < batch_size)
                if function is None and vars(model).get("train_step") is step:
                    function = model.train_function  # Later training need not trace it again.
        finally:
            model.train_function = function
        if reading.lost:
            raise DeviceLostError()
        if reading.peak_bytes is not None:
            self._smallest_that_ran = min(reading.rows, self._smallest_that_ran)
        return reading

    def renew(self) -> bool:
        return False


Probes = WorkerProbes | ProcessProbes


def _start(workload: Workload, memory_limit_bytes: int | None) -> Run:
    fail_at_once_without_memory()
    if memory_limit_bytes is not None:
        device_memory.limit_gpu(memory_limit_bytes)
    return workload.start()


@contextlib.contextmanager
def open_probes(
    workload: Workload,
    *,
    memory_limit_bytes: int | None,
    model: Callable[[], keras.Model] | None = None,
    why_here: str | None = None,
    ends_s: float = math.inf,  # From then on, calls of a worker raise a `TimeoutError`.
) -> Iterator[Probes]:
    """Open probes in a worker process, or in this process if that is not possible.

    In this process the model is the one that `model` returns, if given.
    """
    why_here = why_here or ("gpu" if device_memory.gpu_in_use() else None)
    if why_here is None:
        with WorkerProbes(workload, memory_limit_bytes, ends_s) as probes:
            try:
                probes.facts()  # Starts the worker, which fails if the model cannot be sent.
            except UnsendableError:
                why_here = "not sendable"
            else:
                yield probes
                return
    here = workload if model is None else dataclasses.replace(workload, build=model)
    yield ProcessProbes(here.start(), memory_limit_bytes, why_here)


def no_example_fits(
    facts: WorkloadFacts,
    memory_window: tuple[float, float],
    needed_bytes: float | None,
    died: WorkerDied | None,
) -> OutOfMemoryError:
    needs = "more memory than that" if needed_bytes is None else memory_text(needed_bytes)
    shared = next((f" {note}" for note in facts.notes if note.code == "gpu_shared"), "")
    return _out_of_memory(
        f"One example does not fit. kbatch may use {memory_window[1]:.0%} of "
        f"{memory_text(facts.limit_bytes)}, and the model with one example needs {needs}. The "
        f"weights and the optimizer's variables take {memory_text(facts.variables_bytes)}. Use a "
        f"smaller model, shorter examples, `mixed_float16`, or more memory.{shared}",
        died=died,
        examples=1,
        fitting_examples=0,
        needed_bytes=None if needed_bytes is None else int(needed_bytes),
        limit_bytes=facts.limit_bytes,
    )


def _out_of_memory(
    message: str, *, died: WorkerDied | None, **known: int | None
) -> OutOfMemoryError:
    """Make the error. If a worker died, say so: the real cause may be another crash."""
    if died is None:
        return OutOfMemoryError(message, **known)
    message = (
        f"{message} kbatch assumes that memory ran out, because the worker process ended with "
        f"status {died.exit_code}. Another kind of crash can end with the same status."
    )
    error = OutOfMemoryError(message, **known)
    error.__cause__ = died
    error.add_note(f"Last output of the worker process:\n{died.tail}")
    return error


class MaxBatchExperiment:
    """Search for the largest batch with probes, and keep all their results."""

    def __init__(
        self,
        probes: Probes,
        memory_window: tuple[float, float],
        max_batch_size: int | None,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.facts = facts = probes.facts()
        if facts.examples == 1:
            raise InputError(
                "The data must have at least two examples, because kbatch tries two batch sizes: "
                "give more, or `longest_example=(x, y)`, which kbatch repeats. Received: 1 example."
            )
        self._probes, self._say = probes, say
        self._window = memory_window
        self._most = memory_window[1] * facts.limit_bytes
        self._search = MaxBatchSearch(
            limit_bytes=facts.limit_bytes,
            memory_window=memory_window,
            max_batch_size=max_batch_size,
            examples=facts.examples,
        )
        self._memory = self._search.memory_bytes
        # Size, peak bytes, outcome, seconds and purpose of each run.
        self.runs: list[tuple[int, int | None, Outcome, float, Purpose]] = []
        self.free: device_memory.FreeMemory | None = None
        self._died: WorkerDied | None = None

    def search(self) -> MaxBatchAnswer:
        """Measure sizes until there is an answer. Sizes that were measured are not run again."""
        while (size := self._search.ask()) is not None:
            self._measure(size, "search")
        assert self._search.answer is not None
        return self._search.answer

    def largest(self) -> MaxBatchAnswer | None:
        """Try the largest size first. Return None if it does not fit, or if there is no largest."""
        size, reason = self._search.cap, self._search.cap_reason
        if reason.code not in ("reached_data", "reached_most") or not self._probes.isolated:
            return None
        try:
            reading = self._measure(size, "search")
        except InputError:
            raise
        except Exception:  # If the cause is not memory, a smaller batch raises the error too.
            self._probes.renew()
            return None
        if reading.rows < size or self._outcome(self._memory[size]) != "fits":
            return None
        return size, reason

    def confirmed(self, size: int) -> bool:
        """Return whether the answer also fits in a new process, and after another size."""
        if self._probes.renew():
            self._measure(size, "fresh_process")
        if self._outcome(self._memory[size]) == "fits":
            if size > 1:
                larger = [b for b, m in self._memory.items() if m is not None and b > size]
                self._measure(larger[0] if larger else size // 2, "mixed_sizes")
            self._measure(size, "mixed_sizes")
        return self._outcome(self._memory[size]) == "fits"

    def fitting(self, size: int | None) -> int:
        """Return the size, or raise an error if not even one example fits."""
        if size is None:
            raise no_example_fits(self.facts, self._window, self._memory[1], self._died)
        return size

    def is_bound(self, size: int) -> bool:
        """Return whether memory limits the size, rather than the data or `max_batch_size`."""
        reached = (self._memory[size] or 0) >= self._window[0] * self.facts.limit_bytes
        return reached or any(outcome != "fits" for _, _, outcome, _, _ in self.runs)

    def _measure(self, size: int, purpose: Purpose) -> Reading:
        reading = self._probes.read(size)
        peak, rows = reading.bytes_below(self.facts.limit_bytes), reading.rows
        self._search.tell(rows, peak)
        if rows < size:
            self._search.end_at(rows, "reached_data")
        self.free = reading.free or self.free
        self._died = reading.died or self._died
        self.runs.append((rows, peak, self._outcome(peak), reading.duration_s, purpose))
        self._say(f"batch {rows:,}: {'out of memory' if peak is None else memory_text(peak)}")
        return reading

    def _outcome(self, peak: float | None) -> Outcome:
        if peak is None:
            return "out_of_memory"
        return "fits" if peak <= self._most else "above_window"
