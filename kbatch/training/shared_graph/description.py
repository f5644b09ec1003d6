"""What is written into the graphs of a model, and whether a description of it is complete."""

import math
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.library_internals import compile_arguments, excludes_from_decay, layers_of, rate_of
from kbatch.training.fingerprint import model_description, rules_of
from kbatch.training.learning_rate import followed_settings
from kbatch.training.model import installed_step, replica_count, user_step

_KINDS = keras.optimizers
# Those whose arithmetic a `GraphNumber` was seen to pass through unchanged.
_OPTIMIZERS = (
    _KINDS.SGD,
    _KINDS.Adam,
    _KINDS.AdamW,
    _KINDS.Adamax,
    _KINDS.Nadam,
    _KINDS.RMSprop,
    _KINDS.Adagrad,
    _KINDS.Adadelta,
    _KINDS.Lion,
    _KINDS.Lamb,
)
# A part of these is described by its kind and configuration.
_LIBRARIES = ("builtins", "collections", "inspect", "kbatch", "keras", "numpy", "tensorflow")


def description(model: Any) -> Any:
    """Describe what is written into the graphs of a model."""
    settings = [(owner, name, getattr(owner, name)) for owner, name in followed_settings(model)]
    step = installed_step(model)
    compiled = keras.tree.flatten(compile_arguments(model))
    names = [one.name for one in compiled if isinstance(one, keras.metrics.Metric)]
    if len(model.outputs) > 1:  # Their losses are named by them.
        names += model.output_names
    try:
        for owner, name, _ in settings:
            setattr(owner, name, 0.5)
        return (
            model_description(model, without=("learning_rate",)),
            type(step),
            getattr(step, "how", None),
            names,
            [_read_by(one) for one in compiled if isinstance(one, types.FunctionType)],
            [_attributes(layer) for layer in layers_of(model)],
            (keras.config.epsilon(), keras.config.floatx()),
        )
    finally:
        for owner, name, value in settings:
            setattr(owner, name, value)


# What differs between builds, comes by training, or is read by the graphs or never seen by them.
_NOT_DESCRIBED = (
    *("name", "_path", "_parent_path", "seed", "_called", "built", "history"),
    *("steps_per_execution", "stop_training", "stop_predicting", "stop_evaluating"),
    *("train_function", "test_function", "predict_function", "test_step", "_eval_epoch_iterator"),
    *("_dropout_mask", "_recurrent_dropout_mask"),
)


def _attributes(layer: Any) -> dict[str, Any]:
    """Describe the attributes of a layer, of which its configuration holds only a part."""
    found: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if name in _NOT_DESCRIBED or name.startswith(("_kbatch_", "_self_")):
            continue
        if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):  # Not one of a graph.
            value = value.numpy()
        if isinstance(value, np.ndarray):  # Such as the mean of a `Normalization`.
            value = str(value.tolist())
        found[name] = value if isinstance(value, _PLAIN) else ...
    return found


# A fresh model is built beside the one that is kept: larger ones would need twice the memory.
_MOST_WEIGHTS = 2**26


def can_share(model: Any) -> bool:
    """Return whether a description is complete for a model, and its state can be set back."""
    if user_step(model) is not None or replica_count(model) > 1 or model.run_eagerly:
        return False
    if not model.built or sum(math.prod(one.shape) for one in model.weights) > _MOST_WEIGHTS:
        return False
    if getattr(installed_step(model), "loss_denominator", None) is not None:
        return False
    optimizer: Any = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    rate = rate_of(optimizer)
    if type(optimizer) not in _OPTIMIZERS or not isinstance(rate, keras.Variable):
        return False
    if excludes_from_decay(optimizer):
        return False
    kinds = {weight.dtype for weight in model.weights}
    if kinds & {"float16", "bfloat16", "float64"}:  # A `GraphNumber` is a float32.
        return False
    if not all(map(_is_known_layer, layers_of(model))):
        return False
    if not all(_is_of_libraries(rule) for weight in model.weights for rule in rules_of(weight)):
        return False
    compiled = compile_arguments(model)
    parts = [keras.tree.flatten(v) for name, v in compiled.items() if name != "optimizer"]
    return all(_is_known(one) for each in parts for one in each)


def _is_known_layer(layer: Any) -> bool:
    """Return whether a layer is Keras's own, all through, and keeps its state in variables."""
    # Kinds of the user's own may keep state anywhere, and a configuration gives only the name of
    # a function of their own. A vocabulary is a table, and recurrent states are in no list.
    adapts = hasattr(layer, "adapt") and not isinstance(layer, keras.layers.Normalization)
    if adapts or getattr(layer, "stateful", False) or not _is_of_libraries(layer):
        return False
    if isinstance(layer, keras.layers.Lambda):
        return False
    held = {name: value for name, value in vars(layer).items() if name != "loss"}  # Of `compile`.
    return all(map(_is_of_libraries, held.values()))


def _is_known(part: Any) -> bool:
    """Return whether a description is complete for a part of `compile`, as a loss."""
    if isinstance(part, types.FunctionType):
        return _read_by(part) is not None
    if isinstance(part, keras.Variable) or not _is_of_libraries(part):
        return False
    return all(map(_is_of_libraries, getattr(part, "__dict__", {}).values()))


# Modules whose parts hold no state, so that a name describes them; but for what draws.
_STATELESS = ("keras", "tensorflow", "numpy", "math", "builtins")
_DRAWING = ("random", "dropout")
_PLAIN = (bool, int, float, str, type(None))


def _read_by(function: Any, *within: Any) -> list[Any] | None:
    """Return a function's code and all that it reads, None where that may change or draw."""
    if _is_of_libraries(function):
        return [function]
    names = _names(function.__code__)
    # Its attributes are not told, such as the function that one of `functools.wraps` wraps.
    if vars(function) or any(word in name.lower() for name in names for word in _DRAWING):
        return None
    found = [function.__code__]
    for value in (
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
        *(cell.cell_contents for cell in function.__closure__ or ()),
        *(function.__globals__[name] for name in names if name in function.__globals__),
    ):
        kind, read = type(value), None
        if all(isinstance(one, _PLAIN) for one in (value if kind in (list, tuple) else [value])):
            read = [tuple(value) if kind is list else value]
        elif any(value is one for one in (function, *within)):
            read = []
        elif kind is types.FunctionType:
            read = _read_by(value, function, *within)
        elif isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type)):
            module = value.__name__ if kind is types.ModuleType else value.__module__ or ""
            drawing = any(word in module for word in _DRAWING)
            read = [value] if module.split(".")[0] in _STATELESS and not drawing else None
        if read is None:
            return None
        found += read
    return found


def _names(code: types.CodeType) -> list[str]:
    inner = [_names(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return sorted({*code.co_names}.union(*inner))


def _is_of_libraries(part: Any) -> bool:
    module = getattr(part, "__module__", type(part).__module__) or ""
    return module.split(".")[0] in _LIBRARIES
