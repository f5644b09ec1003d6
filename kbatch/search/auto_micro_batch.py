"""The micro-batch size of "auto": the fastest of those that fit, found once for each model."""

import functools
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import keras
import psutil

from kbatch.device.control_group import read_control_group
from kbatch.device.device_memory import DeviceMemory, gpu_visible, nvml_gpu, workers_on_device
from kbatch.device.environment import read_environment
from kbatch.document.number_text import counted
from kbatch.document.where_measured import neighbours_text
from kbatch.memory.max_batch_probing import probe_max_batch
from kbatch.memory.max_batch_record import MaxBatchSizeResult
from kbatch.memory.max_batch_text import slow_steps_text
from kbatch.memory.micro_batch_limit import MicroBatchLimit
from kbatch.memory.probe_places import OF_SEVERAL_REPLICAS, search_in_place
from kbatch.memory.workload import STEPS, Load
from kbatch.records.json_files import load_if_readable, write_record
from kbatch.search.data import SearchData
from kbatch.search.fastest_micro_batch import FastestMicroBatch
from kbatch.training.accumulation.parts_checks import PartsChecks
from kbatch.training.data.data_source import Source, row_shapes
from kbatch.training.fingerprint import model_fingerprint
from kbatch.training.replica_meter import replica_count


class FoundMicroBatch(NamedTuple):
    """A micro-batch size and how it was found.

    Attributes:
        size: Examples that go through the device at once.
        most: Most examples that fit.
        memory_bound: Whether more of them were found not to fit.
        search_s: Seconds that probes and timing took now, 0 where an earlier search told it.
        notes: The same in words.
        key: What tells the model, its data and the limits from others.
    """

    size: int
    most: int
    memory_bound: bool
    search_s: float
    notes: tuple[str, ...]
    key: str


class TrainingLeft(NamedTuple):
    """What a search is still to train at its large batch sizes, as far as it is known.

    Attributes:
        examples: Examples of these trainings, or None.
        train_s: Seconds that budgets let them take, or None.
    """

    examples: float | None = None
    train_s: float | None = None

    def seconds(self, example_s: float) -> float | None:
        """Forecasts the seconds of training, None where nothing is known.

        Args:
            example_s: Seconds of training on an example.
        """
        by_examples = None if self.examples is None else self.examples * example_s
        return min((s for s in (by_examples, self.train_s) if s is not None), default=None)


