"""The gradient noise scale B_noise = tr(Sigma) / |G|^2, with an interval, and its moments.

McCandlish et al. (2018), arXiv:1812.06162, equation 2.9, the simple noise scale. Let G be the true
gradient and Sigma the covariance of per-example gradients. A gradient averaged over n examples has
E|g|^2 = |G|^2 + tr(Sigma) / n. An update that is split into K micro-batches of n_k examples (N in
total, w_k = n_k / N) gives the squared norm at two sizes

    m = sum_k w_k |g_k|^2        M = |sum_k w_k g_k|^2

with E m = |G|^2 + K tr(Sigma) / N, because w_k / n_k = 1 / N for every k, even if the n_k differ,
and E M = |G|^2 + tr(Sigma) / N. So these estimates are unbiased (appendix A.1, here for unequal
n_k):

    tr(Sigma) = (m - M) N / (K - 1)        |G|^2 = M - tr(Sigma) / N

They are exact only for the weights n_k / N. With sample weights or token masks the examples of an
update have different shares, and N is an upper bound of the effective number of examples.

Both moments are averaged over steps first and divided last. Neighbouring steps are similar while
training moves, and so are the means of neighbouring epochs. So both moments are averaged in blocks,
and the interval is Fieller's for the means of the blocks. A block is at least as long as 2 tau - 1,
and a block of steps at least as long as the cube root of their number (Flegal and Jones 2010,
Ann. Stat. 38, 1034-1070):

    tau = (1 + rho) / (1 - rho)        the correlation time of an AR(1) process

where rho is the correlation of neighbours, corrected for its bias in short series (Marriott and
Pope 1954, Biometrika 41, 390-402). There are at least three blocks, so the interval of a short,
strongly correlated series is too narrow.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kbatch.analysis.intervals import FEWEST_VALUES, UNRESOLVED, Estimate, ratio_of_means

# Names of an epoch's metrics: means of tr(Sigma) and of |G|^2 over its measured updates.
MOMENT_METRICS = ("gradient_variance", "gradient_squared_norm")
# Largest correlation of neighbours that is used. If the estimate is larger, it may be 1.
_MOST_CORRELATED = 0.95


def gradient_noise_scale(
    micro_sq_norms: ArrayLike,
    batch_sq_norms: ArrayLike,
    *,
    batch_size: ArrayLike,
    accumulation_steps: ArrayLike,
) -> Estimate[float | None]:
    """Estimate the gradient noise scale from the squared norms of accumulated updates.

    The noise scale grows during training: give the steps of the late half, or of one stretch at a
    time. Steps with a norm that is not finite and steps of a single micro-batch are skipped. The
    formulas are in the docstring of this module (McCandlish et al. 2018, arXiv:1812.06162).

    Example:

    >>> round(gradient_noise_scale([3.0, 3.2, 2.8], [1.5, 1.7, 1.6], batch_size=64,
    ...                            accumulation_steps=4).value, 2)
    26.35

    Args:
        micro_sq_norms: Array, for each step the mean of the squared norms of the gradients of its
            micro-batches, weighted by their numbers of examples.
        batch_sq_norms: Array, for each step the squared norm of its gradient before clipping.
        batch_size: Integers. Examples of a step: one number, or one for each step.
        accumulation_steps: Integers. Micro-batches of a step: one number, or one for each step.

    Returns:
        An `Estimate` in examples, with a 95 % confidence interval. If there are fewer than three
        steps, or if |G|^2 may be 0, its `value` is None, and `low` may hold a lower bound.

    Raises:
        ValueError: If the shapes differ, if no step was split, or if squared norms are impossible.
    """
    variances, squared_norms = gradient_moments(
        micro_sq_norms, batch_sq_norms, batch_size=batch_size, accumulation_steps=accumulation_steps
    )
    steps = len(variances)
    run = np.stack([variances, squared_norms, np.ones(steps)])
    return _noise_scale([run], shortest=max(1, int(steps ** (1 / 3))))


def noise_scale_of_runs(
    runs: Sequence[tuple[ArrayLike, ArrayLike, ArrayLike]],
) -> Estimate[float | None]:
    """Estimate one gradient noise scale from the late halves of several runs.

    A run has the means of tr(Sigma) and |G|^2 (the `MOMENT_METRICS`) by epoch, and the numbers of
    measured updates as weights: one number, or one per epoch. Epochs without a measured update
    (NaN) are left out first. The late half has at least three epochs. With fewer than three epochs
    in total the estimate is unresolved.
    """
    halves = []
    for moments in runs:
        run = np.stack(np.broadcast_arrays(*(np.asarray(values, float) for values in moments)))
        known = run[:, np.isfinite(run).all(0)]
        halves.append(known[:, -max(FEWEST_VALUES, (known.shape[1] + 1) // 2) :])
    return _noise_scale(halves)


def _noise_scale(runs: Sequence[np.ndarray], *, shortest: int = 1) -> Estimate[float | None]:
    """Estimate the noise scale. A run has the rows tr(Sigma), |G|^2 and weight, by step."""
    runs = [run for run in runs if run.size]
    if not runs:
        return UNRESOLVED
    # If there are fewer than three blocks of this length, runs are cut into two or three blocks.
    counts, length = [run.shape[1] for run in runs], max(shortest, _block_length(runs))
    numbers = [max(1, count // length) for count in counts]
    for parts in (2, 3):
        if sum(numbers) < FEWEST_VALUES:
            numbers = [min(count, max(1, count * parts // max(counts))) for count in counts]
    blocks = []
    for run, count, number in zip(runs, counts, numbers, strict=True):
        starts = np.arange(number) * count // number
        weights = np.add.reduceat(run[2], starts)
        blocks.append([*np.add.reduceat(run[:2] * run[2], starts, axis=1) / weights, weights])
    variances, squared_norms, weights = np.hstack(blocks)
    return ratio_of_means(variances, squared_norms, weights=weights)


def _block_length(runs: Sequence[np.ndarray]) -> int:
    """Return 2 tau - 1, from the correlation of neighbours within the runs."""
    variances, squared_norms, weights = np.hstack(runs)
    pairs = len(weights) - len(runs)
    if pairs < 2:
        return 1
    shares = weights / weights.sum()
    means = shares @ variances, shares @ squared_norms
    # The ratio's error v - r n (r = mean v / mean n) times mean n, which may be 0.
    errors = [run[0] * means[1] - run[1] * means[0] for run in runs]
    joined = np.concatenate(errors)
    spread = joined @ joined / len(joined)
    if not spread > 0:
        return 1
    rho = sum(e[1:] @ e[:-1] for e in errors) / pairs / spread
    rho = min(max(rho + (1 + 3 * rho) / len(weights), 0.0), _MOST_CORRELATED)
    return int(2 * (1 + rho) / (1 - rho) - 1)


# m >= M by Jensen's inequality. If m is smaller by more than this share, the input is wrong.
_ROUNDING = 1e-3


def gradient_moments(
    micro_sq_norms: ArrayLike,
    batch_sq_norms: ArrayLike,
    *,
    batch_size: ArrayLike,
    accumulation_steps: ArrayLike,
) -> tuple[np.ndarray, np.ndarray]:
    """Estimate tr(Sigma) and |G|^2 of every step, from the arguments of `gradient_noise_scale`.

    The estimates are noisy. Average many of them before you divide.
    """
    m, batch = np.atleast_1d(np.asarray(micro_sq_norms, float), np.asarray(batch_sq_norms, float))
    if m.ndim != 1 or m.shape != batch.shape:
        raise ValueError(
            "`micro_sq_norms` and `batch_sq_norms` must have one value per step. Received: "
            f"shapes {m.shape} and {batch.shape}."
        )
    sizes = {"batch_size": batch_size, "accumulation_steps": accumulation_steps}
    for name, values in sizes.items():
        counts = np.asarray(values, float)
        if counts.shape not in ((), m.shape) or not np.all(np.isfinite(counts) & (counts >= 1)):
            raise ValueError(
                f"`{name}` must be a positive number, or {len(m)} numbers, one for each step. "
                f"Received: {name}={values}."
            )
    examples, micros = (np.broadcast_to(np.asarray(v, float), m.shape) for v in sizes.values())
    if len(m) and (np.all(micros <= 1) or np.any(micros > examples)):
        raise ValueError(
            "A noise scale needs batches of at least two micro-batches: `accumulation_steps` must "
            "be at least 2 and at most `batch_size`. Received: "
            f"accumulation_steps={accumulation_steps}, batch_size={batch_size}."
        )
    usable = np.isfinite(m) & np.isfinite(batch) & (micros > 1)
    m, batch, examples, micros = m[usable], batch[usable], examples[usable], micros[usable]
    wrong = (batch < 0) | (m < batch * (1 - _ROUNDING))
    if np.any(wrong):
        step = int(np.argmax(wrong))
        raise ValueError(
            "At each step, `micro_sq_norms` must be at least `batch_sq_norms`, and both at least "
            "0. Give `micro_sq_norms` as the first argument, and measure gradients before "
            "clipping and without a loss scale. Received at the first wrong step: "
            f"micro_sq_norm={m[step]}, batch_sq_norm={batch[step]}."
        )
    variance = (m - batch) * examples / (micros - 1)
    return variance, batch - variance / examples
