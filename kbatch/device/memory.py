"""Memory of the device that trains, from TensorFlow's allocator, and of the host."""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
import tensorflow as tf

from kbatch.analysis.batch_sizes import check_size
from kbatch.device.machine import (
    NO_GPU,
    WORKERS_ON_DEVICE,
    WORKERS_ON_HOST,
    available_bytes,
    devices_by_bus_id,
    only_gpu,
    opened_nvml,
)
from kbatch.library_internals import has_started_devices, local_devices

MEBIBYTE = 2**20
# What TensorFlow can have at the least of a GPU that nobody else uses, of 2 GiB or more: it leaves
# 5 % of what is free, and a driver's context takes some hundred megabytes.
_FREE_SHARE = 0.8


def check_memory_limit(limit_bytes: int | None) -> int | None:
    """Check that a limit is None or a number of bytes, at least one MiB."""
    if limit_bytes is None:
        return None
    unit = " of bytes, at least one MiB (2**20), such as 2 * 2**30, or None"
    limit = check_size(limit_bytes, "memory_limit_bytes", unit=unit)
    if limit < MEBIBYTE:
        raise ValueError(
            "`memory_limit_bytes` must be at least one MiB (2**20). "
            f"Received: memory_limit_bytes={limit_bytes!r}."
        )
    return limit


