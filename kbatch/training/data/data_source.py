"""Rows of data or a function that makes them, as experiments take batches from them."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kbatch.training.borrowed_step import held_on_device, rows_of, takes_int64
from kbatch.training.data.data import called_for
from kbatch.training.data.sample_rows import SampleElements, SampleRows
from kbatch.training.symbolic_build import build_symbolically

Source = SampleRows | SampleElements | Callable[[int], tf.data.Dataset]


def build_on(model: keras.Model, source: Source) -> None:
    """Builds a model that has no weights yet from the shapes of its data."""
    if model.built:
        return
    if isinstance(source, SampleElements):
        source = source.rows(model)
    if isinstance(source, SampleRows):
        build_symbolically(model, keras.tree.map_structure(_spec, source.rows))
    else:
        build_symbolically(model, called_for(source, model, 1).element_spec)


def row_shapes(source: Source, model: keras.Model) -> tuple[tuple[int, ...], ...] | None:
    """Gives the shapes of one row, where longer ones need more memory; None of a function."""
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
    """Gives a batch of as many rows, on the device.

    Raises:
        DataEnded: If a data function has fewer.
    """
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
