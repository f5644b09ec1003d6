"""Measure the use of GPUs while a block of code runs."""

import array
import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kbatch.device.machine import NvmlGpu, opened_nvml, read_gpu
from kbatch.records.machine import GpuSample, GpuUsage, UsageRecord

if TYPE_CHECKING:
    import pandas as pd


# The usage has at most this many samples, each the mean of several readings.
_MOST_SAMPLES = 100
# At this number of readings, every second one is dropped, and the interval is doubled.
_MOST_READINGS = 2**14


class _GpuTally:
    """Collects the readings of one GPU."""

    def __init__(self, gpu: NvmlGpu, tensorflow_devices: tuple[str, ...]):
        self._gpu = gpu
        self._devices = tensorflow_devices
        self._values = array.array("d")  # Rows of a sample and its energy. NaN means None.

    def add(self, time_s: float) -> None:
        sample, energy_mj = read_gpu(self._gpu, time_s)
        row = (*dataclasses.astuple(sample), energy_mj)
        self._values.extend(math.nan if value is None else value for value in row)

    def halve(self) -> None:
        self._values = array.array("d", self._rows()[::2].tobytes())

    def _rows(self) -> np.ndarray:
        return np.array(self._values).reshape(-1, 1 + len(dataclasses.fields(GpuSample)))

    def usage(self, duration_s: float) -> GpuUsage:
        rows = self._rows()
        ends = rows[[0, -1]]
        counter = rows[:, -1][~np.isnan(rows[:, -1])]
        mean, energy_j, source = _mean(rows), None, None
        # If the counter fell, it was reset, and a difference would be wrong.
        if not np.isnan(ends[:, -1]).any() and (np.diff(counter) >= 0).all():
            energy_j, source = float(ends[1, -1] - ends[0, -1]) / 1e3, "counter"
        elif mean.power_w is not None and not np.isnan(ends[:, -2]).any():
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
            samples=tuple(map(_mean, np.array_split(rows, min(len(rows), _MOST_SAMPLES)))),
        )


def _mean(rows: np.ndarray) -> GpuSample:
    """Return the mean of each quantity, or None if it has no value; without the energy counter."""
    columns = (column[~np.isnan(column)] for column in rows[:, 1:-1].T)
    means = (float(column.mean()) if len(column) else None for column in columns)
    return GpuSample(float(rows[:, 0].mean()), *means)


class GpuMonitor:
    """Measure utilization, memory, power and energy of the GPUs while a block of code runs.

    TensorFlow initialises its GPUs when the block begins, so set memory growth and limits before. A
    thread reads its GPUs once in `interval_s` seconds, and less often in a long block.
    NVML reports a GPU as a whole, including other processes and all MIG instances. Energy is the
    difference of the driver's counter. The counter moves in steps, so a block of milliseconds may
    show no energy. If there is no counter, energy is the mean power times the duration.

    Example:

    >>> with kbatch.GpuMonitor() as monitor:
    ...     model.fit(x, y)
    >>> for gpu in monitor.gpus or ():
    ...     print(gpu.name, gpu.energy_j, gpu.mean.utilization)
    >>> monitor.unavailable
    'There is no NVIDIA driver: its library NVML was not found.'

    Args:
        interval_s: Float. Seconds from the end of a reading to the next one. Default: 0.1.
        now: Function that returns the time, in seconds. Default: `time.perf_counter`.

    Attributes:
        usage: A `UsageRecord` of the block. None until the block ends.
        unavailable: String that says why no GPU can be read. None if a GPU is read, or if the block
            has not begun.

    Raises:
        ValueError: If `interval_s` is not positive.
    """

    def __init__(self, *, interval_s: float = 0.1, now: Callable[[], float] = time.perf_counter):
        if not interval_s > 0:
            raise ValueError(f"`interval_s` must be positive. Received: {interval_s=}.")
        self.usage: UsageRecord | None = None
        self.unavailable: str | None = None
        self._now = now
        self._interval_s = interval_s
        self._thread = threading.Thread(target=self._run, name="kbatch-sampling", daemon=True)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: contextlib.ExitStack | None = None
        self._started_s: float | None = None
        self._readings = self._kept = 0
        self._gpus: list[_GpuTally] = []

    @property
    def gpus(self) -> tuple[GpuUsage, ...] | None:
        """Usage of each GPU. None until the block ends, or if no GPU can be read."""
        return self.usage.gpus if self.usage else None

    def __enter__(self) -> "GpuMonitor":
        if self._started_s is not None:
            raise RuntimeError("A `GpuMonitor` works for one `with` block: create a new one.")
        with contextlib.ExitStack() as opening:
            self._gpus = self._open_gpus(opening)
            self._started_s = self._now()
            self.sample()
            self._thread.start()
            self._open = opening.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the thread, take the last sample and close NVML."""
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
        """Read the GPUs once, in addition to the thread.

        Returns:
            Seconds since the block began.

        Raises:
            RuntimeError: If the block has not begun.
        """
        if self._started_s is None:
            raise RuntimeError("Call `GpuMonitor.sample` inside `with monitor:`.")
        with self._lock:
            time_s = self._now() - self._started_s
            self._readings, self._kept = self._readings + 1, self._kept + 1
            for tally in self._gpus:
                tally.add(time_s)
            if self._kept == _MOST_READINGS:
                self._kept, self._interval_s = self._kept // 2, 2 * self._interval_s
                for tally in self._gpus:
                    tally.halve()
        return time_s

    def to_dataframe(self) -> "pd.DataFrame":
        """Return a table of the samples with one row for each sample and GPU.

        Returns:
            A DataFrame with the column `gpu` (TensorFlow's name) and the fields of `GpuSample`.

        Raises:
            RuntimeError: If the block has not ended.
        """
        import pandas as pd

        if self.usage is None:
            raise RuntimeError("Call `GpuMonitor.to_dataframe` after the `with` block.")
        names = [field.name for field in dataclasses.fields(GpuSample)]
        rows = [
            (", ".join(gpu.tensorflow_devices), *dataclasses.astuple(sample))
            for gpu in self.usage.gpus or ()
            for sample in gpu.samples
        ]
        return pd.DataFrame(rows, columns=["gpu", *names])

    def _open_gpus(self, opening: contextlib.ExitStack) -> list[_GpuTally]:
        listed, self.unavailable = opening.enter_context(opened_nvml())
        if self.unavailable is not None:
            return []
        # Imported late: without a driver there is no need to start TensorFlow.
        from kbatch.device import memory

        devices = memory.tensorflow_gpus()
        by_bus_id = {gpu.pci_bus_id: gpu for gpu in listed}
        if not any(bus_id in by_bus_id for bus_id in devices):
            listed_text = f"NVML lists {', '.join(by_bus_id) or 'no GPU'}"
            used = f"TensorFlow uses the GPU {', '.join(devices)}, but {listed_text}."
            self.unavailable = used if devices else f"TensorFlow uses no GPU; {listed_text}."
            return []
        # A GPU that NVML does not list has no readings, so that sums over all GPUs are None.
        return [
            _GpuTally(by_bus_id.get(bus_id, NvmlGpu(None, None, bus_id, None)), names)
            for bus_id, names in devices.items()
        ]

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self.sample()
