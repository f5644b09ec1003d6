"""Which batch size to try next, when the model of goodput tells what others would cost.

A run of batch size B costs (McCandlish et al. 2018, arXiv:1812.06162, equation 2.11)

    T(B) = c + S(B) t(B)        S(B) = S_min (1 + B_crit / B)

with c what a run costs before it moves, t what an update costs, measured for every size, and S the
updates to the target. The noise scale of a first run, the pilot, is a guess of B_crit, and its
updates give S_min. What later runs needed corrects both. The curve is an idealisation, so
log S(B) may leave it by a random walk that starts at the pilot and grows with the distance in
octaves: neighbours are told best.

All of it is a normal model of log S for each B_crit on a grid, weighted by how well it explains
the runs so far. A size is worth trying while it may, with some probability, be better than the best
run by more than a margin; the one with the largest expected gain comes next.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kbatch.analysis.intervals import Interval

# Smaller gains than this share of the best cost are not looked for.
MARGIN = 0.05
# Sizes are worth trying down to this probability of a gain by more than the margin.
_LEAST_PROBABILITY = 0.15
# Standard deviations, in units of log S: of a run, for another seed and for whole epochs; of the
# walk, per octave; of a guess of B_crit by a resolved noise scale, by a bound, and without one.
_RUN, _WALK = 0.08, 0.12
_RESOLVED, _BOUNDED, _UNKNOWN = 0.7, 1.0, 1.6
# A run that missed the target is taken to have needed twice what it had, give or take.
_MISSED_FACTOR, _MISSED = 2.0, 0.5
# Of the level of log S, about which nothing is known.
_LEVEL = 10.0
_NORMAL_975 = 1.96


@dataclasses.dataclass(frozen=True)
class SizeCosts:
    """What updates cost, before anything is trained.

    Attributes:
        update_costs: t, of an update of each batch size, such as seconds.
        start_cost: c, of a run before its first steady update, likewise.
    """

    update_costs: Mapping[int, float]
    start_cost: float = 0.0


@dataclasses.dataclass(frozen=True)
class Tried:
    """A run that ended.

    Attributes:
        batch_size: In examples.
        cost: T, what it took to come to the target; None where it did not.
        updates: Its updates: to the target, or in all; None where it could not be trained.
        noise_scale: Gradient noise scale in it, in examples; None if unresolved.
        noise_at_least: Lower bound of that, or None.
    """

    batch_size: int
    cost: float | None
    updates: float | None
    noise_scale: float | None = None
    noise_at_least: float | None = None


class NextSize(NamedTuple):
    """What to do next.

    Attributes:
        batch_size: Size to try, None to stop.
        kind: `"pilot"` for a first size that was chosen here, `"given"` for one that was not;
            `"gain"`, `"no target yet"`; or why to stop: `"separated"`, `"tie"`, `"all tried"`.
        best: Size of the best run so far, None where none came to the target.
        rival: The untried size that is most likely to be better, None without one.
        probability: Probability that it is better by more than the margin, None without a model.
    """

    batch_size: int | None
    kind: str
    best: int | None = None
    rival: int | None = None
    probability: float | None = None


def next_size(costs: SizeCosts, tried: Sequence[Tried], *, pilot: int | None = None) -> NextSize:
    """Chooses the batch size to try next, or says why none is.

    Args:
        costs: What updates of each size cost; these are the sizes to choose from.
        tried: The runs so far, in order, at most one a size.
        pilot: Size to begin with, None for the one that suits most noise scales.

    Returns:
        The size, or the reason to stop.
    """
    left = _left(costs, tried)
    if not tried:
        return NextSize(pilot_size(costs), "pilot") if pilot is None else NextSize(pilot, "given")
    reached = [run for run in tried if run.cost is not None]
    best = min(reached, key=lambda run: (run.cost or 0.0, run.batch_size), default=None)
    if not left:
        return NextSize(None, "all tried", best and best.batch_size)
    told = [run for run in tried if run.updates]
    if not told:
        return NextSize(_nearest(left, tried[-1].batch_size), "no target yet")
    outlook = _outlook(costs, told, left)
    if best is None or best.cost is None:
        return NextSize(left[int(np.argmin(outlook.medians()))], "no target yet")
    chances = outlook.chances(best.cost * (1 - MARGIN))
    rival = int(np.argmax(chances))
    found = (best.batch_size, left[rival], float(chances[rival]))
    if chances[rival] >= _LEAST_PROBABILITY:
        return NextSize(left[int(np.argmax(outlook.gains(best.cost)))], "gain", *found)
    may_tie = outlook.chances(best.cost * (1 + MARGIN)).max() >= _LEAST_PROBABILITY
    return NextSize(None, "tie" if may_tie else "separated", *found)


@dataclasses.dataclass(frozen=True)
class UpdatesForecast:
    """What sizes need to the target, by all runs so far.

    Attributes:
        updates: S of each size, the median.
        intervals: The 95 % interval of each.
        critical: B_crit, the median, in examples.
        critical_interval: Its 95 % interval.
        tied: Sizes, ascending, that may cost no more than 5 % above the best median, of those up to
            the largest that was asked for.
    """

    updates: Mapping[int, float]
    intervals: Mapping[int, Interval]
    critical: float
    critical_interval: Interval
    tied: tuple[int, ...]


def forecast_updates(
    costs: SizeCosts, runs: Sequence[Tried], *, largest: int | None = None
) -> UpdatesForecast | None:
    """Forecasts the updates to the target of every size, those of the runs too.

    Args:
        costs: What updates of each size cost; these are the sizes.
        runs: The runs so far, the pilot first.
        largest: The largest size that may be `tied`, None for all.

    Returns:
        The forecast; None where no run came to the target.
    """
    told = [run for run in runs if run.updates]
    if not any(run.cost is not None for run in told):
        return None
    sizes = sorted(costs.update_costs)
    outlook = _outlook(costs, told, sizes)
    guesses, _ = _critical_sizes(costs, told)
    low, middle, high = (_quantile(guesses, outlook.weights, p) for p in (0.025, 0.5, 0.975))
    means = outlook.weights @ outlook.means
    spread = outlook.weights @ ((outlook.means - means) ** 2 + outlook.deviations**2)
    half = _NORMAL_975 * np.sqrt(spread)
    allowed = [largest is None or size <= largest for size in sizes]
    medians = [m for m, a in zip(outlook.medians(), allowed, strict=True) if a]
    chances = outlook.chances(float(min(medians, default=0.0)) * (1 + MARGIN))
    return UpdatesForecast(
        updates=dict(zip(sizes, np.exp(means).tolist(), strict=True)),
        intervals={
            size: Interval(math.exp(mean - d), math.exp(mean + d))
            for size, mean, d in zip(sizes, means, half, strict=True)
        },
        critical=middle,
        critical_interval=Interval(low, high),
        tied=tuple(
            size
            for size, chance, may in zip(sizes, chances, allowed, strict=True)
            if may and chance >= _LEAST_PROBABILITY
        ),
    )


def pilot_size(costs: SizeCosts) -> int:
    """Gives the size that costs least above the best one, averaged over noise scales.

    They range from the smallest to the largest size, evenly in their logarithm.
    """
    sizes = np.array(sorted(costs.update_costs), float)
    updates = np.array([costs.update_costs[int(size)] for size in sizes])
    noise = np.geomspace(sizes[0], sizes[-1], 33)[:, None]
    logs = np.log(updates * (1 + noise / sizes))
    regrets = logs - logs.min(axis=1, keepdims=True)
    return int(sizes[int(np.argmin(regrets.mean(axis=0)))])


def _quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    return float(np.interp(share, np.cumsum(weights) - weights / 2, values))


def _left(costs: SizeCosts, tried: Sequence[Tried]) -> list[int]:
    """Lists the sizes that may still be tried: none above one that could not be trained."""
    taken = {run.batch_size for run in tried}
    broken = min((run.batch_size for run in tried if not run.updates), default=None)
    sizes = [size for size in sorted(costs.update_costs) if size not in taken]
    return [size for size in sizes if broken is None or size < broken]


def _nearest(sizes: Sequence[int], size: int) -> int:
    return min(sizes, key=lambda other: (abs(math.log(other / size)), other))


class _Outlook(NamedTuple):
    """What untried sizes would cost: a mixture of log-normal updates, one part a B_crit.

    Attributes:
        weights: Of shape (parts,).
        means: Of log S, of shape (parts, sizes).
        deviations: Likewise.
        update_costs: Of shape (sizes,).
        start_cost: Of a run.
    """

    weights: np.ndarray
    means: np.ndarray
    deviations: np.ndarray
    update_costs: np.ndarray
    start_cost: float

    def medians(self) -> np.ndarray:
        """Gives the typical cost of each size."""
        return self.start_cost + np.exp(self.weights @ self.means) * self.update_costs

    def chances(self, cost: float) -> np.ndarray:
        """Gives the probability that each size costs less."""
        room = max(cost - self.start_cost, 1e-12)
        z = (np.log(room / self.update_costs) - self.means) / self.deviations
        return self.weights @ _normal(z)

    def gains(self, cost: float) -> np.ndarray:
        """Gives the mean of what each size would save, below 0 cut off, over what it costs."""
        points = np.linspace(-3, 3, 41)
        shares = np.exp(-0.5 * points**2)
        logs = self.means[..., None] + self.deviations[..., None] * points
        costs = self.start_cost + np.exp(logs) * self.update_costs[:, None]
        saved = np.maximum(cost - costs, 0.0) @ (shares / shares.sum())
        return self.weights @ saved / self.medians()


def _outlook(costs: SizeCosts, runs: Sequence[Tried], sizes: Sequence[int]) -> _Outlook:
    guesses, prior = _critical_sizes(costs, runs)
    tried, untried = (np.array(s, float) for s in ([r.batch_size for r in runs], list(sizes)))
    needed = np.array(
        [r.updates if r.cost is not None else _MISSED_FACTOR * (r.updates or 1) for r in runs]
    )
    noise = np.array([_RUN if r.cost is not None else _MISSED for r in runs])
    covariance = _covariance(tried, tried, tried[0]) + np.diag(noise**2)
    across = _covariance(untried, tried, tried[0])
    gain = np.linalg.solve(covariance, across.T).T
    variances = np.diag(_covariance(untried, untried, tried[0])) - np.sum(gain * across, axis=1)
    residuals = np.log(needed) - np.log1p(guesses[:, None] / tried)
    logs = prior - 0.5 * np.sum(residuals * np.linalg.solve(covariance, residuals.T).T, axis=1)
    weights = np.exp(logs - logs.max())
    return _Outlook(
        weights / weights.sum(),
        np.log1p(guesses[:, None] / untried) + residuals @ gain.T,
        np.broadcast_to(np.sqrt(variances + _RUN**2), (len(guesses), len(untried))),
        np.array([costs.update_costs[size] for size in sizes]),
        costs.start_cost,
    )


def _critical_sizes(costs: SizeCosts, runs: Sequence[Tried]) -> tuple[np.ndarray, np.ndarray]:
    """Gives B_crit on a grid with the logarithm of what is believed of each."""
    known = [run.noise_scale for run in runs if run.noise_scale]
    bounds = [run.noise_at_least for run in runs if run.noise_at_least]
    sizes = sorted(costs.update_costs)
    if known:
        centre, spread = float(np.mean(np.log(known))), _RESOLVED
    elif bounds:
        centre, spread = math.log(2 * max(bounds)), _BOUNDED
    else:
        centre, spread = 0.5 * math.log(sizes[0] * sizes[-1]), _UNKNOWN
    offsets = np.linspace(-3, 3, 61)
    return np.exp(centre + spread * offsets), -0.5 * offsets**2


def _covariance(first: np.ndarray, second: np.ndarray, pilot: float) -> np.ndarray:
    """Gives the covariance of the level and of a random walk to both sides of the pilot."""
    a, b = np.log2(first / pilot)[:, None], np.log2(second / pilot)
    together = np.where(a * b > 0, np.minimum(np.abs(a), np.abs(b)), 0.0)
    return _LEVEL**2 + _WALK**2 * together


def _normal(z: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda value: 0.5 * math.erfc(-value / math.sqrt(2)))(z)
