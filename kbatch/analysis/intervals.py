"""Confidence intervals of a mean, a median and a ratio, and an upper bound of a quantile.

The number of n independent values below the q-quantile is Binomial(n, q) for any distribution. So
sorted values bound the quantile (David and Nagaraja 2003, Order Statistics, section 7.1). The
median is between the k-th smallest and the k-th largest value with confidence
1 - 2 P(Binomial(n, 1/2) < k). If another process slows some rounds, this interval widens less than
an interval of the mean. The k-th smallest value is an upper bound of the q-quantile with confidence
P(Binomial(n, q) < k). The largest value is a bound only if 1 - q^n is at least the confidence. At
95 %, p95 needs 59 calls and p99 needs 299.

If two settings are timed in each round, the ratio of their times does not depend on the machine's
speed in that round. Ratios are averaged as logarithms.

For estimates n and d with covariance V, a ratio r is compatible with both if

    (n - r d)^2 <= t^2 (V_nn - 2 r V_nd + r^2 V_dd)

Fieller (1954), J. R. Stat. Soc. B 16, 175-185. If d may be 0, there is no largest r, so the ratio
has only a lower bound. The delta method would then give a wrong, finite interval.
"""

import dataclasses
import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

# Student's t is 12.7 for two values and 4.3 for three.
FEWEST_VALUES = 3
# The range of five values holds the median with 94 % confidence only.
FEWEST_VALUES_OF_A_MEDIAN = 6
# With at least this many rounds, the interval of a median leaves out the lowest and highest round.
_ROUNDS_FOR_ORDER = 9

# If noise hides a value, it is None, and `low` may still be known.
Value = TypeVar("Value", bound=float | None, covariant=True)


@dataclasses.dataclass(frozen=True)
class Estimate(Generic[Value]):
    """A number and its range: a 95 % confidence interval unless stated otherwise."""

    value: Value  #: The estimate, in the unit of what was measured.
    low: float | None = None  #: Lower end of the range, in the same unit.
    high: float | None = None  #: Upper end.
    n: int | None = None  #: Number of measured values.

    @property
    def ends(self) -> tuple[float, float] | None:
        """Both ends of the range; None if one is unknown."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def times(self, factor: float) -> "Estimate[Value]":
        """Multiply the value and its range by a positive `factor`, such as to change the unit."""
        known = {"value": self.value, "low": self.low, "high": self.high}
        changed = {name: factor * x for name, x in known.items() if x is not None}
        return dataclasses.replace(self, **changed)


UNRESOLVED: "Estimate[float | None]" = Estimate(None)


def ranged_columns(name: str, estimate: Estimate[Any] | None) -> dict[str, float | None]:
    """Return a number and the ends of its range as columns of a table, in three cells of a row."""
    known = estimate or UNRESOLVED
    return {name: known.value, f"{name}, low": known.low, f"{name}, high": known.high}


def mean_interval(values: Sequence[float]) -> Estimate[float] | None:
    """Compute a mean and its 95 % interval by Student's t.

    The values must be independent and roughly normal, such as runs of a trial with different seeds.
    If there are fewer than three, return None: with two, it would be 13 standard errors wide.
    """
    if len(values) < FEWEST_VALUES:
        return None
    # For the few runs of a trial `np.mean` and `np.std` take ten times as long.
    count, mean = len(values), fmean(values)
    # A power would raise an error if it overflowed, and a product does not.
    variance = sum((value - mean) * (value - mean) for value in values) / (count - 1)
    half_width = t_quantile(count - 1) * math.sqrt(variance / count)
    return Estimate(mean, mean - half_width, mean + half_width, count)


def t_quantile(degrees_of_freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution."""
    return float(special.stdtrit(degrees_of_freedom, 0.975))


def median_interval(values: Sequence[float]) -> Estimate[float] | None:
    """Compute a median and its 95 % interval. For fewer than six values, return None."""
    count = len(values)
    if count < FEWEST_VALUES_OF_A_MEDIAN:
        return None
    rank = int(np.searchsorted(special.bdtr(np.arange(count), count, 0.5), 0.025, side="right"))
    ordered = sorted(values)
    ends = float(ordered[rank - 1]), float(ordered[count - rank])
    return Estimate(float(np.median(values)), *ends, count)


def over_rounds(values: Sequence[float]) -> Estimate[float] | None:
    """Return the median of rounds. Below nine, the interval is Student's t of the logarithms."""
    count = len(values)
    if count >= _ROUNDS_FOR_ORDER:
        return median_interval(values)
    if not count:
        return None
    logs = mean_interval([math.log(value) for value in values])
    low, high = (None, None) if logs is None or logs.ends is None else map(math.exp, logs.ends)
    return Estimate(float(np.median(values)), low, high, count)


# A training is cut into this many parts. The median is right if at most two are disturbed.
_PARTS = 5


