"""The machine: its software, the processors and memory that are free, and its GPUs.

Only `read_environment` starts TensorFlow. GPUs are read with NVIDIA's management library (NVML).
"""

import contextlib
import datetime
import importlib.metadata
import itertools
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pynvml

from kbatch import __version__
from kbatch.records.machine import EnvironmentRecord, GpuSample

_PACKAGES = ("tensorflow", "keras", "keras-tuner", "numpy")


def read_environment() -> EnvironmentRecord:
    import tensorflow as tf

    versions = {"python": platform.python_version(), "kbatch": __version__}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    gpus = tf.config.get_visible_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    if gpus:
        build = tf.sysconfig.get_build_info()
        known = {"cuda": build.get("cuda_version"), "cudnn": build.get("cudnn_version")}
        with opened_nvml():
            known["nvidia-driver"] = read_driver_version()
        versions |= {name: version for name, version in known.items() if version}
    return EnvironmentRecord(
        versions=versions,
        platform=platform.platform(),
        cpu=_cpu_name(),
        cpu_count=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        devices=tuple(
            f"GPU:{i} {device.get('device_name', '')}".strip() for i, device in enumerate(details)
        )
        or ("CPU",),
        load_average=psutil.getloadavg()[0],
        command=_command(),
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def usable_cores() -> int:
    """Return the number of processors that this process may use."""
    affinity = getattr(psutil.Process(), "cpu_affinity", None)
    cores = len(affinity()) if affinity is not None else os.cpu_count() or 1
    return min(cores, read_cores_left() or cores)


def _command() -> str:
    """Return the command line that repeats this run."""
    program = os.path.basename(sys.argv[0])
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # Absent in a debugger.
    if program == "ipykernel_launcher.py":
        # The arguments name a connection file that is deleted with the kernel.
        return "# run the cells of the notebook again"
    if program in ("", "-", "-c"):
        return "python"
    words = ["python", program] if program.endswith(".py") else [program]
    # Started with `-m`. If a tool such as cProfile runs the program, `spec` is that of the tool.
    if spec is not None and spec.origin == sys.argv[0]:
        words = ["python", "-m", spec.name.removesuffix(".__main__")]
    return shlex.join([*words, *sys.argv[1:]])


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if "model name" in line:
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def available_bytes() -> int:
    """Return the free memory of the host and of its control group, in bytes."""
    available, left = psutil.virtual_memory().available, read_memory_left_bytes()
    return available if left is None else min(available, left)


# Linux's control groups, version 2.
_ROOT = Path("/sys/fs/cgroup")


def read_cores_left(root: Path = _ROOT, membership: str | None = None) -> int | None:
    """Read the processor quota of this process's control groups, or None if there is none."""
    cores = []
    for folder in _folders(root, membership):
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():  # Without a quota the file says "max".
            cores.append(max(1, int(quota) // int(period)))
    return min(cores, default=None)


def read_memory_left_bytes(root: Path = _ROOT, membership: str | None = None) -> int | None:
    """Read the free memory of this process's control groups, or None if there is no limit."""
    left_bytes = []
    for folder in _folders(root, membership):
        limit, used = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
        if limit.isdigit() and used.isdigit():  # Without a limit the file says "max".
            # The kernel frees cached file pages when a process needs memory.
            cached = _number(folder / "memory.stat", "inactive_file") or 0
            left_bytes.append(max(0, int(limit) - int(used) + cached))
    return min(left_bytes, default=None)


def read_memory_kills(root: Path = _ROOT, membership: str | None = None) -> int:
    """Count the processes of this control group that the kernel killed to free memory."""
    for folder in _folders(root, membership):
        if (kills := _number(folder / "memory.events", "oom_kill")) is not None:
            return kills
    return 0


def _folders(root: Path, membership: str | None) -> list[Path]:
    """List the folders of this process's control groups, the innermost first."""
    membership = _text(Path("/proc/self/cgroup")) if membership is None else membership
    match = re.search(r"^0::/(.*)$", membership, re.M)
    group = Path(match[1] if match else "")
    # In a container the path may be the host's, but only the root is mounted.
    return [root / part for part in (group, *group.parents)]


def _number(file: Path, name: str) -> int | None:
    match = re.search(rf"^{name} (\d+)$", _text(file), re.M)
    return int(match[1]) if match else None


def _text(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8")
    return ""


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
    """One GPU. Values that the driver does not report are None."""

    handle: Any  # NVML's handle, valid while the library is open.
    name: str | None
    pci_bus_id: str  # In the form of `normal_bus_id`.
    memory_total_bytes: int | None  # None if GPU and host share their memory.
    uuid: str | None = None  # The name for `CUDA_VISIBLE_DEVICES`.
    mig: bool = False  # Whether it is split into instances. Readings are for the whole board.
    index: int | None = None  # Index in NVML and `nvidia-smi`. None if it is not listed.


@contextlib.contextmanager
def opened_nvml() -> Iterator[tuple[tuple[NvmlGpu, ...], str | None]]:
    """Open NVML for a block, which may be nested, and list the GPUs that answer.

    If NVML cannot be opened, the list is empty, and the second value says why in one line.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        code: Any = error
        yield (), _REASONS.get(code.value, f"NVML cannot be opened: {error}.")
        return
    try:
        gpus = map(_gpu, range(_ask_nvml(pynvml.nvmlDeviceGetCount) or 0))
        yield tuple(gpu for gpu in gpus if gpu is not None), None
    finally:
        # Fails if the driver was unloaded meanwhile. Then there is nothing to close.
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def read_gpu(gpu: NvmlGpu, time_s: float = 0.0) -> tuple[GpuSample, int | None]:
    """Read one GPU, and its energy counter in mJ. Values that it does not report are None."""
    if gpu.handle is None:
        return GpuSample(time_s), None

    def read(name: str, *arguments: Any) -> Any:
        return _ask_nvml(getattr(pynvml, name), gpu.handle, *arguments)

    utilization, memory = read("nvmlDeviceGetUtilizationRates"), read("nvmlDeviceGetMemoryInfo")
    power_mw = read("nvmlDeviceGetPowerUsage")
    sample = GpuSample(
        time_s,
        utilization=None if utilization is None else utilization.gpu / 100,
        memory_used_bytes=None if memory is None else memory.used,
        power_w=None if power_mw is None else power_mw / 1e3,
    )
    return sample, read("nvmlDeviceGetTotalEnergyConsumption")


def read_driver_version() -> str | None:
    return _ask_nvml(pynvml.nvmlSystemGetDriverVersion)


def _gpu(index: int) -> NvmlGpu | None:
    handle = _ask_nvml(pynvml.nvmlDeviceGetHandleByIndex, index)
    pci = None if handle is None else _ask_nvml(pynvml.nvmlDeviceGetPciInfo, handle)
    bus_id = None if pci is None else normal_bus_id(pci.busId)
    if bus_id is None:
        return None
    memory = _ask_nvml(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return NvmlGpu(
        handle=handle,
        name=_ask_nvml(pynvml.nvmlDeviceGetName, handle),
        pci_bus_id=bus_id,
        memory_total_bytes=None if memory is None else memory.total,
        uuid=_ask_nvml(pynvml.nvmlDeviceGetUUID, handle),
        mig=(_ask_nvml(pynvml.nvmlDeviceGetMigMode, handle) or [0])[0] == 1,
        index=index,
    )


def _ask_nvml(function: Callable[..., Any], *arguments: Any) -> Any:  # None if it fails.
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


_BUS_ID = re.compile(r"([0-9a-f]+):([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-9a-f]))?", re.IGNORECASE)


def normal_bus_id(text: str) -> str | None:
    """Return a PCI bus id in the form "00000000:0a:00.0", or None if the text is no bus id."""
    # NVML writes the domain with eight digits, TensorFlow with four; either may use capitals.
    match = _BUS_ID.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device, function = match.groups(default="0")
    return f"{int(domain, 16):08x}:{bus}:{device}.{function}".lower()


def devices_by_bus_id(descriptions: Iterable[tuple[str, str]]) -> Mapping[str, tuple[str, ...]]:
    """Map the bus ids in TensorFlow's descriptions of its devices to names such as "GPU:0"."""
    devices: dict[str, tuple[str, ...]] = {}
    for name, description in descriptions:
        match = re.search(r"pci bus id: ([^,]+)", description)
        bus_id = normal_bus_id(match.group(1)) if match else None
        if bus_id is not None:
            devices[bus_id] = (*devices.get(bus_id, ()), name.rpartition("/device:")[2])
    return devices


_VISIBLE = "CUDA_VISIBLE_DEVICES"
WORKERS_ON_DEVICE = "KBATCH_WORKERS_ON_DEVICE"
WORKERS_ON_HOST = "KBATCH_WORKERS_ON_HOST"

# The environment of a process that must use no GPU.
NO_GPU = {_VISIBLE: "-1"}


def device_environments(workers: int, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Return the environment of each worker of a search, which gets one GPU, in turn."""
    devices = [gpus[i % len(gpus)] if gpus else "-1" for i in range(workers)]
    environments = []
    for device in devices:
        sharing = devices.count(device)
        variables = {_VISIBLE: device, WORKERS_ON_HOST: str(workers)}
        variables[WORKERS_ON_DEVICE] = str(sharing)
        if sharing > 1 and device != "-1":
            # Otherwise the first worker takes all memory of the GPU.
            variables["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        environments.append(variables)
    return environments


def only_gpu(number: int) -> dict[str, str]:
    """Return the environment of a child process that sees one GPU of this process."""
    named = _named_gpus()
    # Without names, the GPUs have the same numbers in the child as in this process.
    return {_VISIBLE: str(number) if named is None else named[number]}


def usable_gpus() -> tuple[str, ...]:
    """List the GPUs that this process may use, without starting TensorFlow."""
    named = _named_gpus()
    if named is not None:
        return named
    with opened_nvml() as (gpus, _):
        return tuple(gpu.uuid for gpu in gpus if gpu.uuid is not None)


def _named_gpus() -> tuple[str, ...] | None:
    """Return the names in `CUDA_VISIBLE_DEVICES`, or None if it is not set."""
    visible = os.environ.get(_VISIBLE)
    if visible is None:
        return None
    names = [name.strip() for name in visible.split(",")]
    # CUDA ignores all names after an invalid one.
    return tuple(itertools.takewhile(lambda name: name and not name.startswith("-"), names))
