"""Records of memory: a search for the largest batch, and one batch size."""

import dataclasses
from collections.abc import Iterable

from kbatch.analysis.batch_sizes import powers_of_two
from kbatch.memory.search import MemoryFit, check_window, fit_memory
from kbatch.records.record import EnvironmentRecord, SavedRecord, check_choice, check_ranges
from kbatch.records.usage import GpuProcess

OUTCOMES = ("fits", "above_window", "out_of_memory")


@dataclasses.dataclass(frozen=True)
class ProbeRecord:
    """One batch size that was run."""

    batch_size: int  #: Examples in the batch.
    #: Most bytes held at once over its steps after the first, None where memory ran out.
    peak_memory_bytes: int | None
    outcome: str  #: One of `OUTCOMES`.
    duration_s: float  #: Seconds that it took, tracing included.
    purpose: str = "search"  #: Or "fresh process", "mixed sizes" where the answer is confirmed.
    step_s: float | None = None  #: Of a train step after the first, None where none was timed.
    #: Most bytes in the first step, which also compiles and tries algorithms; or None.
    first_step_peak_memory_bytes: int | None = None
    stopped_after: int | None = None  #: Train steps after which slow ones ended it, else None.

    def __post_init__(self):
        check_choice(OUTCOMES, outcome=self.outcome)
        check_ranges(1, batch_size=self.batch_size)
        check_ranges(
            0,
            peak_memory_bytes=self.peak_memory_bytes,
            first_step_peak_memory_bytes=self.first_step_peak_memory_bytes,
        )


@dataclasses.dataclass(frozen=True)
class MaxBatchSizeResult(SavedRecord):
    """The largest batch size whose memory lies in the window, and how it was found."""

    max_batch_size: int  #: The size, in examples. It was run.
    reason: str  #: Why it is this one.
    in_window: bool  #: Whether its memory lies in the window.
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
    notes: tuple[str, ...] = ()  #: What a reader of the figures must know.
    environment: EnvironmentRecord | None = None  #: The machine.
    other_processes: tuple[GpuProcess, ...] = ()  #: Who held memory of the GPU beside it.

    def __post_init__(self):
        check_ranges(1, max_batch_size=self.max_batch_size, limit_bytes=self.limit_bytes)
        if self.max_batch_size not in self.memory_bytes:
            raise ValueError(
                "`max_batch_size` must be a size whose memory was probed. "
                f"Received: max_batch_size={self.max_batch_size}."
            )
        check_window(self.memory_window)

    def __repr__(self) -> str:
        share = self.peak_memory_bytes / self.limit_bytes
        return (
            f"<MaxBatchSizeResult: {self.max_batch_size} examples, {100 * share:.0f} % of "
            f"{self.limit_bytes / 2**30:.3g} GiB on {self.device}, {len(self.probes)} runs>"
        )

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
    def memory_bound(self) -> bool:
        """Whether memory set the size, and not the end of the data or of the search."""
        return self.in_window or any(probe.outcome != "fits" for probe in self.probes)

    @property
    def spread(self) -> float | None:
        """Range of the peaks of `max_batch_size` as a share of the largest; None from one run."""
        same = [probe for probe in self.probes if probe.batch_size == self.max_batch_size]
        peaks = [p.peak_memory_bytes for p in same if p.peak_memory_bytes is not None]
        return (max(peaks) - min(peaks)) / max(peaks) if len(peaks) > 1 else None

    @property
    def fit(self) -> MemoryFit | None:
        """The line through the sizes that fitted, None from fewer than two."""
        return fit_memory(self.memory_bytes)

    @property
    def duration_s(self) -> float:
        """Seconds that all probes took."""
        return sum(probe.duration_s for probe in self.probes)

    def predict(self, batch_size: int) -> float:
        """Estimate the bytes of a batch size from the line through two measured sizes or more."""
        fit = self.fit
        if fit is None:
            raise ValueError(
                "A line needs two measured sizes: search with a larger `max_batch_size` or data "
                f"set. Received: measured sizes={sorted(self.memory_bytes)}."
            )
        return fit.predict(batch_size)

    def powers_of_two(self, low: int = 1) -> tuple[int, ...]:
        """List the powers of two from `low` up to `max_batch_size`."""
        return powers_of_two(low, self.max_batch_size)


MEMORY_OUTCOMES = ("fits", "out_of_memory", "not_run")


@dataclasses.dataclass(frozen=True)
class MemoryRecord:
    """The memory of one batch size."""

    dtype_policy: str  #: Under which policy, or `"int8"`.
    batch_size: int  #: Examples in the batch.
    outcome: str  #: One of `MEMORY_OUTCOMES`.
    reason: str | None = None  #: Why it was not run, None where it was.
    peak_bytes: int | None = None  #: Most held at once, weights included; None if not known.
    predicted_bytes: float | None = None  #: What smaller sizes let expect, None for the first.
    guarded: bool = False  #: Whether it was not run because it would need too much.

    def __post_init__(self) -> None:
        check_choice(MEMORY_OUTCOMES, outcome=self.outcome)
        check_ranges(1, batch_size=self.batch_size)
        check_ranges(0, peak_bytes=self.peak_bytes)

    @property
    def refusal(self) -> str | None:
        """Why the size is not to be run again; None where nothing speaks against it."""
        if self.outcome == "out_of_memory":
            return "memory ran out when it was probed"
        return self.reason if self.guarded else None


def peaks_under(dtype_policy: str, records: Iterable[MemoryRecord]) -> dict[int, int]:
    """Return the known peak memory of each batch size under a policy, in bytes."""
    peaks = {r.batch_size: r.peak_bytes for r in records if r.dtype_policy == dtype_policy}
    return {size: peak for size, peak in peaks.items() if peak is not None}
