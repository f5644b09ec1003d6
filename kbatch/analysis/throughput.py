"""Throughput and energy of training, from the durations of its steps and readings of power."""

import math
from collections.abc import Sequence
from statistics import quantiles

import numpy as np

from kbatch.analysis.intervals import Estimate

SHORTEST_WINDOW_S = 0.05
MOST_WINDOWS = 200
FEWEST_STEADY = 3  # Of fewer steady steps, one that is disturbed would decide.


def throughput_of_windows(
    examples: Sequence[int], durations_s: Sequence[float]
) -> Estimate[float] | None:
    """Return all examples over all seconds, and the quartiles of two windows or more.

    The ends are drawn out to the mean, which few slow steps take out of the quartiles.
    """
    if not len(examples):
        return None
    mean = sum(examples) / math.fsum(durations_s)
    if len(examples) == 1:
        return Estimate(mean)
    # For lists as short as these NumPy takes ten times as long.
    rates = [n / s for n, s in zip(examples, durations_s, strict=True)]
    low, _, high = quantiles(rates, method="inclusive")
    return Estimate(mean, min(low, mean), max(high, mean))


def steady_windows(
    examples: Sequence[int], durations_s: Sequence[float], steady: Sequence[bool]
) -> tuple[list[int], list[float]]:
    """Join consecutive steady steps into windows of 50 ms or more, what is left with the last."""
    counted = [(n, s) for n, s, ok in zip(examples, durations_s, steady, strict=True) if ok]
    if len(counted) < FEWEST_STEADY:
        return [], []
    shortest = max(SHORTEST_WINDOW_S, sum(s for _, s in counted) / MOST_WINDOWS)
    windows: list[tuple[int, float]] = []
    rows, seconds = 0, 0.0
    for n, s in counted:
        rows, seconds = rows + n, seconds + s
        if seconds >= shortest:
            windows.append((rows, seconds))
            rows, seconds = 0, 0.0
    if rows:
        more_rows, more_s = windows.pop() if windows else (0, 0.0)
        windows.append((more_rows + rows, more_s + seconds))
    return [rows for rows, _ in windows], [seconds for _, seconds in windows]


class ThinnedSeries:
    """Keeps the means of pieces of a series; neighbours are joined where there are too many."""

    def __init__(self, *, columns: int, most: int = 100):
        if most < 2 or most % 2:
            raise ValueError(f"`most` must be even and positive. Received: most={most}.")
        # Sum and count of each column, a row a piece.
        self._pieces = np.zeros((most, columns, 2))
        self._length = 1
        self.readings = 0

    def add(self, reading: Sequence[float | None]) -> None:
        if self.readings == len(self._pieces) * self._length:
            joined = self._pieces[::2] + self._pieces[1::2]
            self._pieces = np.concatenate([joined, np.zeros_like(joined)])
            self._length *= 2
        last = self._pieces[self.readings // self._length]
        for column, value in enumerate(reading):
            if value is not None:
                last[column] += (value, 1)
        self.readings += 1

    @property
    def means(self) -> list[tuple[float | None, ...]]:
        """The mean of each piece, a number a column, None where none is known."""
        return [_means(piece) for piece in self._pieces[: -(-self.readings // self._length)]]

    @property
    def mean(self) -> tuple[float | None, ...]:
        """The mean of all readings, a number a column, None where none is known."""
        return _means(self._pieces.sum(axis=0))


def _means(sums: np.ndarray) -> tuple[float | None, ...]:
    return tuple(total / count if count else None for total, count in sums.tolist())
