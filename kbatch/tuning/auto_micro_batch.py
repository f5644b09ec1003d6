"""The micro-batch size of "auto": the largest that fits, found once for each model."""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import keras

from kbatch.instruments.environment import read_environment
from kbatch.profiling.loads import Load, Source
from kbatch.profiling.max_batch_probing import probe_max_batch
from kbatch.profiling.probe_places import search_in_place
from kbatch.records.json_files import RecordError
from kbatch.records.max_batch import MaxBatchSizeResult
from kbatch.training.fingerprint import model_fingerprint
from kbatch.training.replica_meter import replica_count


class FoundMicroBatch(NamedTuple):
    """A micro-batch size and how it was found.

    Attributes:
        size: Examples that go through the device at once.
        search_s: Seconds that the probes took now, 0 where an earlier search told it.
        note: The same in words.
    """

    size: int
    search_s: float
    note: str


class AutoMicroBatch:
    """Finds the largest micro-batch that fits, and remembers it for each model.

    Args:
        largest_batch_size: Largest batch of the search: nothing beyond it is tried.
        memory_limit_bytes: Memory that may be taken, None for what the device has.
        memory_window: Lower and upper share of it that is aimed at.
    """

    def __init__(
        self,
        *,
        largest_batch_size: int,
        memory_limit_bytes: int | None,
        memory_window: tuple[float, float],
    ):
        self._largest = largest_batch_size
        self._limit_bytes = memory_limit_bytes
        self._window = memory_window
        self._found: dict[str, MaxBatchSizeResult] = {}
        # Sizes that ran out of memory later on, halved.
        self._halved: dict[str, int] = {}

    def find(
        self,
        model: keras.Model,
        build: Callable[[], keras.Model],
        source: Source,
        directory: Path | None,
    ) -> FoundMicroBatch:
        """Finds the size for a model.

        Args:
            model: The model of the trial, built; it stays as it is.
            build: Builds it anew, for a worker process.
            source: Its data.
            directory: Where results are kept for later runs of the search, or None.

        Raises:
            InputError: If the limit is below the weights.
            OutOfMemoryError: If one example does not fit.
        """
        key = self._key(model)
        known = self._found.get(key) or _loaded(directory, key)
        result = known or self._probed(model, build, source)
        self._found[key] = result
        if known is None and directory is not None:
            result.save(_file(directory, key))
        size = min(result.max_batch_size, self._halved.get(key, self._largest))
        return FoundMicroBatch(
            size, 0.0 if known else result.duration_s, _note(result, size, bool(known))
        )

    def halve(self, model: keras.Model, size: int) -> int | None:
        """Takes half of a size that ran out of memory after all; None below one example."""
        if size < 2:
            return None
        self._halved[self._key(model)] = size // 2
        return size // 2

    def _key(self, model: keras.Model) -> str:
        limits = (self._rows(model), self._limit_bytes, self._window)
        described = repr((model_fingerprint(model), limits, read_environment().devices))
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def _probed(
        self, model: keras.Model, build: Callable[[], keras.Model], source: Source
    ) -> MaxBatchSizeResult:
        rows = self._rows(model)
        load = Load(build, source, model.dtype_policy.name, accumulate_below=rows)
        search = functools.partial(
            probe_max_batch, memory_window=self._window, max_batch_size=rows, confirm=False
        )
        return search_in_place(
            load,
            search,
            memory_limit_bytes=self._limit_bytes,
            memory_window=self._window,
            # One of several replicas cannot be probed with the others: a model on one device can.
            model=model if replica_count(model) == 1 else None,
        )

    def _rows(self, model: keras.Model) -> int:
        """Gives the most examples that a replica has of a batch."""
        return -(-self._largest // replica_count(model))


def _note(result: MaxBatchSizeResult, size: int, known: bool) -> str:
    if size < result.max_batch_size:
        return (
            f"Micro-batches have {size} examples: larger ones, up to {result.max_batch_size}, ran "
            "out of memory in training."
        )
    took = "from an earlier search" if known else f"found in {result.duration_s:.1f} s"
    return (
        f"Up to {size} examples fit at once ({result.reason}), {took} with "
        f"{len(result.probes)} probes."
    )


def _file(directory: Path, key: str) -> Path:
    return directory / "kbatch-micro-batches" / f"{key}.json"


def _loaded(directory: Path | None, key: str) -> MaxBatchSizeResult | None:
    if directory is None or not _file(directory, key).exists():
        return None
    try:
        return MaxBatchSizeResult.load(_file(directory, key))
    except RecordError:
        return None  # It is measured again, and written anew.
