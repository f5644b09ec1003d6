"""The gradient noise scale B_noise = tr(Sigma) / |G|^2, with an interval.

McCandlish et al. (2018), arXiv:1812.06162, equation 2.9, the simple noise scale. Both moments
are averaged over steps first and divided last. Neighbouring steps resemble each other while
training moves, and so do the means of neighbouring epochs. So both are averaged in blocks, and the
interval is Fieller's for the means of the blocks. A block is at least as long as the cube root of
the number of steps (Flegal and Jones 2010, Ann. Stat. 38, 1034-1070), and as 2 tau - 1 for

    tau = (1 + rho) / (1 - rho)        the correlation time of an AR(1) process

where rho is the correlation of neighbours, corrected for its bias in short series (Marriott and
Pope 1954, Biometrika 41, 390-402). There are three blocks at least, so a short series that is
strongly correlated still has an interval that is too narrow.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kbatch.analysis.intervals import FEWEST_VALUES, Interval
from kbatch.analysis.moments import gradient_moments
from kbatch.analysis.ratio import ratio_of_means

# A correlation of neighbours that is estimated as larger is not told from 1.
_MOST_CORRELATED = 0.95


@dataclasses.dataclass(frozen=True)
class NoiseScale:
    """The gradient noise scale of a stretch of training.

    Attributes:
        value: B_noise, in examples; None when unresolved, that is when |G|^2 is not
            distinguishable from 0.
        interval: Its 95 % interval, in examples; None when unresolved.
        at_least: Lower bound with 97.5 % confidence, in examples. An unresolved scale has one
            too when the gradients are mostly noise; None when there is none.
        variance: Mean estimate of tr(Sigma), in squared gradient units; None without a step.
        squared_norm: Mean estimate of |G|^2, in squared gradient units; None without a step.
        measurements: Steps, or epochs, behind it.
    """

    value: float | None
    interval: Interval | None
    at_least: float | None
    variance: float | None
    squared_norm: float | None
    measurements: int


def gradient_noise_scale(
    micro_sq_norms: ArrayLike,
    batch_sq_norms: ArrayLike,
    *,
    batch_size: ArrayLike,
    accumulation_steps: ArrayLike,
) -> NoiseScale:
    """Estimates the gradient noise scale from the squared norms of accumulated updates.

    It grows during training: give the steps of the late half, or of stretches one by one.
    Steps with a norm that is not finite and steps of a single micro-batch are skipped.

    Example:

    >>> gradient_noise_scale([3.0, 3.2, 2.8], [1.5, 1.7, 1.6], batch_size=64,
    ...                      accumulation_steps=4).value
    26.35

    Args:
        micro_sq_norms: m of every step, the mean of |g_k|^2 weighted by the examples behind g_k.
        batch_sq_norms: M of every step, the squared norm of its gradient before clipping.
        batch_size: N, the examples behind a step: one number or one a step.
        accumulation_steps: K, the micro-batches of a step: one number or one a step.

    Returns:
        The noise scale, unresolved for fewer than three steps.

    Raises:
        ValueError: If the shapes differ, no step was split, or numbers contradict each other.
    """
    moments = gradient_moments(
        micro_sq_norms,
        batch_sq_norms,
        batch_size=batch_size,
        accumulation_steps=accumulation_steps,
    )
    steps = len(moments.variance)
    run = _Run(moments.variance, moments.squared_norm, np.ones(steps))
    return _noise_scale([run], shortest=max(1, int(steps ** (1 / 3))))


def noise_scale_of_epochs(
    variances: ArrayLike, squared_norms: ArrayLike, *, weights: ArrayLike = 1.0
) -> NoiseScale:
    """Estimates the gradient noise scale of the late half of training from means by epoch.

    The late half is at least three epochs; an epoch without a measured update (NaN) is left out
    before it is cut.

    Args:
        variances: Mean estimate of tr(Sigma) of every epoch, `gradient_variance` in kbatch's
            epoch metrics.
        squared_norms: Mean estimate of |G|^2 of every epoch, `gradient_squared_norm` there.
        weights: Measured updates of an epoch: one number or one an epoch.

    Returns:
        The noise scale, unresolved for fewer than three epochs.

    Raises:
        ValueError: If the shapes differ or a weight is not positive.
    """
    return noise_scale_of_runs([(variances, squared_norms, weights)])


def noise_scale_of_runs(runs: Sequence[tuple[ArrayLike, ArrayLike, ArrayLike]]) -> NoiseScale:
    """Estimates the gradient noise scale of the late halves of several runs together.

    All their late epochs make one estimate: what differs between runs widens the interval as what
    differs between epochs does.

    Args:
        runs: Variances, squared norms and weights of each run, one at least, as
            `noise_scale_of_epochs` takes them.

    Returns:
        The noise scale, unresolved for fewer than three epochs in all.

    Raises:
        ValueError: If the shapes differ or a weight is not positive.
    """
    return _noise_scale([_late_half(*run) for run in runs])


class _Run(NamedTuple):
    """Consecutive steps or epochs: tr(Sigma), |G|^2 and a weight of each."""

    variances: np.ndarray
    squared_norms: np.ndarray
    weights: np.ndarray

    def blocks(self, number: int) -> "_Run":
        """Average so many stretches, about as long as each other."""
        count = len(self.weights)
        starts = np.arange(number) * count // number
        weights = np.add.reduceat(self.weights, starts)
        variances = np.add.reduceat(self.variances * self.weights, starts) / weights
        squared_norms = np.add.reduceat(self.squared_norms * self.weights, starts) / weights
        return _Run(variances, squared_norms, weights)


def _late_half(variances: ArrayLike, squared_norms: ArrayLike, weights: ArrayLike) -> _Run:
    pairs = [np.asarray(variances, float), np.asarray(squared_norms, float)]
    counts = np.asarray(weights, float)
    if pairs[0].ndim != 1 or pairs[0].shape != pairs[1].shape:
        raise ValueError(
            "`variances` and `squared_norms` must have one value an epoch each. Received: "
            f"shapes {pairs[0].shape} and {pairs[1].shape}."
        )
    if counts.shape not in ((), pairs[0].shape) or not np.all(np.isfinite(counts) & (counts > 0)):
        raise ValueError(
            f"`weights` must be a positive number or one for each of the {len(pairs[0])} epochs. "
            f"Received: weights={weights}."
        )
    known = np.flatnonzero(np.isfinite(pairs[0]) & np.isfinite(pairs[1]))
    late = known[-max(FEWEST_VALUES, (len(known) + 1) // 2) :]
    return _Run(pairs[0][late], pairs[1][late], np.broadcast_to(counts, pairs[0].shape)[late])


def _noise_scale(runs: Sequence[_Run], *, shortest: int = 1) -> NoiseScale:
    runs = [run for run in runs if len(run.weights)]
    if not runs:
        return NoiseScale(None, None, None, None, None, 0)
    variances, squared_norms, weights = _joined(_cut(runs, max(shortest, _block_length(runs))))
    ratio = ratio_of_means(variances, squared_norms, weights=weights)
    return NoiseScale(
        ratio.value,
        ratio.interval,
        ratio.at_least,
        variance=float(np.average(variances, weights=weights)),
        squared_norm=float(np.average(squared_norms, weights=weights)),
        measurements=sum(len(run.weights) for run in runs),
    )


def _cut(runs: Sequence[_Run], length: int) -> list[_Run]:
    """Cut each run into blocks of a length, or shorter ones for three in all."""
    counts = [len(run.weights) for run in runs]
    numbers = [max(1, count // length) for count in counts]
    for parts in (2, 3):
        if sum(numbers) < FEWEST_VALUES:
            numbers = [min(count, max(1, count * parts // max(counts))) for count in counts]
    return [run.blocks(number) for run, number in zip(runs, numbers, strict=True)]


def _joined(runs: Sequence[_Run]) -> _Run:
    variances, squared_norms, weights = zip(*runs, strict=True)
    return _Run(np.concatenate(variances), np.concatenate(squared_norms), np.concatenate(weights))


def _block_length(runs: Sequence[_Run]) -> int:
    """Return 2 tau - 1, from the correlation of neighbours within the runs."""
    variances, squared_norms, weights = _joined(runs)
    pairs = len(weights) - len(runs)
    if pairs < 2:
        return 1
    means = np.average(variances, weights=weights), np.average(squared_norms, weights=weights)
    # What the ratio's error consists of, v - r n, without a division by a mean that may be 0.
    errors = [run.variances * means[1] - run.squared_norms * means[0] for run in runs]
    spread = np.mean(np.concatenate(errors) ** 2)
    if not spread > 0:
        return 1
    found = sum(np.sum(e[1:] * e[:-1]) for e in errors) / pairs / spread
    rho = min(max(found + (1 + 3 * found) / len(weights), 0.0), _MOST_CORRELATED)
    return int(2 * (1 + rho) / (1 - rho) - 1)
