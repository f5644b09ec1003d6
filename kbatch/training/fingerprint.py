"""What tells one model from another where memory is concerned."""

import hashlib
import json
from typing import Any

import keras

from kbatch.training.own_code import function_code, own_code

# They change the steps, not what these need.
_NOT_OF_MEMORY = ("learning_rate", "name")


def model_fingerprint(model: keras.Model) -> str:
    """Gives a text that is equal for models that need the same memory, in any process.

    Layers, shapes, dtypes, loss, metrics, optimizer and compilation by XLA are in it, and the code
    and the plain attributes of layers that are not Keras's own. Weights, the
    learning rate and the names of layers, which Keras counts up, are not; of the optimizer's other
    numbers only whether they are zero, which decides the slots.

    Args:
        model: A compiled model.
    """
    target: Any = model
    names = {layer.name: f"layer {i}" for i, layer in enumerate(target._flatten_layers())}
    compiled = dict(target._compile_config.config)
    del compiled["optimizer"]
    described = {
        "model": _described(model, names),
        "own code": [own_code(layer) for layer in target._flatten_layers()],
        "weights": [(tuple(weight.shape), weight.dtype) for weight in target.weights],
        "trainable": [tuple(weight.shape) for weight in target.trainable_weights],
        "policy": target.dtype_policy.name,
        "optimizer": _zero_or_not(_described(target.optimizer, names)),
        "compiled": _described(compiled | {"jit_compile": target.jit_compile}, names),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _described(value: Any, names: dict[str, str]) -> Any:
    """Gives plain data: never a `repr`, which may hold an address in memory."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        kept = {str(key): item for key, item in value.items() if key not in _NOT_OF_MEMORY}
        return {key: _described(item, names) for key, item in kept.items()}
    if isinstance(value, (list, tuple)):
        return [_described(item, names) for item in value]
    if hasattr(value, "get_config") and not isinstance(value, type):
        return [_class(type(value)), _described(_config(value), names)]
    if hasattr(value, "__code__"):
        return [_class(value), function_code(value)]
    return _class(value if isinstance(value, type) else type(value))


def _config(part: Any) -> Any:
    try:
        return part.get_config()
    # Keras refuses with the first to describe a subclass without a `get_config` of its own, and
    # with the others parts that it cannot serialize. Its weights and its code still tell it.
    except (NotImplementedError, TypeError, ValueError):
        return list(getattr(part, "layers", []))


def _class(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _zero_or_not(value: Any) -> Any:
    if isinstance(value, float):
        return value != 0
    if isinstance(value, dict):
        return {key: _zero_or_not(item) for key, item in value.items()}
    return [_zero_or_not(item) for item in value] if isinstance(value, list) else value
