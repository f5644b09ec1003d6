"""GPUs, watched while a block of code runs."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kbatch.device.gpus import (
    GpuReading,
    NvmlGpu,
    NvmlUnavailableError,
    opened_nvml,
    read_gpu,
)
from kbatch.records.machine import GpuSample, GpuUsage, UsageRecord

if TYPE_CHECKING:
    import pandas as pd


class _GpuTally:
    """Sums up the readings of one GPU."""

    def __init__(self, gpu: NvmlGpu, tensorflow_devices: tuple[str, ...]):
        self._gpu = gpu
        self._devices = tensorflow_devices
        self._series = ThinnedSeries(columns=len(GpuSample.__dataclass_fields__))
        self._ends: list[GpuReading] = []  # The first reading and the last.
        self._last_mj = 0
        self._counter_fell = False

    def add(self, time_s: float) -> None:
        reading = read_gpu(self._gpu)
        *shown, counter_mj = reading
        self._series.add((time_s, *shown))
        self._ends[1:] = [reading]
        if counter_mj is not None:
            # One that began again may have passed its start.
            self._counter_fell |= counter_mj < self._last_mj
            self._last_mj = counter_mj

    def usage(self, duration_s: float) -> GpuUsage:
        first, last = self._ends[0], self._ends[-1]
        mean = _sample(self._series.mean)
        energy_j = source = None
        counters = first.energy_counter_mj, last.energy_counter_mj
        if counters[0] is not None and counters[1] is not None and not self._counter_fell:
            energy_j, source = (counters[1] - counters[0]) / 1e3, "counter"
        elif mean.power_w is not None and None not in (first.power_w, last.power_w):
            energy_j, source = mean.power_w * duration_s, "power"
        return GpuUsage(
            name=self._gpu.name,
            pci_bus_id=self._gpu.pci_bus_id,
            tensorflow_devices=self._devices,
            memory_total_bytes=self._gpu.memory_total_bytes,
            mig=self._gpu.mig,
            energy_j=energy_j,
            energy_source=source,
            mean=mean,
            samples=tuple(_sample(row) for row in self._series.means),
        )


def _sample(row: tuple[float | None, ...]) -> GpuSample:
    time_s, *shown = row
    return GpuSample(time_s or 0.0, *shown)


class GpuMonitor:
    """Measures what a block of code takes of the GPUs.

    Entering it starts TensorFlow's GPUs, so set memory growth and limits before. It reads every
    GPU that TensorFlow uses at the start, in a thread every `interval_s` and at the end. NVML shows
    a GPU as a whole, with other processes and, where it is split, with all instances (MIG). Energy
    is the difference of the driver's counter, which moves in steps: a block of milliseconds may
    show none. Without a counter it is the mean power times the seconds.

    Example:

    >>> with kbatch.GpuMonitor() as monitor:
    ...     model.fit(x, y)
    >>> for gpu in monitor.gpus or ():
    ...     print(gpu.name, gpu.energy_j, gpu.mean.utilization)
    >>> monitor.unavailable
    'There is no NVIDIA driver: its library NVML was not found.'

    Args:
        interval_s: Seconds between two readings; the time that a reading takes comes on top.
        now: Returns the time, in seconds.

    Attributes:
        usage: What the block took, None until it ends.
        unavailable: Why no GPU is read, in one line; None before the start and where one is read.

    Raises:
        ValueError: If `interval_s` is not positive.
    """

    def __init__(
        self,
        *,
        interval_s: float = 0.1,
        now: Callable[[], float] = time.perf_counter,
    ):
        if not interval_s > 0:
            raise ValueError(
                f"`interval_s` must be positive seconds. Received: interval_s={interval_s}."
            )
        self.usage: UsageRecord | None = None
        self.unavailable: str | None = None
        self._now = now
        self._interval_s = interval_s
        self._thread = threading.Thread(target=self._run, name="kbatch-sampling", daemon=True)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: contextlib.ExitStack | None = None
        self._started_s: float | None = None
        self._readings = 0
        self._gpus: list[_GpuTally] = []

    @property
    def gpus(self) -> tuple[GpuUsage, ...] | None:
        """What the block took of each GPU; None until it ends, and where no GPU is read."""
        return self.usage.gpus if self.usage else None

    def __enter__(self) -> "GpuMonitor":
        if self._started_s is not None:
            raise RuntimeError("A `GpuMonitor` measures one block: make another for the next.")
        with contextlib.ExitStack() as opening:
            self._gpus = self._found_gpus(opening)
            self._started_s = self._now()
            self._sample(0.0)
            self._thread.start()
            self._open = opening.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the thread, take the last sample and close NVML; a second time does nothing."""
        if self._open is None:
            return
        opened, self._open = self._open, None
        with opened:
            self._stopped.set()
            self._thread.join()
            duration_s = self.sample()
            self.usage = UsageRecord(
                duration_s=duration_s,
                readings=self._readings,
                gpus=tuple(tally.usage(duration_s) for tally in self._gpus) or None,
                unavailable=self.unavailable,
            )

    def sample(self) -> float:
        """Read the GPUs once more, besides the thread, and return the seconds so far.

        Raises:
            RuntimeError: If the block has not begun.
        """
        if self._started_s is None:
            raise RuntimeError("A `GpuMonitor` takes samples inside its `with` block only.")
        with self._lock:
            time_s = self._now() - self._started_s
            self._sample(time_s)
        return time_s

    def to_dataframe(self) -> "pd.DataFrame":
        """Make a table of the samples, one row a sample and GPU.

        Raises:
            RuntimeError: If the block has not ended.
        """
        if self.usage is None:
            raise RuntimeError("Leave the `with` block first: the usage is summed up at its end.")
        return self.usage.to_dataframe()

    def _found_gpus(self, opening: contextlib.ExitStack) -> list[_GpuTally]:
        try:
            listed = opening.enter_context(opened_nvml())
        except NvmlUnavailableError as error:
            self.unavailable = str(error)
            return []
        # Without a driver TensorFlow is not asked, nor imported.
        from kbatch.device import memory

        devices = memory.tensorflow_gpus()
        by_bus_id = {gpu.pci_bus_id: gpu for gpu in listed}
        if not any(bus_id in by_bus_id for bus_id in devices):
            there = f"NVML lists {', '.join(by_bus_id) or 'no GPU'}"
            used = f"TensorFlow uses the GPU {', '.join(devices)}, but {there}."
            self.unavailable = used if devices else f"TensorFlow uses no GPU; {there}."
            return []
        # A lost GPU has no readings, and then the sums have none: a part is not the whole.
        return [
            _GpuTally(by_bus_id.get(bus_id, NvmlGpu(None, None, bus_id, None)), names)
            for bus_id, names in devices.items()
        ]

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self.sample()

    def _sample(self, time_s: float) -> None:
        self._readings += 1
        for tally in self._gpus:
            tally.add(time_s)


class ThinnedSeries:
    """Keeps the means of pieces of a series; neighbours are joined where there are too many."""

    def __init__(self, *, columns: int, most: int = 100):
        # Sum and count of each column, a row a piece.
        self._pieces = np.zeros((most, columns, 2))
        self._length = 1
        self.readings = 0

    def add(self, reading: Sequence[float | None]) -> None:
        if self.readings == len(self._pieces) * self._length:
            joined = self._pieces[::2] + self._pieces[1::2]
            self._pieces = np.concatenate([joined, np.zeros_like(joined)])
            self._length *= 2
        last = self._pieces[self.readings // self._length]
        for column, value in enumerate(reading):
            if value is not None:
                last[column] += (value, 1)
        self.readings += 1

    @property
    def means(self) -> list[tuple[float | None, ...]]:
        """The mean of each piece, a number a column, None where none is known."""
        return [_means(piece) for piece in self._pieces[: -(-self.readings // self._length)]]

    @property
    def mean(self) -> tuple[float | None, ...]:
        """The mean of all readings, a number a column, None where none is known."""
        return _means(self._pieces.sum(axis=0))


def _means(sums: np.ndarray) -> tuple[float | None, ...]:
    return tuple(total / count if count else None for total, count in sums.tolist())
