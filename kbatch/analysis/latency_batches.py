"""Batch sizes that a latency answers for: knee, efficient, fastest, and within a target.

On the line t(b) = (b + n_half) / r_inf:

    knee          n_half                 throughput over latency, b / t^2, is largest
    efficient     n_half p / (1 - p)     a share p of r_inf: 9 n_half for 90 %
    within T      r_inf T - n_half       the largest with t(b) <= T

Where no line holds the same is read off the interpolation, whose peak is the largest throughput
that was measured. Its pieces are straight in logarithms, so the largest b / t^2 lies at a
measured size.
"""

import dataclasses
import math

import numpy as np

from kbatch.analysis.intervals import Interval, t_quantile
from kbatch.analysis.latency import Latency
from kbatch.analysis.latency_curve import LatencyCurve
from kbatch.analysis.ratio import Ratio

# A size that is whole but for rounding.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class BatchAnswer:
    """A batch size with its uncertainty.

    Attributes:
        batch_size: The size, in examples; None if there is none.
        interval: 95 % interval of the size before it was made whole, in examples; None if
            unknown.
        extrapolated: Whether the size lies outside the measured ones.
    """

    batch_size: int | None
    interval: Interval | None
    extrapolated: bool


def knee_batch_size(latency: Latency) -> BatchAnswer:
    """Finds the batch size of the largest throughput over latency.

    Args:
        latency: The fitted latency.

    Returns:
        The size, at least 1.
    """
    if latency.follows_line:
        return _of_ratio(latency, latency.half_peak_batch_size, round)
    curve = latency.curve
    return _largest(latency, curve.batch_sizes / curve.latencies_s**2, errors=2)


def fastest_batch_size(latency: Latency) -> BatchAnswer:
    """Finds the measured batch size of the largest throughput.

    Args:
        latency: The fitted latency.

    Returns:
        The size; the interval holds the sizes that the noise does not tell from it.
    """
    return _largest(latency, latency.curve.batch_sizes / latency.curve.latencies_s, errors=1)


def efficient_batch_size(latency: Latency, *, share: float = 0.9) -> BatchAnswer:
    """Finds the smallest batch size with a share of the peak throughput.

    Args:
        latency: The fitted latency.
        share: Share of the peak, in (0, 1).

    Returns:
        The size, at least 1.

    Raises:
        ValueError: If `share` is not in (0, 1).
    """
    if not 0 < share < 1:
        raise ValueError(f"`share` must lie between 0 and 1. Received: share={share}.")
    if latency.follows_line:
        return _of_ratio(latency, latency.half_peak_batch_size, math.ceil, share / (1 - share))
    curve = latency.curve
    error = _error(latency)
    rates = curve.batch_sizes / curve.latencies_s
    best = int(np.argmax(rates))
    size = curve.smallest_of_rate(share * rates[best])
    interval = None
    if error is not None and size is not None:
        low = _scaled(curve, 1 - error).smallest_of_rate(share * rates[best] * (1 - error[best]))
        high = _scaled(curve, 1 + error).smallest_of_rate(share * rates[best] * (1 + error[best]))
        interval = _interval(curve, low, high)
    return _answer(latency, size, interval, math.ceil)


def is_saturated(batch_sizes: tuple[int, int], latencies_s: tuple[float, float]) -> bool:
    """Return whether the larger of two sizes has 90 % of the peak throughput, by what it gained.

    On the line a size of k times another one, at 9 n_half, has 0.9 + 0.1 k times its throughput.

    Example:

    >>> is_saturated((64, 128), (0.010, 0.0195))
    True

    Args:
        batch_sizes: Both sizes, ascending, in examples.
        latencies_s: Latency of each, in seconds.
    """
    factor = batch_sizes[1] / batch_sizes[0]
    gain = factor * latencies_s[0] / latencies_s[1]
    return gain <= 0.9 + 0.1 * factor


def batch_size_within(latency: Latency, *, latency_s: float) -> BatchAnswer:
    """Finds the largest batch size of at most a latency.

    The interval tells how far the size may be off: to keep to the target, verify the size by
    calls, or take the lower bound.

    Args:
        latency: The fitted latency.
        latency_s: The target, in seconds.

    Returns:
        The size; None when not even one example is within the target.

    Raises:
        ValueError: If `latency_s` is not positive.
    """
    if not 0 < latency_s < math.inf:
        raise ValueError(
            f"`latency_s` must be positive, in seconds. Received: latency_s={latency_s}."
        )
    if latency.follows_line:
        reached = latency.line.reaches(latency_s)
        return _answer(latency, reached.value, reached.interval, math.floor)
    curve, error = latency.curve, _error(latency)
    interval = None
    if error is not None:
        low = _scaled(curve, 1 + error).largest_within(latency_s)
        high = _scaled(curve, 1 - error).largest_within(latency_s)
        interval = Interval(low or 0.0, high or 0.0)
    return _answer(latency, curve.largest_within(latency_s), interval, math.floor)


def _of_ratio(latency: Latency, ratio: Ratio, whole, factor: float = 1.0) -> BatchAnswer:
    if ratio.value is None or ratio.interval is None:
        return BatchAnswer(None, None, False)
    interval = Interval(factor * ratio.interval.low, factor * ratio.interval.high)
    return _answer(latency, max(1.0, factor * ratio.value), interval, whole)


def _answer(latency: Latency, size: float | None, interval: Interval | None, whole) -> BatchAnswer:
    """Makes a size whole; the rounding of its last digits must not cost an example."""
    if size is None or size < 1 - _ROUNDING:
        return BatchAnswer(None, interval, False)
    nearest = round(size)
    number = nearest if abs(size - nearest) <= _ROUNDING * nearest else int(whole(size))
    smallest, largest = latency.curve.batch_sizes[[0, -1]]
    return BatchAnswer(number, interval, not smallest <= number <= largest)


def _largest(latency: Latency, scores: np.ndarray, *, errors: int) -> BatchAnswer:
    """Finds the measured size of the largest score, which has so many times latency's error."""
    sizes, error = latency.curve.batch_sizes, _error(latency)
    best = int(np.argmax(scores))
    if error is None:
        return BatchAnswer(int(sizes[best]), None, False)
    # The error of a difference of two sizes, in quadrature.
    behind = 1 - scores / scores[best]
    near = sizes[behind <= errors * np.hypot(error, error[best])]
    return BatchAnswer(int(sizes[best]), Interval(float(near[0]), float(near[-1])), False)


def _error(latency: Latency) -> np.ndarray | None:
    """Gives the relative half-width of the interval of each measured size's median."""
    counts = latency.curve.counts
    spare = int(np.sum(counts) - len(counts))
    if latency.line.departure.noise is None or spare < 1:
        return None
    half_width = t_quantile(spare) * latency.line.departure.noise * np.sqrt(np.pi / 2 / counts)
    return np.minimum(half_width, 0.9)


def _scaled(curve: LatencyCurve, factors: np.ndarray) -> LatencyCurve:
    latencies = np.maximum.accumulate(curve.latencies_s * factors)
    return dataclasses.replace(curve, latencies_s=latencies)


def _interval(curve: LatencyCurve, low: float | None, high: float | None) -> Interval:
    smallest, largest = (float(size) for size in curve.batch_sizes[[0, -1]])
    return Interval(smallest if low is None else low, largest if high is None else high)
