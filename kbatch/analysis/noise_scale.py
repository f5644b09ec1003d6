"""The gradient noise scale B_noise = tr(Sigma) / |G|^2, with an interval, and its moments.

McCandlish et al. (2018), arXiv:1812.06162, equation 2.9, the simple noise scale. Let G be the true
gradient and Sigma the covariance of per-example gradients. A gradient averaged over n examples has
E|g|^2 = |G|^2 + tr(Sigma) / n. One update that is split into K micro-batches of n_k examples (N in
all, w_k = n_k / N) shows the squared norm at two sizes

    m = sum_k w_k |g_k|^2        M = |sum_k w_k g_k|^2

with E m = |G|^2 + K tr(Sigma) / N, because w_k / n_k = 1 / N for every k, also of a ragged
update, and E M = |G|^2 + tr(Sigma) / N. Hence, unbiased (appendix A.1, here for unequal n_k),

    tr(Sigma) = (m - M) N / (K - 1)        |G|^2 = M - tr(Sigma) / N

Exact it is for weights n_k / N only. With sample weights or token masks the examples of an
update have different shares, and N is an upper bound of what they count for.

Both moments are averaged over steps first and divided last. Neighbouring steps resemble each other
while training moves, and so do the means of neighbouring epochs. So both are averaged in blocks,
and the interval is Fieller's for the means of the blocks. A block is at least as long as 2 tau - 1,
and one of steps as the cube root of their number (Flegal and Jones 2010, Ann. Stat. 38, 1034-1070):

    tau = (1 + rho) / (1 - rho)        the correlation time of an AR(1) process

where rho is the correlation of neighbours, corrected for its bias in short series (Marriott and
Pope 1954, Biometrika 41, 390-402). There are three blocks at least, so a short series that is
strongly correlated still has an interval that is too narrow.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kbatch.analysis.intervals import FEWEST_VALUES, UNRESOLVED, Estimate, ratio_of_means

# Metrics of an epoch: means of tr(Sigma) and of |G|^2 over its measured updates.
MOMENT_METRICS = ("gradient_variance", "gradient_squared_norm")
# A correlation of neighbours that is estimated as larger may be 1.
_MOST_CORRELATED = 0.95


def gradient_noise_scale(
    micro_sq_norms: ArrayLike,
    batch_sq_norms: ArrayLike,
    *,
    batch_size: ArrayLike,
    accumulation_steps: ArrayLike,
) -> Estimate[float | None]:
    """Estimate the gradient noise scale from the squared norms of accumulated updates.

    It grows during training: give the steps of the late half, or of stretches one by one.
    Steps with a norm that is not finite and steps of a single micro-batch are skipped. Unresolved
    for fewer than three steps, and where |G|^2 is not told apart from 0: then a lower bound may be
    all that is known.

    Example:

    >>> gradient_noise_scale([3.0, 3.2, 2.8], [1.5, 1.7, 1.6], batch_size=64,
    ...                      accumulation_steps=4).value
    26.35

    Args:
        micro_sq_norms: m of every step, the mean of |g_k|^2 weighted by the examples behind g_k.
        batch_sq_norms: M of every step, the squared norm of its gradient before clipping.
        batch_size: N, the examples behind a step: one number or one a step.
        accumulation_steps: K, the micro-batches of a step: one number or one a step.

    Raises:
        ValueError: If the shapes differ, no step was split, or numbers contradict each other.
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
    """Estimate one gradient noise scale of the late halves of several runs, from means by epoch.

    A run has means of tr(Sigma) and |G|^2 (the `MOMENT_METRICS`) of each epoch, and the measured
    updates behind them as weights: one number or one an epoch. Its late half is at least three
    epochs; an epoch without a measured update (NaN) is left out before it is cut. Unresolved for
    fewer than three epochs in all.
    """
    halves = []
    for each in runs:
        run = np.stack(np.broadcast_arrays(*(np.asarray(values, float) for values in each)))
        known = run[:, np.isfinite(run).all(0)]
        halves.append(known[:, -max(FEWEST_VALUES, (known.shape[1] + 1) // 2) :])
    return _noise_scale(halves)


def _noise_scale(runs: Sequence[np.ndarray], *, shortest: int = 1) -> Estimate[float | None]:
    """Estimate it from runs of consecutive steps or epochs: tr(Sigma), |G|^2 and weight of each."""
    runs = [run for run in runs if run.size]
    if not runs:
        return UNRESOLVED
    # Blocks of the length, or shorter ones for three in all.
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
    # What the ratio's error consists of, v - r n, without a division by a mean that may be 0.
    errors = [run[0] * means[1] - run[1] * means[0] for run in runs]
    joined = np.concatenate(errors)
    spread = joined @ joined / len(joined)
    if not spread > 0:
        return 1
    found = sum(e[1:] @ e[:-1] for e in errors) / pairs / spread
    rho = min(max(found + (1 + 3 * found) / len(weights), 0.0), _MOST_CORRELATED)
    return int(2 * (1 + rho) / (1 - rho) - 1)


# m >= M by Jensen's inequality: what is below by more than float32's rounding is an error.
_ROUNDING = 1e-3


def gradient_moments(
    micro_sq_norms: ArrayLike,
    batch_sq_norms: ArrayLike,
    *,
    batch_size: ArrayLike,
    accumulation_steps: ArrayLike,
) -> tuple[np.ndarray, np.ndarray]:
    """Estimate tr(Sigma) and |G|^2 of every step, from what `gradient_noise_scale` takes.

    They are noisy, and in squared gradient units: average many, and divide last.
    """
    m, batch = np.atleast_1d(np.asarray(micro_sq_norms, float), np.asarray(batch_sq_norms, float))
    if m.ndim != 1 or m.shape != batch.shape:
        raise ValueError(
            "`micro_sq_norms` and `batch_sq_norms` must have one value a step each. Received: "
            f"shapes {m.shape} and {batch.shape}."
        )
    sizes = {"batch_size": batch_size, "accumulation_steps": accumulation_steps}
    for name, values in sizes.items():
        found = np.asarray(values, float)
        if found.shape not in ((), m.shape) or not np.all(np.isfinite(found) & (found >= 1)):
            raise ValueError(
                f"`{name}` must be a positive number or one for each of the {len(m)} steps. "
                f"Received: {name}={values}."
            )
    examples, micros = (np.broadcast_to(np.asarray(v, float), m.shape) for v in sizes.values())
    if len(m) and (np.all(micros <= 1) or np.any(micros > examples)):
        raise ValueError(
            "The noise scale needs gradients of two sizes: split updates into at least two "
            "micro-batches, and none into more than it has examples. Received: "
            f"accumulation_steps={accumulation_steps}, batch_size={batch_size}."
        )
    usable = np.isfinite(m) & np.isfinite(batch) & (micros > 1)
    m, batch, examples, micros = m[usable], batch[usable], examples[usable], micros[usable]
    wrong = (batch < 0) | (m < batch * (1 - _ROUNDING))
    if np.any(wrong):
        step = int(np.argmax(wrong))
        raise ValueError(
            "A mean of squared norms is never below the squared norm of the mean, nor that below "
            "0: check that `micro_sq_norms` comes first and that both are taken before clipping "
            "and without the loss scale. Received at the first such step: "
            f"micro_sq_norm={m[step]}, batch_sq_norm={batch[step]}."
        )
    variance = (m - batch) * examples / (micros - 1)
    return variance, batch - variance / examples
