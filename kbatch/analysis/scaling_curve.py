"""Models of the time of a batch by batch size, and the batch sizes that follow from them.

**The line.** t(b) = a + c b, or (b + n_half) / r_inf (Hockney and Jesshope 1988, Parallel Computers
2, section 1.3.2). r_inf = 1 / c is the throughput of an infinitely large batch, and a batch of
n_half = a / c reaches half of it. On the line

    knee          n_half                 throughput over latency, b / t^2, is largest
    efficient     n_half p / (1 - p)     a share p of r_inf: 9 n_half for 90 %
    within T      r_inf T - n_half       the largest with t(b) <= T

The scatter of durations is proportional to their size, and a few durations are far too long. So
residuals are divided by the median at their size, and Huber's weights limit the effect of a single
measurement (Huber 1981, Robust Statistics, chapter 7, also for the covariance). Several
measurements at one size show the noise independently of the line: if their centre is off by more
than this noise explains, the line is wrong. All centres are medians.

**The curve.** If the line is wrong, a monotone interpolation gives the answers. Its peak is the
largest measured throughput. The medians at each size are pooled if a larger size was faster
(isotonic regression, Barlow et al. 1972), and joined by straight pieces of log latency over log2 of
the batch size. The curve ends at the measurements. Its pieces are straight in logarithms, so the
largest b / t^2 is at a measured size.

**The rounds.** Other work on the same machine makes calls slower and never faster (Chen and Revels
2016, arXiv:1608.04295). If it comes and goes, there are two groups of rounds at every batch size.
So the logarithms of all times, minus a centre per size, are fitted by two normal distributions, one
of which is higher and at least as wide (expectation and maximization, Dempster, Laird and Rubin
1977). Rounds that probably belong to the slow group are left out, but only if two groups fit much
better than one and are far from each other. Otherwise slow rounds are noise of the calls
themselves, and a fit without them would make the model look faster than it is.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from kbatch.analysis.intervals import (
    UNRESOLVED,
    Estimate,
    median_interval,
    ranged_columns,
    ratio_of_estimates,
    t_quantile,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """Batches of one size, and their time in each round of a sweep."""

    batch_size: int  #: Examples that go through the device at once.
    outcome: Literal["measured", "out_of_memory", "not_run"] = "measured"
    first_call_s: float | None = None  #: Seconds of the first call, with tracing and compiling.
    #: Median seconds of a batch in each round. If a call has several batches, its time is divided.
    times_s: tuple[float, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether the size was measured, so that there are times."""
        return self.outcome == "measured"

    @property
    def median_s(self) -> float:
        """Median seconds of a batch over the rounds."""
        return median(self.times_s)

    @property
    def time_s(self) -> Estimate[float] | None:
        """Median seconds of a batch. With six rounds or more it has an interval."""
        if not self.times_s:
            return None
        return median_interval(self.times_s) or Estimate(self.median_s, n=len(self.times_s))

    @property
    def rate(self) -> Estimate[float] | None:
        """Examples per second, with an interval if `time_s` has one."""
        time_s, size = self.time_s, self.batch_size
        if time_s is None:
            return None
        low, high = (None if end is None else size / end for end in (time_s.high, time_s.low))
        return Estimate(size / time_s.value, low, high, time_s.n)


def timed_columns(timed: Timed, time: str) -> dict[str, float | None]:
    """Return columns of a table: the time with its interval, the rate and the rounds."""
    return {
        **ranged_columns(f"{time} (ms)", timed.time_s and timed.time_s.times(1e3)),
        "samples/s": timed.rate and timed.rate.value,
        "rounds": len(timed.times_s),
    }


# If the line is wrong by less than this share, no decision on a batch size changes.
_NEGLIGIBLE = 0.02
# Huber's constant: residuals up to this many standard deviations have full weight. The fit is then
# 99 % efficient for normal errors.
_FULL_WEIGHT = 2.0
_MOST_ROUNDS = 100
# Standard deviation over median absolute deviation, for a normal distribution.
_DEVIATION = 1.4826


