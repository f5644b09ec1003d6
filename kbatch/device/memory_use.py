"""Memory in use while a model trains."""

import psutil
import tensorflow as tf

_DEVICE = "GPU:0"


def reset_memory_use() -> None:
    """Begins a new peak, where the device keeps one."""
    if tf.config.list_logical_devices("GPU"):
        tf.config.experimental.reset_memory_stats(_DEVICE)


def memory_use_bytes() -> int:
    """Reads the peak of the first GPU's memory, or the memory of this process without one.

    TensorFlow reserves almost all of a GPU; this is what it needed of that.
    """
    if tf.config.list_logical_devices("GPU"):
        return int(tf.config.experimental.get_memory_info(_DEVICE)["peak"])
    return psutil.Process().memory_info().rss
