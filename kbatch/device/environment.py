"""The machine and the software, as they are now."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import sys

import psutil
import tensorflow as tf

from kbatch import __version__
from kbatch.device.gpus import NvmlUnavailableError, opened_nvml, read_driver_version
from kbatch.records.machine import EnvironmentRecord

_PACKAGES = ("tensorflow", "keras", "keras-tuner", "numpy")


def read_environment() -> EnvironmentRecord:
    versions = {"python": platform.python_version(), "kbatch": __version__}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    gpus = tf.config.get_visible_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    if gpus:
        built = tf.sysconfig.get_build_info()
        found = {"cuda": built.get("cuda_version"), "cudnn": built.get("cudnn_version")}
        with contextlib.suppress(NvmlUnavailableError), opened_nvml():
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
    if hasattr(psutil.Process, "cpu_affinity"):
        return len(psutil.Process().cpu_affinity() or [])
    return os.cpu_count() or 1


def _command() -> str:
    """Return the command line as a person would type it again."""
    program = os.path.basename(sys.argv[0])
    if program == "ipykernel_launcher.py":
        # Its words name a file of the kernel's connection, which ends with it.
        return "# run the cells of the notebook again"
    words = ["python", program] if program.endswith(".py") else [program]
    return " ".join([*words, *sys.argv[1:]])


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if "model name" in line:
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
