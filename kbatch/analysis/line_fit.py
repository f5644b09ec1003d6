"""A line y = a + b x through measurements with relative errors, and whether it fits them.

Durations of steps or calls and numbers of updates scatter by a share of their size, and now
and then one is far too long. So residuals are divided by the median at their x, and Huber's weights
limit what a single measurement can do (Huber 1981, Robust Statistics, chapter 7, for the
covariance as well).

Several measurements at one place show the noise without the line. Where their centre is off by
more than that noise explains, the line is wrong. Medians throughout: one hiccup is neither noise
nor a departure.

A neighbour on the same machine makes calls slower and never faster (Chen and Revels 2016,
arXiv:1608.04295). One that comes and goes leaves two groups of rounds at every batch size. So the
logarithms of all times, each less a centre of its size, are fitted by two normal distributions: a
share of the rounds lies higher, and scatters as much or more (expectation and maximization,
Dempster, Laird and Rubin 1977). Rounds that more likely belong there are left out, but only where
two groups are far likelier than one and lie apart: elsewhere slow rounds are noise of the calls
themselves, and a fit without them would find the model faster than it is.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from kbatch.analysis.intervals import Estimate, ratio_of_estimates, t_quantile

# A departure of less than this share changes no decision on a batch size.
_NEGLIGIBLE = 0.02
# Huber's constant: full weight up to as many standard deviations; 99 % efficient for normal errors.
_FULL_WEIGHT = 2.0
_MOST_ROUNDS = 100
# A normal distribution's standard deviation over its median absolute one.
_DEVIATION = 1.4826


@dataclasses.dataclass(frozen=True)
class Departure:
    """How far measurements leave a curve."""

    noise: float | None  # Relative deviation of those at one place; None if none repeats.
    worst: float  # Largest distance of a centre from the curve, as a share of its value.
    holds: bool | None  # False when beyond the noise and 2 %; None when it cannot be told.


def measure_departure(places: np.ndarray, residuals: np.ndarray) -> Departure:
    """Compare how far the centres are off with how the measurements scatter."""
    distinct, index, counts = np.unique(places, return_inverse=True, return_counts=True)
    groups = [residuals[index == i] for i in range(len(distinct))]
    centres = np.abs([np.median(group) for group in groups])
    worst = float(np.max(centres))
    spare = len(places) - len(distinct)
    if spare == 0:
        return Departure(None, worst, None)
    # Shamos's median of differences: deviations of two or three values from their own median
    # would be too small.
    pairs = [(group, np.triu_indices(len(group), 1)) for group in groups]
    differences = np.concatenate([np.abs(group[i] - group[j]) for group, (i, j) in pairs])
    noise = _DEVIATION / math.sqrt(2) * float(np.median(differences))
    if len(distinct) == 2:
        return Departure(noise, worst, None)
    # Bonferroni over the places; the median of normal values has pi / 2 times the mean's variance.
    quantile = special.stdtrit(spare, 1 - 0.025 / len(distinct))
    allowance = quantile * noise * np.sqrt(np.pi / 2 / counts)
    return Departure(noise, worst, bool(np.all(centres <= np.maximum(allowance, _NEGLIGIBLE))))


@dataclasses.dataclass(frozen=True)
class Line:
    """A fitted line y = a + b x."""

    intercept: float  # a, in the unit of y.
    slope: float  # b, in units of y per unit of x.
    covariance: np.ndarray  # Of (a, b), of shape (2, 2).
    degrees_of_freedom: int  # Measurements less two.
    departure: Departure

    @property
    def holds(self) -> bool | None:
        """Whether the measurements are compatible with a line; None where it cannot be told."""
        return self.departure.holds

    @property
    def slope_interval(self) -> Estimate[float]:
        return self._interval(self.slope, self.covariance[1, 1])

    @property
    def intercept_in_x(self) -> Estimate[float | None]:
        """The x whose part b x of the line equals the intercept, a / b."""
        return self._ratio(self.intercept, self.slope, self.covariance)

    @property
    def slope_over_intercept(self) -> Estimate[float | None]:
        """One over that x, b / a."""
        return self._ratio(self.slope, self.intercept, self.covariance[::-1, ::-1])

    def reaches(self, y: float) -> Estimate[float | None]:
        """Return the x at which the line reaches y, (y - a) / b."""
        covariance = self.covariance * [[1, -1], [-1, 1]]
        return self._ratio(y - self.intercept, self.slope, covariance)

    @property
    def one_over_slope(self) -> Estimate[float | None]:
        """1 / b."""
        return self._ratio(1.0, self.slope, np.diag([0.0, self.covariance[1, 1]]))

    def __call__(self, x: float) -> float:
        return self.intercept + self.slope * x

    def _ratio(
        self, numerator: float, denominator: float, covariance: np.ndarray
    ) -> Estimate[float | None]:
        freedom = self.degrees_of_freedom
        return ratio_of_estimates(
            numerator, denominator, covariance=covariance, degrees_of_freedom=freedom
        )

    def _interval(self, value: float, variance: float) -> Estimate[float]:
        # By rounding, a variance of 0 may come out slightly negative.
        half_width = t_quantile(self.degrees_of_freedom) * math.sqrt(max(0.0, variance))
        return Estimate(value, value - half_width, value + half_width)


def fit_line(x: ArrayLike, y: ArrayLike) -> Line:
    x, y = check_measurements(x, y)
    count, unit = len(y), np.array([1.0, 1 / np.max(x)])
    # Residuals in units of the fitted value would let a line that does not fit make them small by
    # being large: the unit is the median at the x of each measurement.
    places, index = np.unique(x, return_inverse=True)
    scale = np.array([np.median(y[index == i]) for i in range(len(places))])[index]
    design = np.stack([np.ones_like(x), x], axis=1) * unit / scale[:, None]
    weights, residuals = np.ones_like(y), np.full_like(y, np.inf)
    for _ in range(_MOST_ROUNDS):
        root = np.sqrt(weights)
        coefficients = np.linalg.lstsq(design * root[:, None], y / scale * root, rcond=None)[0]
        previous, residuals = residuals, y / scale - design @ coefficients
        # The standard deviation, less the two degrees of freedom that the line took.
        deviation = _DEVIATION * np.median(np.abs(residuals)) * math.sqrt(count / (count - 2))
        # Residuals that are rounding alone are all as good.
        limit = max(_FULL_WEIGHT * deviation, 1e-12)
        weights = np.minimum(1.0, limit / np.maximum(np.abs(residuals), 1e-300))
        if np.max(np.abs(residuals - previous)) <= 1e-8:
            break
    # The covariance of an M-estimate, whose psi is weights * residuals.
    full = float(np.mean(weights == 1.0))
    variance = float(np.sum((weights * residuals) ** 2)) / (count - 2) / full**2
    intercept, slope = (coefficients * unit).tolist()
    covariance = variance * np.linalg.pinv(design.T @ design) * np.outer(unit, unit)
    return Line(intercept, slope, covariance, count - 2, measure_departure(x, residuals))


def check_measurements(x: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(x, float), np.asarray(y, float)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(
            "Measurements need one size each, in one dimension. Received: "
            f"shapes {x.shape} and {y.shape}."
        )
    if len(x) < 3 or len(np.unique(x)) < 2:
        raise ValueError(
            "A line with its error needs at least three measurements at two or more sizes: "
            f"measure more. Received: {len(x)} at {len(np.unique(x))} sizes."
        )
    if not np.all(np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)):
        raise ValueError(
            "Sizes and measurements must be positive and finite: leave out the runs that failed. "
            f"Received: x={x.tolist()}, y={y.tolist()}."
        )
    return x, y


# Rounds that are slower by less are noise of the calls themselves.
_TOLERANCE = math.log1p(0.10)
# Twice the logarithm of the ratio of likelihoods: three parameters more give 12 once in 100.
_LIKELIER = 12.0
# Distance of the groups in units of their scatter, above which they have two peaks
# (Ashman, Bird and Zepf 1994, AJ 108, 2348).
_APART = 2.0
# Less scatter than this cannot be told from few rounds.
_LEAST_SPREAD = 0.01
# The fit ends after so many steps, or when no centre moves by more, in logarithms.
_MOST_STEPS = 200
_SAME = 1e-6


def without_slow_rounds(groups: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Leave out the times of slow rounds where two groups of rounds can be told apart."""
    everything = [tuple(group) for group in groups]
    counts = [len(group) for group in groups]
    if sum(counts) - len(groups) < 3:
        return everything
    logs, sizes = np.log(np.concatenate(everything)), np.repeat(np.arange(len(groups)), counts)
    residuals = logs - (np.bincount(sizes, logs) / counts)[sizes]
    spread = max(_LEAST_SPREAD, float(np.std(residuals)))
    alone = np.sum(_log_normal(residuals, spread))
    # Centres of the fast rounds of each size, how much higher the slow ones lie, how far both
    # scatter, and the share of the slow ones: by expectation and maximization.
    centres = np.array([np.quantile(logs[sizes == i], 0.25) for i in range(len(groups))])
    slower = 2 * spread
    fast_spread = slow_spread = spread / 2
    share, moved, steps = 0.4, math.inf, 0
    while True:
        residuals = logs - centres[sizes]
        fast = _log_normal(residuals, fast_spread) + math.log(1 - share)
        slow = _log_normal(residuals - slower, slow_spread) + math.log(share)
        either = np.logaddexp(fast, slow)
        if moved < _SAME or steps == _MOST_STEPS:
            break
        steps += 1
        slowness = np.exp(slow - either)
        calm, late = (1 - slowness) / fast_spread**2, slowness / slow_spread**2
        pulled = calm * logs + late * (logs - slower)
        before = centres
        centres = np.bincount(sizes, pulled) / np.bincount(sizes, calm + late)
        moved = np.max(np.abs(centres - before))
        residuals = logs - centres[sizes]
        share = float(np.mean(slowness))
        late_count, calm_count = share * len(logs), (1 - share) * len(logs)
        slower = float(slowness @ residuals) / late_count
        fast_spread = max(_LEAST_SPREAD, math.sqrt((1 - slowness) @ residuals**2 / calm_count))
        late_spread = math.sqrt(slowness @ (residuals - slower) ** 2 / late_count)
        slow_spread = max(fast_spread, late_spread)
        share = min(max(share, 0.001), 0.999)
    gain = 2 * float(np.sum(either) - alone)
    scatter = math.sqrt((fast_spread**2 + slow_spread**2) / 2)
    calm = (fast > slow) | (logs <= centres[sizes])
    told_apart = gain >= _LIKELIER and slower > max(_TOLERANCE, _APART * scatter)
    # A line needs three rounds, and where few are fast the slow ones are the model's own times.
    if not told_apart or np.sum(calm) < 3 or np.mean(calm) < 1 / 3:
        return everything
    return [
        tuple(value for value, kept in zip(group, calm[sizes == i], strict=True) if kept)
        for i, group in enumerate(everything)
    ]


def _log_normal(residuals: np.ndarray, spread: float) -> np.ndarray:
    return -0.5 * (residuals / spread) ** 2 - math.log(spread)
