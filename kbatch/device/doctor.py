"""The examination of a machine that is to train: packages, GPUs, memory, processors.

The packages are examined before anything is imported that may be missing.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kbatch.document.numbers import gibibytes, pluralize
from kbatch.document.section import processes_text
from kbatch.records.record import EnvironmentRecord, check_choice
from kbatch.records.usage import GpuProcess

if TYPE_CHECKING:
    from kbatch.device.gpus import NvmlGpu

STATUSES = ("ok", "warning", "missing")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    topic: str  # Such as "keras-tuner" or "memory".
    status: str  # "ok", "warning" (results or speed may suffer) or "missing" (needed).
    text: str  # What was found, in one line.
    command: str | None = None  # That mends it, where one does.

    def __post_init__(self) -> None:
        check_choice(STATUSES, status=self.status)


@dataclasses.dataclass(frozen=True)
class PolicySpeed:
    """How long a train step takes under a dtype policy."""

    dtype_policy: str
    step_times_s: tuple[float, ...]  # One a round; of a policy that is very slow one in all.

    def times_as_fast_as(self, other: "PolicySpeed") -> float:
        """Return the median over common rounds of the other policy's step time over this one's."""
        pairs = zip(other.step_times_s, self.step_times_s, strict=False)
        return statistics.median(theirs / ours for theirs, ours in pairs)


@dataclasses.dataclass(frozen=True)
class Examination:
    """What `kbatch doctor` found."""

    findings: tuple[Finding, ...]
    policy_speeds: tuple[PolicySpeed, ...]  # None where train steps could not be timed.
    environment: EnvironmentRecord | None  # None where TensorFlow could not be started.

    @property
    def complete(self) -> bool:
        """Whether nothing that is needed is missing."""
        return all(finding.status != "missing" for finding in self.findings)


# Why a package is needed, where its absence shows in a way that nobody would expect.
_WHY = {"tensorboard": ": keras-tuner imports it in every trial, and every trial fails"}


def package_findings(
    requirements: Sequence[str], installed: Mapping[str, str]
) -> tuple[Finding, ...]:
    findings = []
    for line in requirements:
        if "extra ==" in line:
            continue
        requirement = line.partition(";")[0].strip()
        name, bound = _name(requirement), _lower_bound(requirement)
        mend = f"pip install --upgrade '{requirement}'"
        if (version := installed.get(name)) is None:
            text = f"not installed{_WHY.get(name, '')}"
            findings.append(Finding(name, "missing", text, mend))
        elif bound is not None and _release(version) < _release(bound):
            text = f"{version} is older than {bound}, the oldest that kbatch was tested with"
            findings.append(Finding(name, "warning", text, mend))
        else:
            findings.append(Finding(name, "ok", version))
    return tuple(findings)


def python_finding(version: str, required: str) -> Finding:
    """Compare Python's version with what is required, such as `">=3.11"`."""
    bound = _lower_bound(required)
    if bound is not None and _release(version) < _release(bound):
        text = f"{version} is older than {bound}, which kbatch needs"
        return Finding("python", "missing", text, f"python{bound} -m venv .venv")
    return Finding("python", "ok", version)


def read_package_findings() -> tuple[Finding, ...]:
    home = Path.home()
    backend = backend_finding(os.environ, home if os.access(home, os.W_OK) else Path("/tmp"))
    if _version("kbatch-tuner") is None:
        text = "not installed, only on the path: what it requires is unknown"
        return (Finding("kbatch", "warning", text, "pip install ."), backend)
    requirements = importlib.metadata.requires("kbatch-tuner") or []
    required = importlib.metadata.metadata("kbatch-tuner")["Requires-Python"] or ""
    names = map(_name, requirements)
    installed = {name: version for name in names if (version := _version(name)) is not None}
    python = python_finding(platform.python_version(), required)
    return (python, *package_findings(requirements, installed), backend)


