"""GPUs and host, watched while a block of code runs."""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, NamedTuple

import psutil

from kbatch.analysis.throughput import PowerIntegral, ThinnedSeries, counted_energy_j
from kbatch.device.gpus import GpuReading, NvmlGpu, NvmlUnavailableError, opened_nvml, read_gpu
from kbatch.records.usage import GpuSample, GpuUsage, HostSample, HostUsage, UsageRecord

if TYPE_CHECKING:
    import pandas as pd


class SamplingThread:
    """Calls a function every so often until it is stopped.

    Args:
        sample: Takes one sample.
        interval_s: Seconds from the end of one sample to the start of the next.
    """

    def __init__(self, sample: Callable[[], object], *, interval_s: float):
        self._sample = sample
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kbatch-sampling", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> BaseException | None:
        """End the thread and wait for it."""
        self._stopped.set()
        self._thread.join()
        return self._error

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._interval_s):
                self._sample()
        except BaseException as error:
            self._error = error


class HostReading(NamedTuple):
    """What this process has taken so far; None for what the system does not tell.

    Attributes:
        cpu_s: Processor seconds of all its threads, in user and in system mode.
        resident_bytes: Its memory in RAM, in bytes.
    """

    cpu_s: float | None
    resident_bytes: int | None


def read_host(process: psutil.Process) -> HostReading:
    """Read a process without its children: to look for those scans all processes each time."""
    try:
        with process.oneshot():
            times, memory = process.cpu_times(), process.memory_info()
    except (psutil.Error, OSError):
        return HostReading(None, None)
    return HostReading(times.user + times.system, memory.rss)


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
        """Take a reading, with its time in seconds from the start."""
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
        """Sum up the readings from 0 to `duration_s`."""
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
        """Take a reading, with its time in seconds from the start."""
        if self._last is None:
            self._first_cpu_s = reading.cpu_s
        self._series.add((time_s, self._cores_busy(time_s, reading.cpu_s), reading.resident_bytes))
        self._last = (time_s, reading.cpu_s)

    def usage(self) -> HostUsage:
        """Sum up the readings."""
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


# So long an interval leaves the thread asleep: only the samples that are asked for are taken.
NEVER_S = 1e6


