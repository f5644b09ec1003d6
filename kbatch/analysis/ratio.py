"""Ratios of two estimates, with Fieller's interval.

For estimates n and d with covariance V, a ratio r is compatible with both if

    (n - r d)^2 <= t^2 (V_nn - 2 r V_nd + r^2 V_dd)

Fieller (1954), J. R. Stat. Soc. B 16, 175-185. Where d cannot be told from 0 these r have no
upper end: then there is no ratio to report, only a lower bound. The delta method, which is the
limit of small V_dd, gives a finite interval there too, a wrong one.
"""

import dataclasses
import math

import numpy as np

from kbatch.analysis.intervals import FEWEST_VALUES, Interval, t_quantile


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio that cannot be negative, as far as it can be told."""

    value: float | None  #: The estimate; None when the denominator is not distinguishable from 0.
    interval: Interval | None  #: Its 95 % interval; None when `value` is.
    #: Lower bound with 97.5 % confidence. There may be one without a value: a large ratio is one
    #: whose denominator is lost in noise. None when nothing is known.
    at_least: float | None


UNRESOLVED = Ratio(None, None, None)


def ratio_of_estimates(
    numerator: float, denominator: float, *, covariance: np.ndarray, degrees_of_freedom: int
) -> Ratio:
    """Divide one estimate by another."""
    estimates = np.array([numerator, denominator])
    # Squares of squares follow: in units of the estimates themselves they stay in range.
    unit = np.sqrt(estimates**2 + np.diag(covariance))
    if not np.all(unit > 0):
        return UNRESOLVED if denominator <= 0 else Ratio(0.0, Interval(0.0, 0.0), 0.0)
    n, d = estimates / unit
    v = t_quantile(degrees_of_freedom) ** 2 * covariance / np.outer(unit, unit)
    # The condition on r as a r^2 - 2 b r + c <= 0.
    a, b, c = d**2 - v[1, 1], n * d - v[0, 1], n**2 - v[0, 0]
    root = math.sqrt(max(b**2 - a * c, 0.0))
    scale = unit[0] / unit[1]
    if a > 0 and d < 0:
        return UNRESOLVED
    # The lower root without the difference of two near numbers; 0 is compatible when c <= 0.
    low = float(scale * c / (b + root)) if c > 0 and n > 0 else 0.0
    if a <= 0:
        return Ratio(None, None, low or None)
    high = float(scale * (b + root) / a)
    return Ratio(max(float(scale * n / d), 0.0), Interval(low, max(high, 0.0)), low)


def ratio_of_means(
    numerators: np.ndarray, denominators: np.ndarray, *, weights: np.ndarray
) -> Ratio:
    """Divide the mean of one quantity by that of another, of independent pairs such as blocks."""
    count = len(weights)
    if count < FEWEST_VALUES:
        return UNRESOLVED
    pairs = np.stack([numerators, denominators], axis=1)
    shares = weights / np.sum(weights)
    means = shares @ pairs
    deviations = shares[:, None] * (pairs - means)
    covariance = count / (count - 1) * deviations.T @ deviations
    return ratio_of_estimates(*means, covariance=covariance, degrees_of_freedom=count - 1)
