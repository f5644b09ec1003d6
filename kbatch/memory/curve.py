"""The memory of batch sizes in ascending order, as long as the next one is expected to fit."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kbatch.document.numbers import memory_text
from kbatch.memory.probe import Probes
from kbatch.memory.record import MemoryRecord
from kbatch.memory.search import fit_memory

# A size that is expected to take more than this share of the limit is not run.
GUARD_SHARE = 0.80


class MemoryPass(NamedTuple):
    """The memory of several batch sizes."""

    records: tuple[MemoryRecord, ...]  # One a batch size.
    limit_bytes: int  # What the probes could take.
    notes: tuple[str, ...]  # What a reader must know.


def ascend_memory(
    probes: Probes,
    batch_sizes: Sequence[int],
    *,
    dtype_policy: str,
    limit_bytes: int,
    held_bytes: int,
    time_budget_s: float,
    guard_share: float = GUARD_SHARE,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[MemoryRecord]:
    """Probe ascending sizes as long as the next one is expected to fit; yield each record."""
    # A single size tells nothing of what it needs whatever the batch: before a far one is refused
    # for it, one between them is probed, which has no record.
    began_s = clock()
    most_bytes = guard_share * limit_bytes
    measured: dict[int, float] = {}
    out_at: int | None = None

    def measure(size: int) -> int | None:
        nonlocal out_at
        peak = probes.read(size).bytes_below(limit_bytes)
        if peak is None:
            out_at = size
        else:
            measured[size] = peak
        return peak

    for size in batch_sizes:
        between = _size_between(measured, size, held_bytes, most_bytes)
        if out_at is None and between is not None and clock() - began_s < time_budget_s:
            measure(between)
        expected = expected_bytes(measured, size, held_bytes)
        guarded, reason = True, None
        if out_at is not None:
            reason = f"memory ran out at batch size {out_at}"
        elif expected is not None and expected > most_bytes:
            reason = (
                f"expected to need {memory_text(expected)}, more than {guard_share:.0%} of "
                f"{memory_text(limit_bytes)}"
            )
        elif clock() - began_s >= time_budget_s:
            guarded, reason = False, "the time for the memory was spent"
        if reason is None:
            peak = measure(size)
            outcome = "out_of_memory" if peak is None else "fits"
            yield MemoryRecord(dtype_policy, size, outcome, None, peak, expected)
        else:
            yield MemoryRecord(dtype_policy, size, "not_run", reason, None, expected, guarded)


def _size_between(
    measured: dict[int, float], size: int, held_bytes: int, most_bytes: float
) -> int | None:
    """Return a size to probe before one that is refused on the word of a single, far one."""
    if len(measured) != 1 or size <= 2 * max(measured):
        return None
    ((first, memory),) = measured.items()
    each = (memory - min(held_bytes, memory)) / first
    if not each or memory + each * (size - first) <= most_bytes:
        return None
    between = min(size // 2, int(first + (most_bytes - memory) / each))
    return between if between >= 2 * first else None


def expected_bytes(measured: dict[int, float], batch_size: int, held_bytes: float) -> float | None:
    """Return what the memory of smaller sizes lets expect of a larger one; None from none."""
    if not measured:
        return None
    fit = fit_memory(measured)
    largest = max(measured)
    if fit is None:
        fixed = min(held_bytes, measured[largest])
        return fixed + (measured[largest] - fixed) * batch_size / largest
    return max(fit.predict(batch_size), measured[largest])