class AutoMicroBatch:
    """Finds the fastest micro-batch that fits, and remembers it for each model and batch size.

    Args:
        largest_batch_size: Largest batch of the search: nothing beyond it is tried.
        memory_limit_bytes: Memory that may be taken, None for what the device has.
        memory_window: Lower and upper share of it that is aimed at.
        moments_every: As in `accumulate_gradients`.

    Attributes:
        data: Takes rows of the data of the search.
        checks: Compare parts of a batch with the whole.
    """

    def __init__(
        self,
        *,
        largest_batch_size: int,
        memory_limit_bytes: int | None,
        memory_window: tuple[float, float],
        moments_every: int,
    ):
        self.data = SearchData()
        self.checks = PartsChecks()
        self._largest = largest_batch_size
        self._limit_bytes = memory_limit_bytes
        self._window = memory_window
        self._moments_every = moments_every
        self._found: dict[str, MaxBatchSizeResult] = {}
        self._limits: dict[str, MicroBatchLimit] = {}
        self._fastest = FastestMicroBatch(
            self.checks, largest_batch_size=largest_batch_size, moments_every=moments_every
        )

    def find(
        self,
        model: keras.Model,
        build: Callable[[], keras.Model],
        *,
        source: Source,
        directory: Path | None,
        rows: int,
        left: TrainingLeft | None = None,
    ) -> FoundMicroBatch:
        """Finds the size for a model and a batch.

        Args:
            model: The model of the trial, built; it stays as it is.
            build: Builds it anew, for a worker process.
            source: Its data.
            directory: Where results are kept for later runs of the search, or None.
            rows: Examples that a device has of a batch.
            left: What the search is still to train, None where nothing is known.

        Raises:
            InputError: If the limit is below the weights.
            OutOfMemoryError: If one example does not fit.
        """
        key = self._key(model, source)
        result, search_s = self._result(
            key, model=model, build=build, source=source, directory=directory
        )
        most = min(result.max_batch_size, self._limit(key, directory))
        fastest = self._fastest.find(
            model,
            source,
            batch_size=rows,
            most=most,
            key=key,
            directory=directory,
            left_s=None if left is None else left.seconds(self._example_s(result)),
            example_s=self._example_s(result),
        )
        notes = (fastest.note, _note(result, most, search_s))
        bound = most < result.max_batch_size or result.memory_bound
        return FoundMicroBatch(fastest.size, most, bound, search_s + fastest.search_s, notes, key)

    def most(
        self,
        model: keras.Model,
        build: Callable[[], keras.Model],
        *,
        source: Source,
        directory: Path | None,
    ) -> int:
        """Finds the most examples that fit at once, and remembers it.

        Args:
            model: A built model; it stays as it is.
            build: Builds it anew, for a worker process.
            source: Its data.
            directory: Where results are kept for later runs of the search, or None.

        Raises:
            InputError: If the limit is below the weights.
            OutOfMemoryError: If one example does not fit.
        """
        key = self._key(model, source)
        result, _ = self._result(key, model=model, build=build, source=source, directory=directory)
        return min(result.max_batch_size, self._limit(key, directory))

    def halve(self, key: str, size: int, directory: Path | None) -> int | None:
        """Takes half of a size that ran out of memory after all, and remembers it.

        Args:
            key: What tells the model, its data and the limits from others.
            size: Examples that went through the device at once.
            directory: Where that is kept for later runs of the search, or None.

        Returns:
            The half, or less where less ran out elsewhere; None below one example.
        """
        if size < 2:
            return None
        half = min(size // 2, self._limit(key, directory))
        self._limits[key] = MicroBatchLimit(half)
        _save(self._limits[key], _limit_file(directory, key))
        return half

    def _limit(self, key: str, directory: Path | None) -> int:
        """Gives the largest size that may be tried; another worker may have learnt of it."""
        known = [
            self._limits.get(key),
            load_if_readable(MicroBatchLimit, _limit_file(directory, key)),
        ]
        return min([self._largest, *(limit.micro_batch_size for limit in known if limit)])

    def _key(self, model: keras.Model, source: Source) -> str:
        limits = (self._rows(model), self._limit_bytes or _memory(), self._window)
        here = read_environment()
        devices = (here.devices, here.versions.get("nvidia-driver"), *_gpu())
        described = repr((model_fingerprint(model), row_shapes(source, model), limits, devices))
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def _result(
        self,
        key: str,
        *,
        model: keras.Model,
        build: Callable[[], keras.Model],
        source: Source,
        directory: Path | None,
    ) -> tuple[MaxBatchSizeResult, float]:
        """Gives what fits, and the seconds that finding it took now."""
        known = self._found.get(key) or load_if_readable(MaxBatchSizeResult, _file(directory, key))
        if known is not None:
            self._found[key] = known
            return known, 0.0
        began_s = time.perf_counter()
        self._found[key] = found = self._probed(model, build, source)
        if not found.other_processes:  # Beside others it is that of this search alone.
            _save(found, _file(directory, key))
        return found, time.perf_counter() - began_s

    def _probed(
        self, model: keras.Model, build: Callable[[], keras.Model], source: Source
    ) -> MaxBatchSizeResult:
        rows, replicas = self._rows(model), replica_count(model)
        load = Load(
            build,
            source,
            model.dtype_policy.name,
            accumulate_below=rows,
            moments_every=self._moments_every,
            replicas=replicas,
        )
        search = functools.partial(
            probe_max_batch,
            memory_window=self._window,
            max_batch_size=rows,
            confirm=False,
            largest_first=True,
        )
        return search_in_place(
            load,
            search,
            memory_limit_bytes=self._limit_bytes,
            memory_window=self._window,
            model=lambda: model,
            here_since=None if replicas == 1 else OF_SEVERAL_REPLICAS,
        )

    def _example_s(self, result: MaxBatchSizeResult) -> float:
        """Return the seconds of training on an example, an upper bound for older records."""
        size = result.max_batch_size
        probes = [probe for probe in result.probes if probe.batch_size == size]
        return min(p.step_s or p.duration_s / STEPS for p in probes) / size

    def _rows(self, model: keras.Model) -> int:
        """Gives the most examples that a replica has of a batch."""
        return -(-self._largest // replica_count(model))


def _memory() -> tuple[int, int | None, int | None]:
    """Tells what decides the limit of a search that is given none: it differs between hosts."""
    group_bytes = read_control_group().memory_limit_bytes
    return psutil.virtual_memory().total, group_bytes, workers_on_device()


def _gpu() -> tuple[float | None, ...]:
    """Return the limit and the power cap of the GPU, which is started; nothing without one."""
    if not gpu_visible():
        return ()
    limit_bytes, gpu = DeviceMemory().limit_bytes or 0, nvml_gpu()
    # To 1 part in 16 or finer: what a driver and a desktop leave differs from start to start.
    step = 2 ** max(0, limit_bytes.bit_length() - 5)
    return limit_bytes // step * step, None if gpu is None else gpu.power_cap_w


def _note(result: MaxBatchSizeResult, size: int, search_s: float) -> str:
    if size < result.max_batch_size:
        return (
            f"Micro-batches have up to {size} examples: larger ones, up to "
            f"{result.max_batch_size}, ran out of memory in training.{_beside(result)}"
        )
    took = f"found in {search_s:.1f} s" if search_s else "from an earlier search"
    found = (
        f"Up to {size} examples fit at once ({result.reason}), {took} with "
        f"{counted(len(result.probes), 'probe')}.{_beside(result)}"
    )
    slow = slow_steps_text(result)
    return found if slow is None else f"{found} {slow}"


def _beside(result: MaxBatchSizeResult) -> str:
    if not result.other_processes:
        return ""
    return f" {neighbours_text(result.other_processes)} So it is not kept for later searches."


def _file(directory: Path | None, key: str) -> Path | None:
    return None if directory is None else directory / "kbatch-micro-batches" / f"{key}.json"


def _limit_file(directory: Path | None, key: str) -> Path | None:
    return None if directory is None else directory / "kbatch-micro-batches" / f"{key}-limit.json"


def _save(record: object, path: Path | None) -> None:
    if path is not None:
        write_record(record, path)
