"""The pipeline of the data that `fit` would get, read again from its start as often as needed."""

import glob
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from kbatch.analysis.batch_sizes import check_size
from kbatch.device.failures import failure_text
from kbatch.errors import InputError
from kbatch.library_internals import ArrayDataAdapter, cache_file, inputs_of_dataset
from kbatch.training.data.forms import (
    arrays_of,
    as_dataset,
    batches_of,
    gives_batches,
    is_batched,
    is_dataset,
)

_KERAS_BATCH_SIZE = 32


def pipeline_of(data: Any, model: keras.Model, *, batch_size: int | None) -> tf.data.Dataset:
    """Return batches of what a person would give to `fit`."""
    size = None if batch_size is None else check_size(batch_size, "batch_size")
    if isinstance(data, Iterator):
        raise InputError(
            "The data must be readable from the start again and again, and an iterator is used up "
            "by reading it: give what it was made from, such as "
            "`tf.data.Dataset.from_generator(function, output_signature=...)` with the function "
            f"that makes the generator. Received: a {type(data).__name__}."
        )
    if isinstance(data, keras.utils.PyDataset):
        if size is not None:
            raise InputError(
                "A `PyDataset` makes its own batches: leave out `batch_size`. "
                f"Received: batch_size={size}."
            )
        return read_by_workers(data, data.workers)
    if not gives_batches(data):
        parts = tuple(data) if isinstance(data, (tuple, list)) else (data,)
        if not 1 <= len(parts) <= 3 or parts[0] is None:
            raise InputError(
                "Arrays are `x`, `(x, y)` or `(x, y, sample_weight)`. "
                f"Received: a {type(data).__name__} of {len(parts)}."
            )
        arrays_of(*parts)
        whole = ArrayDataAdapter(*parts, batch_size=size or _KERAS_BATCH_SIZE, shuffle=True)
        return whole.get_tf_dataset()
    if size is not None:
        data = batches_of(data, model, size)
    elif not is_dataset(data):
        raise InputError(
            "A data function is called with the batch size: give `batch_size`. "
            f"Received: a function {getattr(data, '__name__', data)!r}, batch_size=None."
        )
    elif not is_batched(data.element_spec, model):
        raise InputError(
            "The dataset gives single examples: end it with `.batch(batch_size)`, or give "
            f"`batch_size`. Received: element_spec={data.element_spec}."
        )
    _check_file_caches(data)
    return data


def read_by_workers(data: keras.utils.PyDataset, workers: int) -> tf.data.Dataset:
    """Return the batches of a PyDataset, read by so many threads as Keras would."""
    try:
        batches = as_dataset(_ReadByWorkers(data, workers))
    except InputError:
        raise
    except Exception as error:  # The first batches tell the spec.
        raise _broken(error, 0) from error
    options = tf.data.Options()
    # To free an iterator whose prefetch is tuned takes as long as it lived.
    options.autotune.enabled = False
    return batches.prefetch(max(1, data.max_queue_size)).with_options(options)


class _ReadByWorkers(keras.utils.PyDataset):
    """The batches of a PyDataset, which hears of no epochs: it stays as it is."""

    def __init__(self, given: keras.utils.PyDataset, workers: int):
        super().__init__(workers=workers)
        self._given = given

    @property
    def num_batches(self) -> int | None:
        return self._given.num_batches

    def __getitem__(self, index: int) -> Any:
        return self._given[index]


def _check_file_caches(dataset: Any) -> None:
    """Refuse a file cache that is not complete: reading a part of it would leave it locked."""
    waiting = [dataset]
    while waiting:
        stage = waiting.pop()
        waiting += inputs_of_dataset(stage)
        name = cache_file(stage)
        if name and not glob.glob(f"{glob.escape(name)}*.index"):
            raise InputError(
                "The dataset's file cache is not complete, and measuring would leave half of it "
                "behind: read the dataset once (`for _ in dataset: pass`), then measure. "
                f"Received: a dataset with cache({name!r})."
            )


class BatchStream:
    """Reads a pipeline batch by batch; at the end of the data it starts the next epoch."""

    def __init__(self, pipeline: Iterable[Any]):
        self._pipeline = pipeline
        self._iterator: Any = None
        self._of_epoch = 0
        self.epochs = 0  # Those that have ended.

    def __enter__(self) -> "BatchStream":
        self._iterator = iter(self._pipeline)
        return self

    def __exit__(self, *error: object) -> None:
        # The threads behind an iterator end with its last reference.
        self._iterator = None

    def next(self) -> Any:
        while True:
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._end_epoch()
            except Exception as error:
                raise _broken(error, self._of_epoch) from error
            else:
                self._of_epoch += 1
                return batch

    def _end_epoch(self) -> None:
        if self._of_epoch == 0:
            raise InputError(
                "There are no batches to measure: give data with at least one, and let a data "
                "function make a new generator each time it is called, for one that was used up "
                f"gives none. Received: no batch in epoch {self.epochs} (the first is 0)."
            )
        self.epochs += 1
        self._of_epoch = 0
        self._iterator = None  # Nothing runs behind two.
        self._iterator = iter(self._pipeline)


def _broken(error: Exception, batch: int) -> InputError:
    return InputError(
        f"The data raised an error at batch {batch} (the first is 0): mend them so that they can "
        f"be read from start to end. Received: {failure_text(error)}"
    )
