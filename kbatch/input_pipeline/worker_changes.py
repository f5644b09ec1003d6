"""Changes to the workers of a Keras `PyDataset`."""

import os
from typing import Any

from kbatch.errors import InputError
from kbatch.input_pipeline.input_rates import UntriedRecord
from kbatch.input_pipeline.pipeline_changes import Change, Changes
from kbatch.training.data.batch_source import source_of_py_dataset
from kbatch.training.data.batch_stream import first_batch

_THREADS = "`__getitem__` may be called from several threads at once"
_PROCESSES = "each process has its own copy of the data"
_FEWEST_WORKERS = 2
_LONGER = 4


def worker_changes(dataset: Any, *, timeout_s: float | None) -> Changes:
    """Finds the settings of a PyDataset to try: threads, processes and a longer queue.

    Args:
        dataset: The PyDataset.
        timeout_s: Seconds that processes may take to a batch, None not to start any.
    """
    found = [_more_workers(dataset), _processes(dataset, timeout_s), _longer_queue(dataset)]
    return Changes(
        tuple(change for change in found if isinstance(change, Change)),
        tuple(change for change in found if isinstance(change, UntriedRecord)),
    )


def _more_workers(dataset: Any) -> Change | UntriedRecord:
    workers = _workers(dataset)
    name, code = "more workers", f"workers={workers}"
    if dataset.workers >= workers:
        return UntriedRecord(name, code, "there is one a core already")
    return Change(name, code, _THREADS, _source(dataset, workers=workers))


def _processes(dataset: Any, timeout_s: float | None) -> Change | UntriedRecord:
    workers = _workers(dataset)
    name, code = "processes", f"workers={workers}, use_multiprocessing=True"
    if dataset.use_multiprocessing:
        return UntriedRecord(name, code, "the workers are processes already")
    limit = {} if timeout_s is None else {"timeout_s": timeout_s}
    source = _source(dataset, workers=workers, use_multiprocessing=True, **limit)
    problem = None if timeout_s is None else _problem(source)
    if problem:
        return UntriedRecord(name, code, problem)
    return Change(name, code, _PROCESSES, source)


def _longer_queue(dataset: Any) -> Change | UntriedRecord:
    longer = _LONGER * dataset.max_queue_size
    name, code = "longer queue", f"max_queue_size={longer}"
    if dataset.workers < 2 and not dataset.use_multiprocessing:
        return UntriedRecord(name, code, "a single worker in the main thread has no queue")
    return Change(name, code, None, _source(dataset, max_queue_size=longer))


def _workers(dataset: Any) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(_FEWEST_WORKERS, cores or 1, dataset.workers)


def _source(dataset: Any, **changed: Any):
    names = ("workers", "use_multiprocessing", "max_queue_size")
    return source_of_py_dataset(dataset, **{n: getattr(dataset, n) for n in names} | changed)


def _problem(source: Any) -> str | None:
    """Tries processes once: forked beside TensorFlow's threads, they may never answer."""
    try:
        first_batch(source)
    except InputError as error:
        return f"processes failed: {error}"
    return None
