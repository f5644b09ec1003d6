"""Times that nothing disturbed.

A neighbour on the same machine makes calls slower and never faster (Chen and Revels 2016,
arXiv:1608.04295). One that comes and goes leaves two groups of rounds at every batch size. So the
logarithms of all times, each less a centre of its size, are fitted by two normal distributions: a
share of the rounds lies higher, and scatters as much or more (expectation and maximization,
Dempster, Laird and Rubin 1977). Rounds that more likely belong there are left out, but only where
two groups are far likelier than one and lie apart: elsewhere slow rounds are noise of the calls
themselves, and a fit without them would find the model faster than it is.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Rounds that are slower by less are noise of the calls themselves.
_TOLERANCE = math.log1p(0.10)
# Twice the logarithm of the ratio of likelihoods: three parameters more give 12 once in 100.
_LIKELIER = 12.0
# Distance of the groups in units of their scatter, above which they have two peaks
# (Ashman, Bird and Zepf 1994, AJ 108, 2348).
_APART = 2.0
# Less scatter than this cannot be told from few rounds.
_LEAST_SPREAD = 0.01
# With fewer rounds in the fast group the slow ones are the model's own times.
_LEAST_CALM = 1 / 3
# A line needs so many of them.
_FEWEST = 3
# The fit ends after so many steps, or when no centre moves by more, in logarithms.
_MOST_STEPS = 200
_SAME = 1e-6


class _TwoGroups(NamedTuple):
    """Centres of the fast rounds of each size; how much higher the slow ones lie, and how many."""

    centres: np.ndarray
    slower: float
    spread: float
    slow_spread: float
    share: float

    def log_densities(self, logs: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the logarithm of the density of each value, in the fast and in the slow group."""
        residuals = logs - self.centres[sizes]
        return (
            _log_normal(residuals, self.spread) + math.log(1 - self.share),
            _log_normal(residuals - self.slower, self.slow_spread) + math.log(self.share),
        )

    def likelier(self, logs: np.ndarray, sizes: np.ndarray) -> "_TwoGroups":
        """Make one step of expectation and maximization."""
        fast, slow = self.log_densities(logs, sizes)
        slowness = np.exp(slow - np.logaddexp(fast, slow))
        calm, late = (1 - slowness) / self.spread**2, slowness / self.slow_spread**2
        pulled = calm * logs + late * (logs - self.slower)
        centres = np.bincount(sizes, pulled) / np.bincount(sizes, calm + late)
        residuals = logs - centres[sizes]
        share = float(np.mean(slowness))
        late_count, calm_count = share * len(logs), (1 - share) * len(logs)
        slower = float(slowness @ residuals) / late_count
        spread = max(_LEAST_SPREAD, math.sqrt((1 - slowness) @ residuals**2 / calm_count))
        slow_spread = max(spread, math.sqrt(slowness @ (residuals - slower) ** 2 / late_count))
        return _TwoGroups(centres, slower, spread, slow_spread, min(max(share, 0.001), 0.999))


def without_slow_rounds(groups: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Leave out the times of slow rounds where two groups of rounds can be told apart."""
    everything = [tuple(group) for group in groups]
    counts = [len(group) for group in groups]
    if sum(counts) - len(groups) < 3:
        return everything
    logs, sizes = np.log(np.concatenate(everything)), np.repeat(np.arange(len(groups)), counts)
    residuals = logs - (np.bincount(sizes, logs) / counts)[sizes]
    spread = max(_LEAST_SPREAD, float(np.std(residuals)))
    low = np.array([np.quantile(logs[sizes == i], 0.25) for i in range(len(groups))])
    found = _TwoGroups(low, 2 * spread, spread / 2, spread / 2, 0.4)
    for _ in range(_MOST_STEPS):
        before, found = found, found.likelier(logs, sizes)
        if np.max(np.abs(found.centres - before.centres)) < _SAME:
            break
    fast, slow = found.log_densities(logs, sizes)
    gain = 2 * float(np.sum(np.logaddexp(fast, slow)) - np.sum(_log_normal(residuals, spread)))
    scatter = math.sqrt((found.spread**2 + found.slow_spread**2) / 2)
    calm = (fast > slow) | (logs <= found.centres[sizes])
    told_apart = gain >= _LIKELIER and found.slower > max(_TOLERANCE, _APART * scatter)
    if not told_apart or np.sum(calm) < _FEWEST or np.mean(calm) < _LEAST_CALM:
        return everything
    return [
        tuple(value for value, kept in zip(group, calm[sizes == i], strict=True) if kept)
        for i, group in enumerate(everything)
    ]


def _log_normal(residuals: np.ndarray, spread: float) -> np.ndarray:
    return -0.5 * (residuals / spread) ** 2 - math.log(spread)