class GpuMonitor:
    """Measures what a block of code takes of the GPUs and of the host.

    Entering it starts TensorFlow's GPUs, so set memory growth and limits before. It reads every
    GPU that TensorFlow uses, found in NVML by PCI bus id, and this process, without child
    processes, at the start, in a thread every `interval_s` and at the end. NVML tells of a GPU
    as a whole: other processes on it are in the figures, and where it is split into instances
    (MIG) the power and energy of all of them. Energy is the difference of the driver's counter,
    which moves in steps: a block of milliseconds may show none. On GPUs without a counter it is
    the integral of the power readings. Memory is TensorFlow's own count on an instance, and where
    GPU and host share one memory.

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
        find_gpus: Returns TensorFlow's names of its GPUs by PCI bus id; TensorFlow's own if None.
        find_memory: Returns what TensorFlow has of the GPU with these names, for a GPU whose
            memory the driver does not show, or shows of the whole board; TensorFlow's own if None.

    Attributes:
        usage: What the block took, None until it ends.
        unavailable: Why no GPU is read, in one line, such as a reading that failed on the way;
            None before the start and where one is read.

    Raises:
        ValueError: If `interval_s` is not positive.
    """

    def __init__(
        self,
        *,
        interval_s: float = 0.1,
        now: Callable[[], float] = time.perf_counter,
        find_gpus: Callable[[], Mapping[str, tuple[str, ...]]] | None = None,
        find_memory: Callable[[tuple[str, ...]], TensorFlowMemory] | None = None,
    ):
        if not interval_s > 0:
            raise ValueError(
                f"`interval_s` must be positive seconds. Received: interval_s={interval_s}."
            )
        self.usage: UsageRecord | None = None
        self.unavailable: str | None = None
        self._now = now
        self._find_gpus = find_gpus
        self._find_memory = find_memory
        self._thread = SamplingThread(self.sample, interval_s=interval_s)
        self._lock = threading.Lock()
        self._open: contextlib.ExitStack | None = None
        self._started_s: float | None = None
        self._process = psutil.Process()
        self._host = HostTally()
        self._gpus: list[GpuTally] = []

    @property
    def gpus(self) -> tuple[GpuUsage, ...] | None:
        """What the block took of each GPU; None until it ends, and where no GPU is read."""
        return self.usage.gpus if self.usage else None

    def __enter__(self) -> "GpuMonitor":
        """Open NVML, take the first sample and start the thread."""
        if self._started_s is not None:
            raise RuntimeError("A `GpuMonitor` measures one block: make another for the next.")
        with contextlib.ExitStack() as opening:
            self._gpus = self._found_gpus(opening)
            self._started_s = self._now()
            self._sample(0.0)
            self._thread.start()
            self._open = opening.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the thread, take the last sample and closes NVML; a second time does nothing.

        Where a reading raised, the GPUs are left out: the block itself has not failed.
        """
        if self._open is None:
            return
        opened, self._open = self._open, None
        with opened:
            failure = self._thread.stop()
            duration_s = self._now() - (self._started_s or 0.0)
            try:
                duration_s = self.sample()
            except Exception as mistake:  # Whatever a library raises that changed.
                failure = failure or mistake
            if failure is not None:
                self._leave_out_gpus(failure)
            self.usage = self._summed_up(duration_s)

    def sample(self) -> float:
        """Read GPUs and host once more, besides the thread.

        Returns:
            Seconds from the start of the block.

        Raises:
            RuntimeError: If the block has not begun.
        """
        if self._started_s is None:
            raise RuntimeError("A `GpuMonitor` takes samples inside its `with` block only.")
        with self._lock:
            time_s = self._now() - self._started_s
            self._sample(time_s)
        return time_s

    def sample_clock_mhz(self) -> float | None:
        """Read the GPUs once more, for the clock of the first in MHz; None where none is read.

        Raises:
            RuntimeError: If the block has not begun.
        """
        if not self._gpus:
            return None
        self.sample()
        return self._gpus[0].sm_clock_mhz

    def to_dataframe(self) -> "pd.DataFrame":
        """Make a table of the samples, one row a sample and GPU; without GPUs one a sample.

        Raises:
            RuntimeError: If the block has not ended.
        """
        if self.usage is None:
            raise RuntimeError("Leave the `with` block first: the usage is summed up at its end.")
        return self.usage.to_dataframe()

    def _found_gpus(self, opening: contextlib.ExitStack) -> list[GpuTally]:
        try:
            listed = opening.enter_context(opened_nvml())
        except NvmlUnavailableError as error:
            self.unavailable = str(error)
            return []
        devices = (self._find_gpus or _tensorflow().tensorflow_gpus)()
        by_bus_id = {gpu.pci_bus_id: gpu for gpu in listed}
        self.unavailable = _missing(by_bus_id, devices)
        if self.unavailable is not None:
            return []
        tallies = []
        for bus_id, names in devices.items():
            # One that is lost has no readings, and so the sums have none: a part is not the whole.
            gpu, memory = by_bus_id.get(bus_id, NvmlGpu(None, None, bus_id, None)), None
            if gpu.handle is not None and (gpu.mig or gpu.memory_total_bytes is None):
                memory = (self._find_memory or _tensorflow().tensorflow_memory)(names)
            tallies.append(GpuTally(gpu, names, memory))
        return tallies

    def _leave_out_gpus(self, failure: BaseException) -> None:
        text = " ".join(str(failure).split())
        # What was read before is a part of the block, and would look like all of it.
        self._gpus = []
        self.unavailable = self.unavailable or (
            f"A reading failed, which ended the sampling: {type(failure).__name__}: {text}"
        )

    def _sample(self, time_s: float) -> None:
        self._host.add(time_s, read_host(self._process))
        for tally in self._gpus:
            tally.add(time_s, read_gpu(tally.gpu))

    def _summed_up(self, duration_s: float) -> UsageRecord:
        return UsageRecord(
            duration_s=duration_s,
            readings=self._host.readings,
            host=self._host.usage(),
            gpus=tuple(tally.usage(duration_s) for tally in self._gpus) or None,
            unavailable=self.unavailable,
        )


def _tensorflow() -> ModuleType:
    # Without a driver TensorFlow is not asked, nor imported.
    from kbatch.device import tensorflow_gpus

    return tensorflow_gpus


def _missing(listed: Collection[str], devices: Collection[str]) -> str | None:
    """Describe that none of TensorFlow's GPUs can be read, None where one can."""
    there = f"NVML lists {', '.join(listed) or 'no GPU'}"
    if not devices:
        return f"TensorFlow uses no GPU; {there}."
    if any(bus_id in listed for bus_id in devices):
        return None
    return f"TensorFlow uses the GPU {', '.join(devices)}, but {there}."
