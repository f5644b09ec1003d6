"""The largest batch that fits and how it was found, and the memory of one batch size."""

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from kbatch.analysis.batch_sizes import powers_of_two
from kbatch.analysis.intervals import Estimate
from kbatch.memory.search import (
    MemoryFit,
    Outcome,
    Purpose,
    fit_memory,
    largest_within,
    predict_memory,
)
from kbatch.page.numbers import in_brackets, memory_text, percent, pluralize
from kbatch.page.result import Result
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note, most_important

if TYPE_CHECKING:
    import pandas as pd


# Memory of common GPUs, in 10^9 bytes.
_DEVICES_GB = (8, 16, 24, 40, 80, 141)


@dataclasses.dataclass(frozen=True)
class ProbeRecord:
    """One batch size that was run."""

    batch_size: int  #: Examples in the batch.
    #: Most bytes held at once over its steps after the first, or in the first where that takes
    #: more than the limit; None where memory ran out.
    peak_memory_bytes: int | None
    outcome: Outcome
    duration_s: float  #: Seconds that it took, tracing included.
    #: To search, or to confirm the answer in a fresh process and after other sizes.
    purpose: Purpose = "search"


@dataclasses.dataclass(frozen=True, repr=False)
class MaxBatchSizeResult(Result):
    """The largest batch size whose memory lies in the window, and how it was found."""

    max_batch_size: int  #: The size, in examples. It was run.
    reason: Note  #: Why it is this one.
    limit_bytes: int  #: Memory of the device that TensorFlow could take.
    memory_window: tuple[float, ...]  #: Lower and upper share of the limit that was aimed at.
    training: bool  #: Whether train steps were run, or predictions.
    device: str  #: TensorFlow's name of the device.
    dtype_policy: str  #: Policy of the model.
    weights_bytes: int  #: Bytes of the model's variables, those of the optimizer included.
    probes: tuple[ProbeRecord, ...]  #: All runs, in order.
    requested_block_bytes: int | None = None  #: Of the last allocation that failed, in one piece.
    free_bytes: int | None = None  #: What was free then.
    largest_free_block_bytes: int | None = None  #: The largest piece of it.
    noted: tuple[Note, ...] = ()  #: What was noted while it was measured.
    environment: EnvironmentRecord | None = None  #: The machine.

    @property
    def title(self) -> str:
        """What it is a result of."""
        return f"Largest batch for {'training' if self.training else 'inference'}"

    @property
    def answer(self) -> str:
        """The size, what it takes, and why it is this one."""
        peak, limit = self.peak_memory_bytes, self.limit_bytes
        return (
            f"{self.title}: {pluralize(self.max_batch_size, 'example')}, {memory_text(peak)} of "
            f"{memory_text(limit)} ({percent(peak / limit)}) on {self.device} under "
            f"{self.dtype_policy}; {self.reason}."
        )

    def table(self) -> "pd.DataFrame":
        """Return all runs, in order."""
        import pandas as pd

        peaks = [probe.peak_memory_bytes for probe in self.probes]
        table = pd.DataFrame(
            {
                "batch size": [probe.batch_size for probe in self.probes],
                "peak memory (MiB)": [peak and peak / 2**20 for peak in peaks],
                "of the limit (%)": [peak and 100 * peak / self.limit_bytes for peak in peaks],
                "time (s)": [probe.duration_s for probe in self.probes],
                "outcome": [probe.outcome.replace("_", " ") for probe in self.probes],
                "run": [probe.purpose.replace("_", " ") for probe in self.probes],
            }
        )
        table.attrs["answer"] = [
            place
            for place, probe in enumerate(self.probes)
            if probe.batch_size == self.max_batch_size and peaks[place] is not None
        ]
        return table

    @property
    def notes(self) -> tuple[Note, ...]:
        """At most three things that change what to do, the most important first."""
        end = (Note.of("data_end"),) if self.reason.code == "reached_data" else ()
        return most_important((*self.noted, *end))

    @property
    def settings(self) -> dict[str, str]:
        """What it was measured with, the fitted line, and what was free at the last failure."""
        found = {
            "task": "train steps" if self.training else "predictions",
            "memory limit": memory_text(self.limit_bytes),
            "target window": " to ".join(map(percent, self.memory_window)),
            "dtype policy": self.dtype_policy,
            "variables": memory_text(self.weights_bytes),
        }
        if (fit := self.fit) is not None:
            line = fit.fixed_bytes, fit.bytes_per_example
            fixed, each = (memory_text(max(value, 0.0)) for value in line)
            found["fitted line"] = f"{fixed} fixed, {each} per example"
        if self.largest_free_block_bytes is not None and self.free_bytes is not None:
            found["last failure"] = (
                f"{memory_text(self.requested_block_bytes or 0)} requested in one block, "
                f"{memory_text(self.free_bytes)} free, the largest free block "
                f"{memory_text(self.largest_free_block_bytes)}"
            )
        return found

    @property
    def memory_bytes(self) -> dict[int, int]:
        """Most bytes seen at each size that fitted."""
        found: dict[int, int] = {}
        for probe in self.probes:
            if (peak := probe.peak_memory_bytes) is not None:
                found[probe.batch_size] = max(found.get(probe.batch_size, 0), peak)
        return found

    @property
    def peak_memory_bytes(self) -> int:
        """Most bytes seen at `max_batch_size`."""
        return self.memory_bytes[self.max_batch_size]

    @property
    def fit(self) -> MemoryFit | None:
        """The line through the sizes that fitted, None from fewer than two."""
        return fit_memory(self.memory_bytes)

    @property
    def fits(self) -> dict[int, Estimate[float | None]]:
        """The largest batch for devices of 8, 16, 24, 40, 80 and 141 GB (10^9 bytes).

        It fills the upper share of `memory_window`, 90 % by default, by the line through what was
        measured on this device. The range is a 95 % interval. Values are whole examples: 0 if not
        even one fits. A device that no line determines is left out.
        """
        known = {}
        for size_gb in _DEVICES_GB:
            most_bytes = self.memory_window[1] * size_gb * 1e9
            found = largest_within(self.memory_bytes, most_bytes)
            if found.value is not None and found.ends is not None:
                low, high = map(math.floor, found.ends)
                known[size_gb] = Estimate(math.floor(found.value), low, high, found.n)
        return known

    @property
    def use(self) -> str:
        """The largest batch for each size of a device."""
        found = [
            f"{size_gb} GB {found.value:,}{in_brackets(found)}"
            for size_gb, found in self.fits.items()
        ]
        return f"Largest batch by memory of the device: {', '.join(found)}." if found else ""

    def predict(self, batch_size: int) -> int:
        """Estimate the bytes of a batch size from the line through two measured sizes or more.

        It is at least what a smaller size needed, or the limit if that ran out of memory.
        """
        smaller = [probe for probe in self.probes if probe.batch_size <= batch_size]
        least = [probe.peak_memory_bytes or 0 for probe in smaller]
        least += [self.limit_bytes for probe in smaller if probe.outcome == "out_of_memory"]
        return round(max([predict_memory(self.memory_bytes, batch_size), *least]))

    def powers_of_two(self, low: int = 1) -> tuple[int, ...]:
        """List the powers of two from `low` up to `max_batch_size`."""
        return powers_of_two(low, self.max_batch_size)


@dataclasses.dataclass(frozen=True)
class MemoryRecord:
    """The memory of one batch size."""

    dtype_policy: str  #: Under which policy, or `"int8"`.
    batch_size: int  #: Examples in the batch.
    outcome: Literal["fits", "out_of_memory", "not_run"]
    reason: Note | None = None  #: Why it was not run. None if it was.
    peak_bytes: int | None = None  #: Most held at once, weights included; None if not known.
    #: Whether it is not to be run at all: it would need too much, or the data end before.
    guarded: bool = False

    @property
    def refusal(self) -> Note | None:
        """Why the size is not to be run again; None where nothing speaks against it."""
        if self.outcome == "out_of_memory":
            return Note.of("out_of_memory")
        return self.reason if self.guarded else None


def peaks_under(dtype_policy: str | None, records: Iterable[MemoryRecord]) -> dict[int, int]:
    """Return the known peak memory of each batch size under a policy, in bytes."""
    peaks = {r.batch_size: r.peak_bytes for r in records if r.dtype_policy == dtype_policy}
    return {size: peak for size, peak in peaks.items() if peak is not None}
