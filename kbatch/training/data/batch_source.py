"""Where batches come from: data that can be read again from its start, as often as one likes."""

import contextlib
import glob
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter,
    can_convert_arrays,
)
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from kbatch.analysis.batch_sizes import LARGEST_SIZE
from kbatch.errors import InputError
from kbatch.training.data.batched import is_batched
from kbatch.training.data.data import called_for, check_targets, rebatched
from kbatch.training.data.py_dataset_workers import Workers

_FORMS = (
    "Give a `tf.data.Dataset`, a `keras.utils.PyDataset`, arrays as `x`, `(x, y)` or "
    "`(x, y, sample_weight)`, or a function `batch_size -> tf.data.Dataset`."
)
_KERAS_BATCH_SIZE = 32
_PROCESSES_S = 60.0


class BatchSource(NamedTuple):
    """Data that gives batches, each time from its start.

    Attributes:
        kind: `"tf.data.Dataset"`, `"PyDataset"` or `"arrays"`.
        open: Starts an epoch: a context that holds an iterator of batches and ends what runs
            behind it.
        given: The data: a dataset in batches, a PyDataset, or the arrays.
        batch_size: Examples in a batch as asked for, None where the data decide.
    """

    kind: str
    open: Callable[[], AbstractContextManager[Iterator[Any]]]
    given: Any
    batch_size: int | None


def batch_source(data: Any, model: keras.Model, *, batch_size: int | None) -> BatchSource:
    """Makes a source of batches from what a person would give to `fit`.

    Args:
        data: A `tf.data.Dataset`, a `PyDataset`, arrays, or a function `batch_size -> Dataset`.
        model: The model to train.
        batch_size: Examples in a batch; None for those that a dataset has, and for Keras's
            default with arrays.

    Raises:
        InputError: If the data can be read once only, or cannot be put into batches.
    """
    whole = hasattr(batch_size, "__index__") and not isinstance(batch_size, bool)
    if batch_size is not None and not (whole and 1 <= batch_size <= LARGEST_SIZE):
        raise InputError(
            "`batch_size` must be an integer of at least 1 and at most 2**53. "
            f"Received: batch_size={batch_size!r}."
        )
    if isinstance(data, Iterator):
        raise InputError(
            "The data must be readable from the start again and again, and an iterator is used up "
            "by reading it: give what it was made from, such as "
            "`tf.data.Dataset.from_generator(function, output_signature=...)` with the function "
            f"that makes the generator. {_FORMS} Received: a {type(data).__name__}."
        )
    if isinstance(data, keras.utils.PyDataset):
        return _of_py_dataset(data, batch_size)
    if isinstance(data, tf.data.Dataset) or callable(data):
        dataset = _batched(data, model, batch_size)
        _check_file_caches(dataset)
        return source_of_dataset(dataset, batch_size)
    arrays = tuple(data) if isinstance(data, (tuple, list)) else (data,)
    if not 1 <= len(arrays) <= 3 or arrays[0] is None or not can_convert_arrays(arrays):
        raise InputError(f"{_FORMS} Received: {_named(data)}.")
    return _of_arrays(arrays, batch_size or _KERAS_BATCH_SIZE)


def source_of_dataset(dataset: tf.data.Dataset, batch_size: int | None = None) -> BatchSource:
    """Makes a source of batches from a dataset of batches."""
    return BatchSource("tf.data.Dataset", lambda: _epoch(dataset), dataset, batch_size)


def source_of_py_dataset(
    dataset: keras.utils.PyDataset,
    *,
    workers: int,
    use_multiprocessing: bool,
    max_queue_size: int,
    timeout_s: float = _PROCESSES_S,
) -> BatchSource:
    """Makes a source of batches from a PyDataset, with workers of its own choice.

    Args:
        dataset: The PyDataset, whose own settings stay as they are.
        workers: Threads or processes that make batches.
        use_multiprocessing: Whether they are processes.
        max_queue_size: Batches that may wait in the queue.
        timeout_s: Seconds that processes may take to a batch: forked beside TensorFlow's threads,
            they may never answer.
    """
    settings = {
        "workers": workers,
        "use_multiprocessing": use_multiprocessing,
        "max_queue_size": max_queue_size,
    }
    signature = None

    def open_epoch():
        nonlocal signature
        adapter = _py_adapter(dataset, settings)
        if adapter.enqueuer is not None:
            adapter.enqueuer = Workers(dataset, **settings, timeout_s=timeout_s)
        adapter._output_signature = signature
        batches = adapter.get_tf_dataset()
        signature = adapter._output_signature
        return _worked_epoch(adapter, batches)

    return BatchSource("PyDataset", open_epoch, dataset, None)