@dataclasses.dataclass(frozen=True)
class Line:
    """A fitted line y = a + b x."""

    intercept: float  # a, in the unit of y.
    slope: float  # b, in units of y per unit of x.
    covariance: np.ndarray  # Covariance of (a, b), of shape (2, 2).
    degrees_of_freedom: int  # Measurements minus two.
    noise: float | None  # Relative deviation of measurements at one x; None if each x has one.
    worst: float  # Largest distance of the median at one x from the line, as a share of it.
    holds: bool | None  # Whether `worst` is within the noise or 2 %. If unknown, None.

    @property
    def slope_interval(self) -> Estimate[float]:
        # Rounding may make a variance of 0 slightly negative.
        error = math.sqrt(max(0.0, self.covariance[1, 1]))
        half_width = t_quantile(self.degrees_of_freedom) * error
        return Estimate(self.slope, self.slope - half_width, self.slope + half_width)

    @property
    def intercept_in_x(self) -> Estimate[float | None]:
        """The intercept over the slope, a / b: n_half of a latency, in examples."""
        return self._ratio(self.intercept, self.slope, self.covariance)

    @property
    def slope_over_intercept(self) -> Estimate[float | None]:
        """The slope over the intercept, b / a."""
        return self._ratio(self.slope, self.intercept, self.covariance[::-1, ::-1])

    def reaches(self, y: float) -> Estimate[float | None]:
        """Return the x at which the line reaches y, (y - a) / b."""
        covariance = self.covariance * [[1, -1], [-1, 1]]
        return self._ratio(y - self.intercept, self.slope, covariance)

    @property
    def one_over_slope(self) -> Estimate[float | None]:
        """The inverse of the slope, 1 / b: r_inf of a latency, in examples per second."""
        return self._ratio(1.0, self.slope, np.diag([0.0, self.covariance[1, 1]]))

    def __call__(self, x: float) -> float:
        return self.intercept + self.slope * x

    def _ratio(self, over: float, under: float, covariance: np.ndarray) -> Estimate[float | None]:
        freedom = self.degrees_of_freedom
        return ratio_of_estimates(over, under, covariance=covariance, degrees_of_freedom=freedom)


def fit_line(x: ArrayLike, y: ArrayLike) -> Line:
    x, y = np.asarray(x, float), np.asarray(y, float)
    places, index = np.unique(x, return_inverse=True)
    if len(x) < 3 or len(places) < 2:
        raise ValueError(
            "At least three measurements at two or more batch sizes are needed: measure more. "
            f"Received: measurements: {len(x)}, batch sizes: {len(places)}."
        )
    count, unit = len(y), np.array([1.0, 1 / np.max(x)])
    # The unit of a residual is the median at its x. If it were the fitted value, a wrong line could
    # make its residuals small by being large.
    scale = np.array([np.median(y[index == i]) for i in range(len(places))])[index]
    design = np.stack([np.ones_like(x), x], axis=1) * unit / scale[:, None]
    weights, residuals = np.ones_like(y), np.full_like(y, np.inf)
    for _ in range(_MOST_ROUNDS):
        root = np.sqrt(weights)
        coefficients = np.linalg.lstsq(design * root[:, None], y / scale * root, rcond=None)[0]
        previous, residuals = residuals, y / scale - design @ coefficients
        # The standard deviation, corrected for the two parameters of the line.
        deviation = _DEVIATION * np.median(np.abs(residuals)) * math.sqrt(count / (count - 2))
        # Residuals below 1e-12 are rounding errors, so they have full weight.
        limit = max(_FULL_WEIGHT * deviation, 1e-12)
        weights = np.minimum(1.0, limit / np.maximum(np.abs(residuals), 1e-300))
        if np.max(np.abs(residuals - previous)) <= 1e-8:
            break
    # The covariance of an M-estimate (Huber), whose function psi is weights * residuals.
    full = float(np.mean(weights == 1.0))
    variance = float(np.sum((weights * residuals) ** 2)) / (count - 2) / full**2
    intercept, slope = (coefficients * unit).tolist()
    covariance = variance * np.linalg.pinv(design.T @ design) * np.outer(unit, unit)
    return Line(intercept, slope, covariance, count - 2, *departure(x, residuals))


