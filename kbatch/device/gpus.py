"""GPUs as NVIDIA's management library (NVML) shows them."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pynvml

from kbatch.records.usage import GpuProcess

_REASONS = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "There is no NVIDIA driver: its library NVML was not found."
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "The NVIDIA driver is not loaded: see `nvidia-smi`.",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "The NVIDIA driver and its library NVML differ in version: restart the machine."
    ),
}
# What lowers the clocks, by NVML's bits; an idle GPU lowers them too, which slows nothing.
_THROTTLE_REASONS = {
    pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "application clocks",
    pynvml.nvmlClocksEventReasonSwPowerCap: "power cap",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "temperature",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "temperature (hardware)",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
    pynvml.nvmlClocksEventReasonDisplayClockSetting: "display clocks",
}


class NvmlUnavailableError(Exception):
    """NVML cannot be used; the message says why in one line.

    Attributes:
        mismatch: Whether the driver and its library differ in version.
    """

    def __init__(self, message: str, *, mismatch: bool = False):
        super().__init__(message)
        self.mismatch = mismatch


class NvmlGpu(NamedTuple):
    """One GPU.

    Attributes:
        handle: NVML's handle, valid while the library is open.
        name: Name of the product, None if the driver does not tell.
        pci_bus_id: Where it sits, in the form of `normal_bus_id`.
        memory_total_bytes: Memory of the whole board in bytes. None if the driver does not tell,
            as where GPU and host share one memory.
        uuid: Its name for `CUDA_VISIBLE_DEVICES`, None if the driver does not tell.
        power_cap_w: Power that the driver lets it take, in watts, None if the driver does not tell.
        compute_capability: Such as (9, 0), None if the driver does not tell.
        mig: Whether it is split into instances (MIG). Every reading is then of the whole board,
            however small the instance that a process has.
        index: Its number in NVML and `nvidia-smi`, None if it is not listed.
    """

    handle: Any
    name: str | None
    pci_bus_id: str
    memory_total_bytes: int | None
    uuid: str | None = None
    power_cap_w: float | None = None
    compute_capability: tuple[int, int] | None = None
    mig: bool = False
    index: int | None = None


class NvmlDriver(NamedTuple):
    """The driver, and the GPUs that it has but cannot reach.

    Attributes:
        version: Such as `"550.54.15"`, None if unknown.
        cuda_version: Newest CUDA that it runs, such as (12, 4), None if unknown.
        silent_gpus: A line for each GPU that does not answer, such as `"GPU 1 (GPU is lost)"`.
    """

    version: str | None
    cuda_version: tuple[int, int] | None
    silent_gpus: tuple[str, ...]


class GpuReading(NamedTuple):
    """What one GPU shows now; None for what it does not tell.

    Attributes:
        utilization: Share of the driver's last sampling window in which some kernel ran.
        memory_used_bytes: Memory in use or reserved, in bytes.
        power_w: Power of the board, in watts.
        temperature_c: Temperature of the chip, in degrees Celsius.
        sm_clock_mhz: Clock of the multiprocessors, in MHz.
        memory_clock_mhz: Clock of the memory, in MHz.
        energy_counter_mj: Energy since the driver was loaded, in millijoules.
        throttle_reasons: What lowers the clocks, such as `("power cap",)`.
    """

    utilization: float | None
    memory_used_bytes: int | None
    power_w: float | None
    temperature_c: int | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    energy_counter_mj: int | None
    throttle_reasons: tuple[str, ...] | None = None


@contextlib.contextmanager
def opened_nvml() -> Iterator[tuple[NvmlGpu, ...]]:
    """Open the library for a block and lists its GPUs.

    NVML counts its users: blocks may be nested. A GPU that does not answer is left out.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        code: Any = error
        mismatch = code.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
        raise NvmlUnavailableError(_reason(error), mismatch=mismatch) from error
    try:
        yield _listed_gpus()
    finally:
        # A driver that went away has nothing left to close.
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def read_driver() -> NvmlDriver:
    """Read the driver; within a block of `opened_nvml`."""
    cuda = _known(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    silent = []
    for index in range(read_gpu_count()):
        try:
            pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError as error:
            silent.append(f"GPU {index} ({error})")
    return NvmlDriver(
        version=read_driver_version(),
        # 12040 is CUDA 12.4.
        cuda_version=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        silent_gpus=tuple(silent),
    )


def read_gpu(gpu: NvmlGpu) -> GpuReading:
    """Read one GPU; what it does not support, or fails to tell now, is None.

    A GPU without a handle is one that the library does not list: it tells nothing.
    """
    if gpu.handle is None:
        return GpuReading(None, None, None, None, None, None, None)
    utilization = _known(pynvml.nvmlDeviceGetUtilizationRates, gpu.handle)
    memory = _known(pynvml.nvmlDeviceGetMemoryInfo, gpu.handle)
    power_mw = _known(pynvml.nvmlDeviceGetPowerUsage, gpu.handle)
    return GpuReading(
        utilization=None if utilization is None else utilization.gpu / 100,
        memory_used_bytes=None if memory is None else memory.used,
        power_w=None if power_mw is None else power_mw / 1e3,
        temperature_c=_temperature(gpu),
        sm_clock_mhz=_known(pynvml.nvmlDeviceGetClockInfo, gpu.handle, pynvml.NVML_CLOCK_SM),
        memory_clock_mhz=_known(pynvml.nvmlDeviceGetClockInfo, gpu.handle, pynvml.NVML_CLOCK_MEM),
        energy_counter_mj=_known(pynvml.nvmlDeviceGetTotalEnergyConsumption, gpu.handle),
        throttle_reasons=_throttle_reasons(gpu),
    )


def read_driver_version() -> str | None:
    """Read the version of the NVIDIA driver; the library must be open."""
    return _known(pynvml.nvmlSystemGetDriverVersion)


def read_gpu_count() -> int:
    """Count the GPUs, those included that do not answer; the library must be open."""
    return _known(pynvml.nvmlDeviceGetCount) or 0


def read_processes(gpu: NvmlGpu) -> tuple[GpuProcess, ...]:
    """List the processes that compute on a GPU, those with most memory first."""
    found = _known(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu.handle) or ()
    processes = [GpuProcess(one.pid, one.usedGpuMemory) for one in found]
    return tuple(sorted(processes, key=lambda one: one.memory_bytes or 0, reverse=True))


def _throttle_reasons(gpu: NvmlGpu) -> tuple[str, ...] | None:
    bits = _known(pynvml.nvmlDeviceGetCurrentClocksEventReasons, gpu.handle)
    if bits is None:  # Drivers before 535 have the earlier name only.
        bits = _known(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu.handle)
    if bits is None:
        return None
    return tuple(reason for bit, reason in _THROTTLE_REASONS.items() if bits & bit)


def _temperature(gpu: NvmlGpu) -> int | None:
    new = _known(pynvml.nvmlDeviceGetTemperatureV, gpu.handle, pynvml.NVML_TEMPERATURE_GPU)
    if new is not None:
        return new
    # Older drivers have the earlier function only, newer ones are to lose it.
    return _known(pynvml.nvmlDeviceGetTemperature, gpu.handle, pynvml.NVML_TEMPERATURE_GPU)


def _listed_gpus() -> tuple[NvmlGpu, ...]:
    found = (_gpu(index) for index in range(read_gpu_count()))
    return tuple(gpu for gpu in found if gpu is not None)


def _gpu(index: int) -> NvmlGpu | None:
    handle = _known(pynvml.nvmlDeviceGetHandleByIndex, index)
    pci = None if handle is None else _known(pynvml.nvmlDeviceGetPciInfo, handle)
    bus_id = None if pci is None else normal_bus_id(pci.busId)
    if bus_id is None:
        return None
    memory = _known(pynvml.nvmlDeviceGetMemoryInfo, handle)
    cap_mw = _known(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return NvmlGpu(
        handle=handle,
        name=_known(pynvml.nvmlDeviceGetName, handle),
        pci_bus_id=bus_id,
        memory_total_bytes=None if memory is None else memory.total,
        uuid=_known(pynvml.nvmlDeviceGetUUID, handle),
        power_cap_w=None if cap_mw is None else cap_mw / 1e3,
        compute_capability=_known(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        mig=(_known(pynvml.nvmlDeviceGetMigMode, handle) or [0])[0] == 1,
        index=index,
    )


def _known(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def _reason(error: Any) -> str:
    return _REASONS.get(error.value, f"NVML cannot be opened: {error}.")


_BUS_ID = re.compile(r"([0-9a-f]+):([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-9a-f]))?", re.IGNORECASE)
_IN_DESCRIPTION = re.compile(r"pci bus id: ([^,]+)")


def normal_bus_id(text: str) -> str | None:
    """Write a PCI bus id in one form.

    NVML gives the domain eight digits, TensorFlow four; either may use capitals.

    >>> normal_bus_id("0000:0A:00.0"), normal_bus_id("<undefined>")
    ('00000000:0a:00.0', None)
    """
    match = _BUS_ID.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device, function = match.groups(default="0")
    return f"{int(domain, 16):08x}:{bus}:{device}.{function}".lower()


def devices_by_bus_id(descriptions: Iterable[tuple[str, str]]) -> Mapping[str, tuple[str, ...]]:
    """Find the bus ids in TensorFlow's descriptions of its devices.

    >>> devices_by_bus_id([("/device:GPU:0", "device: 0, pci bus id: 0000:01:00.0")])
    {'00000000:01:00.0': ('GPU:0',)}
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, description in descriptions:
        match = _IN_DESCRIPTION.search(description)
        bus_id = normal_bus_id(match.group(1)) if match else None
        if bus_id is not None:
            found[bus_id] = (*found.get(bus_id, ()), name.rpartition("/device:")[2])
    return found
