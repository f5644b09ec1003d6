"""The copy of a batch from the host's memory to the GPU's."""

import statistics
import time
from typing import Any

import keras
import tensorflow as tf

_COPIES = 7
_WARM_UP_COPIES = 2


def measure_copy_s(batch: Any) -> float | None:
    """Times the copy of a batch to the first GPU.

    A copy is over when an element of it can be read on the GPU.

    Args:
        batch: Nested NumPy arrays.

    Returns:
        The median over some copies, in seconds; None without a GPU, where nothing is copied.
    """
    if not tf.config.list_physical_devices("GPU"):
        return None
    with tf.device("CPU:0"):
        on_host = keras.tree.map_structure(tf.constant, batch)
    durations_s = [_copy_s(on_host) for _ in range(_WARM_UP_COPIES + _COPIES)]
    return statistics.median(durations_s[_WARM_UP_COPIES:])


def _copy_s(on_host: Any) -> float:
    began_s = time.perf_counter()
    with tf.device("GPU:0"):
        copies = [tf.identity(leaf) for leaf in keras.tree.flatten(on_host)]
        for copy in copies:
            tf.reshape(copy, [-1])[:1].numpy()
    return time.perf_counter() - began_s
