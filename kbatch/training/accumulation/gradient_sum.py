"""Cut a batch into micro-batches, sum their gradients, and measure the gradients' moments."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kbatch.library_internals import loss_tracker_of
from kbatch.training.data.forms import each_part, is_composite, parts_of, row_count, rows_between


def sources(variables: Sequence[Any]) -> list[Any]:
    """List the values that a tape watches: outside replicas, the copies on the first device."""
    values = [variable.value for variable in variables]
    if not tf.distribute.in_cross_replica_context():
        return values
    copies_of = tf.distribute.get_strategy().experimental_local_results
    return [copies_of(value)[0] for value in values]


def init(variables: Sequence[Any]) -> tuple[tf.Tensor, ...]:
    """Make a zero tensor for each variable, in float32 if the variable has half precision."""
    half = ("float16", "bfloat16")
    return tuple(tf.zeros(v.shape, "float32" if v.dtype in half else v.dtype) for v in variables)


def add(sums: Sequence[tf.Tensor], gradients: Sequence[Any]) -> tuple[tf.Tensor, ...]:
    """Add the gradients of one micro-batch. A gradient of None does not change its sum."""

    def added(total: tf.Tensor, gradient: Any) -> tf.Tensor:
        if gradient is None:
            return total
        if isinstance(gradient, tf.IndexedSlices):
            # Add only the rows that were looked up, because a dense gradient of an embedding is
            # large. Use int64, because TensorFlow slices with int32 indices on the host.
            indices = tf.cast(gradient.indices, tf.int64)[:, None]
            return tf.tensor_scatter_nd_add(total, indices, tf.cast(gradient.values, total.dtype))
        # Otherwise, a gradient of unknown shape could be broadcast along an axis.
        return total + tf.ensure_shape(tf.cast(gradient, total.dtype), total.shape)

    return tuple(added(s, g) for s, g in zip(sums, gradients, strict=True))


def finalize(
    sums: Sequence[tf.Tensor], variables: Sequence[Any], connected: Sequence[bool]
) -> list[tf.Tensor | None]:
    """Return the gradients for the optimizer. If the loss does not reach a variable, None."""
    return [
        tf.cast(total, variable.dtype) if is_connected else None
        for total, variable, is_connected in zip(sums, variables, connected, strict=True)
    ]


class MicroBatches(NamedTuple):
    leaves: Any  # Nested tensors of shape (rows, ...). A part may be None.
    rows: tf.Tensor
    known_rows: int | None  # None if the number is unknown in the graph.
    size: int  # Rows of a micro-batch. The last one may be smaller.

    def part(self, start: tf.Tensor | int, size: tf.Tensor | int) -> Any:
        return each_part(lambda leaf: rows_between(leaf, start, size), self.leaves)

    def fold(self, add: Callable[[Any, Any], Any], sums: Any, *, fixed: bool) -> Any:
        """Call `add(sums, micro_batch)` for each micro-batch, so that only one is in memory."""
        # XLA needs one `fixed` size in the loop. It must not be larger than the batch, because XLA
        # also compiles a loop that never runs.
        end = self.rows // self.size * self.size if fixed else self.rows

        def step(start: tf.Tensor, sums: Any) -> tuple[tf.Tensor, Any]:
            rest = self.rows if fixed else self.rows - start
            return start + self.size, add(sums, self.part(start, tf.minimum(self.size, rest)))

        start = tf.constant(0)
        if tf.executing_eagerly():  # In a Python loop, the sums may change their structure.
            while start < end:
                start, sums = step(start, sums)
        else:
            loop = (start, sums)
            _, sums = tf.while_loop(lambda start, _: start < end, step, loop, parallel_iterations=1)
        if not fixed:
            return sums
        # XLA also compiles this branch if no rows remain, and cannot compile it for zero rows.
        rest = self.rows - end
        size = tf.maximum(rest, 1)
        return tf.cond(rest > 0, lambda: add(sums, self.part(self.rows - size, size)), lambda: sums)


def cut(batch: Any, size: int) -> MicroBatches:
    leaves = each_part(as_tensor, batch)
    present = parts_of(leaves)
    lengths = [leaf.shape[0] for leaf in present]
    known = {length for length in lengths if length is not None}
    message = "Inputs, targets and sample weights of a batch must have the same number of rows"
    if len(known) > 1:
        shapes = [part.shape for part in present]
        raise ValueError(f"{message}: check their first axes. Received: {shapes=}.")
    rows, checks = row_count(present[0]), []
    if len(known) != 1:
        checks = [tf.debugging.assert_equal(row_count(p), rows, message) for p in present[1:]]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return MicroBatches(leaves, tf.identity(rows), lengths[0], size)


def as_tensor(leaf: Any) -> Any:
    """Convert a part of a batch to a tensor. Ragged and sparse tensors stay as they are."""
    if is_composite(leaf):
        return leaf
    tensor = tf.convert_to_tensor(leaf)
    if tensor.shape.rank == 0:
        raise ValueError(
            "All parts of a batch must have a batch axis: batch the dataset first. "
            f"Received: a scalar of dtype {tensor.dtype.name}."
        )
    return tensor


class MomentMeans:
    """Averages the two moments of the gradient noise scale, from gradients of micro-batches.

    With K micro-gradients g_k, each the mean over n_k of N examples, and w_k = n_k / N:

        m = sum_k w_k |g_k|^2        M = |sum_k w_k g_k|^2
        S = (m - M) N / (K - 1)      unbiased for tr(Sigma), the variance of one example's gradient
        G2 = M - S / N               unbiased for |G|^2, the squared norm of the true gradient

    McCandlish et al. (2018), arXiv:1812.06162, appendix A.1. The noise scale is mean(S) / mean(G2):
    average first, divide last. The means are over the measured updates of an epoch: every n-th,
    and always the first.
    """

    def __init__(self, every: int):
        self._every = every
        # The updates of the epoch so far, and the sums of S and G2 and the number of measured
        # updates. The model does not track these variables, so it does not save them.
        self._updates = tf.Variable(tf.zeros([]), trainable=False)
        self._sums = tf.Variable(tf.zeros([3]), trainable=False)

    def due(self, model: Any) -> tf.Tensor:
        """Count an update, and return whether to measure it."""
        epoch_begins = tf.equal(tf.convert_to_tensor(loss_tracker_of(model).count), 0.0)
        due = epoch_begins | tf.equal(tf.math.floormod(self._updates, self._every), 0.0)
        self._updates.assign(tf.where(epoch_begins, 0.0, self._updates) + 1.0)
        self._sums.assign(tf.where(epoch_begins, tf.zeros([3]), self._sums))
        return due

    def add(
        self, micro: tf.Tensor, whole: tf.Tensor, rows: tf.Tensor, steps: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Add m (`micro`) and M (`whole`) of an update on N `rows` in K `steps`; return the means.

        m is NaN in an update that is not measured.
        """
        rows, steps = tf.cast(rows, tf.float32), tf.cast(steps, tf.float32)
        variance = (micro - whole) * rows / tf.maximum(steps - 1.0, 1.0)
        # Leave out updates of one micro-batch, which show no noise, and updates that overflow.
        counts = (steps > 1.0) & tf.math.is_finite(micro + whole)
        terms = tf.where(counts, tf.stack([variance, whole - variance / rows, 1.0]), tf.zeros([3]))
        self._sums.assign_add(terms)
        variance, squared = tf.unstack(self._sums[:2] / self._sums[2])
        return {"gradient_variance": variance, "gradient_squared_norm": squared}


