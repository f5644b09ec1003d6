"""TensorFlow's GPUs by PCI bus id, and its memory of them."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from kbatch.device.gpu_monitor import TensorFlowMemory
from kbatch.device.gpus import devices_by_bus_id
from kbatch.library_internals import local_devices


def tensorflow_gpus() -> Mapping[str, tuple[str, ...]]:
    """Find the GPUs that TensorFlow uses; it starts them where it has not yet.

    `tf.config.experimental.get_device_details` tells no bus id, the device list of the client
    library does.
    """
    if not tf.config.list_logical_devices("GPU"):
        return {}
    return devices_by_bus_id((d.name, d.physical_device_desc) for d in local_devices())


def tensorflow_memory(names: Sequence[str]) -> TensorFlowMemory:
    """Find what TensorFlow has of these devices, which it has started."""
    limits = {one.name.rpartition("/device:")[2]: one.memory_limit for one in local_devices()}

    def read_used_bytes() -> int | None:
        try:
            return sum(tf.config.experimental.get_memory_info(name)["current"] for name in names)
        except (ValueError, tf.errors.OpError):  # Its allocator does not count.
            return None

    known = all(name in limits for name in names)
    return TensorFlowMemory(sum(limits[n] for n in names) if known else None, read_used_bytes)
