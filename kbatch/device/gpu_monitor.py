"""GPUs and host, watched while a block of code runs."""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

import psutil

from kbatch.device.host_use import read_host
from kbatch.device.nvml import NvmlGpu, NvmlUnavailableError, opened_nvml, read_gpu
from kbatch.device.sampling_thread import SamplingThread
from kbatch.device.usage_tally import GpuTally, HostTally, TensorFlowMemory
from kbatch.records.usage import GpuUsage, UsageRecord

if TYPE_CHECKING:
    import pandas as pd

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
        """Opens NVML, takes the first sample and starts the thread.

        Raises:
            RuntimeError: If it was entered before.
        """
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
        """Stops the thread, takes the last sample and closes NVML; a second time does nothing.

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
        """Reads GPUs and host once more, besides the thread.

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
        """Reads the GPUs once more, for the clock of the first in MHz; None where none is read.

        Raises:
            RuntimeError: If the block has not begun.
        """
        if not self._gpus:
            return None
        self.sample()
        return self._gpus[0].sm_clock_mhz

    def to_dataframe(self) -> "pd.DataFrame":
        """Makes a table of the samples, one row a sample and GPU; without GPUs one a sample.

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
    """Says that none of TensorFlow's GPUs can be read, None where one can."""
    there = f"NVML lists {', '.join(listed) or 'no GPU'}"
    if not devices:
        return f"TensorFlow uses no GPU; {there}."
    if any(bus_id in listed for bus_id in devices):
        return None
    return f"TensorFlow uses the GPU {', '.join(devices)}, but {there}."