def departure(places: np.ndarray, residuals: np.ndarray) -> tuple[float | None, float, bool | None]:
    """Return the fields `noise`, `worst` and `holds` of a `Line`, from residuals by place."""
    distinct, index, counts = np.unique(places, return_inverse=True, return_counts=True)
    groups = [residuals[index == i] for i in range(len(distinct))]
    centres = np.abs([np.median(group) for group in groups])
    worst = float(np.max(centres))
    spare = len(places) - len(distinct)
    if spare == 0:
        return None, worst, None
    # The median of differences (Shamos). Deviations of two or three values from their own median
    # would be too small.
    pairs = [(group, np.triu_indices(len(group), 1)) for group in groups]
    differences = np.concatenate([np.abs(group[i] - group[j]) for group, (i, j) in pairs])
    noise = _DEVIATION / math.sqrt(2) * float(np.median(differences))
    if len(distinct) == 2:
        return noise, worst, None
    # Bonferroni over the places. The median of normal values has pi / 2 times the variance of the
    # mean.
    quantile = special.stdtrit(spare, 1 - 0.025 / len(distinct))
    allowance = quantile * noise * np.sqrt(np.pi / 2 / counts)
    return noise, worst, bool(np.all(centres <= np.maximum(allowance, _NEGLIGIBLE)))


@dataclasses.dataclass(frozen=True)
class Latency:
    """A fitted latency: a line through all measurements, and a monotone curve between them."""

    line: Line  # Seconds by examples.
    batch_sizes: np.ndarray  # Measured sizes, ascending, in examples.
    latencies_s: np.ndarray  # Latency of the curve at each size, never descending.
    counts: np.ndarray  # Number of measurements at each size.

    @property
    def follows_line(self) -> bool:
        """Whether the line answers questions: it rises, and the measurements do not reject it."""
        return self.line.holds is not False and (self.line.slope_interval.low or 0.0) > 0

    def latency_s(self, batch_size: float) -> float:
        """Return the seconds of a batch, by the line if it holds, else by the curve."""
        if self.follows_line:
            return self.line(batch_size)
        return _interpolate(batch_size, self.batch_sizes, self.latencies_s)

    def largest_within(self, latency_s: float) -> float | None:
        """Find the largest size with at most this latency, in examples. If there is none, None."""
        if latency_s < self.latencies_s[0]:
            return None
        return _interpolate(latency_s, self.latencies_s, self.batch_sizes)

    def smallest_of_rate(self, rate: float) -> float | None:
        """Find the smallest size with this throughput in examples/s. If there is none, None."""
        rates = self.batch_sizes / self.latencies_s
        reached = np.flatnonzero(rates >= rate)
        if not len(reached):
            return None
        ends = slice(max(0, reached[0] - 1), reached[0] + 1)
        return _interpolate(rate, rates[ends], self.batch_sizes[ends])

    def scaled(self, factors: np.ndarray) -> "Latency":
        """Multiply the latencies of the curve, and keep them from descending."""
        latencies = np.maximum.accumulate(self.latencies_s * factors)
        return dataclasses.replace(self, latencies_s=latencies)


def _interpolate(x: float, xs: np.ndarray, ys: np.ndarray) -> float:
    """Interpolate by straight pieces in logarithms. Beyond the ends the value is constant."""
    return float(np.exp2(np.interp(np.log2(x), np.log2(xs), np.log2(ys))))


def fit_latency(batch_sizes: ArrayLike, latencies_s: ArrayLike) -> Latency:
    """Fit the latency of one call path, in seconds, to measurements at several batch sizes.

    There is one latency per round of calls: the median or another quantile.

    >>> latency = fit_latency([1, 2, 4, 8] * 2, [5e-3, 6e-3, 8e-3, 12e-3] * 2)
    >>> round(latency.line.one_over_slope.value), round(latency.line.intercept_in_x.value)
    (1000, 4)
    """
    from scipy.optimize import isotonic_regression

    line, latencies = fit_line(batch_sizes, latencies_s), np.asarray(latencies_s, float)
    places, index, counts = np.unique(batch_sizes, return_inverse=True, return_counts=True)
    medians = [np.log(np.median(latencies[index == i])) for i in range(len(places))]
    joined = np.exp(isotonic_regression(medians, weights=counts).x)
    return Latency(line, places.astype(float), joined, counts)