def rate_of_windows(examples: Sequence[int], durations_s: Sequence[float]) -> float:
    """Return examples/s: the median over five parts with equally many consecutive windows.

    A single pause changes one part and not the median. A repeated slowdown changes all parts.
    """
    count = len(examples)
    parts = min(_PARTS, count) if count > 2 else 1
    ends = [count * part // parts for part in range(parts + 1)]
    return median(
        sum(examples[begin:end]) / math.fsum(durations_s[begin:end])
        for begin, end in itertools.pairwise(ends)
    )


def ratio_over_rounds(
    numerator: Sequence[float], denominator: Sequence[float]
) -> Estimate[float] | None:
    """Return the ratio of two measurements that were made in the same rounds."""
    return over_rounds([n / d for n, d in zip(numerator, denominator, strict=True)])


def quantile_upper_bound(
    values: ArrayLike, *, quantile: float, confidence: float = 0.95
) -> float | None:
    """Return the smallest value that is an upper bound of a quantile with this confidence.

    The values of calls must be independent. Calls in a row that share a delay are not independent.
    If there are fewer than `calls_for_quantile`, return None.

    >>> quantile_upper_bound(range(59), quantile=0.95)
    58.0
    """
    needed = calls_for_quantile(quantile, confidence=confidence)
    ordered = np.sort(np.asarray(values, float))
    calls = len(ordered)
    if calls < needed:
        return None
    below = special.bdtr(np.arange(calls - 1), calls, quantile)
    return float(ordered[np.searchsorted(below, confidence)])


def calls_for_quantile(quantile: float, *, confidence: float = 0.95) -> int:
    """Return how many calls an upper bound of a quantile needs: 1 - quantile^n >= confidence.

    >>> calls_for_quantile(0.99)
    299
    """
    for name, value in (("quantile", quantile), ("confidence", confidence)):
        if not isinstance(value, numbers.Real) or not 0 < value < 1:
            raise ValueError(f"`{name}` must be between 0 and 1. Received: {name}={value!r}.")
    # Without 1e-9, a rounding error could add a call if the quotient is an integer.
    return max(1, math.ceil(math.log1p(-confidence) / math.log(quantile) - 1e-9))


def ratio_of_estimates(
    numerator: float, denominator: float, *, covariance: np.ndarray, degrees_of_freedom: int
) -> Estimate[float | None]:
    """Divide two estimates with Fieller's interval. The true ratio must not be negative."""
    estimates = np.array([numerator, denominator])
    # In these units, the fourth powers below neither overflow nor underflow.
    unit = np.sqrt(estimates**2 + np.diag(covariance))
    if not np.all(unit > 0):
        return UNRESOLVED if denominator <= 0 else Estimate(0.0, 0.0, 0.0)
    n, d = estimates / unit
    v = t_quantile(degrees_of_freedom) ** 2 * covariance / np.outer(unit, unit)
    # The condition on r as a r^2 - 2 b r + c <= 0.
    a, b, c = d**2 - v[1, 1], n * d - v[0, 1], n**2 - v[0, 0]
    root = math.sqrt(max(b**2 - a * c, 0.0))
    scale = unit[0] / unit[1]
    if a > 0 and d < 0:
        return UNRESOLVED
    # This form of the lower root does not subtract nearly equal numbers. If c <= 0, r may be 0.
    low = float(scale * c / (b + root)) if c > 0 and n > 0 else 0.0
    if a <= 0:
        return Estimate(None, low or None)
    high = float(scale * (b + root) / a)
    return Estimate(max(float(scale * n / d), 0.0), low, max(high, 0.0))


def ratio_of_means(
    numerators: np.ndarray, denominators: np.ndarray, *, weights: np.ndarray
) -> Estimate[float | None]:
    """Divide the mean of one quantity by the mean of another, over independent pairs."""
    count = len(weights)
    if count < FEWEST_VALUES:
        return UNRESOLVED
    pairs = np.stack([numerators, denominators], axis=1)
    shares = weights / np.sum(weights)
    means = shares @ pairs
    deviations = shares[:, None] * (pairs - means)
    covariance = count / (count - 1) * deviations.T @ deviations
    return ratio_of_estimates(*means, covariance=covariance, degrees_of_freedom=count - 1)


def pseudo_values(sums: np.ndarray, metric: Callable[[np.ndarray], float]) -> np.ndarray:
    """Return the jackknife's pseudo-values of blocks (Tukey 1958), for any metric.

    With v the metric of all B blocks and v_(-b) the metric without block b,

        p_b = B v - (B - 1) v_(-b)

    The mean of the p_b is the metric of all blocks. If the metric is a mean over equal blocks, p_b
    is the mean of block b. The variance of the metric is the variance of the p_b divided by B.

    Args:
        sums: Array of shape (blocks, sums): the sums that `metric` needs over a block's examples.
        metric: Function that takes such sums over any examples and returns their metric.
    """
    total, count = sums.sum(0), len(sums)
    without_block = np.array([metric(total - block) for block in sums])
    values = count * metric(total) - (count - 1) * without_block
    # Without this, there is a bias of order 1/n if blocks are unequal or the metric is no mean.
    return values - values.mean() + metric(total)
