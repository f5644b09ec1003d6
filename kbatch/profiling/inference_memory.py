"""The memory of predictions, by batch size in ascending order, in a worker process if it can be."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from kbatch.analysis.memory_fit import fit_memory
from kbatch.instruments.device_memory import gpu_in_use, gpu_visible
from kbatch.instruments.mapped_pickles import UnsendableError
from kbatch.profiling.inference_inputs import InferenceInputs
from kbatch.profiling.loads import Load
from kbatch.profiling.memory_probes import (
    LoadFacts,
    Probes,
    ProcessProbes,
    WorkerProbes,
    worker_probes,
)
from kbatch.profiling.memory_refusals import weights_alone_do_not_fit
from kbatch.records.inference_measurements import MemoryRecord
from kbatch.reporting.number_text import memory_text

# A size that is expected to take more than this share of the limit is not run.
GUARD_SHARE = 0.80

_GPU_IN_USE = (
    "Memory was measured in this process, which holds the GPU already: a batch far too large may "
    "end it."
)
_NOT_SENDABLE = (
    "Memory was measured in this process, since the model cannot be sent to a worker process: a "
    "batch far too large may end it, and on a CPU small blocks of memory are not counted."
)


class MemoryPass(NamedTuple):
    """The memory of several batch sizes.

    Attributes:
        records: One a batch size.
        limit_bytes: What the probes could take.
        notes: What a reader must know.
    """

    records: tuple[MemoryRecord, ...]
    limit_bytes: int
    notes: tuple[str, ...]


def probing_place() -> str:
    """Says where memory will be probed."""
    return "this process, which holds the GPU" if gpu_in_use() else "a worker process"


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
    """Measures the memory of predictions in a worker process that may die of it.

    Where this process holds the GPU, as it does once a model lies there, TensorFlow has reserved
    most of its memory, and nothing is left to a worker: the probes run here then, and a note says
    so. The same where the model cannot be sent to a worker.

    Args:
        model: A built model, which stays as it is.
        inputs: Its inputs.
        batch_sizes: Sizes in ascending order.
        dtype_policy: What the model runs under, for the records.
        memory_limit_bytes: Memory that may be taken; None for what the device has, on a CPU half
            of what the host leaves.
        time_budget_s: Seconds after which no size is begun.
        on_probe: Receives each record.

    Raises:
        OutOfMemoryError: If not even the weights fit.
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


def ascend_memory(
    probes: Probes,
    batch_sizes: Sequence[int],
    *,
    dtype_policy: str,
    limit_bytes: int,
    held_bytes: int,
    time_budget_s: float,
    guard_share: float = GUARD_SHARE,
    on_probe: Callable[[MemoryRecord], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[MemoryRecord, ...]:
    """Probes sizes in ascending order as long as the next one is expected to fit.

    From two sizes on a line tells what to expect; before, the first size's memory beyond what is
    held anyway in proportion. That takes what the first size needs whatever the batch for a part
    of each example: before a size far from the first is refused for it, one between them is
    probed, which has no record.
    Once memory has run out, larger sizes are not run.

    Args:
        probes: Where they run.
        batch_sizes: Sizes in ascending order.
        dtype_policy: For the records.
        limit_bytes: Memory that there is.
        held_bytes: Part of it that is taken whatever the batch, as by the model's variables.
        time_budget_s: Seconds after which no size is begun.
        guard_share: Share of the limit above which a size is not run.
        on_probe: Receives each record.
        clock: Tells seconds.

    Returns:
        One record a size.
    """
    began_s = clock()
    measured: dict[int, float] = {}
    records: list[MemoryRecord] = []
    out_at: int | None = None
    for size in batch_sizes:
        expected = expected_bytes(measured, size, held_bytes)
        between = _size_between(measured, size, held_bytes, guard_share * limit_bytes)
        if out_at is None and between is not None and clock() - began_s < time_budget_s:
            peak = probes.read(between).bytes_below(limit_bytes)
            if peak is None:
                out_at = between
            else:
                measured[between] = peak
                expected = expected_bytes(measured, size, held_bytes)
        guarded, reason = _reason_not_to_run(out_at, expected, guard_share, limit_bytes)
        if reason is None and clock() - began_s >= time_budget_s:
            reason = "the time for the memory was spent"
        if reason is not None:
            record = MemoryRecord(dtype_policy, size, "not_run", reason, None, expected, guarded)
        else:
            peak = probes.read(size).bytes_below(limit_bytes)
            if peak is None:
                out_at = size
            else:
                measured[size] = peak
            outcome = "out_of_memory" if peak is None else "fits"
            record = MemoryRecord(dtype_policy, size, outcome, None, peak, expected)
        records.append(record)
        if on_probe is not None:
            on_probe(record)
    return tuple(records)


def _size_between(
    measured: dict[int, float], size: int, held_bytes: int, most_bytes: float
) -> int | None:
    """Gives a size to probe before one that is refused on the word of a single, far one."""
    if len(measured) != 1 or size <= 2 * max(measured):
        return None
    first = max(measured)
    fixed = min(held_bytes, measured[first])
    if fixed == measured[first] or fixed + (measured[first] - fixed) * size / first <= most_bytes:
        return None
    each = (measured[first] - fixed) / first
    between = min(size // 2, int((most_bytes - fixed) / each))
    return between if between >= 2 * first else None


def _reason_not_to_run(
    out_at: int | None, expected: float | None, guard_share: float, limit_bytes: int
) -> tuple[bool, str | None]:
    if out_at is not None:
        return True, f"memory ran out at batch size {out_at}"
    if expected is None or expected <= guard_share * limit_bytes:
        return False, None
    return True, (
        f"expected to need {memory_text(expected)}, more than {guard_share:.0%} of "
        f"{memory_text(limit_bytes)}"
    )


def expected_bytes(measured: dict[int, float], batch_size: int, held_bytes: float) -> float | None:
    """Tells what the memory of smaller sizes lets expect of a larger one; None from none.

    Args:
        measured: Peak bytes of smaller sizes, by the batch size in examples.
        batch_size: The larger size, in examples.
        held_bytes: Part of them that is taken whatever the batch.
    """
    if not measured:
        return None
    fit = fit_memory(measured)
    largest = max(measured)
    if fit is None:
        fixed = min(held_bytes, measured[largest])
        return fixed + (measured[largest] - fixed) * batch_size / largest
    return max(fit.predict(batch_size), measured[largest])


def _facts(probes: Probes, model: keras.Model, memory_limit_bytes: int | None) -> LoadFacts:
    """Reads the model where the probes run, and checks that its weights fit.

    Raises:
        OutOfMemoryError: If they do not.
    """
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