def fit_rounds(timings: Sequence[Timed]) -> Latency:
    """Fit the time of a batch, without rounds that other work on the machine slowed."""
    rounds = without_slow_rounds([timing.times_s for timing in timings])
    sizes = [t.batch_size for t, times_s in zip(timings, rounds, strict=True) for _ in times_s]
    return fit_latency(sizes, [time_s for times_s in rounds for time_s in times_s])


# A value this close to an integer, relative to its size, counts as that integer.
_ROUNDING = 1e-9


# The following answers are integers, in examples. If there is no answer, it is None. The ends of
# their intervals are not rounded.


def knee_batch_size(latency: Latency) -> Estimate[float | None]:
    """Find the batch size of the largest throughput over latency."""
    if latency.follows_line:
        return _of_ratio(latency.line.intercept_in_x, round)
    return _largest(latency, latency.batch_sizes / latency.latencies_s**2, errors=2)


def fastest_batch_size(latency: Latency) -> Estimate[float | None]:
    """Find the measured size of the largest throughput. Its interval holds sizes as fast."""
    return _largest(latency, latency.batch_sizes / latency.latencies_s, errors=1)


def efficient_batch_size(latency: Latency, *, share: float = 0.9) -> Estimate[float | None]:
    """Find the smallest batch size with a share of the peak throughput."""
    if latency.follows_line:
        return _of_ratio(latency.line.intercept_in_x, math.ceil, share / (1 - share))
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
    """Return whether the larger of two sizes reaches 90 % of the peak throughput of their line."""
    factor = batch_sizes[1] / batch_sizes[0]
    gain = factor * latencies_s[0] / latencies_s[1]
    return gain <= 0.9 + 0.1 * factor


def batch_size_within(latency: Latency, *, latency_s: float) -> Estimate[float | None]:
    """Find the largest batch size with at most a latency, in seconds."""
    if latency.follows_line:
        return _whole(latency.line.reaches(latency_s), math.floor)
    size, error = latency.largest_within(latency_s), _error(latency)
    if error is None:
        return _whole(Estimate(size), math.floor)
    low, high = (latency.scaled(x).largest_within(latency_s) or 0.0 for x in (1 + error, 1 - error))
    return _whole(Estimate(size, low, high), math.floor)


def _of_ratio(
    ratio: Estimate[float | None], to_int: Callable[[float], int], factor: float = 1.0
) -> Estimate[float | None]:
    if ratio.value is None:
        return UNRESOLVED
    size = ratio.times(factor)
    return _whole(dataclasses.replace(size, value=max(1.0, factor * ratio.value)), to_int)


def _whole(size: Estimate[float | None], to_int: Callable[[float], int]) -> Estimate[float | None]:
    """Round a size by the function `to_int`. A size very close to an integer is that integer."""
    if size.value is None or size.value < 1 - _ROUNDING:
        return dataclasses.replace(size, value=None)
    nearest = round(size.value)
    near = abs(size.value - nearest) <= _ROUNDING * nearest
    return dataclasses.replace(size, value=nearest if near else to_int(size.value))


def _largest(latency: Latency, scores: np.ndarray, *, errors: int) -> Estimate[float | None]:
    """Find the measured size of the largest score.

    The relative error of a score is `errors` times the relative error of the latency.
    """
    sizes, error = latency.batch_sizes, _error(latency)
    best = int(np.argmax(scores))
    if error is None:
        return Estimate(int(sizes[best]))
    # The relative error of a difference of two sizes is the root of the sum of squared errors.
    behind = 1 - scores / scores[best]
    near = sizes[behind <= errors * np.hypot(error, error[best])]
    return Estimate(int(sizes[best]), float(near[0]), float(near[-1]))


