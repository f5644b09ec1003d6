"""GPUs as NVIDIA's management library (NVML) shows them, and as an environment names them."""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pynvml

_REASONS = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "There is no NVIDIA driver: its library NVML was not found."
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "The NVIDIA driver is not loaded: see `nvidia-smi`.",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "The NVIDIA driver and its library NVML differ in version: restart the machine."
    ),
}


class NvmlGpu(NamedTuple):
    """One GPU; what the driver does not report is None."""

    handle: Any  # NVML's, valid while the library is open.
    name: str | None
    pci_bus_id: str  # Where it sits, in the form of `normal_bus_id`.
    memory_total_bytes: int | None  # Of the board; None where GPU and host share one.
    uuid: str | None = None  # Its name for `CUDA_VISIBLE_DEVICES`.
    mig: bool = False  # Whether it is split into instances: readings are the whole board's.
    index: int | None = None  # In NVML and `nvidia-smi`, None if it is not listed.


class GpuReading(NamedTuple):
    """What one GPU shows now; None for what it does not report."""

    utilization: float | None  # Share of the driver's last window in which some kernel ran.
    memory_used_bytes: int | None  # In use or reserved.
    power_w: float | None
    energy_counter_mj: int | None  # Since the driver was loaded.


@contextlib.contextmanager
def opened_nvml() -> Iterator[tuple[tuple[NvmlGpu, ...], str | None]]:
    """Open the library for a block, which may be nested, and list the GPUs that answer.

    Where it cannot be opened there are none, and one line says why.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        code: Any = error
        yield (), _REASONS.get(code.value, f"NVML cannot be opened: {error}.")
        return
    try:
        gpus = map(_gpu, range(_known(pynvml.nvmlDeviceGetCount) or 0))
        yield tuple(gpu for gpu in gpus if gpu is not None), None
    finally:
        # A driver that went away has nothing left to close.
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def read_gpu(gpu: NvmlGpu) -> GpuReading:
    """Read one GPU; what it does not report is None, and all of it without a handle."""
    if gpu.handle is None:
        return GpuReading(None, None, None, None)

    def read(name: str, *arguments: Any) -> Any:
        return _known(getattr(pynvml, name), gpu.handle, *arguments)

    utilization, memory = read("nvmlDeviceGetUtilizationRates"), read("nvmlDeviceGetMemoryInfo")
    power_mw = read("nvmlDeviceGetPowerUsage")
    return GpuReading(
        utilization=None if utilization is None else utilization.gpu / 100,
        memory_used_bytes=None if memory is None else memory.used,
        power_w=None if power_mw is None else power_mw / 1e3,
        energy_counter_mj=read("nvmlDeviceGetTotalEnergyConsumption"),
    )


def read_driver_version() -> str | None:
    return _known(pynvml.nvmlSystemGetDriverVersion)


def _gpu(index: int) -> NvmlGpu | None:
    handle = _known(pynvml.nvmlDeviceGetHandleByIndex, index)
    pci = None if handle is None else _known(pynvml.nvmlDeviceGetPciInfo, handle)
    bus_id = None if pci is None else normal_bus_id(pci.busId)
    if bus_id is None:
        return None
    memory = _known(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return NvmlGpu(
        handle=handle,
        name=_known(pynvml.nvmlDeviceGetName, handle),
        pci_bus_id=bus_id,
        memory_total_bytes=None if memory is None else memory.total,
        uuid=_known(pynvml.nvmlDeviceGetUUID, handle),
        mig=(_known(pynvml.nvmlDeviceGetMigMode, handle) or [0])[0] == 1,
        index=index,
    )


def _known(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


_BUS_ID = re.compile(r"([0-9a-f]+):([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-9a-f]))?", re.IGNORECASE)


def normal_bus_id(text: str) -> str | None:
    """Write a PCI bus id in one form, such as "00000000:0a:00.0"; None where it is none."""
    # NVML writes the domain with eight digits, TensorFlow with four; either may use capitals.
    match = _BUS_ID.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device, function = match.groups(default="0")
    return f"{int(domain, 16):08x}:{bus}:{device}.{function}".lower()


def devices_by_bus_id(descriptions: Iterable[tuple[str, str]]) -> Mapping[str, tuple[str, ...]]:
    """Map the bus ids in TensorFlow's descriptions of its devices to names such as "GPU:0"."""
    found: dict[str, tuple[str, ...]] = {}
    for name, description in descriptions:
        match = re.search(r"pci bus id: ([^,]+)", description)
        bus_id = normal_bus_id(match.group(1)) if match else None
        if bus_id is not None:
            found[bus_id] = (*found.get(bus_id, ()), name.rpartition("/device:")[2])
    return found


# The device of each worker of a search: a GPU of its own where there are enough.

_VISIBLE = "CUDA_VISIBLE_DEVICES"
WORKERS_ON_DEVICE = "KBATCH_WORKERS_ON_DEVICE"
WORKERS_ON_HOST = "KBATCH_WORKERS_ON_HOST"

# What TensorFlow sees in a process that is to use no GPU.
NO_GPU = {_VISIBLE: "-1"}


def device_environments(workers: int, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Share GPUs out among workers, in turn."""
    devices = [gpus[i % len(gpus)] if gpus else "-1" for i in range(workers)]
    environments = []
    for device in devices:
        sharing = devices.count(device)
        found = {_VISIBLE: device, WORKERS_ON_DEVICE: str(sharing), WORKERS_ON_HOST: str(workers)}
        if sharing > 1 and device != "-1":
            # Else the first of them takes all memory of the GPU.
            found["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        environments.append(found)
    return environments


def only_gpu(number: int) -> dict[str, str]:
    """Return the environment in which a child process sees one GPU of this process alone."""
    named = _named_gpus()
    # Without names CUDA numbers the GPUs of the child as it does those of this process.
    return {_VISIBLE: str(number) if named is None else named[number]}


def usable_gpus() -> tuple[str, ...]:
    """List the GPUs that this process may use, without starting TensorFlow."""
    named = _named_gpus()
    if named is not None:
        return named
    with opened_nvml() as (gpus, _):
        return tuple(gpu.uuid for gpu in gpus if gpu.uuid is not None)


def _named_gpus() -> tuple[str, ...] | None:
    """Return the names in `CUDA_VISIBLE_DEVICES`, None where it is not set."""
    chosen = os.environ.get(_VISIBLE)
    if chosen is None:
        return None
    names = [name.strip() for name in chosen.split(",")]
    # As in CUDA, what follows a name that is none does not count.
    return tuple(itertools.takewhile(lambda name: name and not name.startswith("-"), names))
