"""What tells one model from another where memory is concerned."""

import hashlib
import json
from typing import Any

import keras

# It changes the steps, not what they need.
_NOT_OF_MEMORY = ("learning_rate", "name")


def model_fingerprint(model: keras.Model) -> str:
    """Gives a text that is equal for models that need the same memory.

    Layers, shapes, dtypes, loss, metrics, optimizer and compilation by XLA are in it, weights and
    the learning rate are not.

    Args:
        model: A compiled model.
    """
    target: Any = model
    described = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "layers": _config(model),
        "weights": [(tuple(weight.shape), weight.dtype) for weight in target.weights],
        "trainable": [tuple(weight.shape) for weight in target.trainable_weights],
        "policy": target.dtype_policy.name,
        "optimizer": [type(target.optimizer).__name__, _config(target.optimizer)],
        "compiled": [repr(target.loss), repr(target.jit_compile)],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=repr).encode()).hexdigest()


def _config(part: Any) -> Any:
    try:
        config = part.get_config()
    except (
        NotImplementedError,
        TypeError,
        ValueError,
    ):  # A subclass that does not describe itself.
        return [layer.name for layer in getattr(part, "layers", [])]
    return {name: value for name, value in config.items() if name not in _NOT_OF_MEMORY}
