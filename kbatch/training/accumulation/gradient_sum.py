"""A batch cut into micro-batches, the sum of their gradients, and the moments of these."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kbatch.library_internals import loss_tracker_of
from kbatch.training.data.forms import each_part, is_composite, parts_of, row_count, rows_between


def sources(variables: Sequence[Any]) -> list[Any]:
    """List what a tape knows variables by: outside of replicas, what the first device has."""
    values = [variable.value for variable in variables]
    if not tf.distribute.in_cross_replica_context():
        return values
    copies_of = tf.distribute.get_strategy().experimental_local_results
    return [copies_of(value)[0] for value in values]


def init(variables: Sequence[Any]) -> tuple[tf.Tensor, ...]:
    """Make a zero for each variable, in float32 where the variable has half precision."""
    half = ("float16", "bfloat16")
    return tuple(tf.zeros(v.shape, "float32" if v.dtype in half else v.dtype) for v in variables)


def add(sums: Sequence[tf.Tensor], gradients: Sequence[Any]) -> tuple[tf.Tensor, ...]:
    """Add the gradients of one micro-batch; a None gradient leaves its sum as it is."""

    def added(total: tf.Tensor, gradient: Any) -> tf.Tensor:
        if gradient is None:
            return total
        if isinstance(gradient, tf.IndexedSlices):
            # Only the rows that were looked up move; a dense copy of an embedding costs more.
            # Slices of int32 are made on the host beside a GPU, those of int64 are not.
            indices = tf.cast(gradient.indices, tf.int64)[:, None]
            return tf.tensor_scatter_nd_add(total, indices, tf.cast(gradient.values, total.dtype))
        # A gradient of unknown shape would be broadcast along an axis of length 1.
        return total + tf.ensure_shape(tf.cast(gradient, total.dtype), total.shape)

    return tuple(added(s, g) for s, g in zip(sums, gradients, strict=True))


def finalize(
    sums: Sequence[tf.Tensor], variables: Sequence[Any], connected: Sequence[bool]
) -> list[tf.Tensor | None]:
    """Return the optimizer its gradients, None for a variable that the loss does not reach."""
    return [
        tf.cast(s, v.dtype) if reached else None
        for s, v, reached in zip(sums, variables, connected, strict=True)
    ]


class MicroBatches(NamedTuple):
    leaves: Any  # Nested tensors of shape (rows, ...), with None where a part is absent.
    rows: tf.Tensor
    known_rows: int | None  # If the graph knows them.
    size: int  # The last one may have fewer.

    def part(self, start: tf.Tensor | int, size: tf.Tensor | int) -> Any:
        return each_part(lambda leaf: rows_between(leaf, start, size), self.leaves)

    def fold(self, add: Callable[[Any, Any], Any], sums: Any, *, fixed: bool) -> Any:
        """Add up micro-batches one after the other: that saves the memory."""
        # XLA wants one size in the loop (`fixed`), one that is in the batch, for it compiles a loop
        # that never runs too.
        end = self.rows // self.size * self.size if fixed else self.rows

        def one(start: tf.Tensor, sums: Any) -> tuple[tf.Tensor, Any]:
            rest = self.rows if fixed else self.rows - start
            return start + self.size, add(sums, self.part(start, tf.minimum(self.size, rest)))

        start = tf.constant(0)
        if tf.executing_eagerly():  # Sums may change their structure there.
            while start < end:
                start, sums = one(start, sums)
        else:
            loop = (start, sums)
            _, sums = tf.while_loop(lambda start, _: start < end, one, loop, parallel_iterations=1)
        if not fixed:
            return sums
        # XLA compiles the branch also where there is no rest, but not for zero rows.
        rest = self.rows - end
        size = tf.maximum(rest, 1)
        return tf.cond(rest > 0, lambda: add(sums, self.part(self.rows - size, size)), lambda: sums)


def cut(batch: Any, size: int) -> MicroBatches:
    leaves = each_part(as_tensor, batch)
    present = parts_of(leaves)
    lengths = [leaf.shape[0] for leaf in present]
    known = {length for length in lengths if length is not None}
    if len(known) > 1:
        raise ValueError(
            "Every part of a batch (inputs, targets, sample weights) must have the same number "
            f"of rows: check their first axes. Received: shapes={[p.shape for p in present]}."
        )
    rows, checks = row_count(present[0]), []
    if len(known) != 1:
        message = "Every part of a batch must have the same number of rows."
        checks = [tf.debugging.assert_equal(row_count(p), rows, message) for p in present[1:]]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return MicroBatches(leaves, tf.identity(rows), lengths[0], size)


def as_tensor(leaf: Any) -> Any:
    """Make a tensor of a part of a batch, unless it is ragged or sparse."""
    if is_composite(leaf):
        return leaf
    tensor = tf.convert_to_tensor(leaf)
    if tensor.shape.rank == 0:
        raise ValueError(
            "Every part of a batch needs a batch axis: batch the dataset first. "
            f"Received: a scalar of dtype {tensor.dtype.name}."
        )
    return tensor


class MomentMeans:
    """The two moments behind the gradient noise scale, from the gradients of the micro-batches.

    With K micro-gradients g_k, each the mean over n_k of the N examples, w_k = n_k / N:

        m = sum_k w_k |g_k|^2        M = |sum_k w_k g_k|^2
        S = (m - M) N / (K - 1)      unbiased for tr(Sigma), the variance of one example's gradient
        G2 = M - S / N               unbiased for |G|^2, the squared norm of the true gradient

    McCandlish et al. (2018), arXiv:1812.06162, appendix A.1. The noise scale is mean(S) over
    mean(G2): average first, divide last.

    They are means over the measured updates of an epoch: every n-th, and always the first.
    """

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
    # compiles it to a loop over them, five times slower for 32,768 (TensorFlow 2.21). In int64:
    # without XLA much of TensorFlow's int32 arithmetic runs on the host beside a GPU, which then
    # waits for it.
    indices = tf.cast(gradient.indices, tf.int64)
    order = tf.cast(tf.argsort(indices), tf.int64)
    ordered = tf.gather(indices, order)
    starts = tf.cast(ordered[1:] != ordered[:-1], tf.int64)
    numbers = tf.cumsum(tf.concat([tf.zeros([1], tf.int64), starts], axis=0))
    positions = tf.scatter_nd(order[:, None], numbers, tf.shape(indices, tf.int64))
    values = tf.cast(gradient.values, tf.float32)
    summed = tf.math.unsorted_segment_sum(values, positions, tf.shape(gradient.indices)[0])
    return 2.0 * tf.nn.l2_loss(summed)
