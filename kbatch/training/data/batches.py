"""Data in batches: arrays by functions that are traced once, validation data in blocks."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.analysis.cross_fit import MOST_BLOCKS
from kbatch.errors import InputError
from kbatch.training.data.forms import (
    arrays_of,
    as_dataset,
    batches_of,
    called_for,
    each_part,
    gives_batches,
    is_batched,
    is_dataset,
    open_spec,
    parts_of,
)
from kbatch.training.model import replica_count

_ENDLESS = 2**62
_NUMBER, _NUMBERS = tf.TensorSpec([], tf.int64), tf.TensorSpec([None], tf.int64)


def sized(examples: int, size: int) -> list[int]:
    """Return the sizes of the batches of an epoch."""
    full, rest = divmod(examples, size)
    return [size] if full and not rest else [*[size] * full, rest]


def held_batches(arrays: Any, batch_size: int) -> tf.data.Dataset:
    """Return arrays as they are, in batches."""
    with tf.device("CPU:0"):
        whole = tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(arrays))
        rows = len(parts_of(arrays)[0])
    return _pipeline(rebatched(whole, sized(rows, batch_size)), -(-rows // batch_size))


def _pipeline(batches: tf.data.Dataset, cardinality: int) -> tf.data.Dataset:
    """Leave a pipeline of known length as it is: to tune or to rewrite it does not pay."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return batches.apply(tf.data.experimental.assert_cardinality(cardinality)).with_options(options)


class ArrayRows:
    """Arrays as tensors, and the graphs that draw an order of their rows and gather them."""

    def __init__(self, arrays: Any, *, shuffle: bool):
        # tf.data would pack a list into one tensor.
        arrays = keras.tree.lists_to_tuples(arrays)
        with tf.device("CPU:0"):
            tensors = each_part(tf.convert_to_tensor, arrays)
            self._parts = parts_of(tensors)
            self.examples: int = self._parts[0].shape[0]
            count = tf.constant(self.examples, tf.int64)
        whole = tf.data.Dataset.from_tensors(tensors).element_spec
        self._spec = tf.nest.map_structure(of_any_length, whole)
        self._count, self._shuffle = count, shuffle
        self._order = _traced(self._numbers, _NUMBER, _NUMBER)
        self._gather = _traced(self._rows, _NUMBERS)

    def endless(self, batch_size: int, *, seed: int | None) -> tf.data.Dataset:
        """Return batches of one epoch after the other, each in an order of its own."""
        chosen = self._chosen(self._order, tf.data.Dataset.range(_ENDLESS), batch_size, seed)
        batches = map_traced(self._gather, chosen, self._spec)
        return _pipeline(batches.prefetch(2), tf.data.INFINITE_CARDINALITY)

    def epoch(self, batch_size: int, *, seed: int | None) -> tf.data.Dataset:
        """Return the batches of an epoch, in the next order each time they were read to the end."""
        # Keras makes iterators that it does not read, or of which it reads one batch.
        with tf.device("CPU:0"):
            read = tf.Variable(tf.constant(0, tf.int64), trainable=False)
        steps = -(-self.examples // batch_size)

        def gather(step: tf.Tensor, chosen: tf.Tensor) -> list[tf.Tensor]:
            with tf.control_dependencies([read.assign_add(tf.cast(step == steps, tf.int64))]):
                return self._rows(chosen)

        order = _traced(
            lambda number, seed: self._numbers(read.read_value(), seed), _NUMBER, _NUMBER
        )
        chosen = self._chosen(order, tf.data.Dataset.range(1), batch_size, seed)
        numbered = tf.data.Dataset.zip(tf.data.Dataset.range(1, steps + 1), chosen)
        batches = map_traced(_traced(gather, _NUMBER, _NUMBERS), numbered, self._spec)
        return _pipeline(batches.prefetch(2), steps)

    def _rows(self, chosen: tf.Tensor) -> list[tf.Tensor]:
        return [tf.gather(part, chosen) for part in self._parts]

    def _numbers(self, epoch: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Return the numbers of the rows in the order of an epoch."""
        numbers: Any = tf.range(self._count)
        random: Any = tf.random
        if not self._shuffle:
            return numbers
        return random.experimental.stateless_shuffle(numbers, seed=tf.stack([seed, epoch]))

    def _chosen(
        self, order: Any, epochs: tf.data.Dataset, batch_size: int, seed: int | None
    ) -> tf.data.Dataset:
        """Return the numbers of the rows of each batch."""
        seed = int(np.random.randint(2**31)) if seed is None else seed
        seeds = tf.data.Dataset.from_tensors(np.int64(seed)).repeat()
        orders = map_traced(order, tf.data.Dataset.zip(epochs, seeds), _NUMBERS)
        return rebatched(orders, sized(self.examples, batch_size))


def _traced(function: Any, *specs: tf.TensorSpec) -> Any:
    return tf.function(function, autograph=False).get_concrete_function(*specs)


# `tf.data` traces each function that is mapped for each dataset and makes it ready for each
# iterator, and `Dataset.rebatch` maps one that changes nothing: beside small models that takes
# longer than to read the data.


def map_traced(function: Any, dataset: tf.data.Dataset, spec: Any) -> tf.data.Dataset:
    """Map a concrete function, whose results have this spec, over a dataset of dense tensors."""
    return _dataset_of(
        tf.raw_ops.MapDataset,
        spec,
        input_dataset=tf.data.experimental.to_variant(dataset),
        other_arguments=function.captured_inputs,
        f=function,
        use_inter_op_parallelism=False,
        preserve_cardinality=True,
    )


def rebatched(dataset: tf.data.Dataset, sizes: list[int]) -> tf.data.Dataset:
    """Cut and join batches of dense tensors to these sizes, in turn and again and again."""
    with tf.device("CPU:0"):
        return _dataset_of(
            tf.raw_ops.RebatchDatasetV2,
            tf.nest.map_structure(of_any_length, dataset.element_spec),
            input_dataset=tf.data.experimental.to_variant(dataset),
            batch_sizes=tf.constant(sizes, tf.int64),
            drop_remainder=False,
        )


def _dataset_of(op: Any, spec: Any, **arguments: Any) -> tf.data.Dataset:
    tensors = [one for one in tf.nest.flatten(spec) if isinstance(one, tf.TensorSpec)]
    types, shapes = [one.dtype for one in tensors], [one.shape for one in tensors]
    variant = op(**arguments, output_types=types, output_shapes=shapes)
    return tf.data.experimental.from_variant(variant, spec)


def of_any_length(spec: Any) -> Any:
    return open_spec(spec) if isinstance(spec, tf.TensorSpec) else spec  # Else there is no part.


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
