"""The machine: its software, what its processors and memory leave to this process, and its GPUs.

Only the devices in an `EnvironmentRecord` are read by starting TensorFlow. GPUs
are shown as NVIDIA's management library (NVML) does, and named as an environment names them.
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
        built = tf.sysconfig.get_build_info()
        found = {"cuda": built.get("cuda_version"), "cudnn": built.get("cudnn_version")}
        with opened_nvml():
            found["nvidia-driver"] = read_driver_version()
        versions |= {name: version for name, version in found.items() if version}
    return EnvironmentRecord(
        versions=versions,
        platform=platform.platform(),
        cpu=_cpu_name(),
        cpu_count=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        devices=tuple(
            f"GPU:{i} {each.get('device_name', '')}".strip() for i, each in enumerate(details)
        )
        or ("CPU",),
        load_average=psutil.getloadavg()[0],
        command=_command(),
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def usable_cores() -> int:
    """Count the processors that this process may use at once."""
    affinity = getattr(psutil.Process(), "cpu_affinity", None)
    cores = len(affinity()) if affinity is not None else os.cpu_count() or 1
    return min(cores, read_cores_left() or cores)


def _command() -> str:
    """Return the command line as a person would type it again."""
    program = os.path.basename(sys.argv[0])
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # A debugger leaves none.
    if program == "ipykernel_launcher.py":
        # Its words name a file of the kernel's connection, which ends with it.
        return "# run the cells of the notebook again"
    if program in ("", "-", "-c"):
        return "python"
    words = ["python", program] if program.endswith(".py") else [program]
    # Under -m; a program that runs another one, such as cProfile, has put that one's words there.
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
    """Return how many bytes this process may still take of the host and of its control group."""
    available, left = psutil.virtual_memory().available, read_memory_left_bytes()
    return available if left is None else min(available, left)


# Where Linux keeps its control groups, of version 2.
_ROOT = Path("/sys/fs/cgroup")


def read_cores_left(root: Path = _ROOT, membership: str | None = None) -> int | None:
    """Read how many processors the quotas of this process's groups come to, None without one."""
    left = []
    for folder in _folders(root, membership):
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():  # Without a quota it is "max".
            left.append(max(1, int(quota) // int(period)))
    return min(left, default=None)


def read_memory_left_bytes(root: Path = _ROOT, membership: str | None = None) -> int | None:
    """Read how much memory the groups of this process leave it, None without a limit."""
    left = []
    for folder in _folders(root, membership):
        limit, used = _text(folder / "memory.max").strip(), _text(folder / "memory.current").strip()
        if limit.isdigit() and used.isdigit():  # Without a limit it is "max".
            # What the kernel keeps of files that were read makes room for whoever needs it.
            kept = _number(folder / "memory.stat", "inactive_file") or 0
            left.append(max(0, int(limit) - int(used) + kept))
    return min(left, default=None)


def read_memory_kills(root: Path = _ROOT, membership: str | None = None) -> int:
    """Count the processes of this group that the kernel has killed for want of memory."""
    for folder in _folders(root, membership):
        if (kills := _number(folder / "memory.events", "oom_kill")) is not None:
            return kills
    return 0


def _folders(root: Path, membership: str | None) -> list[Path]:
    """List the folders of the groups of this process, the innermost first."""
    membership = _text(Path("/proc/self/cgroup")) if membership is None else membership
    found = re.search(r"^0::/(.*)$", membership, re.M)
    group = Path(found[1] if found else "")
    # In a container the path may be the host's, while only the root is mounted.
    return [root / part for part in (group, *group.parents)]


def _number(file: Path, name: str) -> int | None:
    found = re.search(rf"^{name} (\d+)$", _text(file), re.M)
    return int(found[1]) if found else None


def _text(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8")
    return ""


# GPUs, by NVML.

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


def read_gpu(gpu: NvmlGpu, time_s: float = 0.0) -> tuple[GpuSample, int | None]:
    """Read one GPU, and its counter of energy since the driver was loaded, in mJ.

    What it does not report is None, and all of it without a handle.
    """
    if gpu.handle is None:
        return GpuSample(time_s), None

    def read(name: str, *arguments: Any) -> Any:
        return _known(getattr(pynvml, name), gpu.handle, *arguments)

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