def backend_finding(variables: Mapping[str, str], home: Path) -> Finding:
    """Read which backend Keras will take, as Keras itself does."""
    settings = Path(variables.get("KERAS_HOME") or home / ".keras") / "keras.json"
    backend, source = variables.get("KERAS_BACKEND"), "KERAS_BACKEND"
    if not backend:
        backend, source = "tensorflow", "Keras's default"
        # Keras ignores such a file as well.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(settings.read_text(encoding="utf-8"))["backend"]
            backend, source = str(found), str(settings)
    if backend == "tensorflow":
        return Finding("backend", "ok", f"Keras runs on tensorflow ({source})")
    text = f"Keras would run on {backend} ({source}): kbatch trains on tensorflow"
    return Finding("backend", "missing", text, "export KERAS_BACKEND=tensorflow")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def _lower_bound(requirement: str) -> str | None:
    found = re.search(r">=\s*([0-9][0-9.]*)", requirement)
    return found.group(1) if found else None


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version, without zeros at the end."""
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    numbers = [int(word) for word in found.group().split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


# A share of a GPU's memory that nobody misses: a driver's context takes some hundred megabytes.
_SMALL_SHARE = 0.05
# The first with tensor cores for float16 (CUDA C++ Programming Guide, Compute Capabilities).
_TENSOR_CORES = (7, 0)
# The oldest driver of each major version of CUDA, which runs all of its minor versions (CUDA
# Compatibility, Minor Version Compatibility, Linux).
_OLDEST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


class ListedGpu(NamedTuple):
    gpu: "NvmlGpu"
    memory_used_bytes: int | None  # None if the driver does not say.
    processes: tuple[GpuProcess, ...] = ()  # What computes on it.


class NvidiaReading(NamedTuple):
    driver_loaded: bool  # Whether the kernel has NVIDIA's driver.
    device_nodes: int  # How many GPUs have a device file that a process can open.
    pci_gpus: int  # How many NVIDIA GPUs sit in this machine, whatever their driver.
    gpus: tuple[ListedGpu, ...] | None  # None without NVML.
    nvml_error: str | None  # Why NVML is not available, None if it is.
    mismatch: bool = False  # Whether that is since the driver and its library differ in version.
    driver_version: str | None = None  # Such as "550.54.15", None if unknown.
    cuda_version: tuple[int, int] | None = None  # Newest that the driver runs, None if unknown.
    silent_gpus: tuple[str, ...] = ()  # That the driver cannot reach, as "GPU 1 (GPU is lost)".

    @property
    def gpu_count(self) -> int:
        """How many GPUs this process could use."""
        return max(self.device_nodes, len(self.gpus or ()) + len(self.silent_gpus))


class TensorFlowBuild(NamedTuple):
    cuda_version: tuple[int, int] | None  # Such as (12, 5), None for a build without GPUs.
    compute_capabilities: tuple[tuple[int, int], ...] = ()  # Of its kernels, ascending.
    missing_packages: tuple[str, ...] = ()  # NVIDIA's libraries for it, not installed.


def read_nvidia() -> NvidiaReading:
    """Read what the driver and NVML show. Call it before TensorFlow takes the memory."""
    from kbatch.device.gpus import (
        NvmlUnavailableError,
        opened_nvml,
        read_driver,
        read_gpu,
        read_processes,
    )

    gpus = error = version = cuda_version = None
    mismatch, silent = False, ()
    try:
        with opened_nvml() as found:
            version, cuda_version, silent = read_driver()
            gpus = tuple(
                ListedGpu(gpu, read_gpu(gpu).memory_used_bytes, read_processes(gpu))
                for gpu in found
            )
    except NvmlUnavailableError as reason:
        error, mismatch = str(reason), reason.mismatch
    return NvidiaReading(
        driver_loaded=Path("/proc/driver/nvidia/version").exists(),
        device_nodes=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        pci_gpus=sum(map(_is_nvidia_gpu, Path("/sys/bus/pci/devices").glob("*"))),
        gpus=gpus,
        nvml_error=error,
        mismatch=mismatch,
        driver_version=version,
        cuda_version=cuda_version,
        silent_gpus=silent,
    )


def _is_nvidia_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == "0x10de" and kind.startswith("0x03")  # NVIDIA; a display controller.


def read_tensorflow_build() -> TensorFlowBuild:
    """Read what the installed TensorFlow was built for; it starts no device."""
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    if not build.get("is_cuda_build"):
        return TensorFlowBuild(None)
    # Such as "sm_60", or "compute_90" where newer ones can be compiled for.
    numbers = [re.sub(r"\D", "", text) for text in build.get("cuda_compute_capabilities", ())]
    major, minor = re.findall(r"\d+", str(build.get("cuda_version", "")) + ".0.0")[:2]
    requirements = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        requirements = importlib.metadata.requires("tensorflow") or []
    libraries = [_name(line) for line in requirements if re.search("extra == .and-cuda", line)]
    return TensorFlowBuild(
        cuda_version=(int(major), int(minor)),
        compute_capabilities=tuple(sorted((int(n[:-1]), int(n[-1])) for n in numbers if n[1:])),
        missing_packages=tuple(name for name in libraries if _version(name) is None),
    )


def nvidia_findings(
    reading: NvidiaReading,
    devices: Sequence[str],
    *,
    build: TensorFlowBuild,
    variables: Mapping[str, str],
) -> tuple[Finding, ...]:
    seen = [device for device in devices if device.startswith("GPU")]
    if not seen:
        findings = [_why_not(reading, build, variables), _nvml_finding(reading)]
    else:
        growth = variables.get("TF_FORCE_GPU_ALLOW_GROWTH", "")
        text = (
            f"TF_FORCE_GPU_ALLOW_GROWTH={growth}: TensorFlow takes GPU memory as it needs it"
            if growth.lower() in ("true", "1")
            else "TensorFlow takes nearly all GPU memory at its start; where the GPU is shared, "
            "export TF_FORCE_GPU_ALLOW_GROWTH=true"
        )
        sees = Finding("GPU", "ok", f"TensorFlow sees {', '.join(seen)}")
        findings = [sees, _nvml_finding(reading), Finding("GPU growth", "ok", text)]
    return (*findings, *(_one_gpu_finding(one, build) for one in reading.gpus or ()))


def _why_not(
    reading: NvidiaReading, build: TensorFlowBuild, variables: Mapping[str, str]
) -> Finding:
    """Name the first thing that keeps TensorFlow from a GPU, from the hardware upwards."""
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if not reading.gpu_count and not reading.mismatch:
        if reading.driver_loaded:
            text = "the host has NVIDIA's driver, but no GPU is handed to this container"
            return Finding("GPU", "warning", text, "docker run --gpus all IMAGE")
        if not reading.pci_gpus:
            return Finding("GPU", "ok", "no NVIDIA GPU: training runs on the CPU")
        text = (
            f"{pluralize(reading.pci_gpus, 'NVIDIA GPU')} in this machine, but NVIDIA's driver is "
            "not loaded: install it and restart; until then training runs on the CPU"
        )
        return Finding("GPU", "warning", text)
    if visible in ("", "-1"):
        text = f"CUDA_VISIBLE_DEVICES={visible} hides the GPU: training runs on the CPU"
        return Finding("GPU", "warning", text, "unset CUDA_VISIBLE_DEVICES")
    if reading.gpus is None:
        text = f"TensorFlow cannot use the GPU because of its driver. {reading.nvml_error}"
        return Finding("GPU", "missing", text, "nvidia-smi")
    if not reading.gpus:
        silent = ", ".join(reading.silent_gpus)
        text = f"no GPU answers: {silent or 'NVML lists none'}; look for the cause, then restart"
        return Finding("GPU", "missing", text, "sudo dmesg | grep -i -e NVRM -e Xid")
    gpus = [one.gpu for one in reading.gpus]
    if visible is not None and not _names_one(visible, gpus, count=reading.gpu_count):
        text = (
            f"CUDA_VISIBLE_DEVICES={visible} names no GPU that is here "
            f"({', '.join(f'{gpu.index}: {gpu.name}' for gpu in gpus)}): training runs on the CPU"
        )
        return Finding("GPU", "warning", text, "unset CUDA_VISIBLE_DEVICES")
    if build.cuda_version is None:
        text = f"{gpus[0].name or 'a GPU'} is here, but this TensorFlow was built for CPUs only"
        mend = "pip uninstall -y tensorflow tensorflow-cpu && pip install 'tensorflow[and-cuda]'"
        return Finding("GPU", "missing", text, mend)
    return _unusable_gpu(gpus, reading, build)


def _unusable_gpu(
    gpus: "Sequence[NvmlGpu]", reading: NvidiaReading, build: TensorFlowBuild
) -> Finding:
    needed = build.cuda_version or (0, 0)
    if reading.cuda_version and reading.cuda_version[0] < needed[0]:
        oldest = _OLDEST_DRIVERS.get(needed[0])
        text = (
            f"the driver {reading.driver_version} is too old: it runs CUDA up to "
            f"{_dotted(reading.cuda_version)} and this TensorFlow was built with "
            f"{_dotted(needed)}; install a driver {f'from {oldest} on' if oldest else 'for it'}"
        )
        return Finding("GPU", "missing", text)
    least = min(build.compute_capabilities, default=(0, 0))
    if all(gpu.compute_capability and gpu.compute_capability < least for gpu in gpus):
        text = (
            f"{gpus[0].name or 'the GPU'} is too old: its compute capability is "
            f"{_dotted(gpus[0].compute_capability or (0, 0))} and this TensorFlow was built for "
            f"{_dotted(least)} and newer; use an older TensorFlow, or train on the CPU"
        )
        return Finding("GPU", "missing", text)
    if build.missing_packages:
        text = (
            "an NVIDIA GPU is here and TensorFlow sees none: of NVIDIA's libraries these are not "
            f"installed: {', '.join(build.missing_packages)}"
        )
        return Finding("GPU", "missing", text, "pip install 'tensorflow[and-cuda]'")
    if all(gpu.mig for gpu in gpus):
        text = "the GPU is split into instances (MIG), and this process has none of them"
        return Finding("GPU", "missing", text, "nvidia-smi -L")
    text = (
        "an NVIDIA GPU is here and TensorFlow sees none, though NVIDIA's libraries are installed: "
        "its log names the one that could not be loaded"
    )
    show = "import tensorflow as tf; tf.config.list_physical_devices('GPU')"
    return Finding("GPU", "missing", text, f'TF_CPP_MIN_LOG_LEVEL=0 python -c "{show}"')


def _names_one(visible: str, gpus: "Sequence[NvmlGpu]", *, count: int) -> bool:
    """Return whether CUDA would take the first name, an index or the start of a UUID."""
    name = visible.split(",")[0].strip()
    if name.isdigit():
        return int(name) < count
    uuids = [gpu.uuid for gpu in gpus if gpu.uuid]
    # The UUIDs of instances (MIG) are not the board's.
    return name.startswith("MIG-") or not uuids or any(uuid.startswith(name) for uuid in uuids)


def _nvml_finding(reading: NvidiaReading) -> Finding:
    if reading.gpus is None:
        if reading.gpu_count or reading.mismatch:
            text = f"utilisation, power and memory of the GPU cannot be read: {reading.nvml_error}"
            return Finding("NVML", "warning", text)
        return Finding("NVML", "ok", f"not available, as without a GPU ({reading.nvml_error})")
    text = f"shows {pluralize(len(reading.gpus), 'GPU')}"
    if reading.driver_version:
        text = f"{text}, driver {reading.driver_version}"
    if silent := ", ".join(reading.silent_gpus):
        return Finding("NVML", "warning", f"{text}; no answer from {silent}: restart the machine")
    return Finding("NVML", "ok", text)


def _one_gpu_finding(reading: ListedGpu, build: TensorFlowBuild) -> Finding:
    gpu, used = reading.gpu, reading.memory_used_bytes
    total, capability = gpu.memory_total_bytes, gpu.compute_capability
    parts = ["the driver shows no memory of its own: TensorFlow's count is used"]
    if total is not None:
        parts = [gibibytes(total)]
    if gpu.mig:
        parts.append("split into instances (MIG): this memory and all power are the whole board's")
    newest = max(build.compute_capabilities, default=None)
    warnings = []
    shared = not gpu.mig  # What lies in other instances is in nobody's way.
    if shared and total is not None and used is not None and used > _SMALL_SHARE * total:
        whose = "nvidia-smi on the host names them"
        if reading.processes:
            whose = processes_text(reading.processes)
        warnings.append(f"other processes hold {gibibytes(used)}: {whose}")
    if capability and capability < _TENSOR_CORES:
        warnings.append(
            f"compute capability {_dotted(capability)}: no tensor cores, so mixed_float16 saves "
            "memory and no time"
        )
    if capability and newest and capability[0] > newest[0]:
        warnings.append(
            f"compute capability {_dotted(capability)} is newer than this TensorFlow's kernels "
            f"({_dotted(newest)}): the driver compiles them at the first start, which may take "
            "half an hour, or fails; a newer TensorFlow has them"
        )
    status = "warning" if warnings else "ok"
    return Finding(f"GPU {gpu.index}", status, "; ".join([*parts, *warnings]))


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


# A worker process with TensorFlow takes about half a GiB before it trains anything.
_LEAST_FREE_BYTES = 2**30
# Timings suffer when others keep more than this share of the processors busy.
_BUSY_SHARE = 0.5
# Variables that change what is measured.
_VARIABLES = (
    "TF_CPU_ALLOCATOR_USE_BFC",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB",
    "TF_GPU_ALLOCATOR",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_XLA_FLAGS",
    "XLA_FLAGS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "OMP_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
)


def read_host_findings(cpu_count: int, *, variables: Mapping[str, str]) -> tuple[Finding, ...]:
    import psutil

    from kbatch.device.control_group import read_control_group

    memory = psutil.virtual_memory()
    group = read_control_group()
    changed = [f"{name}={variables[name]}" for name in _VARIABLES if name in variables]
    text = f"these change memory or speed: {', '.join(changed)}"
    return (
        memory_finding(memory.total, memory.available, group.memory_limit_bytes),
        cpu_finding(cpu_count, group.cpu_quota, psutil.getloadavg()[0]),
        Finding("variables", "ok", text if changed else "none that change memory or speed"),
    )


def memory_finding(total_bytes: int, available_bytes: int, group_bytes: int | None) -> Finding:
    text = f"{gibibytes(total_bytes)}, {gibibytes(available_bytes)} free"
    if group_bytes is not None and group_bytes < total_bytes:
        text = f"{text}; the control group allows {gibibytes(group_bytes)}"
        available_bytes = min(available_bytes, group_bytes)
    if available_bytes >= _LEAST_FREE_BYTES:
        return Finding("memory", "ok", text)
    return Finding("memory", "warning", f"{text}: a second process with TensorFlow needs 1 GiB")


def cpu_finding(cpu_count: int, quota: float | None, load: float) -> Finding:
    usable = cpu_count if quota is None else min(cpu_count, quota)
    text = pluralize(cpu_count, "core")
    if usable < cpu_count:
        text = f"{text}, of whose time the control group allows {usable:g}"
    text = f"{text}, load {load:.1f}"
    if load > _BUSY_SHARE * usable:
        return Finding("CPU", "warning", f"{text}: other work disturbs timings")
    return Finding("CPU", "ok", text)
