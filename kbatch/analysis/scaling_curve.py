"""How latency grows with the batch size, and which batch sizes a latency answers for.

Latency of inference against batch size, t(b) = (b + n_half) / r_inf (Hockney and Jesshope 1988,
Parallel Computers 2, section 1.3.2): r_inf is the throughput of an unboundedly large batch, and a
batch of n_half reaches half of it. It is the line t = a + c b with c = 1 / r_inf and
a = n_half / r_inf. On it

    knee          n_half                 throughput over latency, b / t^2, is largest
    efficient     n_half p / (1 - p)     a share p of r_inf: 9 n_half for 90 %
    within T      r_inf T - n_half       the largest with t(b) <= T

Where the measurements leave the line by more than their noise, the same is read off a monotone
interpolation of them, whose peak is the largest throughput that was measured: the medians at each
size, pooled where a larger size came out faster (isotonic regression, Barlow et al. 1972), joined
by straight pieces of log latency over log2 of the batch size. It goes no further than the
measurements. Its pieces are straight in logarithms, so the largest b / t^2 lies at a measured size.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from kbatch.analysis.intervals import UNRESOLVED, Estimate, t_quantile
from kbatch.analysis.line_fit import Line, check_measurements, fit_line


@dataclasses.dataclass(frozen=True)
class Latency:
    """A fitted latency: a line through all measurements, and a monotone curve between them."""

    line: Line  # Examples against seconds.
    batch_sizes: np.ndarray  # Measured sizes, ascending, in examples.
    latencies_s: np.ndarray  # Of the curve at each, not descending.
    counts: np.ndarray  # Measurements behind each.

    @property
    def follows_line(self) -> bool:
        """Whether the line answers questions: nothing speaks against it, and it rises."""
        return self.line.departure.holds is not False and (self.line.slope_interval.low or 0.0) > 0

    @property
    def peak_throughput(self) -> Estimate[float | None]:
        """r_inf, in examples per second; without a value where the line may be flat."""
        return self.line.one_over_slope

    @property
    def half_peak_batch_size(self) -> Estimate[float | None]:
        """n_half, in examples; without a value where the line may be flat."""
        return self.line.intercept_in_x

    def latency_s(self, batch_size: float) -> float:
        """Return the seconds of b examples by the line, or by the curve where no line holds."""
        return self.line(batch_size) if self.follows_line else self.interpolated_s(batch_size)

    def interpolated_s(self, batch_size: float) -> float:
        """Return the seconds of b examples by the curve, which ends where measurements do."""
        smallest, largest = self.batch_sizes[[0, -1]]
        if not smallest <= batch_size <= largest:
            raise ValueError(
                f"`batch_size` must lie in the measured range, {smallest:g} to {largest:g}: "
                f"measure it. Received: batch_size={batch_size}."
            )
        return _interpolate(batch_size, self.batch_sizes, self.latencies_s)

    def largest_within(self, latency_s: float) -> float | None:
        """Find the largest size of at most that latency, in examples; None if none is."""
        if latency_s < self.latencies_s[0]:
            return None
        return _interpolate(latency_s, self.latencies_s, self.batch_sizes)

    def smallest_of_rate(self, rate: float) -> float | None:
        """Find the smallest size with that throughput in examples/s; None if none has it."""
        rates = self.batch_sizes / self.latencies_s
        reached = np.flatnonzero(rates >= rate)
        if not len(reached):
            return None
        ends = slice(max(0, reached[0] - 1), reached[0] + 1)
        return _interpolate(rate, rates[ends], self.batch_sizes[ends])

    def scaled(self, factors: np.ndarray) -> "Latency":
        """Multiply the latencies of the curve, and let none fall."""
        latencies = np.maximum.accumulate(self.latencies_s * factors)
        return dataclasses.replace(self, latencies_s=latencies)

    @property
    def drawn(self) -> list[tuple[float, float]]:
        """Sizes and seconds along the line, as a figure draws it; none where no line holds."""
        if not self.follows_line:
            return []
        # A line looks curved on logarithmic axes.
        smallest, largest = self.batch_sizes[[0, -1]]
        sizes = np.geomspace(smallest, largest, 60).tolist()
        return [(size, self.line(size)) for size in sizes]


def _interpolate(x: float, xs: np.ndarray, ys: np.ndarray) -> float:
    """Interpolate by straight pieces in logarithms; beyond the ends is what the ends have."""
    return float(np.exp2(np.interp(np.log2(x), np.log2(xs), np.log2(ys))))


def fit_latency(batch_sizes: ArrayLike, latencies_s: ArrayLike) -> Latency:
    """Fit the latency of one call path, in seconds, to measurements at several batch sizes.

    The latencies may be medians or another quantile of rounds of calls, one value a round.

    >>> latency = fit_latency([1, 2, 4, 8] * 2, [5e-3, 6e-3, 8e-3, 12e-3] * 2)
    >>> latency.peak_throughput.value, latency.half_peak_batch_size.value
    (1000.0, 4.0)
    """
    from scipy.optimize import isotonic_regression

    sizes, latencies = check_measurements(batch_sizes, latencies_s)
    places, index, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    medians = [np.log(np.median(latencies[index == i])) for i in range(len(places))]
    joined = np.exp(isotonic_regression(medians, weights=counts).x)
    return Latency(fit_line(sizes, latencies), places, joined, counts)


# A size that is whole but for rounding.
_ROUNDING = 1e-9


# The answers are whole sizes, in examples, None where there is none; their ends are not made whole.


def knee_batch_size(latency: Latency) -> Estimate[float | None]:
    """Find the batch size of the largest throughput over latency."""
    if latency.follows_line:
        return _of_ratio(latency.half_peak_batch_size, round)
    return _largest(latency, latency.batch_sizes / latency.latencies_s**2, errors=2)


def fastest_batch_size(latency: Latency) -> Estimate[float | None]:
    """Find the measured size of the largest throughput; its interval holds those as fast."""
    return _largest(latency, latency.batch_sizes / latency.latencies_s, errors=1)


def efficient_batch_size(latency: Latency, *, share: float = 0.9) -> Estimate[float | None]:
    """Find the smallest batch size with a share of the peak throughput, in (0, 1)."""
    if not 0 < share < 1:
        raise ValueError(f"`share` must lie between 0 and 1. Received: share={share}.")
    if latency.follows_line:
        return _of_ratio(latency.half_peak_batch_size, math.ceil, share / (1 - share))
    rates, error = latency.batch_sizes / latency.latencies_s, _error(latency)
    best = int(np.argmax(rates))
    size = latency.smallest_of_rate(share * rates[best])
    if error is None or size is None:
        return _whole(Estimate(size), math.ceil)
    low, high = (
        latency.scaled(1 + off).smallest_of_rate(share * rates[best] * (1 + off[best]))
        for off in (-error, error)
    )
    smallest, largest = latency.batch_sizes[[0, -1]].tolist()
    ends = smallest if low is None else low, largest if high is None else high
    return _whole(Estimate(size, *ends), math.ceil)


def is_saturated(batch_sizes: tuple[int, int], latencies_s: tuple[float, float]) -> bool:
    """Return whether the larger of two sizes has 90 % of the peak throughput, by what it gained."""
    factor = batch_sizes[1] / batch_sizes[0]
    gain = factor * latencies_s[0] / latencies_s[1]
    return gain <= 0.9 + 0.1 * factor


def batch_size_within(latency: Latency, *, latency_s: float) -> Estimate[float | None]:
    """Find the largest batch size of at most a latency; None where one example takes longer."""
    if not 0 < latency_s < math.inf:
        raise ValueError(
            f"`latency_s` must be positive, in seconds. Received: latency_s={latency_s}."
        )
    if latency.follows_line:
        return _whole(latency.line.reaches(latency_s), math.floor)
    size, error = latency.largest_within(latency_s), _error(latency)
    if error is None:
        return _whole(Estimate(size), math.floor)
    low, high = (
        latency.scaled(factors).largest_within(latency_s) or 0.0
        for factors in (1 + error, 1 - error)
    )
    return _whole(Estimate(size, low, high), math.floor)


def _of_ratio(
    ratio: Estimate[float | None], whole: Callable[[float], int], factor: float = 1.0
) -> Estimate[float | None]:
    if ratio.value is None:
        return UNRESOLVED
    size = ratio.times(factor)
    return _whole(dataclasses.replace(size, value=max(1.0, factor * ratio.value)), whole)


def _whole(size: Estimate[float | None], whole: Callable[[float], int]) -> Estimate[float | None]:
    """Make a size whole; the rounding of its last digits must not cost an example."""
    if size.value is None or size.value < 1 - _ROUNDING:
        return dataclasses.replace(size, value=None)
    nearest = round(size.value)
    near = abs(size.value - nearest) <= _ROUNDING * nearest
    return dataclasses.replace(size, value=nearest if near else whole(size.value))


def _largest(latency: Latency, scores: np.ndarray, *, errors: int) -> Estimate[float | None]:
    """Find the measured size of the largest score, which has so many times latency's error."""
    sizes, error = latency.batch_sizes, _error(latency)
    best = int(np.argmax(scores))
    if error is None:
        return Estimate(int(sizes[best]))
    # The error of a difference of two sizes, in quadrature.
    behind = 1 - scores / scores[best]
    near = sizes[behind <= errors * np.hypot(error, error[best])]
    return Estimate(int(sizes[best]), float(near[0]), float(near[-1]))


def _error(latency: Latency) -> np.ndarray | None:
    """Return the relative half-width of the interval of each measured size's median."""
    counts = latency.counts
    spare = int(np.sum(counts) - len(counts))
    if latency.line.departure.noise is None or spare < 1:
        return None
    half_width = t_quantile(spare) * latency.line.departure.noise * np.sqrt(np.pi / 2 / counts)
    return np.minimum(half_width, 0.9)
