"""Rows: what is known of each size that was measured, as tables and figures show it."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from kbatch.analysis.intervals import Estimate, median_interval, ranged_columns

MEASURED = "measured"
OUT_OF_MEMORY = "out of memory"


class Row(NamedTuple):
    """The time of one size."""

    size: int  # Examples that go through the device at once.
    n: int  # Rounds.
    value: float | None  # Seconds that so many examples take, the median over the rounds.
    low: float | None  # Its 95 % interval; None from fewer than six rounds.
    high: float | None
    outcome: str  # `MEASURED`, or why there is no time.

    @classmethod
    def of(cls, size: int, times_s: Sequence[float], *, outcome: str = MEASURED) -> "Row":
        """Make a row of the seconds of each round, which are none where it was not measured."""
        found = median_interval(times_s) or Estimate(None)
        value = statistics.median(times_s) if times_s else None
        return cls(size, len(times_s), value, found.low, found.high, outcome)

    @property
    def time_s(self) -> Estimate[float] | None:
        """The time with its interval, None where there is none."""
        return None if self.value is None else Estimate(self.value, self.low, self.high, self.n)

    @property
    def rate(self) -> Estimate[float] | None:
        """Examples per second with their interval, None where nothing was timed."""
        if self.value is None:
            return None
        low, high = (None if end is None else self.size / end for end in (self.high, self.low))
        return Estimate(self.size / self.value, low, high, self.n)


def timed_columns(row: Row, time: str) -> dict[str, float | None]:
    """Return the columns of a row's time, which is named, with its interval, and of its rate."""
    time_ms = row.time_s and row.time_s.times(1e3)
    return {
        **ranged_columns(f"{time} (ms)", time_ms),
        "samples/s": row.rate and row.rate.value,
        "rounds": row.n,
    }