def limited_cpu(limit_bytes: int) -> dict[str, str]:
    """Return the environment in which the CPU's allocator has a limit, and counts every byte."""
    limit = str(limit_bytes // MEBIBYTE)
    return {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": limit}


def limit_gpu(limit_bytes: int) -> None:
    """Limit TensorFlow to so many bytes of its first GPU; before its first use only."""
    for gpu in tf.config.get_visible_devices("GPU")[:1]:
        logical = tf.config.LogicalDeviceConfiguration(memory_limit=limit_bytes / MEBIBYTE)
        tf.config.set_logical_device_configuration(gpu, [logical])


def set_limit_bytes() -> int | None:
    """Return the limit that this program set for its first GPU, None without one."""
    for gpu in tf.config.get_visible_devices("GPU")[:1]:
        for logical in (tf.config.get_logical_device_configuration(gpu) or ())[:1]:
            if logical.memory_limit is not None:
                return int(logical.memory_limit * MEBIBYTE)
    return None


def gpu_visible() -> bool:
    """Return whether TensorFlow sees a GPU; it is not started."""
    return bool(tf.config.get_visible_devices("GPU"))


def gpu_in_use() -> bool:
    """Return whether this process holds a GPU already, which leaves little to another one."""
    return has_started_devices() and gpu_visible()


def worker_device() -> dict[str, str]:
    """Return the environment in which a worker process sees the first GPU of this one alone."""
    # A worker knows nothing of `tf.config.set_visible_devices`, and would take memory of all GPUs.
    if not tf.config.list_physical_devices("GPU"):
        return {}
    visible = tf.config.get_visible_devices("GPU")
    return only_gpu(int(visible[0].name.rpartition(":")[2])) if visible else NO_GPU


def workers_on_device() -> int | None:
    """Return how many workers share the device of this process, None outside `executor="local"`."""
    # Where TensorFlow sees no GPU, those of the host share its processors, whatever GPUs it has.
    text = os.environ.get(WORKERS_ON_DEVICE if gpu_visible() else WORKERS_ON_HOST, "")
    return int(text) if text.isdigit() else None


# Of what the host and its control group leave to all workers; the rest is for everything else.
_SHARE_OF_HOST = 0.5


def host_limit_bytes() -> int:
    """Return the memory of the host that a process may take unless a limit is given."""
    return int(_SHARE_OF_HOST * available_bytes() / (workers_on_device() or 1))


class DeviceMemory:
    """Memory of the first GPU, or of the CPU where TensorFlow sees no GPU."""

    def __init__(self):
        self.device = "GPU:0" if gpu_visible() else "CPU:0"
        self._before = _read_resident_memory()["current"]

    @property
    def limit_bytes(self) -> int | None:
        """Bytes of a GPU that this process may take, or a worker's part of it; None on a CPU."""
        if self.device == "CPU:0":
            return None
        workers = 1 if set_limit_bytes() is not None else workers_on_device() or 1
        if (total_bytes := _gpu_total_bytes()) is None:
            return _gpu_limit_bytes() // workers
        return min(_gpu_limit_bytes(), total_bytes // workers)

    def held_by_others(self) -> tuple[int, int] | None:
        """Return what is free of a GPU, and all of its memory, if others hold a part of it."""
        # Workers of a search that share it have parts of their own.
        shared = (workers_on_device() or 1) > 1
        if self.device == "CPU:0" or shared or set_limit_bytes() is not None:
            return None
        free_bytes, total_bytes = _gpu_limit_bytes(), _gpu_total_bytes() or 0
        return (free_bytes, total_bytes) if free_bytes < _FREE_SHARE * total_bytes else None

    def reset(self) -> None:
        """Start a new peak at what is held now."""
        try:
            tf.config.experimental.reset_memory_stats(self.device)
        except ValueError:
            if self.device != "CPU:0":
                raise
            with contextlib.suppress(OSError):  # Not every host keeps a peak.
                Path("/proc/self/clear_refs").write_text("5")

    @property
    def held_bytes(self) -> int:
        """Bytes held now, by all of this process."""
        return self._read("current")

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at once since the last reset."""
        return self._read("peak")

    def _read(self, name: str) -> int:
        try:
            return tf.config.experimental.get_memory_info(self.device)[name]
        except ValueError:
            # An allocator without a limit counts on a CPU with oneDNN's units alone. Elsewhere the
            # process reports what it took since the beginning.
            if self.device != "CPU:0":
                raise
            return max(0, _read_resident_memory()[name] - self._before)


def _read_resident_memory() -> dict[str, int]:
    """Read the bytes of the host's memory that this process takes, and took at most."""
    with contextlib.suppress(OSError):
        text = Path("/proc/self/status").read_text()
        found = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB$", text, re.M))
        if len(found) == 2:
            return {"current": 1024 * int(found["VmRSS"]), "peak": 1024 * int(found["VmHWM"])}
    # A host that keeps no peak.
    return dict.fromkeys(("current", "peak"), psutil.Process().memory_info().rss)


def _gpu_limit_bytes() -> int:
    """Return what TensorFlow's allocator can have of its first GPU: almost all that was free."""
    return next(d.memory_limit for d in local_devices() if d.name.endswith("device:GPU:0"))


def _gpu_total_bytes() -> int | None:
    """Return the memory of TensorFlow's first GPU, None if the driver does not report it."""
    by_device = {name: bus_id for bus_id, names in tensorflow_gpus().items() for name in names}
    with opened_nvml() as (listed, _):
        found = (gpu for gpu in listed if gpu.pci_bus_id == by_device.get("GPU:0"))
        # Of a GPU in instances (MIG) it is the memory of all of them.
        return next((gpu.memory_total_bytes for gpu in found if not gpu.mig), None)


def tensorflow_gpus() -> Mapping[str, tuple[str, ...]]:
    """Find TensorFlow's names of its GPUs by PCI bus id; it starts them where it has not yet."""
    # `tf.config.experimental.get_device_details` has no bus id.
    if not tf.config.list_logical_devices("GPU"):
        return {}
    return devices_by_bus_id((d.name, d.physical_device_desc) for d in local_devices())


class FreeMemory(NamedTuple):
    """Memory that was free when an allocation failed."""

    requested_bytes: int  # What the allocation asked for, in one piece.
    free_bytes: int
    largest_block_bytes: int  # The largest free piece.


def free_memory(log: str) -> FreeMemory | None:
    """Read the free memory at the last failure in a log of TensorFlow's allocator."""
    dump = log[max(log.rfind("ran out of memory trying to allocate"), 0) :]
    requested = re.search(r"rounded to (\d+)\)", dump)
    untaken = re.search(r"available size: ([\d.]+)(B|KiB|MiB|GiB|TiB)", dump)
    if requested is None or untaken is None:
        return None
    blocks = [int(size) for size in re.findall(r"Free\s+at \w+ of size (\d+)", dump)]
    unit = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(untaken[2])
    blocks.append(int(float(untaken[1]) * unit))
    return FreeMemory(int(requested[1]), sum(blocks), max(blocks))
