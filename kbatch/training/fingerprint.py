"""What tells one model from another where memory is concerned."""

import hashlib
import json
from typing import Any

import keras

from kbatch.training.own_code import function_code, own_code

# They change the steps, not what these need: the momentum is that of BatchNormalization.
_NOT_OF_MEMORY = ("learning_rate", "name")
_NOT_OF_LAYERS_MEMORY = (*_NOT_OF_MEMORY, "momentum")
# Keras counts names up, and draws seeds that are not given.
_DRAWN = ("name", "seed")


def model_fingerprint(model: keras.Model) -> str:
    """Gives a text that is equal for models that need the same memory, in any process.

    Layers, shapes, dtypes, loss, metrics, optimizer and compilation by XLA are in it, and the code
    and the plain attributes of layers that are not Keras's own. Weights, the
    learning rate and the names of layers, which Keras counts up, are not; of the optimizer's other
    numbers only whether they are zero, which decides the slots.

    Args:
        model: A compiled model.
    """
    described = _description(model, _NOT_OF_MEMORY, of_layers=_NOT_OF_LAYERS_MEMORY)
    described["optimizer"] = _zero_or_not(described["optimizer"])
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def model_description(model: keras.Model) -> dict[str, Any]:
    """Describe what a compiled model is and how it trains, equal in any process.

    Names and seeds of layers are left out: Keras counts or draws those that are not given.

    Args:
        model: A compiled model, built or not.

    Returns:
        Plain data: layers, their own code, the shapes of weights, optimizer and compilation.
    """
    return _description(model, _DRAWN, of_layers=_DRAWN)


def _description(
    model: keras.Model, dropped: tuple[str, ...], *, of_layers: tuple[str, ...]
) -> dict[str, Any]:
    target: Any = model
    parts = target._flatten_layers()
    # Operations such as a sum of two tensors are no layers, and counted up as these are.
    operations = [o for part in parts for o in getattr(part, "operations", ())]
    counted = dict.fromkeys(part.name for part in (*parts, *operations))
    names = {name: f"layer {i}" for i, name in enumerate(counted)}
    compiled = dict(target._compile_config.config)
    del compiled["optimizer"]

    def described(value: Any) -> Any:
        return _described(value, names, dropped)

    return {
        "model": _described(model, names, of_layers),
        "own code": [own_code(layer) for layer in target._flatten_layers()],
        "weights": [(tuple(weight.shape), weight.dtype) for weight in target.weights],
        "trainable": [tuple(weight.shape) for weight in target.trainable_weights],
        "policy": target.dtype_policy.name,
        "optimizer": described(target.optimizer),
        "compiled": described(compiled | {"jit_compile": target.jit_compile}),
    }


def _described(value: Any, names: dict[str, str], dropped: tuple[str, ...]) -> Any:
    """Gives plain data: never a `repr`, which may hold an address in memory."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        kept = {str(key): item for key, item in value.items() if key not in dropped}
        return {key: _described(item, names, dropped) for key, item in kept.items()}
    if isinstance(value, (list, tuple)):
        return [_described(item, names, dropped) for item in value]
    if hasattr(value, "get_config") and not isinstance(value, type):
        return [_class(type(value)), _described(_config(value), names, dropped)]
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
