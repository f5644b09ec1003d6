"""Validation data in batches that are blocks of examples, or parts of blocks."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from kbatch.analysis.cross_fit import MOST_BLOCKS
from kbatch.errors import InputError
from kbatch.training.data.array_rows import held_batches
from kbatch.training.data.forms import (
    arrays_of,
    as_dataset,
    batches_of,
    called_for,
    each_part,
    gives_batches,
    is_batched,
    is_dataset,
    parts_of,
)
from kbatch.training.model import replica_count

# Of data of unknown length, so that there are blocks enough of a small set.
_UNKNOWN_BATCH_SIZE = 32


def in_blocks(
    data: Any, model: Any, *, batch_size: int, steps: int | None
) -> tuple[Any, int, int | None]:
    """Cut what `steps` batches of a size validate on into blocks, all data without a number.

    Return a dataset in batches, the size of a batch, and how many there are at most. Arrays of
    which no blocks are measured stay arrays.
    """
    if data is None:
        return None, batch_size, None
    if isinstance(data, Iterator):
        raise InputError(
            "An iterator as `validation_data` is used up by the first trial: give arrays, or what "
            f"`tf.data.Dataset.from_generator` makes. Received: a {type(data).__name__}."
        )
    # Of several replicas no blocks are measured, and a batch must have an example for each.
    several = hasattr(model, "distribute_strategy") and replica_count(model) > 1
    if not gives_batches(data):
        rows = len(parts_of(data)[0])
        if steps is not None and steps * batch_size < rows:
            rows = steps * batch_size
            data = each_part(lambda leaf: leaf[:rows], data)
        if several:
            return data, batch_size, -(-rows // batch_size)
        size = _block_part(rows, batch_size)
        arrays, _ = arrays_of(*keras.utils.unpack_x_y_sample_weight(data))
        return held_batches(arrays, size), size, -(-rows // size)
    data = as_dataset(data)
    spec = data.element_spec if is_dataset(data) else None
    dense = [one.shape for one in tf.nest.flatten(spec) if isinstance(one, tf.TensorSpec)]
    padded = not all(shape.rank and shape[1:].is_fully_defined() for shape in dense)
    # Batches that are padded to lengths of their own cannot be joined: all sizes take them.
    if padded and is_batched(spec, model):
        data = data if steps is None else data.take(steps)
        return data, batch_size, _length(data)
    if not is_dataset(data):
        data = called_for(data, model, batch_size)
    # The length of what is batched again is not known.
    rows = most_examples(data, model)
    if steps is not None:
        data = batches_of(data, model, batch_size).take(steps)
        rows = min(steps * batch_size, rows or steps * batch_size)
    if several:
        size = batch_size
    elif rows is None:
        size = min(batch_size, _UNKNOWN_BATCH_SIZE)
    else:
        size = _block_part(rows, batch_size)
    return batches_of(data, model, size), size, rows and -(-rows // size)


def most_examples(dataset: tf.data.Dataset, model: keras.Model) -> int | None:
    """Return the most examples that a dataset can have, from its length and its first batch."""
    cardinality = _length(dataset)
    if cardinality is None or not is_batched(dataset.element_spec, model):
        return cardinality
    first = [keras.tree.flatten(batch)[0] for batch in dataset.take(1)]
    return cardinality * first[0].shape[0] if first else 0


def _length(dataset: tf.data.Dataset) -> int | None:
    length = int(dataset.cardinality())
    return None if length < 0 else length


def _block_part(examples: int, most: int) -> int:
    """Return a size of batches, of which one or several are a block."""
    block = max(1, -(-examples // MOST_BLOCKS))
    return -(-block // -(-block // most))
