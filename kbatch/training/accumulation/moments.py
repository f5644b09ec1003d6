"""The two moments behind the gradient noise scale, from the gradients of the micro-batches.

With K micro-gradients g_k, each the mean over n_k of the N examples, w_k = n_k / N:

    m = sum_k w_k |g_k|^2        M = |sum_k w_k g_k|^2
    S = (m - M) N / (K - 1)      unbiased for tr(Sigma), the variance of one example's gradient
    G2 = M - S / N               unbiased for |G|^2, the squared norm of the true gradient

McCandlish et al. (2018), arXiv:1812.06162, appendix A.1. The noise scale is mean(S) over
mean(G2): average first, divide last.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kbatch.records.training_run import MOMENT_METRICS


class MomentMeans:
    """Means of S and G2 over the measured updates of an epoch.

    Every n-th update is measured, the first of an epoch always. Updates of a single micro-batch
    tell nothing about the noise, and updates that overflowed are skipped by the optimizer too:
    neither counts.

    Args:
        every: n, updates from one that is measured to the next.
    """

    def __init__(self, every: int):
        self._every = every
        # Updates of the epoch so far; sums of S and of G2, and the updates behind them. No model
        # owns them, so that no weights file knows them.
        self._updates = tf.Variable(tf.zeros([]), trainable=False)
        self._sums = tf.Variable(tf.zeros([3]), trainable=False)

    def is_due(self, epoch_begins: tf.Tensor) -> tf.Tensor:
        """Return whether the coming update is to be measured."""
        return epoch_begins | tf.equal(tf.math.floormod(self._updates, self._every), 0.0)

    def update(
        self,
        micro_sq_norm: tf.Tensor,
        batch_sq_norm: tf.Tensor,
        rows: Any,
        steps: Any,
        epoch_begins: Any,
    ) -> dict[str, tf.Tensor]:
        """Take in one update."""
        rows, steps = tf.cast(rows, tf.float32), tf.cast(steps, tf.float32)
        variance = (micro_sq_norm - batch_sq_norm) * rows / tf.maximum(steps - 1.0, 1.0)
        squared_norm = batch_sq_norm - variance / rows
        counts = (steps > 1.0) & tf.math.is_finite(micro_sq_norm + batch_sq_norm)
        found = tf.where(counts, tf.stack([variance, squared_norm, 1.0]), tf.zeros([3]))
        self._updates.assign(tf.where(epoch_begins, 0.0, self._updates) + 1.0)
        self._sums.assign(tf.where(epoch_begins, tf.zeros([3]), self._sums) + found)
        means = self._sums[:2] / self._sums[2]
        return dict(zip(MOMENT_METRICS, tf.unstack(means), strict=True))


def squared_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Sum the squares of all elements of all gradients, a float32 scalar.

    float16 gradients are at most 65504 each, so their squares stay in float32's range before
    the loss scale is divided out, and small ones do not vanish.
    """
    return tf.add_n([tf.zeros([]), *(_squares(g) for g in gradients if g is not None)])


def _squares(gradient: Any) -> tf.Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        return 2.0 * tf.nn.l2_loss(_summed_by_index(gradient))
    return 2.0 * tf.nn.l2_loss(tf.cast(gradient, tf.float32))


def _summed_by_index(slices: tf.IndexedSlices) -> tf.Tensor:
    """Add up the rows that belong to one index: a row looked up twice has one gradient."""
    rows = tf.shape(slices.indices)[0]
    values = tf.cast(slices.values, tf.float32)
    return tf.math.unsorted_segment_sum(values, _positions(slices.indices), rows)


def _positions(indices: tf.Tensor) -> tf.Tensor:
    """Number the distinct indices, without `tf.unique`, which XLA does not compile.

    In int64: without XLA much of TensorFlow's int32 arithmetic runs on the host beside a GPU, which
    then waits for it.
    """
    indices = tf.cast(indices, tf.int64)
    order = tf.cast(tf.argsort(indices), tf.int64)
    ordered = tf.gather(indices, order)
    starts = tf.cast(ordered[1:] != ordered[:-1], tf.int64)
    positions = tf.cumsum(tf.concat([tf.zeros([1], tf.int64), starts], axis=0))
    return tf.scatter_nd(order[:, None], positions, tf.shape(indices, tf.int64))
