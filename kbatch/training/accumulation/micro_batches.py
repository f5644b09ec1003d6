"""A batch cut into micro-batches along its first axis."""

from typing import Any, NamedTuple

import keras
import tensorflow as tf


class MicroBatches(NamedTuple):
    """A batch and the size of its cuts.

    Attributes:
        leaves: The batch: nested tensors of shape (rows, ...), with None where a part is absent.
        rows: Examples in the batch, an int32 scalar.
        size: Examples in a micro-batch, the last one of the batch may have fewer.
    """

    leaves: Any
    rows: tf.Tensor
    size: int | tf.Variable

    @property
    def known_rows(self) -> int | None:
        """Examples in the batch where the graph knows them, else None."""
        first = next(leaf for leaf in keras.tree.flatten(self.leaves) if leaf is not None)
        return first.shape[0]

    @property
    def full(self) -> tf.Tensor:
        """How many micro-batches have `size` examples."""
        return self.rows // self.size

    @property
    def count(self) -> tf.Tensor:
        """How many micro-batches there are."""
        return -(-self.rows // self.size)

    def part(self, start: tf.Tensor | int, size: tf.Tensor | int) -> Any:
        """Cuts out `size` rows from row `start` on."""
        return keras.tree.map_structure(
            lambda leaf: None if leaf is None else _rows(leaf, start, size), self.leaves
        )


def cut(batch: Any, size: int | tf.Variable) -> MicroBatches:
    """Prepares a batch for cutting.

    Args:
        batch: Nested tensors or arrays of shape (rows, ...); None where a part is absent.
        size: Examples in a micro-batch.

    Returns:
        The batch, ready to be cut.

    Raises:
        TypeError: If a part is a RaggedTensor or a SparseTensor.
        ValueError: If a part has no batch axis, or parts differ in length.
    """
    leaves = keras.tree.map_structure(_as_tensor, batch)
    present = [leaf for leaf in keras.tree.flatten(leaves) if leaf is not None]
    lengths = [leaf.shape[0] for leaf in present]
    known = {length for length in lengths if length is not None}
    if len(known) > 1:
        raise ValueError(
            "Every part of a batch (inputs, targets, sample weights) must have the same number "
            f"of rows: check their first axes. Received: shapes={[p.shape for p in present]}."
        )
    rows = tf.shape(present[0])[0]
    with tf.control_dependencies(_same_length(present, rows) if len(known) != 1 else []):
        return MicroBatches(leaves, tf.identity(rows), size)


def _as_tensor(leaf: Any) -> tf.Tensor | None:
    if leaf is None:
        return None
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        raise TypeError(
            "Gradient accumulation cuts batches by rows, which a RaggedTensor or SparseTensor "
            "does not allow here: convert the data with `.to_tensor()` or `tf.sparse.to_dense`. "
            f"Received: a {type(leaf).__name__}."
        )
    tensor = tf.convert_to_tensor(leaf)
    if tensor.shape.rank == 0:
        raise ValueError(
            "Every part of a batch needs a batch axis: batch the dataset first. "
            f"Received: a scalar of dtype {tensor.dtype.name}."
        )
    return tensor


def _same_length(leaves: list[tf.Tensor], rows: tf.Tensor) -> list[tf.Operation]:
    message = "Every part of a batch must have the same number of rows."
    asserts = [tf.debugging.assert_equal(tf.shape(leaf)[0], rows, message) for leaf in leaves[1:]]
    return [check for check in asserts if check is not None]


def _rows(leaf: tf.Tensor, start: tf.Tensor | int, size: tf.Tensor | int) -> tf.Tensor:
    # tf.slice, since XLA takes a moving start there as long as the size is fixed.
    rest = tf.shape(leaf)[1:]
    part = tf.slice(
        leaf,
        tf.concat([[start], tf.zeros_like(rest)], axis=0),
        tf.concat([[size], rest], axis=0),
    )
    part.set_shape([size if isinstance(size, int) else None, *leaf.shape[1:]])
    return part
