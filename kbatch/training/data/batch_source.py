"""Where batches come from, read again from the start as often as needed."""

import contextlib
import glob
import multiprocessing
import queue
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kbatch.analysis.batch_sizes import LARGEST_SIZE
from kbatch.device.failures import failure_text
from kbatch.errors import InputError
from kbatch.library_internals import (
    ArrayDataAdapter,
    OrderedEnqueuer,
    PyDatasetAdapter,
    cache_file,
    can_convert_arrays,
    forget_py_dataset,
    inputs_of_dataset,
    set_signature,
    signature_of,
)
from kbatch.training.data.forms import (
    batches_of,
    check_targets,
    gives_batches,
    is_batched,
    is_dataset,
)

_FORMS = (
    "Give a `tf.data.Dataset`, a `keras.utils.PyDataset`, arrays as `x`, `(x, y)` or "
    "`(x, y, sample_weight)`, or a function `batch_size -> tf.data.Dataset`."
)
_KERAS_BATCH_SIZE = 32
_PROCESSES_S = 60.0


class BatchSource(NamedTuple):
    """Data that gives batches, each time from its start."""

    kind: str  # "tf.data.Dataset", "PyDataset" or "arrays".
    # Starts an epoch: a context that holds an iterator of batches and ends what runs behind it.
    open: Callable[[], AbstractContextManager[Iterator[Any]]]
    given: Any  # A dataset in batches, a PyDataset, or the arrays.
    batch_size: int | None  # None where the data decide.


def batch_source(data: Any, model: keras.Model, *, batch_size: int | None) -> BatchSource:
    """Make a source of batches from what a person would give to `fit`."""
    integer = hasattr(batch_size, "__index__") and not isinstance(batch_size, bool)
    if batch_size is not None and not (integer and 1 <= batch_size <= LARGEST_SIZE):
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
        if batch_size is not None:
            raise InputError(
                "A `PyDataset` makes its own batches: leave out `batch_size`. "
                f"Received: batch_size={batch_size}."
            )
        if data.num_batches == 0:
            raise InputError(
                "There are no batches to measure: give data with at least one. "
                f"Received: a {type(data).__name__} with num_batches=0."
            )
        return source_of_py_dataset(data)
    if gives_batches(data):
        if batch_size is not None:
            data = batches_of(data, model, batch_size)
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
        return source_of_dataset(data, batch_size)
    arrays = tuple(data) if isinstance(data, (tuple, list)) else (data,)
    if not 1 <= len(arrays) <= 3 or arrays[0] is None or not can_convert_arrays(arrays):
        name = f"a {type(data).__module__}.{type(data).__name__}"
        if isinstance(data, (tuple, list)):
            name += f" of {len(data)}: {', '.join(type(one).__name__ for one in data[:3])}"
        raise InputError(f"{_FORMS} Received: {name}.")
    check_targets(arrays[1] if len(arrays) > 1 else None)
    size = batch_size or _KERAS_BATCH_SIZE
    try:
        adapter = ArrayDataAdapter(*arrays, batch_size=size, shuffle=True)
    except (ValueError, TypeError) as error:
        raise InputError(str(error)[:300]) from error
    whole = adapter.get_tf_dataset()
    return BatchSource("arrays", lambda: _epoch(whole), arrays, size)


def source_of_dataset(dataset: tf.data.Dataset, batch_size: int | None = None) -> BatchSource:
    return BatchSource("tf.data.Dataset", lambda: _epoch(dataset), dataset, batch_size)


def source_of_py_dataset(
    dataset: keras.utils.PyDataset,
    changed: Mapping[str, Any] = types.MappingProxyType({}),
    *,
    timeout_s: float = _PROCESSES_S,
) -> BatchSource:
    """Make a source of batches from a PyDataset, with its settings but for those `changed`."""
    names = ("workers", "use_multiprocessing", "max_queue_size")
    settings = {name: getattr(dataset, name) for name in names} | dict(changed)
    signature = None

    @contextlib.contextmanager
    def open_epoch() -> Iterator[Iterator[Any]]:
        nonlocal signature
        kept = {name: getattr(dataset, name) for name in settings}
        try:  # Keras's adapter reads them once, when it is made.
            for name, value in settings.items():
                setattr(dataset, name, value)
            adapter: Any = PyDatasetAdapter(dataset)
        finally:
            for name, value in kept.items():
                setattr(dataset, name, value)
        if adapter.enqueuer is not None:
            adapter.enqueuer = Workers(dataset, **settings, timeout_s=timeout_s)
        set_signature(adapter, signature)
        batches = adapter.get_tf_dataset()
        signature = signature_of(adapter)
        try:
            yield iter(batches)
        finally:
            if adapter.enqueuer is not None:
                adapter.enqueuer.stop()
            # TensorFlow keeps the functions of every generator, which would keep the data.
            adapter.py_dataset = None

    return BatchSource("PyDataset", open_epoch, dataset, None)


