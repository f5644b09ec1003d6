"""Latency against batch size where no line holds: monotone interpolation of what was measured.

The medians at each size, pooled where a larger size came out faster (isotonic regression, Barlow
et al. 1972), are joined by straight pieces of log latency over log2 of the batch size. It goes
no further than the measurements.
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from kbatch.analysis.lines import check_measurements


@dataclasses.dataclass(frozen=True)
class LatencyCurve:
    """A latency that never falls with the batch size, between the sizes that were measured.

    Attributes:
        batch_sizes: Measured sizes, ascending, in examples.
        latencies_s: Latency at each, not descending, in seconds.
        counts: Measurements behind each.
    """

    batch_sizes: np.ndarray
    latencies_s: np.ndarray
    counts: np.ndarray

    def latency_s(self, batch_size: float) -> float:
        """Interpolates the latency of a batch size, in seconds.

        Raises:
            ValueError: If the size lies outside the measured ones.
        """
        smallest, largest = self.batch_sizes[[0, -1]]
        if not smallest <= batch_size <= largest:
            raise ValueError(
                f"`batch_size` must lie in the measured range, {smallest:g} to {largest:g}: "
                f"measure it. Received: batch_size={batch_size}."
            )
        log_latency = np.interp(
            np.log2(batch_size), np.log2(self.batch_sizes), np.log2(self.latencies_s)
        )
        return float(2**log_latency)

    def largest_within(self, latency_s: float) -> float | None:
        """Finds the largest size of at most that latency, in examples; None if none is."""
        j = int(np.searchsorted(self.latencies_s, latency_s, side="right")) - 1
        if j < 0:
            return None
        if j == len(self.batch_sizes) - 1:
            return float(self.batch_sizes[-1])
        share = np.log(latency_s / self.latencies_s[j]) / np.log(
            self.latencies_s[j + 1] / self.latencies_s[j]
        )
        return _between(self.batch_sizes[j], self.batch_sizes[j + 1], share)

    def smallest_of_rate(self, rate: float) -> float | None:
        """Finds the smallest size with that throughput in examples/s; None if none has it."""
        rates = self.batch_sizes / self.latencies_s
        reached = np.flatnonzero(rates >= rate)
        if not len(reached):
            return None
        j = int(reached[0])
        if j == 0:
            return float(self.batch_sizes[0])
        share = np.log(rate / rates[j - 1]) / np.log(rates[j] / rates[j - 1])
        return _between(self.batch_sizes[j - 1], self.batch_sizes[j], share)


def fit_latency_curve(batch_sizes: ArrayLike, latencies_s: ArrayLike) -> LatencyCurve:
    """Joins measurements at several batch sizes: takes and raises what `fit_latency` does."""
    sizes, latencies = check_measurements(batch_sizes, latencies_s)
    places, index, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    medians = np.array([np.median(latencies[index == i]) for i in range(len(places))])
    return LatencyCurve(places, np.exp(_not_descending(np.log(medians), counts)), counts)


def _between(low: float, high: float, share: float) -> float:
    """Goes from one size to another by a share of the octaves between them."""
    return float(low * (high / low) ** share)


def _not_descending(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Pools adjacent values that descend into their weighted mean."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pools.append((float(value), float(weight), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, v, m), (b, w, n) = pools[-2:]
            pools[-2:] = [((a * v + b * w) / (v + w), v + w, m + n)]
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])
