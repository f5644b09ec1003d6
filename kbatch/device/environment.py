"""The machine and the software as they are now, and the memory that this process may take."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import sys
from pathlib import Path

import psutil

from kbatch import __version__
from kbatch.device.gpus import opened_nvml, read_driver_version
from kbatch.records.machine import EnvironmentRecord

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
