"""A few rows of the training data, repeated into batches of any size."""

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.training.batched import is_batched
from kbatch.training.data import FitData, is_dataset, tensors_of
from kbatch.training.errors import InputError

_MOST_ROWS = 64
_ELEMENTS_LOOKED_AT = 16


class SampleRows(NamedTuple):
    """Some rows of the data, and how many there are in all.

    Attributes:
        rows: Inputs, targets and perhaps sample weights: nested NumPy arrays of shape (rows, ...).
        examples: Examples of the whole data set, None where it does not tell.
        note: What a reader must know of the choice, or None.
    """

    rows: Any
    examples: int | None
    note: str | None = None

    def batches(self, batch_size: int) -> tf.data.Dataset:
        """Makes an endless dataset of one batch size; rows are repeated where they are too few."""
        # tf.data would pack a list into one tensor.
        rows = keras.tree.lists_to_tuples(self.rows)
        count = keras.tree.flatten(rows)[0].shape[0]
        # A length that is not known until it runs: one graph serves all sizes.
        sizes = tf.data.Dataset.from_tensors(tf.constant(batch_size)).repeat()
        return sizes.map(
            lambda size: keras.tree.map_structure(
                lambda leaf: None if leaf is None else tf.gather(leaf, tf.range(size) % count),
                rows,
            )
        )


class SampleElements(NamedTuple):
    """The first elements of a dataset, which may be batches or examples.

    Attributes:
        spec: The dataset's `element_spec`.
        elements: Nested NumPy arrays.
        cardinality: Number of elements; negative where the dataset does not tell.
    """

    spec: Any
    elements: tuple[Any, ...]
    cardinality: int

    def rows(self, model: keras.Model) -> SampleRows:
        """Gives rows, those of the largest element: the longest sequence needs most memory."""
        batched = is_batched(self.spec, model)
        elements = [e if batched else _with_axis(e) for e in self.elements]
        sizes = [_bytes_per_row(element) for element in elements]
        largest = elements[int(np.argmax(sizes))]
        per_element = keras.tree.flatten(elements[0])[0].shape[0]
        examples = self.cardinality * per_element if self.cardinality >= 0 else None
        note = None
        if len(set(sizes)) > 1:
            note = (
                f"Rows of the dataset differ in length: the longest of the first {len(elements)} "
                "elements was used. Give `longest_example` if there are longer ones."
            )
        return SampleRows(_first_rows(largest), examples, note)


def sample_of(data: FitData) -> SampleRows | SampleElements:
    """Takes a sample of arrays or of a dataset, which is neither consumed nor changed.

    Args:
        data: Arguments of `fit`; `x` is nested arrays or a `tf.data.Dataset`.

    Raises:
        InputError: If kbatch cannot batch the data, or there is none.
    """
    x: Any = data.x
    if not is_dataset(x):
        examples = len(_array_leaf(x))
        if examples == 0:
            raise InputError("The data are empty: give arrays with rows. Received: 0 examples.")
        first = [_first_rows(part) for part in (x, data.y, data.sample_weight)]
        rows, _ = tensors_of(FitData(*first, class_weight=data.class_weight))
        return SampleRows(_numpy(rows), examples)
    if data.y is not None:
        raise InputError(
            "A dataset brings its own targets, as (x, y): leave out `y`. "
            f"Received: y of type {type(data.y).__name__}."
        )
    elements = tuple(_numpy(element) for element in x.take(_ELEMENTS_LOOKED_AT))
    if not elements:
        raise InputError("The dataset is empty: give one that has elements. Received: no element.")
    return SampleElements(x.element_spec, elements, int(x.cardinality()))


def example_rows(example: Any) -> SampleRows:
    """Makes rows of one example, (x, y) without a batch axis."""
    rows, _ = tensors_of(FitData(*_with_axis(example)))
    return SampleRows(_numpy(rows), None)


def _array_leaf(x: Any) -> Any:
    leaves = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
    if not leaves or not hasattr(leaves[0], "__len__"):
        raise InputError(
            "Training data are arrays, a `tf.data.Dataset` or a function "
            f"`batch_size -> tf.data.Dataset`. Received: x={x!r}."
        )
    return leaves[0]


def _first_rows(data: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: leaf[:_MOST_ROWS] if hasattr(leaf, "__getitem__") else leaf, data
    )


def _numpy(element: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else np.asarray(leaf), element
    )


def _with_axis(example: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else np.asarray(leaf)[None], example
    )


def _bytes_per_row(element: Any) -> float:
    leaves = [leaf for leaf in keras.tree.flatten(element) if leaf is not None]
    return sum(leaf.nbytes for leaf in leaves) / max(1, leaves[0].shape[0])