def squared_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Sum the squares of all elements of all gradients, in float32."""
    # In float16, the squares of scaled gradients would overflow or become zero.
    return tf.add_n([tf.zeros([]), *(_squares(g) for g in gradients if g is not None)])


def _squares(gradient: Any) -> tf.Tensor:
    if not isinstance(gradient, tf.IndexedSlices):
        return 2.0 * tf.nn.l2_loss(tf.cast(gradient, tf.float32))
    # First add up the gradients of a row that was looked up several times. `tf.unique` could number
    # the rows, but XLA compiles it to a loop, which is five times slower for 32,768 indices
    # (TensorFlow 2.21). Use int64, because TensorFlow computes much int32 arithmetic on the host.
    indices = tf.cast(gradient.indices, tf.int64)
    order = tf.cast(tf.argsort(indices), tf.int64)
    ordered = tf.gather(indices, order)
    starts = tf.cast(ordered[1:] != ordered[:-1], tf.int64)
    numbers = tf.cumsum(tf.concat([tf.zeros([1], tf.int64), starts], axis=0))
    positions = tf.scatter_nd(order[:, None], numbers, tf.shape(indices, tf.int64))
    values = tf.cast(gradient.values, tf.float32)
    summed = tf.math.unsorted_segment_sum(values, positions, tf.shape(gradient.indices)[0])
    return 2.0 * tf.nn.l2_loss(summed)
