"""A few rows of the training data, repeated into batches of any size."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.training.data.forms import FitData, arrays_of, called_for, is_batched, is_dataset
from kbatch.training.model import build_symbolically
from kbatch.training.train_step import held_on_device, rows_of, takes_int64

_MOST_ROWS = 64
_ELEMENTS_LOOKED_AT = 16


class SampleRows(NamedTuple):
    """Some rows of the data, and how many there are in all.

    Attributes:
        rows: Inputs, targets and perhaps sample weights: nested NumPy arrays of shape (rows, ...).
        examples: Examples of the whole data set, None where it does not tell. A long dataset of
            batches tells at most how many: its last batch may be smaller.
        note: What a reader must know of the choice, or None.
    """

    rows: Any
    examples: int | None
    note: str | None = None

    def batches(self, batch_size: int) -> tf.data.Dataset:
        """Make an endless dataset of one batch size; rows are repeated where they are too few."""
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


class _Reading(NamedTuple):
    """Elements read as batches, or as examples of one row.

    Attributes:
        rows: Rows of the element with the most bytes per row: nested NumPy arrays.
        row_bytes: Bytes per row of each element.
        counts: Rows of each element.
    """

    rows: Any
    row_bytes: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    def with_element(self, element: Any) -> "_Reading":
        """Add an element, of which only rows are kept, and those only where it is the largest."""
        size = _bytes_per_row(element)
        largest = size > max(self.row_bytes, default=-1.0)
        count = keras.tree.flatten(element)[0].shape[0]
        return _Reading(
            _copied_rows(element) if largest else self.rows,
            (*self.row_bytes, size),
            (*self.counts, count),
        )

    def sample(self, cardinality: int) -> SampleRows:
        """Return the rows, with at most how many there are in a dataset of so many elements."""
        examples = None
        if cardinality >= 0:
            seen_all = cardinality <= len(self.counts)
            examples = sum(self.counts) if seen_all else cardinality * max(self.counts)
        note = None
        if len(set(self.row_bytes)) > 1:
            note = (
                "Rows of the dataset differ in length: the longest of the first "
                f"{len(self.counts)} elements was used. If there are longer ones, put one first "
                "or, where there is such an argument, give it as `longest_example`."
            )
        return SampleRows(self.rows, examples, note)


class SampleElements(NamedTuple):
    """The first elements of a dataset, read as batches and as examples until a model tells which.

    Attributes:
        spec: The dataset's `element_spec`.
        batches: What they are as batches; None where a part of them has no axis.
        examples: What they are as examples.
        cardinality: Number of elements; negative where the dataset does not tell.
    """

    spec: Any
    batches: _Reading | None
    examples: _Reading
    cardinality: int

    def rows(self, model: keras.Model) -> SampleRows:
        """Return rows, those of the largest element: the longest sequence needs most memory."""
        batches = self.batches if is_batched(self.spec, model) else None
        return (batches or self.examples).sample(self.cardinality)


def sample_of(data: FitData) -> SampleRows | SampleElements:
    """Take a sample of arrays or of a dataset, which is neither consumed nor changed."""
    x: Any = data.x
    if not is_dataset(x):
        examples = len(_array_leaf(x))
        if examples == 0:
            raise InputError("The data are empty: give arrays with rows. Received: 0 examples.")
        first = [_first_rows(part) for part in (x, data.y, data.sample_weight)]
        rows, _ = arrays_of(FitData(*first, class_weight=data.class_weight))
        return SampleRows(_numpy(rows), examples)
    if data.y is not None:
        raise InputError(
            "A dataset brings its own targets, as (x, y): leave out `y`. "
            f"Received: y of type {type(data.y).__name__}."
        )
    some_without_axis = any(part.shape.rank == 0 for part in keras.tree.flatten(x.element_spec))
    batches, examples = _read(x, (not some_without_axis, True))
    assert examples is not None
    return SampleElements(x.element_spec, batches, examples, int(x.cardinality()))


def dataset_rows(dataset: tf.data.Dataset, model: keras.Model) -> SampleRows:
    """Take rows of a dataset for a model, which tells at once whether it has batches.

    No element is kept whole that is a batch.
    """
    batched = is_batched(dataset.element_spec, model)
    batches, examples = _read(dataset, (batched, not batched))
    reading = batches or examples
    assert reading is not None
    return reading.sample(int(dataset.cardinality()))


def _read(
    dataset: tf.data.Dataset, wanted: tuple[bool, bool]
) -> tuple[_Reading | None, _Reading | None]:
    """Read elements one after the other, as batches and as examples where that is wanted."""
    _check_rows(dataset.element_spec)
    batches, examples = (_Reading(None) if each else None for each in wanted)
    empty = True
    for element in map(_numpy, dataset.take(_ELEMENTS_LOOKED_AT)):
        empty = False
        batches = batches and batches.with_element(element)
        examples = examples and examples.with_element(_with_axis(element))
    if empty:
        raise InputError("The dataset is empty: give one that has elements. Received: no element.")
    return batches, examples


def _check_rows(spec: Any) -> None:
    """Check that the parts of an element have rows that can be taken and repeated."""
    for part in tf.nest.flatten(spec):
        if isinstance(part, (tf.RaggedTensorSpec, tf.SparseTensorSpec)):
            kind = part.value_type.__name__
            raise InputError(
                f"No rows can be taken out of a {kind}: convert the data with `.to_tensor()` or "
                "`tf.sparse.to_dense`. A search trains them in whole batches with "
                f"`micro_batch_size=None`. Received: a dataset with a {kind}."
            )


def example_rows(example: Any) -> SampleRows:
    """Make rows of one example, (x, y) without a batch axis."""
    rows, _ = arrays_of(FitData(*_with_axis(example)))
    return SampleRows(_numpy(rows), None)


def _array_leaf(x: Any) -> Any:
    leaves = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
    if not leaves or not hasattr(leaves[0], "__len__"):
        raise InputError(
            "Training data are arrays (`np.asarray` of a list), a `tf.data.Dataset` or a function "
            f"`batch_size -> tf.data.Dataset`. Received: x of type {type(x).__name__}."
        )
    return leaves[0]


def _first_rows(data: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: leaf[:_MOST_ROWS] if hasattr(leaf, "__getitem__") else leaf, data
    )


def _copied_rows(element: Any) -> Any:
    """Copy the first rows: a view would keep the whole element."""
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else np.array(leaf[:_MOST_ROWS]), element
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


Source = SampleRows | SampleElements | Callable[[int], tf.data.Dataset]


def build_on(model: keras.Model, source: Source) -> None:
    """Build a model that has no weights yet from the shapes of its data."""
    if model.built:
        return
    if isinstance(source, SampleElements):
        source = source.rows(model)
    if isinstance(source, SampleRows):
        build_symbolically(model, keras.tree.map_structure(_spec, source.rows))
    else:
        build_symbolically(model, called_for(source, model, 1).element_spec)


def row_shapes(source: Source, model: keras.Model) -> tuple[tuple[int, ...], ...] | None:
    """Return the shapes of one row, where longer ones need more memory; None of a function."""
    if isinstance(source, SampleElements):
        source = source.rows(model)
    if not isinstance(source, SampleRows):
        return None
    leaves = [leaf for leaf in keras.tree.flatten(source.rows) if leaf is not None]
    return tuple(tuple(leaf.shape[1:]) for leaf in leaves)


class DataEnded(Exception):
    """A data function that has fewer examples than a batch needs.

    Attributes:
        rows: Examples in the batch that it gave, 0 for none.
    """

    def __init__(self, rows: int):
        super().__init__(rows)
        self.rows = rows


def batch_of(source: Source, model: keras.Model, rows: int) -> Any:
    """Return a batch of as many rows, on the device."""
    if isinstance(source, SampleElements):
        source = source.rows(model)
    known = isinstance(source, SampleRows)
    batches = source.batches(rows) if known else called_for(source, model, rows)
    batch = next(iter(batches), None)
    found = 0 if batch is None else rows_of(batch)
    if found < rows:
        raise DataEnded(found)
    return held_on_device(batch, widen=takes_int64(model))


def _spec(leaf: Any) -> tf.TensorSpec | None:
    return None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)
