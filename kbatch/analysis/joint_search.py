"""Which pair of batch size and learning rate to try next, while the best one is open.

With a the factor of the learning rate relative to a rule (linear or sqrt) the objective is

    y(a, B) = f(u, log B) + noise        u = log a - q log B

where f is a Gaussian process and q how much steeper than the rule the best rate grows: the slope
of log rate against log B is p = p_rule + q. The process has a constant and a slope in log B, and
squared-exponential covariance in both; q, length scales, signal and noise are averaged over a grid
by their marginal likelihood (Rasmussen and Williams 2006, sections 2.7 and 5.4.1).

What lies far below the best value matters little, and a cliff would hide the top: the loss
against it is compressed, c log(1 + loss / c). A run that diverged counts as such a loss, and no
larger rate of its size is tried.

Each pair is run once where that promises the most, by the knowledge gradient (Frazier et al. 2009,
doi:10.1287/ijoc.1080.0314). When no pair is likely to be better by more than the tolerance, the
best pair of each size that may still be the best is repeated, so that these can be compared.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kbatch.analysis.intervals import Interval

# The hyperparameter of a search that holds the factor of the learning rate.
FACTOR_NAME = "learning_rate_factor"
# Executions a batch size on average, where no number is given.
EXECUTIONS_PER_SIZE = 6
# Executions of each pair that is compared at the end.
FINAL_EXECUTIONS = 3
# Factors of the learning rate that are tried around the rule's, in octaves.
FACTORS = tuple(2.0**octave for octave in range(-5, 6))
# A pair is worth looking for down to this probability that one is better by the tolerance.
_LEAST_PROBABILITY = 0.05
# Losses are compressed from this many units on; one of these stands for no value at all.
_COMPRESSED, _NO_VALUE = 3.0, 10.0
# The grid of hyperparameters: q; length in octaves of rate and of size; deviations in units.
_STEEPER = np.arange(-1.0, 1.01, 0.25)
_RATE_LENGTHS, _SIZE_LENGTH = (0.75, 1.5, 3.0), 8.0
_SIGNALS, _NOISES = (3.0, 8.0), (0.15, 0.4, 1.0, 2.0)
_STEEPER_SPREAD, _LEVEL, _SIZE_SLOPE = 0.4, 10.0, 1.0


class PairRun(NamedTuple):
    """One execution of a pair of batch size and learning rate."""

    batch_size: int
    factor: float  # Of the learning rate, relative to the rule.
    value: float | None  # Objective, None where there is none.
    outcome: str = "completed"  # Or "diverged", "out_of_memory", "failed" for other reasons.


class NextPair(NamedTuple):
    pair: tuple[int, float] | None  # Batch size and factor to run, None to stop.
    # "start", "gain", "final" for a repeat; or why to stop: "settled", "budget", "all tried".
    kind: str
    best: tuple[int, float] | None = None  # The best pair so far by the model.
    probability: float | None = None  # That another pair is better by more than the tolerance.


def next_pair(
    batch_sizes: Sequence[int],
    factors: Sequence[float],
    runs: Sequence[PairRun],
    *,
    larger_is_better: bool,
    tolerance: float,
    most: int,
    pending: Sequence[tuple[int, float]] = (),
) -> NextPair:
    """Choose the pair to run next of `most` in all; the `pending` count as the model expects."""
    left = [
        (b, a)
        for b in batch_sizes
        for a in factors
        if not any(
            (run.outcome == "out_of_memory" and b >= run.batch_size)
            or (run.outcome == "failed" and b == run.batch_size)
            or (run.outcome == "diverged" and b == run.batch_size and a >= run.factor)
            for run in runs
        )
    ]
    tried = [*((run.batch_size, run.factor) for run in runs), *pending]
    # It begins with the rule's rate at both ends and in the middle, and around that.
    rule = min(range(len(factors)), key=lambda i: abs(math.log(factors[i])))
    middle = batch_sizes[len(batch_sizes) // 2]
    opening = [(size, factors[rule]) for size in (middle, batch_sizes[0], batch_sizes[-1])]
    opening += [(middle, factors[i]) for i in (max(0, rule - 2), min(len(factors) - 1, rule + 2))]
    begun = next((pair for pair in opening if pair in left and pair not in tried), None)
    if begun is not None and len(tried) < most:
        return NextPair(begun, "start")
    model = PairModel.of(runs, left, larger_is_better=larger_is_better, tolerance=tolerance)
    if model is None:
        untried = [pair for pair in left if pair not in tried]
        more = untried and not pending and len(runs) < most
        return NextPair(untried[0], "start") if more else NextPair(None, "all tried")
    model = model.with_pending(pending)
    best, chance = model.pairs[model.best], model.chance_of_better()
    if len(tried) >= most:
        return NextPair(None, "budget", best, chance)
    finals = model.finals()
    repeats = [pair for pair in finals if tried.count(pair) < FINAL_EXECUTIONS]
    needed = sum(FINAL_EXECUTIONS - tried.count(pair) for pair in repeats)
    untried = model.untried_by_gain()
    if untried and chance >= _LEAST_PROBABILITY and len(tried) + needed < most:
        return NextPair(untried[0], "gain", best, chance)
    if repeats:
        fewest = min(repeats, key=lambda pair: (tried.count(pair), finals.index(pair)))
        return NextPair(fewest, "final", best, chance)
    return NextPair(None, "settled" if untried else "all tried", best, chance)


class PairModel(NamedTuple):
    """What is known of pairs: their values' means and covariance, in units of the model."""

    pairs: tuple[tuple[int, float], ...]
    counts: np.ndarray  # Executions of each that have a value.
    means: np.ndarray
    covariance: np.ndarray
    noise: float  # Variance of one execution.
    tolerance: float
    weights: np.ndarray  # Of each q on its grid.

    @classmethod
    def of(
        cls,
        runs: Sequence[PairRun],
        pairs: Sequence[tuple[int, float]],
        *,
        larger_is_better: bool,
        tolerance: float,
    ) -> "PairModel | None":
        """Condition the process on the runs, None where none of the pairs has a value."""
        sign = 1.0 if larger_is_better else -1.0
        found: dict[tuple[int, float], list[float]] = {}
        for run in runs:
            if run.outcome in ("completed", "diverged"):
                value = -math.inf if run.value is None else sign * run.value
                found.setdefault((run.batch_size, run.factor), []).append(value)
        means = np.array([np.mean(values) for values in found.values()])
        known = means[np.isfinite(means)]
        every = [*pairs, *(pair for pair in found if pair not in pairs)]
        tried = [pair for pair in pairs if pair in found and np.isfinite(np.mean(found[pair]))]
        if not tried:
            return None
        # A unit that neither the noise nor the shape of the objective is far from.
        unit = max(tolerance, (known.max() - np.median(known)) / 8, 1e-12)
        losses = np.minimum((known.max() - means) / unit, _NO_VALUE)
        values = -_COMPRESSED * np.log1p(losses / _COMPRESSED)
        at = np.array([every.index(pair) for pair in found])
        counts = np.zeros(len(every))
        counts[at] = [len(each) for each in found.values()]

        sizes, rates = np.log2(np.array(every)).T
        sizes = sizes - sizes.mean()
        # A covariance for each q, length and signal, without noise.
        shapes = np.meshgrid(_STEEPER, _RATE_LENGTHS, indexing="ij")
        steeper, length = (axis.ravel()[:, None, None] for axis in shapes)
        u = rates - steeper[:, :, 0] * sizes
        du, dv = u[:, :, None] - u[:, None, :], np.subtract.outer(sizes, sizes)
        bumps = np.exp(-0.5 * ((du / length) ** 2 + (dv / _SIZE_LENGTH) ** 2))
        lines = _LEVEL**2 + _SIZE_SLOPE**2 * np.multiply.outer(sizes, sizes)
        smooth = np.square(_SIGNALS)[:, None, None] * bumps[:, None] + lines
        smooth = smooth.reshape(-1, *lines.shape)
        q = np.repeat(steeper.ravel(), len(_SIGNALS) * len(_NOISES))
        noise = np.tile(_NOISES, len(smooth))

        # With the values as a last row, one factorisation also solves `lower @ off = values`.
        last, places = len(at), np.arange(len(at))
        observed = np.zeros((len(noise), last + 1, last + 1))
        observed[:, :last, :last] = np.repeat(smooth[:, at][:, :, at], len(_NOISES), axis=0)
        observed[:, places, places] += np.multiply.outer(noise**2, 1 / counts[at])
        observed[:, last, :last], observed[:, last, last] = values, 1e9
        factor = np.linalg.cholesky(observed)
        lower, off = factor[:, :last, :last], factor[:, last, :last]
        logs = -0.5 * np.sum(off**2, axis=1) - 0.5 * (q / _STEEPER_SPREAD) ** 2
        logs -= np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(axis=1)
        shares = np.exp(logs - logs.max())
        shares /= shares.sum()
        weights = shares.reshape(len(_STEEPER), -1).sum(axis=1)
        # Parts without weight change nothing.
        parts = np.argsort(-shares)[:40]
        shares = shares[parts] / shares[parts].sum()
        whole = smooth[parts // len(_NOISES)]
        across = np.linalg.solve(lower[parts], whole[:, at])
        part_means = np.matmul(across.transpose(0, 2, 1), off[parts][:, :, None])[:, :, 0]
        mean = shares @ part_means
        apart = part_means - mean
        weighted = (np.sqrt(shares)[:, None, None] * across).reshape(-1, len(every))
        covariance = np.tensordot(shares, whole, 1) - weighted.T @ weighted
        covariance += (shares[:, None] * apart).T @ apart
        kept = len(pairs)
        counts = np.where([pair in tried for pair in pairs], counts[:kept], 0.0)
        known = tuple(pairs), counts, mean[:kept], covariance[:kept, :kept]
        margin = float(_COMPRESSED * np.log1p(tolerance / unit / _COMPRESSED))
        return cls(*known, float(shares @ noise[parts] ** 2), margin, weights)

    def with_pending(self, pairs: Sequence[tuple[int, float]]) -> "PairModel":
        """Add pending runs at their expected value: means stay, variances shrink."""
        counts, covariance = self.counts.copy(), self.covariance
        for i in (self.pairs.index(pair) for pair in pairs if pair in self.pairs):
            counts[i] += 1
            across = covariance[:, i]
            covariance = covariance - np.outer(across, across) / (across[i] + self.noise)
        return self._replace(counts=counts, covariance=covariance)

    def slope(self, of_rule: float) -> tuple[float, Interval]:
        """Return how log rate grows with log size, and its 95 % interval, from the rule's slope."""
        # Each weight is spread over its part of the grid.
        step = _STEEPER[1] - _STEEPER[0]
        ends = np.append(_STEEPER, _STEEPER[-1] + step) - step / 2
        below = np.append(0.0, np.cumsum(self.weights))
        low, middle, high = of_rule + np.interp([0.025, 0.5, 0.975], below, ends)
        return float(middle), Interval(float(low), float(high))

    @property
    def best(self) -> int:
        """The index of the best pair that was tried."""
        return int(np.argmax(np.where(self.counts > 0, self.means, -np.inf)))

    def chance_of_better(self) -> float:
        """Return the probability that some pair is better than the best by the tolerance."""
        draws = self._draws()
        return float(np.mean(draws.max(axis=1) - draws[:, self.best] > self.tolerance))

    def untried_by_gain(self) -> list[tuple[int, float]]:
        """Return the untried pairs, the one whose run promises the largest gain first."""
        points = np.linspace(-2.5, 2.5, 15)
        shares = np.exp(-0.5 * points**2)
        deviations = np.sqrt(np.diagonal(self.covariance) + self.noise)
        shifts = self.covariance / deviations  # Of all pairs, a column for each that is run.
        after = np.max(self.means[:, None, None] + shifts[:, :, None] * points, axis=0)
        gains = after @ (shares / shares.sum()) - self.means.max()
        order = np.argsort(-gains, kind="stable")
        return [self.pairs[i] for i in order if not self.counts[i]]

    def finals(self) -> list[tuple[int, float]]:
        """Return the best pair of each size that may be as good as the best, at least two."""
        tried = np.where(self.counts > 0, self.means, -np.inf)
        draws, order = self._draws(), np.argsort(-tried, kind="stable")
        found: dict[int, tuple[int, float]] = {}
        for i in order[: int((self.counts > 0).sum())]:
            size = self.pairs[i][0]
            near = draws[:, i] >= draws[:, self.best] - self.tolerance
            if size not in found and (len(found) < 2 or np.mean(near) >= _LEAST_PROBABILITY):
                found[size] = self.pairs[i]
        return list(found.values())

    def _draws(self) -> np.ndarray:
        values, vectors = np.linalg.eigh(self.covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        normal = np.random.default_rng(0).standard_normal((400, len(self.means)))
        return self.means + normal @ root.T
