"""Peak memory of the device that trains, from TensorFlow's own allocator."""

import operator
from typing import Any

import tensorflow as tf
from tensorflow.python.client import device_lib
from tensorflow.python.eager import context

from kbatch.instruments.nvml import NvmlUnavailableError, opened_nvml
from kbatch.instruments.tensorflow_gpus import tensorflow_gpus
from kbatch.instruments.worker_devices import workers_on_device

# Read by TensorFlow when it starts: the CPU then runs out as a GPU does.
_BFC = "TF_CPU_ALLOCATOR_USE_BFC"
_BFC_LIMIT = "TF_CPU_BFC_MEM_LIMIT_IN_MB"
MEBIBYTE = 2**20
_MOST_BYTES = 2**53


def check_memory_limit(limit_bytes: int | None) -> int | None:
    """Checks that a limit is None or a number of bytes that an allocator can have.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is less than a MiB, or more than 2**53.
    """
    if limit_bytes is None:
        return None
    message = (
        "`memory_limit_bytes` must be an integer of at least one MiB (2**20) and at most 2**53, "
        f"such as 2 * 2**30, or None. Received: memory_limit_bytes={limit_bytes!r}."
    )
    if isinstance(limit_bytes, bool) or not hasattr(limit_bytes, "__index__"):
        raise TypeError(message)
    if not MEBIBYTE <= operator.index(limit_bytes) <= _MOST_BYTES:
        raise ValueError(message)
    return operator.index(limit_bytes)


def limited_cpu(limit_bytes: int) -> dict[str, str]:
    """Gives the environment in which the CPU's allocator has a limit.

    In a process that starts TensorFlow under it, a batch somewhat too large raises
    `ResourceExhaustedError`, and every byte is counted: the plain allocator counts large blocks
    only.

    Args:
        limit_bytes: The limit, taken down to whole MiB.
    """
    return {_BFC: "1", _BFC_LIMIT: str(limit_bytes // MEBIBYTE)}


def limit_gpu(limit_bytes: int) -> None:
    """Gives TensorFlow at most so many bytes of the first GPU; before its first use only."""
    for gpu in tf.config.list_physical_devices("GPU")[:1]:
        logical = tf.config.LogicalDeviceConfiguration(memory_limit=limit_bytes / MEBIBYTE)
        tf.config.set_logical_device_configuration(gpu, [logical])


def gpu_visible() -> bool:
    """Tells whether TensorFlow sees a GPU; it is not started."""
    return bool(tf.config.list_physical_devices("GPU"))


class DeviceMemory:
    """Memory of the first GPU, or of the CPU where TensorFlow sees no GPU."""

    def __init__(self):
        self.device = "GPU:0" if gpu_visible() else "CPU:0"

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that TensorFlow may take of a GPU, less what others held; None on a CPU.

        Where workers of a search share the GPU it is a worker's part, unless a limit was set.
        """
        if self.device == "CPU:0":
            return None
        gpu = tf.config.list_physical_devices("GPU")[0]
        for logical in tf.config.get_logical_device_configuration(gpu) or ():
            if logical.memory_limit is not None:
                # The allocator takes the limit at its word, whatever the GPU has.
                return usable_bytes(_total_bytes(), int(logical.memory_limit * MEBIBYTE), 1)
        found: list[Any] = device_lib.list_local_devices()
        device = next(d.memory_limit for d in found if d.name.endswith(f"device:{self.device}"))
        return usable_bytes(device, None, workers_on_device() or 1)

    def reset(self) -> None:
        """Starts a new peak at what is held now."""
        tf.config.experimental.reset_memory_stats(self.device)

    @property
    def held_bytes(self) -> int:
        """Bytes held now, by all of this process."""
        return tf.config.experimental.get_memory_info(self.device)["current"]

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at once since the last reset."""
        return tf.config.experimental.get_memory_info(self.device)["peak"]


def usable_bytes(device_bytes: int | None, set_bytes: int | None, workers: int) -> int | None:
    """Tells how much of a GPU one process may take.

    Args:
        device_bytes: What the GPU has, None if unknown.
        set_bytes: A limit that was set for this process, None without one.
        workers: How many workers share the GPU, to equal parts where no limit was set.

    Returns:
        Bytes, None if nothing is known.
    """
    if device_bytes is None:
        return set_bytes
    return device_bytes // workers if set_bytes is None else min(set_bytes, device_bytes)


def _total_bytes() -> int | None:
    """Gives the memory of the first GPU, None where the driver does not tell."""
    try:
        with opened_nvml() as listed:
            by_device = {name: bus_id for bus_id, n in tensorflow_gpus().items() for name in n}
            totals = {gpu.pci_bus_id: gpu.memory_total_bytes for gpu in listed}
            return totals.get(by_device.get("GPU:0", ""))
    except NvmlUnavailableError:
        return None


def gpu_in_use() -> bool:
    """Tells whether this process holds a GPU already, which leaves little to another one."""
    # No public name tells: asking any of them would start it. If this one goes, it must be seen.
    running: Any = context.context()
    return bool(running._initialized and gpu_visible())
