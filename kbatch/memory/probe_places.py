"""Where memory is probed: in a worker process, or in this one where that cannot be."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import keras

from kbatch.device.device_memory import gpu_in_use, gpu_visible
from kbatch.device.host_memory import available_bytes
from kbatch.device.mapped_pickles import UnsendableError
from kbatch.device.worker import WorkerDied
from kbatch.memory.memory_probes import Probes, ProcessProbes, worker_probes
from kbatch.memory.memory_refusals import limit_below_weights, no_example_fits, weights_do_not_fit
from kbatch.memory.workload import Load

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
    """Searches in a worker process, or here if this one holds the GPU or the load cannot be sent.

    Args:
        load: What to run.
        search: Searches with the probes that it is given.
        memory_limit_bytes: Memory that may be taken, None for what the device has.
        memory_window: Lower and upper share of it that is aimed at.
        model: Returns the model that this process has or will need itself, for probes here; the
            model stays as it is. None to build one.
        here_since: Why it must run here, None where it need not.

    Raises:
        InputError: If the limit is below the weights, or the data have one example.
        OutOfMemoryError: If one example does not fit.
    """
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
    """Runs one example with all the memory that there is, to tell what it needs."""
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
