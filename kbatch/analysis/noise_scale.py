"""The gradient noise scale B_noise = tr(Sigma) / |G|^2, with an interval.

McCandlish et al. (2018), arXiv:1812.06162, equation 2.9, the simple noise scale. Both moments
are averaged over steps first and divided last. Neighbouring steps resemble each other while
training moves, so steps are averaged in blocks whose length grows as the cube root of their
number (Flegal and Jones 2010, Ann. Stat. 38, 1034-1070), and the interval is Fieller's for the
means of the blocks.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kbatch.analysis.intervals import FEWEST_VALUES, Interval
from kbatch.analysis.moments import gradient_moments
from kbatch.analysis.ratios import ratio_of_means


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
    length = max(1, int(steps ** (1 / 3)))
    starts = np.arange(steps // length) * steps // max(1, steps // length)
    lengths = np.diff(starts, append=steps)
    return _noise_scale(
        _block_means(moments.variance, starts, lengths),
        _block_means(moments.squared_norm, starts, lengths),
        weights=lengths,
        measurements=steps,
    )


def noise_scale_of_epochs(
    variances: ArrayLike, squared_norms: ArrayLike, *, weights: ArrayLike = 1.0
) -> NoiseScale:
    """Estimates the gradient noise scale of the late half of training from means by epoch.

    Epochs are the blocks here. The late half is at least three epochs; an epoch without a
    measured update (NaN) is left out before it is cut.

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

    All their late epochs are blocks of one estimate: what differs between runs widens the
    interval as what differs between epochs does.

    Args:
        runs: Variances, squared norms and weights of each run, one at least, as
            `noise_scale_of_epochs` takes them.

    Returns:
        The noise scale, unresolved for fewer than three epochs in all.

    Raises:
        ValueError: If the shapes differ or a weight is not positive.
    """
    late = [_late_half(*run) for run in runs]
    variances, squared_norms, weights = (np.concatenate(parts) for parts in zip(*late, strict=True))
    return _noise_scale(variances, squared_norms, weights=weights, measurements=len(weights))


def _late_half(
    variances: ArrayLike, squared_norms: ArrayLike, weights: ArrayLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
    return pairs[0][late], pairs[1][late], np.broadcast_to(counts, pairs[0].shape)[late]


def _noise_scale(
    variances: np.ndarray, squared_norms: np.ndarray, *, weights: np.ndarray, measurements: int
) -> NoiseScale:
    ratio = ratio_of_means(variances, squared_norms, weights=weights)
    return NoiseScale(
        ratio.value,
        ratio.interval,
        ratio.at_least,
        variance=float(np.average(variances, weights=weights)) if measurements else None,
        squared_norm=float(np.average(squared_norms, weights=weights)) if measurements else None,
        measurements=measurements,
    )


def _block_means(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values, starts) / lengths if len(values) else values
