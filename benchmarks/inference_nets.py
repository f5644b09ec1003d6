"""The four nets whose predictions the benchmarks time."""

import keras
import numpy as np
from nets import mlp, resnet, transformer


def mobile_net():
    """MobileNetV2, a third as wide, on small images, with random weights."""
    return keras.applications.MobileNetV2(
        input_shape=(96, 96, 3), alpha=0.35, weights=None, classes=10
    )


def inference_nets() -> dict[str, tuple[keras.Model, np.ndarray]]:
    """Makes each net with some rows of inputs."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(64, 96, 96, 3)).astype("float32")
    return {
        "mlp": (mlp(), rng.normal(size=(64, 256)).astype("float32")),
        "cnn": (resnet(), images[:, :16, :16]),
        "transformer": (transformer(), rng.integers(0, 1000, (64, 32)).astype("int32")),
        "mobilenet": (mobile_net(), images),
    }
