"""A few rows of the training data, repeated into batches of any size."""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.library_internals import build_symbolically, compiled_metrics, wrapped_function
from kbatch.records.notes import Note
from kbatch.training.data.forms import (
    FitData,
    arrays_of,
    as_dataset,
    called_for,
    each_part,
    is_batched,
    is_dataset,
    open_spec,
    parts_of,
    rows_of,
)
from kbatch.training.model import build_ahead, user_step

_MOST_ROWS = 64
_ELEMENTS_LOOKED_AT = 16


class SampleRows(NamedTuple):
    """Some rows of the data, and how many there are in all."""

    rows: Any  # Inputs, targets and perhaps weights: nested NumPy arrays of shape (rows, ...).
    # None where the data do not tell; of a long dataset of batches at most so many.
    examples: int | None
    note: Note | None = None  # What a reader must know of the choice.

    def batches(self, batch_size: int) -> tf.data.Dataset:
        """Make an endless dataset of one batch size; rows are repeated where they are too few."""
        # tf.data would pack a list into one tensor.
        rows = keras.tree.lists_to_tuples(self.rows)
        count = keras.tree.flatten(rows)[0].shape[0]
        # A length that is not known until it runs: one graph serves all sizes.
        sizes = tf.data.Dataset.from_tensors(tf.constant(batch_size)).repeat()
        return sizes.map(
            lambda size: each_part(lambda leaf: tf.gather(leaf, tf.range(size) % count), rows)
        )


class _Reading(NamedTuple):
    """Elements read as batches, or as examples of one row: the rows of the largest one."""

    rows: Any
    row_bytes: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    def with_element(self, element: Any) -> "_Reading":
        """Add an element, of which only rows are kept, and those only where it is the largest."""
        leaves = parts_of(element)
        count = leaves[0].shape[0]
        size = sum(leaf.nbytes for leaf in leaves) / max(1, count)
        rows = self.rows
        if size > max(self.row_bytes, default=-1.0):  # A view would keep the whole element.
            rows = each_part(lambda leaf: np.array(leaf[:_MOST_ROWS]), element)
        return _Reading(rows, (*self.row_bytes, size), (*self.counts, count))

    def sample(self, cardinality: int) -> SampleRows:
        """Return the rows, with at most how many there are in a dataset of so many elements."""
        examples = None
        if cardinality >= 0:
            seen_all = cardinality <= len(self.counts)
            examples = sum(self.counts) if seen_all else cardinality * max(self.counts)
        note = None
        if len(set(self.row_bytes)) > 1:
            note = Note.of("rows_differ", elements=len(self.counts))
        return SampleRows(self.rows, examples, note)


class SampleElements(NamedTuple):
    """The first elements of a dataset, as batches and as examples until a model tells which."""

    spec: Any
    batches: SampleRows | None  # None where a part of them has no axis.
    examples: SampleRows

    def rows(self, model: keras.Model) -> SampleRows:
        """Return rows, those of the largest element: the longest sequence needs most memory."""
        batches = self.batches if is_batched(self.spec, model) else None
        return batches or self.examples


def sample_of(data: FitData) -> SampleRows | SampleElements:
    """Take a sample of arrays or of a dataset, which is not changed."""
    x: Any = as_dataset(data.x)
    if is_dataset(x):
        if data.y is not None:
            raise InputError(
                "A dataset brings its own targets, as (x, y): leave out `y`. "
                f"Received: y of type {type(data.y).__name__}."
            )
        return _first_elements(x)
    leaves = parts_of(x)
    if not leaves or not hasattr(leaves[0], "__len__"):
        raise InputError(
            "Training data are arrays (`np.asarray` of a list), a `tf.data.Dataset` or a function "
            f"`batch_size -> tf.data.Dataset`. Received: x of type {type(x).__name__}."
        )
    if len(leaves[0]) == 0:
        raise InputError("The data are empty: give arrays with rows. Received: 0 examples.")
    first: Any = keras.tree.map_structure(
        lambda leaf: leaf[:_MOST_ROWS] if hasattr(leaf, "__getitem__") else leaf,
        [x, data.y, data.sample_weight],
    )
    rows, _ = arrays_of(FitData(*first, class_weight=data.class_weight))
    return SampleRows(each_part(np.asarray, rows), len(leaves[0]))


def _first_elements(dataset: tf.data.Dataset) -> SampleElements:
    """Read elements one after the other, as batches where they may be, and as examples."""
    spec = dataset.element_spec
    for part in tf.nest.flatten(spec):
        if isinstance(part, (tf.RaggedTensorSpec, tf.SparseTensorSpec)):
            kind = part.value_type.__name__
            raise InputError(
                f"No rows can be taken out of a {kind}: convert the data with `.to_tensor()` or "
                "`tf.sparse.to_dense`. A search trains them in whole batches with "
                f"`micro_batch_size=None`. Received: a dataset with a {kind}."
            )
    may_be_batches = all(part.shape.rank != 0 for part in keras.tree.flatten(spec))
    batches, examples = _Reading(None), _Reading(None)
    for element in dataset.take(_ELEMENTS_LOOKED_AT):
        arrays = each_part(np.asarray, element)
        # The rank of what `tf.py_function` returns is known only now.
        may_be_batches = may_be_batches and all(part.ndim for part in keras.tree.flatten(arrays))
        examples = examples.with_element(_with_axis(arrays))
        if may_be_batches:
            batches = batches.with_element(arrays)
    if not examples.counts:
        raise InputError("The dataset is empty: give one that has elements. Received: no element.")
    cardinality = int(dataset.cardinality())
    as_batches = batches.sample(cardinality) if may_be_batches else None
    return SampleElements(spec, as_batches, examples.sample(cardinality))


