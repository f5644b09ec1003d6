"""Lack of fit: whether measurements leave a fitted curve by more than their noise.

Several measurements at one place show the noise without the curve. Where their centre is off by
more than that noise explains, the curve is wrong. Medians throughout: one hiccup is neither
noise nor a departure.
"""

import dataclasses
import math
import statistics

import numpy as np

# A departure of less than this share changes no decision on a batch size.
_NEGLIGIBLE = 0.02


@dataclasses.dataclass(frozen=True)
class Departure:
    """How far measurements leave a curve.

    Attributes:
        noise: Relative standard deviation of the measurements at one place about their centre;
            None when no place was measured twice.
        worst: Largest distance of a centre from the curve, as a share of its value.
        holds: Whether the curve holds: False when a departure is more than the noise explains
            and more than 2 %; None when no place was measured twice, or there are only two and
            any line meets them.
    """

    noise: float | None
    worst: float
    holds: bool | None


def measure_departure(places: np.ndarray, residuals: np.ndarray) -> Departure:
    """Compares how far the centres are off with how the measurements scatter.

    Args:
        places: Where each measurement was made.
        residuals: Its distance from the curve, as a share of the value there.

    Returns:
        The departure. On a right curve with normal noise `holds` is False in up to 5 of 100.
    """
    distinct, index, counts = np.unique(places, return_inverse=True, return_counts=True)
    groups = [residuals[index == i] for i in range(len(distinct))]
    centres = np.array([np.median(group) for group in groups])
    worst = float(np.max(np.abs(centres)))
    spare = len(places) - len(distinct)
    if spare == 0:
        return Departure(None, worst, None)
    noise = _spread_within(groups)
    if len(distinct) == 2:
        return Departure(noise, worst, None)
    # Bonferroni over the places; the median of normal values has pi / 2 times the mean's variance.
    allowance = _t_quantile(0.025 / len(distinct), spare) * noise * np.sqrt(np.pi / 2 / counts)
    holds = bool(np.all(np.abs(centres) <= np.maximum(allowance, _NEGLIGIBLE)))
    return Departure(noise, worst, holds)


def _spread_within(groups: list[np.ndarray]) -> float:
    """Estimates the standard deviation within groups by Shamos's median of differences.

    Deviations of two or three values from their own median would be too small.
    """
    pairs = [(group, np.triu_indices(len(group), 1)) for group in groups]
    differences = np.concatenate([np.abs(group[i] - group[j]) for group, (i, j) in pairs])
    return 1.4826 / math.sqrt(2) * float(np.median(differences))


def _t_quantile(tail: float, degrees_of_freedom: int) -> float:
    """Approximates a quantile of Student's t by two Cornish-Fisher terms."""
    z, n = statistics.NormalDist().inv_cdf(1 - tail), degrees_of_freedom
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
