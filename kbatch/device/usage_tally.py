"""Readings of GPUs and host, summed up as they come."""

from collections.abc import Callable
from typing import NamedTuple

from kbatch.analysis.energy import PowerIntegral, counted_energy_j
from kbatch.analysis.thinned_series import ThinnedSeries
from kbatch.device.host_use import HostReading
from kbatch.device.nvml import GpuReading, NvmlGpu
from kbatch.records.usage import GpuSample, GpuUsage, HostSample, HostUsage

_GPU_COLUMNS = 7
_HOST_COLUMNS = 3


class TensorFlowMemory(NamedTuple):
    """What TensorFlow has of a GPU.

    Attributes:
        memory_total_bytes: Memory that it may take, in bytes, None if unknown.
        read_used_bytes: Returns the bytes that its tensors hold now, None if unknown.
    """

    memory_total_bytes: int | None
    read_used_bytes: Callable[[], int | None]


class GpuTally:
    """Sums up the readings of one GPU.

    Args:
        gpu: The GPU.
        tensorflow_devices: TensorFlow's names of it.
        memory: What TensorFlow has of it, where the driver does not show that; else None.

    Attributes:
        sm_clock_mhz: Clock of the last reading, in MHz.
    """

    def __init__(
        self,
        gpu: NvmlGpu,
        tensorflow_devices: tuple[str, ...],
        memory: TensorFlowMemory | None = None,
    ):
        self.gpu = gpu
        self._devices = tensorflow_devices
        self._memory = memory
        self._series = ThinnedSeries(columns=_GPU_COLUMNS)
        self._power = PowerIntegral()
        self._counters_mj: list[int | None] = []
        self._last_mj = 0
        self._counter_fell = False
        self._throttle_reasons: dict[str, None] | None = None
        self.sm_clock_mhz: float | None = None

    def add(self, time_s: float, reading: GpuReading) -> None:
        """Takes a reading, with its time in seconds from the start."""
        if self._memory is not None:
            reading = reading._replace(memory_used_bytes=self._memory.read_used_bytes())
        self.sm_clock_mhz = reading.sm_clock_mhz
        *shown, counter_mj, reasons = reading
        self._series.add((time_s, *shown))
        self._power = self._power.add(time_s, reading.power_w)
        # The first and the last, if it never fell: one that began again may have passed its start.
        self._counters_mj[1:] = [counter_mj]
        if counter_mj is not None:
            self._counter_fell |= counter_mj < self._last_mj
            self._last_mj = counter_mj
        if reasons is not None:
            self._throttle_reasons = (self._throttle_reasons or {}) | dict.fromkeys(reasons)

    def usage(self, duration_s: float) -> GpuUsage:
        """Sums up the readings from 0 to `duration_s`."""
        energy_j, source = self._energy(duration_s)
        return GpuUsage(
            name=self.gpu.name,
            pci_bus_id=self.gpu.pci_bus_id,
            tensorflow_devices=self._devices,
            memory_total_bytes=(self._memory or self.gpu).memory_total_bytes,
            memory_source="tensorflow" if self._memory else "driver",
            mig=self.gpu.mig,
            energy_j=energy_j,
            energy_source=source,
            mean=_gpu_sample(self._series.mean),
            samples=tuple(_gpu_sample(row) for row in self._series.means),
            power_cap_w=self.gpu.power_cap_w,
            throttle_reasons=None if (seen := self._throttle_reasons) is None else tuple(seen),
        )

    def _energy(self, duration_s: float) -> tuple[float | None, str | None]:
        counted_j = counted_energy_j(self._counters_mj[0], self._counters_mj[-1])
        if counted_j is not None and not self._counter_fell:
            return counted_j, "counter"
        integral_j = self._power.between(0.0, duration_s)
        return integral_j, None if integral_j is None else "power"


class HostTally:
    """Sums up the readings of this process."""

    def __init__(self):
        self._series = ThinnedSeries(columns=_HOST_COLUMNS)
        self._first_cpu_s: float | None = None
        self._last: tuple[float, float | None] | None = None

    @property
    def readings(self) -> int:
        """How many readings there were."""
        return self._series.readings

    def add(self, time_s: float, reading: HostReading) -> None:
        """Takes a reading, with its time in seconds from the start."""
        if self._last is None:
            self._first_cpu_s = reading.cpu_s
        self._series.add((time_s, self._cores_busy(time_s, reading.cpu_s), reading.resident_bytes))
        self._last = (time_s, reading.cpu_s)

    def usage(self) -> HostUsage:
        """Sums up the readings."""
        first, last = self._first_cpu_s, self._last and self._last[1]
        return HostUsage(
            cpu_s=None if first is None or last is None else last - first,
            mean=_host_sample(self._series.mean),
            samples=tuple(_host_sample(row) for row in self._series.means),
        )

    def _cores_busy(self, time_s: float, cpu_s: float | None) -> float | None:
        if self._last is None:
            return None
        last_s, last_cpu_s = self._last
        if cpu_s is None or last_cpu_s is None or time_s <= last_s:
            return None
        return (cpu_s - last_cpu_s) / (time_s - last_s)


def _gpu_sample(row: tuple[float | None, ...]) -> GpuSample:
    time_s, *shown = row
    return GpuSample(time_s or 0.0, *shown)


def _host_sample(row: tuple[float | None, ...]) -> HostSample:
    time_s, *shown = row
    return HostSample(time_s or 0.0, *shown)
