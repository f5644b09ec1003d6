"""The memory of one batch size, as it was measured."""

import dataclasses

from kbatch.records.ranges import check_ranges

MEMORY_OUTCOMES = ("fits", "out_of_memory", "not_run")


@dataclasses.dataclass(frozen=True)
class MemoryRecord:
    """The memory of one batch size.

    Attributes:
        dtype_policy: Under which policy, or `"int8"`.
        batch_size: Examples in the batch.
        outcome: One of `MEMORY_OUTCOMES`.
        reason: Why it was not run, None where it was.
        peak_bytes: Most bytes held at once, weights included; None where it is not known.
        predicted_bytes: What smaller sizes let expect, None for the first.
        guarded: Whether it was not run because it would need too much.
    """

    dtype_policy: str
    batch_size: int
    outcome: str
    reason: str | None = None
    peak_bytes: int | None = None
    predicted_bytes: float | None = None
    guarded: bool = False

    def __post_init__(self) -> None:
        if self.outcome not in MEMORY_OUTCOMES:
            raise ValueError(
                f"`outcome` must be one of {', '.join(MEMORY_OUTCOMES)}. "
                f"Received: outcome={self.outcome!r}."
            )
        check_ranges(1, batch_size=self.batch_size)
        check_ranges(0, peak_bytes=self.peak_bytes)
