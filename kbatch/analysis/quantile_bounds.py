"""Upper confidence bounds for a quantile, from order statistics.

Of n independent calls, those below the q-quantile are Binomial(n, q). So the k-th smallest is
an upper bound of the quantile with confidence P(Binomial(n, q) < k), whatever the distribution
(David and Nagaraja 2003, Order Statistics, section 7.1). Not even the largest is one unless
1 - q^n reaches the confidence: p95 at 95 % needs 59 calls, p99 needs 299.
"""

import dataclasses
import math
import numbers

import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class QuantileBound:
    """An upper bound of a quantile.

    Attributes:
        value: The bound, in the unit of the values; None with too few calls.
        quantile: Which quantile, in (0, 1).
        confidence: How likely the bound holds, in (0, 1).
        calls: Values that there were.
        missing_calls: How many more are needed for a bound: 0 where there is one.
    """

    value: float | None
    quantile: float
    confidence: float
    calls: int
    missing_calls: int


def quantile_upper_bound(
    values: ArrayLike, *, quantile: float, confidence: float = 0.95
) -> QuantileBound:
    """Bounds a quantile from above with confidence.

    Assumes independent values; of calls in a row that share a hiccup there are fewer than
    their number.

    Example:

    >>> quantile_upper_bound(range(59), quantile=0.95).value
    58.0
    >>> quantile_upper_bound(range(40), quantile=0.95).missing_calls
    19

    Args:
        values: One value a call, such as its latency.
        quantile: Which quantile, in (0, 1).
        confidence: How likely the bound is to hold, in (0, 1).

    Returns:
        The bound: the smallest of the values that is one.

    Raises:
        ValueError: If a probability is not in (0, 1) or a value is not a number.
    """
    needed = calls_for_quantile(quantile, confidence=confidence)
    ordered = np.sort(np.asarray(values, float))
    if ordered.ndim != 1 or np.any(np.isnan(ordered)):
        raise ValueError(
            "`values` must be one number a call: leave out the calls that failed, and count them "
            f"elsewhere. Received: values={values}."
        )
    calls = len(ordered)
    if calls < needed:
        return QuantileBound(None, quantile, confidence, calls, needed - calls)
    # Below k = number of calls, for all but rounding, P(Binomial < k) reaches the confidence.
    below = np.cumsum(_binomial(calls, quantile)[:-1])
    rank = min(int(np.searchsorted(below, confidence)), calls - 1)
    return QuantileBound(float(ordered[rank]), quantile, confidence, calls, 0)


def calls_for_quantile(quantile: float, *, confidence: float = 0.95) -> int:
    """Counts the calls from which on a quantile has an upper bound.

    Example:

    >>> calls_for_quantile(0.99)
    299

    Args:
        quantile: Which quantile, in (0, 1).
        confidence: How likely the bound is to hold, in (0, 1).

    Returns:
        The least n with 1 - quantile^n >= confidence.

    Raises:
        ValueError: If a probability is not in (0, 1).
    """
    for name, value in (("quantile", quantile), ("confidence", confidence)):
        if not isinstance(value, numbers.Real) or not 0 < value < 1:
            raise ValueError(
                f"`{name}` must lie between 0 and 1, such as 0.95. Received: {name}={value!r}."
            )
    # An exact power must not be pushed past its integer by rounding.
    return max(1, math.ceil(math.log1p(-confidence) / math.log(quantile) - 1e-9))


def chance_of_at_most(successes: int, n: int, p: float) -> float:
    """Compute P(Binomial(n, p) <= successes), for fewer successes than n."""
    return float(np.sum(_binomial(n, p)[: successes + 1]))


def _binomial(n: int, p: float) -> np.ndarray:
    """Gives the probabilities of 0 to n successes, by logarithms so that n may be large."""
    k = np.arange(1, n + 1)
    log_choose = np.concatenate([[0.0], np.cumsum(np.log(n - k + 1) - np.log(k))])
    successes = np.arange(n + 1)
    return np.exp(log_choose + successes * math.log(p) + (n - successes) * math.log1p(-p))
