"""These tests need an NVIDIA GPU; elsewhere they are skipped and say so."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def gpus():
    """TensorFlow's physical GPUs, which take memory as they need it: a child process needs some."""
    import tensorflow as tf

    found = tf.config.list_physical_devices("GPU")
    if not found:
        pytest.skip("needs an NVIDIA GPU: tf.config.list_physical_devices('GPU') is empty")
    for gpu in found:
        tf.config.experimental.set_memory_growth(gpu, True)
    return found
