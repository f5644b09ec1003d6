"""Which batch size to try next, when the model of goodput tells what others would cost.

A run of batch size B costs (McCandlish et al. 2018, arXiv:1812.06162, equation 2.11)

    T(B) = c + S(B) t(B)        S(B) = S_min (1 + B_crit / B)

with c what a run costs before it moves, t what an update costs, measured for every size, and S the
updates to the target. The noise scale of a first run, the pilot, is a guess of B_crit, and its
updates give S_min. What later runs needed corrects both. The curve is an idealisation, so
log S(B) may leave it by a random walk that starts at the pilot and grows with the distance in
octaves: neighbours are told best.

All of it is a normal model of log S for each B_crit on a grid, weighted by how well it explains
the runs so far. A run that was cut short after n updates says S > n and nothing else: its
likelihood is the survival function P(S > n), and the normal model keeps the mean and the variance
that follow. A run that failed or diverged says nothing of its speed, and no larger size is tried.
A size is worth trying while it may, with some probability, be better than the best run by more than
a margin; the one with the largest expected gain comes next.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from kbatch.analysis.intervals import Interval

# Smaller gains than this share of the best cost are not looked for.
MARGIN = 0.05
# Sizes are worth trying down to this probability of a gain by more than the margin.
_LEAST_PROBABILITY = 0.15
# Standard deviations, in units of log S: of a run, for another seed and for whole epochs; of the
# walk, per octave; of a guess of B_crit by a resolved noise scale, by a bound, and without one.
_RUN, _WALK = 0.08, 0.12
_RESOLVED, _BOUNDED, _UNKNOWN = 0.7, 1.0, 1.6
# Of the level of log S, about which nothing is known.
_LEVEL = 10.0
# Further out, in standard deviations, a survival probability is no longer a float64.
_FURTHEST = 35.0
_NORMAL_975 = 1.96


@dataclasses.dataclass(frozen=True)
class SizeCosts:
    """What updates cost, such as seconds, before anything is trained."""

    update_costs: Mapping[int, float]  # t, of an update of each batch size.
    start_cost: float = 0.0  # c, of a run before its first steady update.


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    batch_size: int
    cost: float | None  # T, what it took to reach the target; None where it did not.
    updates: float | None  # To the target, or in all if cut short; None if it failed or diverged.
    noise_scale: float | None = None  # Gradient noise scale in it, in examples; None if unresolved.
    noise_at_least: float | None = None  # Lower bound of that.
    spread: float = _RUN  # Standard deviation of log(updates), for another seed.


class NextSize(NamedTuple):
    batch_size: int | None  # Size to try, None to stop.
    # "pilot" for a first size that was chosen here, "given" for one that was not; "gain", "no
    # target yet"; or why to stop: "separated", "tie", "all tried".
    kind: str
    best: int | None = None  # Size of the best run so far, None where none reached the target.
    rival: int | None = None  # The untried size that is most likely to be better.
    probability: float | None = None  # That it is better by more than the margin, or None.


def next_size(
    costs: SizeCosts, tried: Sequence[FinishedRun], *, pilot: int | None = None
) -> NextSize:
    """Choose the batch size to try next, or describe why none is."""
    if not tried:
        return NextSize(pilot_size(costs), "pilot") if pilot is None else NextSize(pilot, "given")
    best = best_run(tried)
    left = sorted(size for size in untried(costs, tried) if size < smallest_broken(tried))
    if not left:
        return NextSize(None, "all tried", best and best.batch_size)
    if not any(run.updates for run in tried):
        last = tried[-1].batch_size
        nearest = min(left, key=lambda size: (abs(math.log(size / last)), size))
        return NextSize(nearest, "no target yet")
    mixture = _Mixture.of(costs, tried, left)
    if best is None or best.cost is None:
        return NextSize(left[int(np.argmin(mixture.medians()))], "no target yet")
    chances = mixture.chances(best.cost * (1 - MARGIN))
    rival = int(np.argmax(chances))
    found = (best.batch_size, left[rival], float(chances[rival]))
    if chances[rival] >= _LEAST_PROBABILITY:
        return NextSize(left[int(np.argmax(mixture.gains(best.cost)))], "gain", *found)
    may_tie = mixture.chances(best.cost * (1 + MARGIN)).max() >= _LEAST_PROBABILITY
    return NextSize(None, "tie" if may_tie else "separated", *found)


def best_run(tried: Sequence[FinishedRun]) -> FinishedRun | None:
    """Return the run that reached the target at the least cost, the smaller size of equals."""
    reached = [run for run in tried if run.cost is not None]
    return min(reached, key=lambda run: (run.cost or 0.0, run.batch_size), default=None)


def untried(costs: SizeCosts, tried: Sequence[FinishedRun]) -> set[int]:
    return costs.update_costs.keys() - {run.batch_size for run in tried}


def smallest_broken(tried: Sequence[FinishedRun]) -> float:
    """Return the smallest size that could not be trained: neither it nor a larger one is tried."""
    return min((run.batch_size for run in tried if not run.updates), default=math.inf)


def pilot_size(costs: SizeCosts) -> int:
    """Return the size that costs least above the best one, averaged over noise scales."""
    sizes = np.array(sorted(costs.update_costs), float)
    updates = np.array([costs.update_costs[int(size)] for size in sizes])
    noise = np.geomspace(sizes[0], sizes[-1], 33)[:, None]
    logs = np.log(updates * (1 + noise / sizes))
    regrets = logs - logs.min(axis=1, keepdims=True)
    return int(sizes[int(np.argmin(regrets.mean(axis=0)))])


class SizeForecast(NamedTuple):
    """What a size promises against the best one."""

    speedup: float  # The best size's cost over its own, the median.
    most_speedup: float  # The same at the end of the 95 % interval.
    gain: float  # The mean of what it would save, over what it costs.
    may_gain: bool  # By more than the margin.
    may_tie: bool  # May be no more than the margin worse.


@dataclasses.dataclass(frozen=True)
class CostForecast:
    """What every size needs to the target, by all runs so far."""

    updates: Mapping[int, float]  # S of each size, the median.
    intervals: Mapping[int, Interval]  # Of 95 %.
    critical: float  # B_crit, the median, in examples.
    critical_interval: Interval  # Of 95 %.
    _mixture: "_Mixture" = dataclasses.field(repr=False, compare=False)

    def against(self, best: int) -> dict[int, SizeForecast]:
        """Compare every size with one that reached the target."""
        mixture, sizes = self._mixture, list(self.updates)
        medians, log_means, log_halves = mixture.medians(), *mixture.logs()
        cost = float(medians[sizes.index(best)])
        least = mixture.start_cost + np.exp(log_means - log_halves) * mixture.update_costs
        better, near = (
            mixture.chances(cost * (1 + sign * MARGIN)) >= _LEAST_PROBABILITY for sign in (-1, 1)
        )
        columns = (cost / medians, cost / least, mixture.gains(cost), better, near)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return {size: SizeForecast(*row) for size, row in zip(sizes, rows, strict=True)}


def forecast_updates(costs: SizeCosts, runs: Sequence[FinishedRun]) -> CostForecast | None:
    """Forecast the updates to the target of every size, those of the runs too."""
    if not any(run.cost is not None and run.updates for run in runs):
        return None
    sizes = sorted(costs.update_costs)
    mixture = _Mixture.of(costs, runs, sizes)
    weights = mixture.weights
    low, middle, high = np.interp(
        [0.025, 0.5, 0.975], np.cumsum(weights) - weights / 2, mixture.critical_sizes
    ).tolist()
    logs = list(zip(sizes, *(column.tolist() for column in mixture.logs()), strict=True))
    return CostForecast(
        updates={size: math.exp(mean) for size, mean, _ in logs},
        intervals={size: Interval(math.exp(m - d), math.exp(m + d)) for size, m, d in logs},
        critical=middle,
        critical_interval=Interval(low, high),
        _mixture=mixture,
    )


class _Mixture(NamedTuple):
    """What sizes cost: log-normal updates for each B_crit of a grid, in arrays (parts, sizes)."""

    critical_sizes: np.ndarray
    weights: np.ndarray
    means: np.ndarray
    deviations: np.ndarray
    update_costs: np.ndarray
    start_cost: float

    @classmethod
    def of(cls, costs: SizeCosts, tried: Sequence[FinishedRun], sizes: Sequence[int]) -> "_Mixture":
        """Condition the model on the runs, and ask it for some sizes."""
        runs = [run for run in tried if run.updates]
        # B_crit on a grid, with the logarithm of what is believed of each.
        if noise := [run.noise_scale for run in runs if run.noise_scale]:
            centre, spread = float(np.mean(np.log(noise))), _RESOLVED
        elif bounds := [run.noise_at_least for run in runs if run.noise_at_least]:
            centre, spread = math.log(2 * max(bounds)), _BOUNDED
        else:
            ends = min(costs.update_costs), max(costs.update_costs)
            centre, spread = 0.5 * math.log(ends[0] * ends[1]), _UNKNOWN
        offsets = np.linspace(-3, 3, 61)
        guesses, logs = np.exp(centre + spread * offsets), -0.5 * offsets**2
        every = sorted({*sizes, *(run.batch_size for run in runs)})
        known = np.array(every, float)
        means = np.log1p(guesses[:, None] / known)
        # Of the level, and of a random walk to both sides of the pilot.
        octaves = np.log2(known / runs[0].batch_size)
        a, b = octaves[:, None], octaves
        together = np.where(a * b > 0, np.minimum(np.abs(a), np.abs(b)), 0.0)
        covariance = np.tile(_LEVEL**2 + _WALK**2 * together, (len(guesses), 1, 1))
        for run in sorted(runs, key=lambda run: run.cost is None):  # What reached the target first.
            i = every.index(run.batch_size)
            deviation = np.sqrt(covariance[:, i, i] + run.spread**2)
            off = (math.log(run.updates or 1) - means[:, i]) / deviation
            if run.cost is not None:
                logs, pull, shrink = logs - 0.5 * off**2, off, np.ones_like(off)
            else:  # The moments of a normal distribution cut off below.
                off = np.minimum(off, _FURTHEST)
                survival = special.ndtr(-off)
                pull = np.exp(-0.5 * off**2) / math.sqrt(2 * math.pi) / survival
                logs, shrink = logs + np.log(survival), pull * (pull - off)
            across = covariance[:, :, i] / deviation[:, None]
            means = means + pull[:, None] * across
            covariance -= shrink[:, None, None] * across[:, :, None] * across[:, None, :]
        weights = np.exp(logs - logs.max())
        asked = [every.index(size) for size in sizes]
        variances = np.diagonal(covariance, axis1=1, axis2=2)[:, asked]
        deviations = np.sqrt(np.maximum(variances, 0.0) + _RUN**2)
        update_costs = np.array([costs.update_costs[size] for size in sizes])
        shares = weights / weights.sum()
        return cls(guesses, shares, means[:, asked], deviations, update_costs, costs.start_cost)

    def logs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean of log S of each size, and half of its 95 % interval."""
        means = self.weights @ self.means
        spread = (self.means - means) ** 2 + self.deviations**2
        return means, _NORMAL_975 * np.sqrt(self.weights @ spread)

    def medians(self) -> np.ndarray:
        return self.start_cost + np.exp(self.weights @ self.means) * self.update_costs

    def chances(self, cost: float) -> np.ndarray:
        """Return the probability that each size costs less."""
        room = max(cost - self.start_cost, 1e-12)
        z = (np.log(room / self.update_costs) - self.means) / self.deviations
        return self.weights @ special.ndtr(z)

    def gains(self, cost: float) -> np.ndarray:
        """Return the mean of what each size would save, below 0 cut off, over what it costs."""
        points = np.linspace(-3, 3, 41)
        shares = np.exp(-0.5 * points**2)
        logs = self.means[..., None] + self.deviations[..., None] * points
        costs = self.start_cost + np.exp(logs) * self.update_costs[:, None]
        saved = np.maximum(cost - costs, 0.0) @ (shares / shares.sum())
        return self.weights @ saved / self.medians()