def example_rows(example: Any) -> SampleRows:
    """Make rows of one example, (x, y) without a batch axis."""
    rows, _ = arrays_of(FitData(*_with_axis(example)))
    return SampleRows(each_part(np.asarray, rows), None)


def _with_axis(example: Any) -> Any:
    return each_part(lambda leaf: np.asarray(leaf)[None], example)


DataFunction = Callable[[int], tf.data.Dataset]
Source = SampleRows | SampleElements | DataFunction


class Samples:
    """Samples of the data that `fit` gets; each dataset is read once."""

    # To read it again may fill a buffer of shuffling, or run through what comes before it.
    def __init__(self):
        self._read: WeakKeyDictionary[Any, dict[bool, Any]] = WeakKeyDictionary()

    def __reduce__(self):
        """Leave what was read behind where a copy travels to another process."""
        return Samples, ()

    def source(self, data: FitData, model: keras.Model) -> Source:
        """Return the rows of arrays or of a dataset, or the function that returns datasets."""
        x: Any = data.x
        sequence = isinstance(x, keras.utils.PyDataset)
        if not (sequence or is_dataset(x)):
            function: Any = x
            return function if callable(x) else sample_of(data)
        if data.y is not None:
            return sample_of(data)  # It says what is wrong.
        known = self._read.setdefault(x, {})
        batched = sequence or is_batched(x.element_spec, model)
        if batched not in known:
            known[batched] = rows_for(sample_of(data), model)
        return known[batched]


def rows_for(source: Source, model: keras.Model) -> SampleRows | DataFunction:
    """Return the rows of a sample as a model takes them, or the data function."""
    return source.rows(model) if isinstance(source, SampleElements) else source


def build_on(model: keras.Model, source: Source) -> None:
    """Build a model, its metrics and its optimizer from the shapes of its data."""
    known = rows_for(source, model)
    if isinstance(known, SampleRows):
        spec = each_part(open_spec, known.rows)
    elif model.built:
        return
    else:
        spec = called_for(known, model, 1).element_spec
    if model.built or user_step(model) is not None:
        build_ahead(model, spec)
    else:
        build_symbolically(model, spec)


def row_shapes(source: Source, model: keras.Model) -> tuple[tuple[int, ...], ...] | None:
    """Return the shapes of one row, where longer ones need more memory; None of a function."""
    known = rows_for(source, model)
    if not isinstance(known, SampleRows):
        return None
    return tuple(tuple(leaf.shape[1:]) for leaf in parts_of(known.rows))


def batches_for(source: Source, model: keras.Model, rows: int) -> tf.data.Dataset:
    """Return batches of as many rows: endless ones of a sample, those of a data function."""
    known = rows_for(source, model)
    if isinstance(known, SampleRows):
        return known.batches(rows)
    return called_for(known, model, rows)


class DataEnded(Exception):
    """A data function that has fewer examples than a batch needs: so many `rows`."""

    def __init__(self, rows: int):
        super().__init__(rows)
        self.rows = rows


def batch_of(source: Source, model: keras.Model, rows: int) -> Any:
    """Return a batch of as many rows, on the device."""
    batch = next(iter(batches_for(source, model, rows)), None)
    found = 0 if batch is None else rows_of(batch)
    if found < rows:
        raise DataEnded(found)
    return held_on_device(batch, widen=takes_int64(model))


def held_on_device(batch: Any, *, widen: bool = False) -> Any:
    """Copy a batch to the first GPU, where there is one; texts stay where they are."""
    # TensorFlow keeps int32 on the host whatever device is named, and each step copies it.
    gpus = tf.config.list_logical_devices("GPU")
    if not gpus:
        return batch

    def copied(leaf: Any) -> Any:
        if leaf.dtype == tf.string:
            return leaf
        with tf.device(gpus[0].name):
            dense = isinstance(leaf, tf.Tensor)
            wide = widen and dense and leaf.dtype == tf.int32
            return tf.cast(leaf, tf.int64) if wide else tf.identity(leaf)

    return each_part(copied, batch)


def takes_int64(model: Any) -> bool:
    """Return whether a model trains on int64 as it does on int32."""
    # Keras casts inputs as declared, and its losses and metrics cast targets; what is the user's
    # own may not.
    own = user_step(model) is not None or any(
        getattr(type(model), name) is not getattr(keras.Model, name)
        for name in ("compute_loss", "compute_metrics")
    )
    used = keras.tree.flatten([model.loss, *compiled_metrics(model)])
    return bool(getattr(model, "inputs", None)) and not own and all(map(_is_of_keras, used))


def _is_of_keras(given: Any) -> bool:
    kind = given if hasattr(given, "__name__") else type(given)
    function = wrapped_function(given)
    whole = given is None or isinstance(given, str) or kind.__module__.split(".")[0] == "keras"
    return whole and (function is None or _is_of_keras(function))
