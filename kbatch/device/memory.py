"""Memory of the GPU or CPU that trains, from TensorFlow's allocator, and of the host."""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
import tensorflow as tf

from kbatch.analysis.batch_sizes import check_size
from kbatch.device import machine
from kbatch.library_internals import has_started_devices, local_devices

MEBIBYTE = 2**20
# If TensorFlow can have less than this share of a GPU's memory, other processes use the GPU. On an
# unused GPU, TensorFlow leaves 5 % free, and the driver takes some hundred megabytes.
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
    """Return the environment in which the CPU's allocator has a limit and counts every byte."""
    limit = str(limit_bytes // MEBIBYTE)
    return {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": limit}


def limit_gpu(limit_bytes: int) -> None:
    """Limit TensorFlow's memory of its first GPU. This works before the GPU's first use only."""
    for gpu in tf.config.get_visible_devices("GPU")[:1]:
        logical = tf.config.LogicalDeviceConfiguration(memory_limit=limit_bytes / MEBIBYTE)
        tf.config.set_logical_device_configuration(gpu, [logical])


def set_limit_bytes() -> int | None:
    """Return the memory limit that this program set for its first GPU, or None."""
    for gpu in tf.config.get_visible_devices("GPU")[:1]:
        for logical in (tf.config.get_logical_device_configuration(gpu) or ())[:1]:
            if logical.memory_limit is not None:
                return int(logical.memory_limit * MEBIBYTE)
    return None


def gpu_visible() -> bool:
    """Return whether TensorFlow sees a GPU, without starting the GPU."""
    return bool(tf.config.get_visible_devices("GPU"))


def gpu_in_use() -> bool:
    """Return whether this process already uses a GPU, and so holds most of its memory."""
    return has_started_devices() and gpu_visible()


def worker_device() -> dict[str, str]:
    """Return the environment of a worker process that sees only the first GPU of this one."""
    # `tf.config.set_visible_devices` does not reach a worker, which would take all GPUs.
    if not tf.config.list_physical_devices("GPU"):
        return {}
    visible = tf.config.get_visible_devices("GPU")
    return machine.only_gpu(int(visible[0].name.rpartition(":")[2])) if visible else machine.NO_GPU


def workers_on_device() -> int | None:
    """Return how many workers share this device, or None outside of `executor="local"`."""
    # Without a visible GPU, all workers of the host share its processors.
    name = machine.WORKERS_ON_DEVICE if gpu_visible() else machine.WORKERS_ON_HOST
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


# All workers together may use this share of the host's free memory.
_SHARE_OF_HOST = 0.5


def host_limit_bytes() -> int:
    """Return the default memory limit of a process on the host, in bytes."""
    return int(_SHARE_OF_HOST * machine.available_bytes() / (workers_on_device() or 1))


class DeviceMemory:
    """Memory of the first GPU, or of the CPU if TensorFlow sees no GPU."""

    def __init__(self):
        self.device = "GPU:0" if gpu_visible() else "CPU:0"
        self._before = _read_resident_memory()["current"]

    @property
    def limit_bytes(self) -> int | None:
        """Bytes of the GPU that this process may use; None on a CPU. Workers get equal parts."""
        if self.device == "CPU:0":
            return None
        workers = 1 if set_limit_bytes() is not None else workers_on_device() or 1
        if (total_bytes := _gpu_total_bytes()) is None:
            return _gpu_limit_bytes() // workers
        return min(_gpu_limit_bytes(), total_bytes // workers)

    def held_by_others(self) -> tuple[int, int] | None:
        """Return a GPU's free and total bytes if other programs use its memory, else None."""
        # Workers of the same search do not count as other programs.
        shared = (workers_on_device() or 1) > 1
        if self.device == "CPU:0" or shared or set_limit_bytes() is not None:
            return None
        free_bytes, total_bytes = _gpu_limit_bytes(), _gpu_total_bytes() or 0
        return (free_bytes, total_bytes) if free_bytes < _FREE_SHARE * total_bytes else None

    def reset(self) -> None:
        """Reset the peak to the bytes that are held now."""
        try:
            tf.config.experimental.reset_memory_stats(self.device)
        except ValueError:
            if self.device != "CPU:0":
                raise
            with contextlib.suppress(OSError):  # Only Linux records the peak of a process.
                Path("/proc/self/clear_refs").write_text("5")

    @property
    def held_bytes(self) -> int:
        """Bytes that this process holds now."""
        return self._read("current")

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at once since the last reset."""
        return self._read("peak")

    def _read(self, name: str) -> int:
        try:
            return tf.config.experimental.get_memory_info(self.device)[name]
        except ValueError:
            # On some CPUs TensorFlow's default allocator does not count. Then the memory of the
            # process is used, without what it held at the start.
            if self.device != "CPU:0":
                raise
            return max(0, _read_resident_memory()[name] - self._before)


def _read_resident_memory() -> dict[str, int]:
    """Read the current and the peak memory of this process on the host, in bytes."""
    with contextlib.suppress(OSError):
        text = Path("/proc/self/status").read_text()
        status_kib = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB$", text, re.M))
        if len(status_kib) == 2:
            current, peak = (1024 * int(status_kib[name]) for name in ("VmRSS", "VmHWM"))
            return {"current": current, "peak": peak}
    # Only Linux records a peak. Elsewhere, the current memory is used instead.
    return dict.fromkeys(("current", "peak"), psutil.Process().memory_info().rss)


def _gpu_limit_bytes() -> int:
    """Return the memory limit of TensorFlow's allocator on its first GPU, in bytes."""
    return next(d.memory_limit for d in local_devices() if d.name.endswith("device:GPU:0"))


def _gpu_total_bytes() -> int | None:
    """Return the memory of TensorFlow's first GPU, or None if the driver does not report it."""
    by_device = {name: bus_id for bus_id, names in tensorflow_gpus().items() for name in names}
    with machine.opened_nvml() as (listed, _):
        matching = (gpu for gpu in listed if gpu.pci_bus_id == by_device.get("GPU:0"))
        # With MIG, the total is the memory of all instances together.
        return next((gpu.memory_total_bytes for gpu in matching if not gpu.mig), None)


def tensorflow_gpus() -> Mapping[str, tuple[str, ...]]:
    """Return TensorFlow's names of its GPUs by PCI bus id. This starts the GPUs."""
    # `tf.config.experimental.get_device_details` does not give the bus id.
    if not tf.config.list_logical_devices("GPU"):
        return {}
    return machine.devices_by_bus_id((d.name, d.physical_device_desc) for d in local_devices())


class FreeMemory(NamedTuple):
    """Free memory when an allocation failed."""

    requested_bytes: int  # Size of the block that was requested.
    free_bytes: int
    largest_block_bytes: int  # Size of the largest free block.


def free_memory(log: str) -> FreeMemory | None:
    """Read the free memory at the last failure from a log of TensorFlow's allocator."""
    dump = log[max(log.rfind("ran out of memory trying to allocate"), 0) :]
    requested = re.search(r"rounded to (\d+)\)", dump)
    available = re.search(r"available size: ([\d.]+)(B|KiB|MiB|GiB|TiB)", dump)
    if requested is None or available is None:
        return None
    blocks = [int(size) for size in re.findall(r"Free\s+at \w+ of size (\d+)", dump)]
    unit = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(available[2])
    blocks.append(int(float(available[1]) * unit))
    return FreeMemory(int(requested[1]), sum(blocks), max(blocks))
