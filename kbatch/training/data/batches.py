"""Training data in batches of one size, as a search feeds them."""

import contextlib
import hashlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.library_internals import kept_seeds, make_class_weight_map_fn, train_validation_split
from kbatch.training.data.forms import (
    FORMS,
    FitData,
    arrays_of,
    batches_of,
    called_for,
    check_class_weight,
    each_part,
    gives_batches,
    is_dataset,
    parts_of,
)
from kbatch.training.data.validation import in_blocks, most_examples

# Of arrays, at once.
_GATHERED_ROWS, _GATHERED_BYTES = 4096, 2**22
# Nothing that kbatch maps over a dataset is converted from Python's `if` and `for`.
_graph = tf.autograph.experimental.do_not_convert


class Batches(NamedTuple):
    dataset: tf.data.Dataset
    validation_data: Any  # Arrays, or a dataset in validation batches, or None.
    validation_batch_size: int
    validation_batches: int | None  # At most, None where that is not known.
    examples: int | None  # At most in an epoch, None where that is not known.
    # Fingerprint of the order of arrays, None where it is drawn without a seed; of a dataset only
    # its batches tell it.
    order: str | None
    of_dataset: bool


def in_batches(
    data: FitData,
    model: Any,  # For arrays it may be None.
    *,
    batch_size: int,
    largest_batch_size: int,
    validation_batch_size: int,
    validation_steps: int | None = None,
    seed: int | None,
) -> Batches:
    data = _training_data(data)
    x: Any = data.x
    if gives_batches(x):
        if data.y is not None or data.sample_weight is not None:
            raise InputError(
                "A dataset brings its own targets and sample weights, as (x, y) or "
                "(x, y, sample_weight): leave out `y` and `sample_weight`. "
                f"Received: y of type {type(data.y).__name__}, sample_weight of type "
                f"{type(data.sample_weight).__name__}."
            )
        dataset = batches_of(x, model, batch_size, shuffle=data.shuffle, seed=seed)
        examples = most_examples(x, model) if is_dataset(x) else None
        if data.class_weight is not None:
            _, y, _ = keras.utils.unpack_x_y_sample_weight(dataset.element_spec)
            check_class_weight(y)
            dataset = dataset.map(make_class_weight_map_fn(data.class_weight))
        dataset = dataset.prefetch(tf.data.AUTOTUNE)
    else:
        arrays, examples = arrays_of(data)
        with tf.device("CPU:0"):
            arrays = each_part(tf.convert_to_tensor, arrays)
        dataset = array_batches(arrays, batch_size=batch_size, shuffle=data.shuffle, seed=seed)
    if examples is not None and examples < largest_batch_size:
        raise InputError(
            "A batch cannot be larger than the training set: leave out the batch sizes above "
            f"{examples}. Received: batch_size={largest_batch_size} for {examples} examples."
        )
    validation = in_blocks(
        data.validation_data, model, batch_size=validation_batch_size, steps=validation_steps
    )
    of_dataset, order = gives_batches(x), None
    if not of_dataset and not (data.shuffle and seed is None):
        drawn = repr(seed if data.shuffle else "as given")
        order = hashlib.blake2b(drawn.encode(), digest_size=8).hexdigest()
    return Batches(dataset, *validation, examples, order, of_dataset)


def count_examples(
    data: FitData, build: Callable[[], keras.Model], *, batch_size: int
) -> int | None:
    """Count the training examples of an epoch, None where they are not known before it.

    A data function is called with `batch_size`; what a batch is depends on the model.
    """
    data = _training_data(data)
    x: Any = data.x
    if not gives_batches(x):
        return arrays_of(data)[1]
    if isinstance(x, keras.utils.PyDataset):
        return x.num_batches and x.num_batches * keras.tree.flatten(x[0])[0].shape[0]
    model = build()
    return most_examples(x if is_dataset(x) else called_for(x, model, batch_size), model)


def _training_data(data: FitData) -> FitData:
    """Check that there are training data, and take what is split off for validation from them."""
    if data.validation_split and data.validation_data is None:
        data = _split(data)
    if data.x is None:
        raise InputError(f"There is no training data: `x` is missing. {FORMS} Received: x=None.")
    return data


def _split(data: FitData) -> FitData:
    if gives_batches(data.x):
        raise InputError(
            "`validation_split` splits arrays only: give `validation_data` beside a dataset. "
            f"Received: validation_split={data.validation_split}."
        )
    try:
        split: Any = train_validation_split(
            (data.x, data.y, data.sample_weight), validation_split=data.validation_split
        )
    except (ValueError, TypeError) as error:
        raise InputError(str(error)[:300]) from error
    (x, y, weight), validation = split
    return data._replace(x=x, y=y, sample_weight=weight, validation_data=validation)


def array_batches(arrays: Any, *, batch_size: int, shuffle: bool, seed: int | None):
    """Return arrays in batches, in another order each epoch."""
    # tf.data would pack a list into one tensor.
    arrays = keras.tree.lists_to_tuples(arrays)
    parts = parts_of(arrays)
    examples = parts[0].shape[0]
    # Rows are gathered many at a time, and cut into batches without Python functions: each takes
    # time to trace in an execution, and to start in an epoch.
    row_bytes = sum(math.prod(part.shape[1:]) * max(1, part.dtype.size) for part in parts)
    most = min(_GATHERED_ROWS, _GATHERED_BYTES // max(1, row_bytes))
    gathered = max(1, most // batch_size) * batch_size
    # Orders follow TensorFlow's global seed too, which must not change those of a seed.
    with contextlib.nullcontext() if seed is None else kept_seeds():
        if seed is not None:
            tf.random.set_seed(seed)
        order = _order(examples, shuffle=shuffle, seed=seed, piece=gathered)
    rows = order.map(_graph(lambda chosen: each_part(lambda leaf: tf.gather(leaf, chosen), arrays)))
    batches = rows.rebatch(batch_size).prefetch(2)
    options = tf.data.Options()
    # To tune the one prefetch, or rewrite the graph of the pipeline, takes longer than it saves.
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    cardinality = tf.data.experimental.assert_cardinality(-(-examples // batch_size))
    return batches.apply(cardinality).with_options(options)


def _order(examples: int, *, shuffle: bool, seed: int | None, piece: int) -> tf.data.Dataset:
    """Return the numbers of all rows, in pieces."""
    numbers = tf.data.Dataset.range(examples)
    if not shuffle:
        return numbers.batch(piece)
    # `shuffle` would give replicas, for which Keras opens one more iterator, another order.
    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).take(1)
    # A number that is known when the graph is made would make batches of a fixed shape.
    counted = tf.data.Dataset.zip(seeds, tf.data.Dataset.from_tensors(np.int64(examples)))
    random: Any = tf.random
    shuffled = random.experimental.stateless_shuffle
    return counted.map(_graph(lambda s, n: shuffled(tf.range(n), seed=(s, 0)))).rebatch(piece)
