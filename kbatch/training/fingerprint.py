"""What distinguishes one model from another: its configuration and the code of its own layers."""

import hashlib
import inspect
import json
import types
from collections.abc import Sequence
from typing import Any

import keras

from kbatch.library_internals import compile_arguments, layers_of
from kbatch.training.state import optimizers_of

# They change the steps, not what these need: the momentum is that of BatchNormalization.
_NOT_OF_MEMORY = ("learning_rate", "name")
_NOT_OF_LAYERS_MEMORY = (*_NOT_OF_MEMORY, "momentum")
# Keras counts names up, and draws seeds that are not given.
_DRAWN = ("name", "seed")


def model_fingerprint(model: keras.Model) -> str:
    """Return a text that is equal for models that need the same memory, in any process."""
    described = _description(model, _NOT_OF_MEMORY, of_layers=_NOT_OF_LAYERS_MEMORY)

    # Of the optimizers' numbers only whether they are zero, which decides the slots.
    def zero_or_not(value: Any) -> Any:
        return value != 0 if isinstance(value, float) else value

    for name in [name for name in described if "optimizer" in name]:
        described[name] = keras.tree.map_structure(zero_or_not, described[name])
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def model_description(model: keras.Model, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """Describe what a compiled model is and how it trains, equal in any process.

    Parts of these names are left out.
    """
    dropped = (*_DRAWN, *without)
    found = _description(model, dropped, of_layers=dropped)
    return {name: value for name, value in found.items() if name not in without}


def _description(
    model: keras.Model, dropped: tuple[str, ...], *, of_layers: tuple[str, ...]
) -> dict[str, Any]:
    target: Any = model
    parts = layers_of(target)
    # Operations such as a sum of two tensors are no layers, and counted up as these are.
    operations = [o for part in parts for o in getattr(part, "operations", ())]
    counted = dict.fromkeys(part.name for part in (*parts, *operations))
    names = {name: f"layer {i}" for i, name in enumerate(counted)}
    compiled = compile_arguments(target)
    compiled.pop("optimizer", None)

    def described(value: Any) -> Any:
        return _described(value, names, dropped)

    own = (target.optimizer, getattr(target.optimizer, "inner_optimizer", None))
    found = [one for one in optimizers_of(target) if all(one is not known for known in own)]
    others = [described(one) for one in found]
    return {
        **({"other optimizers": sorted(others, key=json.dumps)} if others else {}),
        "model": _described(model, names, of_layers),
        "own code": [own_code(layer) for layer in parts],
        "weights": [(tuple(weight.shape), weight.dtype) for weight in target.weights],
        "trainable": [tuple(weight.shape) for weight in target.trainable_weights],
        "policy": target.dtype_policy.name,
        "optimizer": described(target.optimizer),
        "compiled": described(compiled | {"jit_compile": target.jit_compile}),
    }


def _described(value: Any, names: dict[str, str], dropped: tuple[str, ...]) -> Any:
    """Return plain data: never a `repr`, which may hold an address in memory."""
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
        config = config_of(value)
        if config is None:  # Its weights and its code still tell it.
            config = getattr(value, "layers", [])
        return [_class(type(value)), _described(config, names, dropped)]
    if hasattr(value, "__code__"):
        return [_class(value), function_code(value)]
    return _class(value if isinstance(value, type) else type(value))


def config_of(part: Any) -> dict[str, Any] | None:
    """Return the configuration of a part of a model, None where Keras cannot tell it."""
    try:
        return part.get_config()
    # Keras refuses with the first to describe a subclass without a `get_config` of its own, and
    # with the others parts that it cannot serialize.
    except (NotImplementedError, TypeError, ValueError):
        return None


def _class(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_PLAIN = (bool, int, float, str)
# `fit` sets it.
_CHANGED_BY_TRAINING = {"stop_training"}
# TensorFlow's own begin so, and what kbatch leaves in a layer.
_TRACKING = ("_self_", "_kbatch_")


def own_code(layer: keras.Layer) -> Any:
    """Describe the code and the plain attributes of a layer or model that is not Keras's own."""
    # Its `call` decides how often a part is applied, of which no configuration need tell.
    seen: set[int] = set()
    if isinstance(layer, keras.layers.Lambda):  # Its configuration has no variables around it.
        return _described_value(layer.function, seen)
    kinds = [kind for kind in type(layer).__mro__ if _is_own(kind)]
    if not kinds:
        return None
    members = (item for kind in kinds for item in sorted(vars(kind).items()))
    code = [
        (name, _described_value(member, seen))
        for name, member in members
        if name in ("__init__", "__call__") or not name.startswith("__")
    ]
    ignored = _CHANGED_BY_TRAINING | vars(keras.Model(name="model")).keys()
    if isinstance(layer, keras.layers.BatchNormalization):
        ignored |= {"momentum"}  # Its configuration tells it, and it may follow the batch size.
    held = [
        (name, _described_value(value, seen))
        for name, value in sorted(vars(layer).items())
        if name not in ignored and not name.startswith(_TRACKING) and _is_plain(value)
    ]
    return [code, held]


def function_code(function: Any) -> Any:
    """Describe what a function does: its code, constants and the plain values that it reads."""
    return _function(inspect.unwrap(function), set())


# Modules whose parts hold no state, so that a name tells all of them; but for what draws.
_STATELESS = ("keras", "tensorflow", "numpy", "math", "builtins")
_DRAWING = ("random", "dropout")


def tells_all(function: types.FunctionType) -> bool:
    """Return whether `function_code` tells all that a function reads: equal ones do the same."""
    return _is_told(function, set())


def _is_told(value: Any, seen: set[int]) -> bool:
    if value is None or isinstance(value, _PLAIN):
        return True
    if isinstance(value, (list, tuple)):
        return all(_is_told(item, seen) for item in value)
    if isinstance(value, types.FunctionType) and _is_own(value):
        if id(value) in seen:
            return True
        seen.add(id(value))
        names = _names(value.__code__)
        read = [value.__globals__[name] for name in names if name in value.__globals__]
        given = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        cells = [_content(cell) for cell in value.__closure__ or ()]
        # Its attributes are not told, such as the function that one of `functools.wraps` wraps.
        return (
            not vars(value)
            and not any(word in name for name in names for word in _DRAWING)
            and all(_is_told(one, seen) for one in (*read, *given, *cells))
        )
    if isinstance(value, types.ModuleType):
        module = value.__name__
    elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        module = value.__module__ or ""
    else:
        return False
    drawing = any(word in module for word in _DRAWING)
    return module.split(".")[0] in _STATELESS and not drawing


def _described_value(value: Any, seen: set[int]) -> Any:
    """Return plain data: never a `repr` of an object, which may hold an address in memory."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return [_described_value(item, seen) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(_described_value(item, seen)) for item in value)
    if isinstance(value, dict):
        return sorted((str(key), _described_value(item, seen)) for key, item in value.items())
    if isinstance(value, property):
        return _described_value(value.fget, seen)
    function = getattr(value, "__func__", value)
    if isinstance(function, types.FunctionType):
        function = inspect.unwrap(function)
        return _function(function, seen) if _is_own(function) else function.__qualname__
    return type(value).__qualname__


def _function(function: Any, seen: set[int]) -> Any:
    if id(function) in seen or not hasattr(function, "__code__"):
        return function.__qualname__
    seen.add(id(function))
    cells = [_content(cell) for cell in function.__closure__ or ()]
    names = _names(function.__code__)
    read = {n: function.__globals__[n] for n in sorted(names) if n in function.__globals__}
    around = [function.__defaults__, function.__kwdefaults__, cells, list(read.items())]
    return [_code(function.__code__), _described_value(around, seen)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # A variable that has no value yet.
        return None


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return set(code.co_names).union(*inner)


def _code(code: types.CodeType) -> Any:
    return [code.co_code.hex(), list(code.co_names), [_constant(c) for c in code.co_consts]]


def _constant(constant: Any) -> Any:
    if isinstance(constant, frozenset):  # Its order differs between processes.
        return str(sorted(map(repr, constant)))
    return _code(constant) if isinstance(constant, types.CodeType) else repr(constant)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, _PLAIN) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, (*_PLAIN, types.FunctionType))


def _is_own(part: Any) -> bool:
    module = (getattr(part, "__module__", None) or "").partition(".")[0]
    return module not in ("keras", "tensorflow", "numpy", "builtins")
