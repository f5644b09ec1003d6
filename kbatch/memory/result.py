"""Results of memory measurements: the largest batch that fits, and the memory of one size."""

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from kbatch.analysis.batch_sizes import powers_of_two
from kbatch.analysis.intervals import Estimate
from kbatch.memory import search
from kbatch.page.numbers import in_brackets, memory_text, percent, pluralize
from kbatch.page.result import Result
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note, most_important

if TYPE_CHECKING:
    import pandas as pd


# Memory of common GPUs, in units of 10^9 bytes.
_DEVICES_GB = (8, 16, 24, 40, 80, 141)


@dataclasses.dataclass(frozen=True)
class ProbeRecord:
    """One batch size that was run."""

    batch_size: int  #: Examples in the batch.
    #: Peak memory of the steps after the first, in bytes. If the first step needs more than the
    #: limit, its peak. None if memory ran out.
    peak_memory_bytes: int | None
    outcome: search.Outcome
    duration_s: float  #: Seconds that the run took, tracing included.
    #: Whether it ran to search, or to confirm the answer in a new process or after other sizes.
    purpose: search.Purpose = "search"


@dataclasses.dataclass(frozen=True, repr=False)
class MaxBatchSizeResult(Result):
    """The largest batch size that fits in memory, and how it was found.

    Example:

    >>> result = kbatch.find_max_batch_size(build, x, y)
    >>> result.max_batch_size, result.predict(64), result.powers_of_two(16)
    """

    max_batch_size: int  #: The size, in examples. It was run.
    reason: Note  #: Why the search ended with this size.
    limit_bytes: int  #: Memory of the device that TensorFlow could use.
    memory_window: tuple[float, ...]  #: The share of the limit to fill, as (low, high).
    training: bool  #: True if train steps were run, False if predictions.
    device: str  #: TensorFlow's name of the device.
    dtype_policy: str  #: Policy of the model.
    weights_bytes: int  #: Bytes of the model's and the optimizer's variables.
    probes: tuple[ProbeRecord, ...]  #: All runs, in order.
    #: Bytes that the last failed allocation requested in one block; None if not reported.
    requested_block_bytes: int | None = None
    free_bytes: int | None = None  #: Bytes that were free when it failed.
    largest_free_block_bytes: int | None = None  #: The largest free block when it failed.
    noted: tuple[Note, ...] = ()  #: Notes about the measurement.
    environment: EnvironmentRecord | None = None  #: The machine and its software.

    @property
    def title(self) -> str:
        """The title of the result."""
        return f"Largest batch for {'training' if self.training else 'inference'}"

    @property
    def answer(self) -> str:
        """The size, its peak memory, and why the search ended with it."""
        peak, limit = self.peak_memory_bytes, self.limit_bytes
        return (
            f"{self.title}: {pluralize(self.max_batch_size, 'example')}, {memory_text(peak)} of "
            f"{memory_text(limit)} ({percent(peak / limit)}) on {self.device} under "
            f"{self.dtype_policy}; {self.reason}."
        )

    def table(self) -> "pd.DataFrame":
        """Return a table with one row for each run, in order."""
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
        runs = enumerate(zip(table["batch size"], peaks, strict=True))
        largest = self.max_batch_size
        table.attrs["answer"] = [i for i, (size, peak) in runs if size == largest and peak]
        return table

    @property
    def notes(self) -> tuple[Note, ...]:
        """At most three notes, the most important first."""
        end = (Note.of("data_end"),) if self.reason.code == "reached_data" else ()
        return most_important((*self.noted, *end))

    @property
    def settings(self) -> dict[str, str]:
        """Conditions of the measurement, the fitted line, and free memory at the last failure."""
        settings = {
            "task": "train steps" if self.training else "predictions",
            "memory limit": memory_text(self.limit_bytes),
            "target window": " to ".join(map(percent, self.memory_window)),
            "dtype policy": self.dtype_policy,
            "variables": memory_text(self.weights_bytes),
        }
        if (fit := self.fit) is not None:
            fixed, per_example = (memory_text(max(size_bytes, 0.0)) for size_bytes in fit)
            settings["fitted line"] = f"{fixed} fixed, {per_example} per example"
        if self.largest_free_block_bytes is not None and self.free_bytes is not None:
            settings["last failure"] = (
                f"{memory_text(self.requested_block_bytes or 0)} requested in one block, "
                f"{memory_text(self.free_bytes)} free, the largest free block "
                f"{memory_text(self.largest_free_block_bytes)}"
            )
        return settings

    @property
    def memory_bytes(self) -> dict[int, int]:
        """Peak bytes of each size that did not run out of memory, the highest of its runs."""
        peaks: dict[int, int] = {}
        for probe in self.probes:
            if (peak := probe.peak_memory_bytes) is not None:
                peaks[probe.batch_size] = max(peaks.get(probe.batch_size, 0), peak)
        return peaks

    @property
    def peak_memory_bytes(self) -> int:
        """Peak bytes at `max_batch_size`."""
        return self.memory_bytes[self.max_batch_size]

    @property
    def fit(self) -> search.MemoryFit | None:
        """The line through the measured sizes; None if there are fewer than two."""
        return search.fit_memory(self.memory_bytes)

    @property
    def fits(self) -> dict[int, Estimate[float | None]]:
        """Estimated largest batch for devices with 8, 16, 24, 40, 80 and 141 GB (10^9 bytes).

        Each size fills the upper share of `memory_window` by the line that was fitted on this
        device, and has a 95 % interval. 0 means that not even one example fits. A device for
        which the line gives no interval is left out.
        """
        sizes = {}
        for size_gb in _DEVICES_GB:
            most_bytes = self.memory_window[1] * size_gb * 1e9
            estimate = search.largest_within(self.memory_bytes, most_bytes)
            if estimate.value is not None and estimate.ends is not None:
                low, high = map(math.floor, estimate.ends)
                sizes[size_gb] = Estimate(math.floor(estimate.value), low, high, estimate.n)
        return sizes

    @property
    def use(self) -> str:
        """One sentence with the largest batch for each device of `fits`, or an empty text."""
        texts = [f"{gb} GB: {size.value:,}{in_brackets(size)}" for gb, size in self.fits.items()]
        return f"Estimated largest batch for devices with {', '.join(texts)}." if texts else ""

    def predict(self, batch_size: int) -> int:
        """Estimate the bytes of a batch size from the line through the measured sizes.

        The estimate is at least the peak of every smaller size, and at least the limit if a
        smaller size ran out of memory.

        Args:
            batch_size: Integer. Batch size, in examples.

        Returns:
            The estimated peak memory, in bytes.

        Raises:
            ValueError: If fewer than two sizes were measured.
        """
        smaller = [probe for probe in self.probes if probe.batch_size <= batch_size]
        least = [probe.peak_memory_bytes or 0 for probe in smaller]
        least += [self.limit_bytes for probe in smaller if probe.outcome == "out_of_memory"]
        return round(max([search.predict_memory(self.memory_bytes, batch_size), *least]))

    def powers_of_two(self, low: int = 1) -> tuple[int, ...]:
        """List the powers of two from `low` up to `max_batch_size`.

        Args:
            low: Integer. Smallest size. Default: 1.

        Returns:
            The sizes in ascending order.

        Raises:
            ValueError: If there is no power of two between them.
        """
        return powers_of_two(low, self.max_batch_size)


@dataclasses.dataclass(frozen=True)
class MemoryRecord:
    """The memory of one batch size."""

    dtype_policy: str  #: Dtype policy of the model, or `"int8"`.
    batch_size: int  #: Examples in the batch.
    outcome: Literal["fits", "out_of_memory", "not_run"]
    reason: Note | None = None  #: Why it was not run. None if it was.
    peak_bytes: int | None = None  #: Peak memory, weights included. None if it was not measured.
    #: True if the size must not be run: it needs too much memory, or the data has fewer examples.
    guarded: bool = False

    @property
    def refusal(self) -> Note | None:
        """Why the size must not be run, or None if it may run."""
        if self.outcome == "out_of_memory":
            return Note.of("out_of_memory")
        return self.reason if self.guarded else None


def peaks_under(dtype_policy: str | None, records: Iterable[MemoryRecord]) -> dict[int, int]:
    """Return the measured peak memory of each batch size under a policy, in bytes."""
    peaks = {r.batch_size: r.peak_bytes for r in records if r.dtype_policy == dtype_policy}
    return {size: peak for size, peak in peaks.items() if peak is not None}
