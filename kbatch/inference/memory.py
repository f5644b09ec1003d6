"""The memory of predictions, by batch size in ascending order, in a worker process if it can be."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from kbatch.device.memory import gpu_in_use, gpu_visible
from kbatch.device.worker import UnsendableError
from kbatch.inference.inputs import InferenceInputs
from kbatch.memory.curve import MemoryPass, ascend_memory
from kbatch.memory.probe import (
    LoadFacts,
    Probes,
    ProcessProbes,
    WorkerProbes,
    weights_alone_do_not_fit,
    worker_probes,
)
from kbatch.memory.record import MemoryRecord
from kbatch.memory.workload import Load

_GPU_IN_USE = (
    "Memory was measured in this process, which holds the GPU already: a batch far too large may "
    "end it."
)
_NOT_SENDABLE = (
    "Memory was measured in this process, since the model cannot be sent to a worker process: a "
    "batch far too large may end it, and on a CPU small blocks of memory are not counted."
)


def measure_memory(
    model: keras.Model,
    inputs: InferenceInputs,
    batch_sizes: Sequence[int],
    *,
    dtype_policy: str,
    memory_limit_bytes: int | None,
    time_budget_s: float,
    on_probe: Callable[[MemoryRecord], None] | None = None,
) -> MemoryPass:
    """Measure the memory of predictions in a worker process that may die of it.

    Where this process holds the GPU, as it does once a model lies there, TensorFlow has reserved
    most of its memory, and nothing is left to a worker: the probes run here then, and a note says
    so. The same where the model cannot be sent to a worker.
    """
    with _probes(model, inputs, memory_limit_bytes) as probes:
        facts = _facts(probes, model, memory_limit_bytes)
        records = ascend_memory(
            probes,
            batch_sizes,
            dtype_policy=dtype_policy,
            limit_bytes=facts.limit_bytes,
            held_bytes=facts.held_bytes,
            time_budget_s=time_budget_s,
            on_probe=on_probe,
        )
        notes = tuple(note for note in facts.notes if note != inputs.note)
        return MemoryPass(records, facts.limit_bytes, notes)


def _facts(probes: Probes, model: keras.Model, memory_limit_bytes: int | None) -> LoadFacts:
    """Read the model where the probes run, and check that its weights fit."""
    limit_bytes = memory_limit_bytes
    if isinstance(probes, WorkerProbes) and not gpu_visible():
        limit_bytes = probes.limit_bytes
    weights_bytes = sum(tf.as_dtype(v.dtype).size * math.prod(v.shape) for v in model.variables)
    try:
        facts = probes.facts
    except MemoryError as error:
        raise weights_alone_do_not_fit(limit_bytes, weights_bytes) from error
    if facts.variables_bytes > facts.limit_bytes:
        raise weights_alone_do_not_fit(facts.limit_bytes, facts.variables_bytes)
    return facts


@contextlib.contextmanager
def _probes(
    model: keras.Model, inputs: InferenceInputs, memory_limit_bytes: int | None
) -> Iterator[Probes]:
    load = Load(lambda: model, inputs.source, keras.config.dtype_policy().name, training=False)
    note = _GPU_IN_USE if gpu_in_use() else None
    if note is None:
        with worker_probes(load, memory_limit_bytes) as probes:
            try:
                _facts(probes, model, memory_limit_bytes)
            # What a class that the worker does not know leads to when the model is read there.
            except (UnsendableError, TypeError, ValueError, AttributeError, ImportError):
                note = _NOT_SENDABLE
            else:
                yield probes
                return
    yield ProcessProbes(load.start(), memory_limit_bytes, note)
