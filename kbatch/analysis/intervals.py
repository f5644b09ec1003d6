"""Confidence intervals for the mean of a few repetitions, by Student's t."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

# 97.5 % quantiles of Student's t distribution for 1 to 30 degrees of freedom.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
# Student's t is 12.7 for two values and 4.3 for three.
FEWEST_VALUES = 3


@dataclasses.dataclass(frozen=True)
class Interval:
    """An interval: of 95 % confidence, or between quartiles where its maker says so.

    Attributes:
        low: Lower bound, in the unit of the values.
        high: Upper bound, in the unit of the values.
    """

    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Computes the 95 % interval of a mean by Student's t.

    Assumes independent values of about normal distribution, as repeated executions of one
    trial with different seeds are.

    Args:
        values: One value a repetition.

    Returns:
        The interval, or None for fewer than three values: with two it is so wide, 13 standard
        errors to each side, that it says nothing.
    """
    if len(values) < FEWEST_VALUES:
        return None
    mean = float(np.mean(values))
    standard_error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half_width = t_quantile(len(values) - 1) * standard_error
    return Interval(mean - half_width, mean + half_width)


def t_quantile(degrees_of_freedom: int) -> float:
    """Gives the 97.5 % quantile of Student's t distribution.

    Args:
        degrees_of_freedom: At least 1.

    Returns:
        The half-width of a 95 % interval, in standard errors.
    """
    if degrees_of_freedom <= len(_T_975):
        return _T_975[degrees_of_freedom - 1]
    # First Cornish-Fisher term: off by less than 0.001 past 30 degrees of freedom.
    z = 1.95996
    return z + (z**3 + z) / (4 * degrees_of_freedom)
