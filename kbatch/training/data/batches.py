"""Training data in batches of one size, as a search feeds them."""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.library_internals import make_class_weight_map_fn, train_validation_split
from kbatch.training.data.array_rows import ArrayRows
from kbatch.training.data.forms import (
    FORMS,
    FitData,
    arrays_of,
    batches_of,
    called_for,
    check_class_weight,
    gives_batches,
    is_dataset,
)
from kbatch.training.data.validation import in_blocks, most_examples


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
    epoch_steps: int | None  # Of a dataset that goes on with the next epoch.


class KeptRows:
    """The rows of the arrays that a search trains on, made once for all its executions."""

    def __init__(self):
        self._data: Any = ()
        self._rows: Any = None

    def of(self, data: FitData, split: FitData) -> ArrayRows:
        if len(self._data) != len(data) or any(
            one is not other for one, other in zip(self._data, data, strict=True)
        ):
            arrays, _ = arrays_of(split)
            self._data, self._rows = data, ArrayRows(arrays, shuffle=split.shuffle)
        return self._rows


def in_batches(
    data: FitData,
    model: Any,  # For arrays it may be None.
    *,
    batch_size: int,
    largest_batch_size: int,
    validation_batch_size: int,
    validation_steps: int | None = None,
    seed: int | None,
    # Where given, arrays go on from epoch to epoch: to begin an iterator takes time.
    endless: KeptRows | None = None,
) -> Batches:
    given, epoch_steps = data, None
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
        rows = (endless or KeptRows()).of(given, data)
        examples = rows.examples
        if endless is None:
            dataset = rows.epoch(batch_size, seed=seed)
        else:
            dataset = rows.endless(batch_size, seed=seed)
            epoch_steps = -(-examples // batch_size)
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
    return Batches(dataset, *validation, examples, order, of_dataset, epoch_steps)


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
