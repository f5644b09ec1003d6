"""What the code of a user's layer tells that its configuration does not."""

import inspect
import types
from typing import Any

import keras

_PLAIN = (bool, int, float, str)
# `fit` sets it.
_CHANGED_BY_TRAINING = {"stop_training"}
# TensorFlow's own begin so, and what kbatch leaves in a layer.
_TRACKING = ("_self_", "_kbatch_")


def own_code(layer: keras.Layer) -> Any:
    """Describes the code and the plain attributes of a layer or model that is not Keras's own.

    Its `call` decides how often a part is applied, by constants, by attributes or by variables
    around it, of which no configuration need tell.

    Args:
        layer: A layer or a model.

    Returns:
        Plain data that are equal in any process, None for a layer of Keras.
    """
    kinds = [kind for kind in type(layer).__mro__ if _is_own(kind)]
    if not kinds:
        return None
    seen: set[int] = set()
    code = [
        (name, _described(member, seen))
        for kind in kinds
        for name, member in sorted(vars(kind).items())
        if name in ("__init__", "__call__") or not name.startswith("__")
    ]
    ignored = _CHANGED_BY_TRAINING | vars(keras.Model(name="model")).keys()
    if isinstance(layer, keras.layers.BatchNormalization):
        ignored |= {"momentum"}  # Its configuration tells it, and it may follow the batch size.
    held = [
        (name, _described(value, seen))
        for name, value in sorted(vars(layer).items())
        if name not in ignored and not name.startswith(_TRACKING) and _is_plain(value)
    ]
    return [code, held]


def function_code(function: Any) -> Any:
    """Describes what a function does: its code, constants and the plain values that it reads."""
    return _function(inspect.unwrap(function), set())


def _described(value: Any, seen: set[int]) -> Any:
    """Gives plain data: never a `repr` of an object, which may hold an address in memory."""
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return [_described(item, seen) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(_described(item, seen)) for item in value)
    if isinstance(value, dict):
        return sorted((str(key), _described(item, seen)) for key, item in value.items())
    if isinstance(value, property):
        return _described(value.fget, seen)
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
    return [_code(function.__code__), _described(around, seen)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # A variable that has no value yet.
        return None


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return set(code.co_names).union(*inner)


def _code(code: types.CodeType) -> Any:
    constants = [
        _code(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts
    ]
    return [code.co_code.hex(), list(code.co_names), constants]


def _constant(constant: Any) -> Any:
    if isinstance(constant, types.CodeType):
        return _code(constant)
    # The order of a set differs between processes.
    return str(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, _PLAIN) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, (*_PLAIN, types.FunctionType))


def _is_own(part: Any) -> bool:
    module = (getattr(part, "__module__", None) or "").partition(".")[0]
    return module not in ("keras", "tensorflow", "numpy", "builtins")
