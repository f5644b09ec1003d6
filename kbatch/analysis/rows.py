"""Rows: what is known of each size that was measured, as tables and figures show it."""

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kbatch.analysis.intervals import Estimate, median_interval

if TYPE_CHECKING:
    import pandas as pd

MEASURED = "measured"
OUT_OF_MEMORY = "out of memory"


class Row(NamedTuple):
    """The time of one size in one series."""

    size: int  # Examples that go through the device at once.
    series: str  # What else it was measured with; empty where there is one series.
    n: int  # Rounds.
    value: float | None  # Seconds that so many examples take, the median over the rounds.
    low: float | None  # Its 95 % interval; None from fewer than six rounds.
    high: float | None
    outcome: str  # `MEASURED`, or why there is no time.

    @classmethod
    def of(
        cls, size: int, times_s: Sequence[float], *, series: str = "", outcome: str = MEASURED
    ) -> "Row":
        """Make a row of the seconds of each round, which are none where it was not measured."""
        found = median_interval(times_s) or Estimate(None)
        value = statistics.median(times_s) if times_s else None
        return cls(size, series, len(times_s), value, found.low, found.high, outcome)

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


def timed_rows(rows: Iterable[Row], *, size: str, time: str) -> "pd.DataFrame":
    """Make a table of rows, a row each; `size` and `time` name what was measured."""
    import pandas as pd

    def ends(name: str, found: Estimate[float] | None) -> dict[str, float | None]:
        known = found or Estimate(None)
        return {name: known.value, f"{name}, low": known.low, f"{name}, high": known.high}

    return pd.DataFrame(
        {
            size: row.size,
            **ends("samples/s", row.rate),
            **ends(f"{time} (ms)", row.time_s and row.time_s.times(1e3)),
            "rounds": row.n,
            "outcome": row.outcome,
        }
        for row in rows
    )
