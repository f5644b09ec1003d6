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

from kbatch.library_internals import loss_tracker_of


class MomentMeans:
    """Means of S and G2 over the measured updates of an epoch: every n-th, and always the first."""

    def __init__(self, every: int):
        self._every = every
        # Updates of the epoch so far; sums of S and of G2, and the updates behind them. No model
        # owns them, so that no weights file knows them.
        self._updates = tf.Variable(tf.zeros([]), trainable=False)
        self._sums = tf.Variable(tf.zeros([3]), trainable=False)

    def due(self, model: Any) -> tf.Tensor:
        """Count an update; return whether it is to be measured."""
        epoch_begins = tf.equal(tf.convert_to_tensor(loss_tracker_of(model).count), 0.0)
        due = epoch_begins | tf.equal(tf.math.floormod(self._updates, self._every), 0.0)
        self._updates.assign(tf.where(epoch_begins, 0.0, self._updates) + 1.0)
        self._sums.assign(tf.where(epoch_begins, tf.zeros([3]), self._sums))
        return due

    def add(
        self, micro: tf.Tensor, whole: tf.Tensor, rows: tf.Tensor, steps: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Add m and M of an update of `rows` examples in `steps` parts; return the means so far.

        They are NaN where it was not due.
        """
        rows, steps = tf.cast(rows, tf.float32), tf.cast(steps, tf.float32)
        variance = (micro - whole) * rows / tf.maximum(steps - 1.0, 1.0)
        # A single micro-batch tells nothing about the noise; overflows the optimizer skips too.
        counts = (steps > 1.0) & tf.math.is_finite(micro + whole)
        found = tf.where(counts, tf.stack([variance, whole - variance / rows, 1.0]), tf.zeros([3]))
        self._sums.assign_add(found)
        variance, squared = tf.unstack(self._sums[:2] / self._sums[2])
        return {"gradient_variance": variance, "gradient_squared_norm": squared}


def squared_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Sum the squares of all elements of all gradients, as float32."""
    # In float16 squares would overflow before the loss scale is divided out, or vanish.
    return tf.add_n([tf.zeros([]), *(_squares(g) for g in gradients if g is not None)])


def _squares(gradient: Any) -> tf.Tensor:
    if not isinstance(gradient, tf.IndexedSlices):
        return 2.0 * tf.nn.l2_loss(tf.cast(gradient, tf.float32))
    # A row looked up twice has one gradient. `tf.unique` would number the distinct indices, but XLA
    # does not compile it. In int64: without XLA much of TensorFlow's int32 arithmetic runs on the
    # host beside a GPU, which then waits for it.
    indices = tf.cast(gradient.indices, tf.int64)
    order = tf.cast(tf.argsort(indices), tf.int64)
    ordered = tf.gather(indices, order)
    starts = tf.cast(ordered[1:] != ordered[:-1], tf.int64)
    numbers = tf.cumsum(tf.concat([tf.zeros([1], tf.int64), starts], axis=0))
    positions = tf.scatter_nd(order[:, None], numbers, tf.shape(indices, tf.int64))
    values = tf.cast(gradient.values, tf.float32)
    summed = tf.math.unsorted_segment_sum(values, positions, tf.shape(gradient.indices)[0])
    return 2.0 * tf.nn.l2_loss(summed)
