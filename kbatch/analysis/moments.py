"""Moments behind the gradient noise scale of McCandlish et al. (2018), arXiv:1812.06162.

Let G be the true gradient and Sigma the covariance of per-example gradients. A gradient
averaged over n examples has E|g|^2 = |G|^2 + tr(Sigma) / n. One update that is split into
K micro-batches of n_k examples (N in all, w_k = n_k / N) shows the squared norm at two sizes

    m = sum_k w_k |g_k|^2        M = |sum_k w_k g_k|^2

with E m = |G|^2 + K tr(Sigma) / N, because w_k / n_k = 1 / N for every k, also of a ragged
update, and E M = |G|^2 + tr(Sigma) / N. Hence, unbiased (appendix A.1, here for unequal n_k),

    tr(Sigma) = (m - M) N / (K - 1)        |G|^2 = M - tr(Sigma) / N

Exact it is for weights n_k / N only. With sample weights or token masks the examples of an
update have different shares, and N is an upper bound of what they count for.
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

# m >= M by Jensen's inequality: what is below by more than float32's rounding is an error.
_ROUNDING = 1e-3


@dataclasses.dataclass(frozen=True)
class GradientMoments:
    """Estimates of tr(Sigma) and |G|^2, one a step.

    One step's are noisy and its `squared_norm` can be negative. Average many first and take
    their ratio last: the mean of ratios is biased without bound.

    Attributes:
        variance: tr(Sigma), in squared gradient units, of shape (steps,).
        squared_norm: |G|^2, in squared gradient units, of shape (steps,).
    """

    variance: np.ndarray
    squared_norm: np.ndarray


def gradient_moments(
    micro_sq_norms: ArrayLike,
    batch_sq_norms: ArrayLike,
    *,
    batch_size: ArrayLike,
    accumulation_steps: ArrayLike,
) -> GradientMoments:
    """Estimates the gradient moments of every usable step.

    Steps with a norm that is not finite are skipped, as the optimizer skips them under a loss
    scale, and steps of a single micro-batch, which say nothing about the noise.

    Args:
        micro_sq_norms: m of every step, the mean of |g_k|^2 weighted by the examples behind g_k.
        batch_sq_norms: M of every step, the squared norm of its gradient before clipping.
        batch_size: N, the examples behind a step: one number or one a step.
        accumulation_steps: K, the micro-batches of a step: one number or one a step.

    Returns:
        Both moments of the steps that can be used, in order; perhaps of none.

    Raises:
        ValueError: If the shapes differ, no step was split, or numbers contradict each other.
    """
    m, batch = np.atleast_1d(np.asarray(micro_sq_norms, float), np.asarray(batch_sq_norms, float))
    if m.ndim != 1 or m.shape != batch.shape:
        raise ValueError(
            "`micro_sq_norms` and `batch_sq_norms` must have one value a step each. Received: "
            f"shapes {m.shape} and {batch.shape}."
        )
    examples = _one_a_step(batch_size, "batch_size", m.shape)
    micros = _one_a_step(accumulation_steps, "accumulation_steps", m.shape)
    if len(m) and not np.any(micros > 1):
        raise ValueError(
            "The noise scale needs gradients of two sizes: split the update into at least two "
            f"micro-batches. Received: accumulation_steps={accumulation_steps}."
        )
    if np.any(micros > examples):
        raise ValueError(
            "A micro-batch holds at least one example: `accumulation_steps` must not exceed "
            f"`batch_size`. Received: accumulation_steps={accumulation_steps}, "
            f"batch_size={batch_size}."
        )
    usable = np.isfinite(m) & np.isfinite(batch) & (micros > 1)
    m, batch, examples, micros = m[usable], batch[usable], examples[usable], micros[usable]
    _check_norms(m, batch)
    variance = (m - batch) * examples / (micros - 1)
    return GradientMoments(variance, batch - variance / examples)


def _one_a_step(sizes: ArrayLike, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = np.asarray(sizes, float)
    if values.shape not in ((), shape) or not np.all(np.isfinite(values) & (values >= 1)):
        raise ValueError(
            f"`{name}` must be a positive number or one for each of the {shape[0]} steps. "
            f"Received: {name}={sizes}."
        )
    return np.broadcast_to(values, shape)


def _check_norms(micro_sq_norms: np.ndarray, batch_sq_norms: np.ndarray) -> None:
    wrong = (batch_sq_norms < 0) | (micro_sq_norms < batch_sq_norms * (1 - _ROUNDING))
    if np.any(wrong):
        step = int(np.argmax(wrong))
        raise ValueError(
            "A mean of squared norms is never below the squared norm of the mean, nor that below "
            "0: check that `micro_sq_norms` comes first and that both are taken before clipping "
            "and without the loss scale. Received at the first such step: "
            f"micro_sq_norm={micro_sq_norms[step]}, batch_sq_norm={batch_sq_norms[step]}."
        )
