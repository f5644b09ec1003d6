"""The machine and the software, as they are now."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import sys

import psutil
import tensorflow as tf

from kbatch.device.gpus import NvmlUnavailableError, opened_nvml, read_driver_version
from kbatch.records.environment import EnvironmentRecord

_PACKAGES = ("kbatch", "tensorflow", "keras", "keras-tuner", "numpy")


def read_environment() -> EnvironmentRecord:
    """Read the versions, the processor, the devices and the load of this machine."""
    return EnvironmentRecord(
        versions={"python": platform.python_version(), **_versions(), **_gpu_versions()},
        platform=platform.platform(),
        cpu=_cpu_name(),
        cpu_count=len(psutil.Process().cpu_affinity() or [])
        if hasattr(psutil.Process, "cpu_affinity")
        else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        devices=_devices(),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        command=_command(),
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _command() -> str:
    """Return the command line as a person would type it again."""
    program = os.path.basename(sys.argv[0])
    if program == "ipykernel_launcher.py":
        # Its words name a file of the kernel's connection, which ends with it.
        return "# run the cells of the notebook again"
    words = ["python", program] if program.endswith(".py") else [program]
    return " ".join([*words, *sys.argv[1:]])


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _gpu_versions() -> dict[str, str]:
    """Return the driver, and the CUDA and cuDNN of the build, where TensorFlow has a GPU."""
    if not tf.config.get_visible_devices("GPU"):
        return {}
    built = tf.sysconfig.get_build_info()
    found = {"cuda": built.get("cuda_version"), "cudnn": built.get("cudnn_version")}
    with contextlib.suppress(NvmlUnavailableError), opened_nvml():
        found["nvidia-driver"] = read_driver_version()
    return {name: version for name, version in found.items() if version}


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _devices() -> tuple[str, ...]:
    gpus = tf.config.get_visible_devices("GPU")
    names = [tf.config.experimental.get_device_details(gpu).get("device_name", "") for gpu in gpus]
    return tuple(f"GPU:{i} {name}".strip() for i, name in enumerate(names)) or ("CPU",)
