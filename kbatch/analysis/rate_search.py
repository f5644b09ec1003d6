"""What is known of pairs of batch size and learning rate, and which untried one promises the most.

With a the factor of the learning rate relative to a rule (linear or sqrt) the objective is

    y(a, B) = f(u, log B) + noise        u = log a - q log B

where f is a Gaussian process and q how much steeper than the rule the best rate grows: the slope
of log rate against log B is p = p_rule + q. The process has a constant and a slope in log B, and
squared-exponential covariance in both; q, length scales, signal and noise are averaged over a grid
by their marginal likelihood (Rasmussen and Williams 2006, sections 2.7 and 5.4.1).

What lies far below the best value matters little, and a cliff would hide the top: the loss
against it is compressed, c log(1 + loss / c). A run that diverged counts as such a loss, and no
larger rate of its size is tried.

A pair is worth what a run of it is expected to raise the best mean of its size by, the knowledge
gradient (Frazier et al. 2009, doi:10.1287/ijoc.1080.0314), times the probability that the size is
the best or the answer: of the sizes within the tolerance of the best, each at its best rate, those
that train about as fast as the fastest, and of these the smallest.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kbatch.analysis.judge import AS_FAST
from kbatch.analysis.run_table import Pair, Run

# Losses are compressed from this many units on; one of these stands for no value at all.
_COMPRESSED, _NO_VALUE = 3.0, 10.0
# The grid of hyperparameters: q; length in octaves of rate and of size; deviations in units.
_STEEPER = np.arange(-1.0, 1.01, 0.25)
_RATE_LENGTHS, _SIZE_LENGTH = (0.75, 1.5, 3.0), 8.0
_SIGNALS, _NOISES = (3.0, 8.0), (0.15, 0.4, 1.0, 2.0)
_STEEPER_SPREAD, _LEVEL, _SIZE_SLOPE = 0.4, 10.0, 1.0


class RateModel(NamedTuple):
    """What is known of pairs: their values' means and covariance, in units of the model."""

    pairs: tuple[tuple[int, float], ...]
    counts: np.ndarray  # Executions of each that have a value.
    means: np.ndarray
    covariance: np.ndarray
    noise: float  # Variance of one execution.
    tolerance: float

    @classmethod
    def of(
        cls,
        runs: Sequence[Run],
        pairs: Sequence[tuple[int, float]],
        *,
        larger_is_better: bool,
        tolerance: float,
    ) -> "RateModel | None":
        """Condition the process on the runs, None where none of the pairs has a value."""
        sign = 1.0 if larger_is_better else -1.0
        found: dict[tuple[int, float], list[float]] = {}
        for run in runs:
            if run.ended in ("completed", "diverged"):
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
        model = tuple(pairs), counts, mean[:kept], covariance[:kept, :kept]
        margin = float(_COMPRESSED * np.log1p(tolerance / unit / _COMPRESSED))
        return cls(*model, float(shares @ noise[parts] ** 2), margin)

    def with_pending(self, pairs: Sequence[tuple[int, float]]) -> "RateModel":
        """Add pending runs at their expected value: means stay, variances shrink."""
        counts, covariance = self.counts.copy(), self.covariance
        for i in (self.pairs.index(pair) for pair in pairs if pair in self.pairs):
            counts[i] += 1
            across = covariance[:, i]
            covariance = covariance - np.outer(across, across) / (across[i] + self.noise)
        return self._replace(counts=counts, covariance=covariance)

    def chances(
        self, seconds: Mapping[int, float], pairs: Sequence[Pair]
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Return the probabilities of each size to be the answer, and to be the best."""
        at = [self.pairs.index(pair) for pair in pairs]
        sizes = np.array([pair[0] for pair in pairs])
        every = np.unique(sizes)
        draws = self._draws()[:, at]
        tops = np.stack([draws[:, sizes == size].max(axis=1) for size in every], axis=1)
        near = tops >= tops.max(axis=1, keepdims=True) - self.tolerance
        costs = np.where(near, [seconds[size] for size in every.tolist()], math.inf)
        fast = costs <= AS_FAST * costs.min(axis=1, keepdims=True)
        answers = np.bincount(fast.argmax(axis=1), minlength=len(every)) / len(tops)
        bests = np.bincount(tops.argmax(axis=1), minlength=len(every)) / len(tops)
        return dict(zip(every.tolist(), answers.tolist(), strict=True)), dict(
            zip(every.tolist(), bests.tolist(), strict=True)
        )

    def gains(self, weights: Mapping[int, float]) -> np.ndarray:
        """Return what a run of each pair promises, each size counted with its weight."""
        sizes = np.array([size for size, _ in self.pairs])
        return sum(
            (
                weight * self._gains_of(np.flatnonzero(sizes == size))
                for size, weight in weights.items()
            ),
            np.zeros(len(sizes)),
        )

    def gain_of_repeats(self, pairs: Sequence[Pair]) -> float:
        """Return by how much one more run of some of `pairs` is expected to raise the best."""
        own = np.array([self.pairs.index(pair) for pair in pairs])
        return float(self._gains_of(own)[own].max())

    def _gains_of(self, own: np.ndarray) -> np.ndarray:
        """Return by how much a run of each pair is expected to raise the best mean of `own`."""
        points = np.linspace(-2.5, 2.5, 15)
        shares = np.exp(-0.5 * points**2)
        deviations = np.sqrt(np.diagonal(self.covariance) + self.noise)
        shifts = self.covariance[own] / deviations  # A column for each pair that is run.
        after = np.max(self.means[own][:, None, None] + shifts[:, :, None] * points, axis=0)
        return after @ (shares / shares.sum()) - self.means[own].max()

    def _draws(self) -> np.ndarray:
        values, vectors = np.linalg.eigh(self.covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        normal = np.random.default_rng(0).standard_normal((1000, len(self.means)))
        return self.means + normal @ root.T