def _error(latency: Latency) -> np.ndarray | None:
    """Return the relative half-width of the interval of each measured size's median."""
    counts = latency.counts
    spare = int(np.sum(counts) - len(counts))
    if latency.line.noise is None or spare < 1:
        return None
    half_width = t_quantile(spare) * latency.line.noise * np.sqrt(np.pi / 2 / counts)
    return np.minimum(half_width, 0.9)


# If the slow group is slower by less than 10 %, it is noise of the calls themselves.
_LEAST_SLOWDOWN = math.log1p(0.10)
# Two groups fit much better than one if twice the log-likelihood ratio is above this. With three
# more parameters, chance alone does this once in 100 fits.
_LEAST_GAIN = 12.0
# Least distance of the centres of two groups that makes two peaks, in units of their scatter
# (Ashman, Bird and Zepf 1994, AJ 108, 2348).
_LEAST_DISTANCE = 2.0
_LEAST_SPREAD = 0.01  # Least scatter of a group. A few rounds may scatter less by chance.
# The fit ends after this many steps, or when no centre moves by more than `_SAME`, in logarithms.
_MOST_STEPS = 200
_SAME = 1e-6


def without_slow_rounds(groups: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Leave out the times of slow rounds if there are clearly two groups of rounds."""
    all_rounds = [tuple(group) for group in groups]
    counts = [len(group) for group in groups]
    if sum(counts) - len(groups) < 3:
        return all_rounds
    logs, sizes = np.log(np.concatenate(all_rounds)), np.repeat(np.arange(len(groups)), counts)
    residuals = logs - (np.bincount(sizes, logs) / counts)[sizes]
    spread = max(_LEAST_SPREAD, float(np.std(residuals)))
    one_group = np.sum(_log_normal(residuals, spread))
    # Expectation and maximization for the centre of the fast rounds of each size, and for the two
    # groups (fast, slow): how much higher they are, their scatter, and their shares.
    centres = np.array([np.quantile(logs[sizes == i], 0.25) for i in range(len(groups))])
    offsets, spreads = np.array([[0.0], [2 * spread]]), np.full((2, 1), spread / 2)
    shares, moved = np.array([[0.6], [0.4]]), math.inf
    for step in range(_MOST_STEPS + 1):
        log_densities = _log_normal(logs - centres[sizes] - offsets, spreads) + np.log(shares)
        mixture = np.logaddexp(*log_densities)
        if moved < _SAME or step == _MOST_STEPS:
            break
        memberships = np.exp(log_densities - mixture)
        pulls, before = memberships / spreads**2, centres
        pulled = (pulls * (logs - offsets)).sum(0)
        centres = np.bincount(sizes, pulled) / np.bincount(sizes, pulls.sum(0))
        moved = np.max(np.abs(centres - before))
        residuals, counted = logs - centres[sizes], memberships.sum(1, keepdims=True)
        offsets[1] = memberships[1] @ residuals / counted[1]
        squares = (memberships * (residuals - offsets) ** 2).sum(1, keepdims=True)
        spreads = np.maximum(_LEAST_SPREAD, np.sqrt(squares / counted))
        spreads[1] = np.max(spreads)
        shares = np.clip(counted / len(logs), 0.001, 0.999)
    gain = 2 * float(np.sum(mixture) - one_group)
    scatter = math.sqrt(np.mean(spreads**2))
    fast = (log_densities[0] > log_densities[1]) | (logs <= centres[sizes])
    least_distance = max(_LEAST_SLOWDOWN, _LEAST_DISTANCE * scatter)
    separate = gain >= _LEAST_GAIN and offsets[1, 0] > least_distance
    # A line needs three rounds. If few rounds are fast, the slow times are the usual ones.
    if not separate or np.sum(fast) < 3 or np.mean(fast) < 1 / 3:
        return all_rounds
    return [
        tuple(time_s for time_s, is_fast in zip(group, fast[sizes == i], strict=True) if is_fast)
        for i, group in enumerate(all_rounds)
    ]


def _log_normal(residuals: np.ndarray, spread: np.ndarray | float) -> np.ndarray:
    return -0.5 * (residuals / spread) ** 2 - np.log(spread)