@contextlib.contextmanager
def _epoch(dataset: tf.data.Dataset) -> Iterator[Iterator[Any]]:
    # The threads behind an iterator end with the last reference to it.
    yield iter(dataset)


@contextlib.contextmanager
def _worked_epoch(adapter: Any, dataset: tf.data.Dataset) -> Iterator[Iterator[Any]]:
    try:
        yield iter(dataset)
    finally:
        if adapter.enqueuer is not None:
            adapter.enqueuer.stop()
        # TensorFlow keeps the functions of every generator, which would keep the data.
        adapter.py_dataset = None


def _py_adapter(dataset: keras.utils.PyDataset, settings: dict[str, Any]) -> Any:
    """Makes Keras's adapter under other settings: it reads them once, when it is made."""
    kept = {name: getattr(dataset, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(dataset, name, value)
        return PyDatasetAdapter(dataset)
    finally:
        for name, value in kept.items():
            setattr(dataset, name, value)


def _of_py_dataset(dataset: Any, batch_size: int | None) -> BatchSource:
    if batch_size is not None:
        raise InputError(
            "A `PyDataset` makes its own batches: leave out `batch_size`. "
            f"Received: batch_size={batch_size}."
        )
    if dataset.num_batches == 0:
        raise InputError(
            "There are no batches to measure: give data with at least one. "
            f"Received: a {type(dataset).__name__} with num_batches=0."
        )
    return source_of_py_dataset(
        dataset,
        workers=dataset.workers,
        use_multiprocessing=dataset.use_multiprocessing,
        max_queue_size=dataset.max_queue_size,
    )


def _of_arrays(arrays: tuple[Any, ...], batch_size: int) -> BatchSource:
    check_targets(arrays[1] if len(arrays) > 1 else None)
    try:
        adapter = ArrayDataAdapter(*arrays, batch_size=batch_size, shuffle=True)
    except (ValueError, TypeError) as error:
        raise InputError(str(error)[:300]) from error
    dataset = adapter.get_tf_dataset()
    return BatchSource("arrays", lambda: _epoch(dataset), arrays, batch_size)


def _batched(data: Any, model: keras.Model, batch_size: int | None) -> tf.data.Dataset:
    if not isinstance(data, tf.data.Dataset):
        if batch_size is None:
            raise InputError(
                "A data function is called with the batch size: give `batch_size`. "
                f"Received: a function {getattr(data, '__name__', data)!r}, batch_size=None."
            )
        return called_for(data, model, batch_size)
    if batch_size is not None:
        return rebatched(data, model, batch_size)
    if not is_batched(data.element_spec, model):
        raise InputError(
            "The dataset gives single examples: end it with `.batch(batch_size)`, or give "
            f"`batch_size`. Received: element_spec={data.element_spec}."
        )
    return data


def _named(data: Any) -> str:
    """Names the type of what was given, and of the parts of a tuple or list."""
    name = f"a {type(data).__module__}.{type(data).__name__}"
    if not isinstance(data, (tuple, list)):
        return name
    return f"{name} of {len(data)}: {', '.join(type(one).__name__ for one in data[:3])}"


def _check_file_caches(dataset: Any) -> None:
    """Refuses a file cache that is not complete: reading a part of it would leave it locked."""
    waiting = [dataset]
    while waiting:
        stage = waiting.pop()
        waiting += stage._inputs()
        if type(stage).__name__ == "CacheDataset":
            name = stage._filename.numpy().decode()
            if name and not glob.glob(f"{glob.escape(name)}*.index"):
                raise InputError(
                    "The dataset's file cache is not complete, and measuring would leave half of "
                    "it behind: read the dataset once (`for _ in dataset: pass`), then measure. "
                    f"Received: a dataset with cache({name!r})."
                )