@contextlib.contextmanager
def _epoch(dataset: tf.data.Dataset) -> Iterator[Iterator[Any]]:
    # The threads behind an iterator end with the last reference to it.
    yield iter(dataset)


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
    """Reads a source batch by batch; at the end of the data it starts the next epoch."""

    def __init__(self, source: BatchSource, *, read_before: bool = False):
        self._source = source
        self._read_before = read_before
        self._exits = contextlib.ExitStack()
        self._iterator: Any = None
        self._of_epoch = 0
        self.batches = 0
        self.epochs = 0  # Those that have ended.

    def __enter__(self) -> "BatchStream":
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def next(self) -> Any:
        while True:
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._end_epoch()
            except Exception as error:
                raise self._broken(error) from error
            else:
                self.batches += 1
                self._of_epoch += 1
                return batch

    def _end_epoch(self) -> None:
        if self._of_epoch == 0 and (self._read_before or self.epochs > 0):
            raise InputError(
                "The data gave batches in the first epoch and none in the second, as an iterator "
                "does that was used up: let the data function make a new generator each time it is "
                "called. Received: an empty second epoch."
            )
        if self._of_epoch == 0:
            raise InputError(
                "There are no batches to measure: give data with at least one. Received: no batch."
            )
        self.epochs += 1
        self._stop()
        self._start()

    def _start(self) -> None:
        self._of_epoch = 0
        try:
            self._iterator = self._exits.enter_context(self._source.open())
        except InputError:
            raise
        except Exception as error:  # A PyDataset makes its first batches here.
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> InputError:
        return InputError(
            f"The data raised an error at batch {self._of_epoch} (the first is 0): mend them so "
            f"that they can be read from start to end. Received: {failure_text(error)}"
        )

    def _stop(self) -> None:
        # The iterator's threads end with its last reference.
        self._iterator = None
        self._exits.close()


def first_batch(source: BatchSource) -> tuple[Any, float]:
    began_s = time.perf_counter()
    with BatchStream(source) as stream:
        return stream.next(), time.perf_counter() - began_s


_POLL_S = 0.05
# Ending a pool of processes that were forked beside TensorFlow's threads may itself never end.
_END_S = 5.0


class Workers(OrderedEnqueuer):
    """Keras's workers, which drop what they have not made when they stop."""

    # Keras's own queue is emptied batch by batch then, which takes as long as making them.
    def __init__(self, py_dataset: Any, *, timeout_s: float, **settings: Any):
        super().__init__(py_dataset, **settings)
        # To make a batch.
        self._timeout_s = timeout_s if settings["use_multiprocessing"] else float("inf")
        self._pools: list[Any] = []
        self._make_pool = self.executor_fn
        self.executor_fn = self._kept_pool

    def get(self) -> Iterator[Any]:
        while self.is_running():
            try:
                pending: Any = self.future_queue.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(pending, Exception):
                raise pending
            batch = self._made(pending)
            if batch is not None:
                yield batch

    def stop(self, drain_queue_and_join: bool = False) -> None:
        """End the workers for good; batches that wait are dropped, and the data are let go."""
        with self.start_stop_lock:
            runner: Any = self.run_thread
            self.running, self.run_thread = False, None
        # Without one they were never started: the data are let go all the same.
        while runner is not None and runner.is_alive():
            # The runner may wait for a place in the queue.
            with self.future_queue.mutex:
                self.future_queue.queue.clear()
                self.future_queue.not_full.notify_all()
            runner.join(_POLL_S)
        pools, self._pools = self._pools, []
        for pool in pools:
            ending = threading.Thread(target=pool.terminate, daemon=True)
            ending.start()
            ending.join(_END_S)
        forget_py_dataset(self.uid)
        self.py_dataset = None

    def _kept_pool(self, sequences: Any) -> Any:
        self._pools.append(self._make_pool(sequences))
        return self._pools[-1]

    def _made(self, pending: Any) -> Any:
        end_s = time.monotonic() + self._timeout_s
        while self.is_running():
            try:
                return pending.get(timeout=_POLL_S)
            except multiprocessing.TimeoutError:
                if not pending.ready() and time.monotonic() > end_s:
                    raise TimeoutError(
                        f"the processes gave no batch within {self._timeout_s:.0f} s"
                    ) from None
        return None
