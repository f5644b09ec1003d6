"""Describe the model, data and settings of a search, to see whether a later call continues it.

Equal objects have equal descriptions in every process. Otherwise, no search could continue. The
description of an array is its shape, dtype and values, or some of the rows of a large array. That
of a dataset is its spec and length, because it may shuffle. Other objects have a configuration.
"""

import dataclasses
import functools
import hashlib
import inspect
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.library_internals import excluded_from_decay
from kbatch.training.data.forms import is_composite
from kbatch.training.data.training_data import FitCall
from kbatch.training.fingerprint import Description, config_of, digest, name_of
from kbatch.training.model import optimizers_of

# Arguments of `fit` that change only the printed output, or that are checked elsewhere.
_NOT_COMPARED = ("verbose", "callbacks", "batch_size", "validation_batch_size")
# Callbacks that only write results.
_WRITERS = (
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
)
# Arguments of callbacks that decide only how and to which file they write.
_OUTPUTS = ("filepath", "filename", "log_dir", "path", "directory", "folder", "file", "verbose")
_MOST_BYTES, _MOST_ROWS = 16 * 2**20, 256  # Of a larger array, at most this many rows are read.
_LONGEST_TEXT = 100
_DESCRIBED = (
    *(bool, int, float, str, bytes, complex, range, Path, type),
    *(types.FunctionType, types.MethodType, functools.partial),
)
# Parts of a description that follow from the dtype policy.
_POLICY_KEYS = ("dtype", "dtype_policy")
_LOSS_SCALE_KEYS = ("initial_scale", "dynamic_growth_steps")


def model_facts(model: keras.Model, *, with_policy: bool = True) -> dict[str, str]:
    """Describe the layers, the optimizer, the arguments of `compile`, and perhaps the policy."""
    parts = Description(model, () if with_policy else _POLICY_KEYS)
    structure = parts.layers()
    layers, rules = structure.pop("layers"), structure.pop("rules")
    optimizer: Any = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    weights = sum(int(np.prod(weight.shape)) for weight in model.weights)
    size = f"{len(model.layers)} layers and {weights:,} weights"
    code = digest([structure, model.dtype_policy.name if with_policy else None])
    facts = {"model": f"{type(model).__name__} of {size} ({code})"}
    for number, layer in enumerate(layers):
        kind = layer["is"] if isinstance(layer["is"], str) else layer["is"]["is"]
        facts[f"model.layer {number}"] = f"{kind.rpartition('.')[2]} ({digest(layer)})"
    facts["model.rules of weights"] = digest(rules)
    # The optimizer may be None, because a custom `fit` may compile the model.
    facts |= _named("optimizer", parts.of(optimizer))
    if optimizer is not None:
        excluded = excluded_from_decay(optimizer, model.trainable_variables)
        facts["optimizer.exclude_from_weight_decay"] = _text(excluded)
    if isinstance(scaled := model.optimizer, keras.optimizers.LossScaleOptimizer):
        # Leave out default values, so that a loss scale made by `compile` equals one made by hand.
        parameters = inspect.signature(type(scaled).__init__).parameters
        for name in _LOSS_SCALE_KEYS:
            if (value := getattr(scaled, name, None)) != parameters[name].default:
                facts[f"optimizer.{name}"] = _text(value)
    config = {} if optimizer is None else config_of(optimizer) or {}
    facts |= {f"optimizer.{name}": _text(value) for name, value in config.items() if name != "name"}
    others = [other for other in optimizers_of(model) if other not in (optimizer, model.optimizer)]
    facts |= {f"optimizer {n + 2}": _text(parts.of(other)) for n, other in enumerate(others)}
    for name, value in parts.compiled().items():
        facts |= _named(f"compile({name})", value)
    return facts


def _named(name: str, described: Any, *, depth: int = 4) -> dict[str, str]:
    """Give each part of a description a name, so that an error can name the part that differs."""
    if not isinstance(described, dict) or depth == 0:
        return {name: _shortened(described)}
    if "is" in described and not isinstance(described["is"], str):  # Such as a partial function.
        facts = _named(name, described["is"], depth=depth - 1)
    else:
        facts = {name: described.get("is", "given").rpartition(".")[2]}
    for key, value in described.items():
        if key != "is":
            facts |= _named(f"{name}.{key.lstrip('_')}", value, depth=depth - 1)
    return facts


def space_facts(space: Any) -> dict[str, str]:
    """Describe the hyperparameters of a search, except the batch size: sizes may be added."""
    texts: dict[str, list[str]] = {}
    for parameter in space.space:
        config = parameter.get_config()
        name = config.pop("name")
        if name != "batch_size":
            config = {key: value for key, value in config.items() if value not in (None, [])}
            texts.setdefault(name, []).append(_text([type(parameter).__name__, config]))
    return {f"hyperparameter {name!r}": " or ".join(parts) for name, parts in texts.items()}


def fit_facts(call: FitCall) -> dict[str, str]:
    """Describe the arguments of `fit`, including data and callbacks."""
    compared = {name: v for name, v in call.named.items() if name not in _NOT_COMPARED}
    facts = {name: _text(value) for name, value in compared.items() if value is not None}
    for callback in call.callbacks:
        kind = type(callback)
        is_plot = kind.__module__.startswith("kbatch.search.")
        if kind not in _WRITERS and not is_plot:
            name, text = f"callback {kind.__name__}", _text(_arguments_of(callback) or "given")
            facts[name] = f"{facts[name]}; {text}" if name in facts else text
    return facts


def _arguments_of(callback: Any) -> dict[str, Any]:
    """Return the constructor arguments of a callback that are attributes of the same name."""
    attributes = vars(callback)
    # The callbacks of kbatch keep their target or budget in a dataclass.
    arguments: dict[str, Any] = {n: v for n, v in attributes.items() if dataclasses.is_dataclass(v)}
    for name in inspect.signature(type(callback).__init__).parameters:
        value = attributes.get(name, attributes.get(f"_{name}"))
        if value is not None and name not in _OUTPUTS and not isinstance(value, Path):
            arguments[name] = value
    return arguments


def _text(value: Any) -> str:
    """Describe a value by a short text, which is the same in every process."""
    return _shortened(Description().of(keras.tree.map_structure(_leaf, value)))


def _shortened(described: Any) -> str:
    text = described if isinstance(described, str) else repr(described)
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[: _LONGEST_TEXT - 30]}... ({digest(text)})"


def _leaf(value: Any) -> Any:
    """Replace data by a text, and an object without a configuration by the name of its class."""
    if isinstance(value, tf.data.Dataset):
        length = int(value.cardinality())
        elements = "an unknown number of" if length < 0 else f"{length:,}"
        return f"a dataset of {elements} elements {value.element_spec}"
    if hasattr(value, "iloc") or (hasattr(value, "shape") and hasattr(value, "dtype")):
        return _array_text(value)
    if dataclasses.is_dataclass(value):
        return vars(value)
    # Such objects may hold state that differs in each process, such as a time or an open file.
    has_config = value is None or isinstance(value, _DESCRIBED) or hasattr(value, "get_config")
    return value if has_config else name_of(value)


def _array_text(leaf: Any) -> Any:
    """Describe an array by its shape, dtype and values, or by some rows if it is large."""
    shape = tuple(leaf.shape)
    if hasattr(leaf, "tocsr"):  # A sparse matrix of SciPy.
        leaf = leaf.tocsr()
        return [shape, *map(_array_text, (leaf.data, leaf.indices, leaf.indptr))]
    if is_composite(leaf):
        return f"{type(leaf).__name__} of shape {shape}"
    if not shape:
        value = (leaf.numpy() if hasattr(leaf, "numpy") else np.asarray(leaf)).item()
        return value if isinstance(value, (bool, int, float, str)) else repr(value)
    count, array = shape[0], getattr(leaf, "iloc", leaf)
    row_bytes = max(1, np.asarray(array[:1]).nbytes)
    slices = [slice(None)]
    if count * row_bytes > _MOST_BYTES:
        most = int(np.clip(_MOST_BYTES // row_bytes, 2, _MOST_ROWS))
        indices = np.unique(np.linspace(0, count - 1, most).astype(int)).tolist()
        slices = [slice(index, index + 1) for index in indices]
    values, dtype = hashlib.sha256(), None
    for part in slices:
        rows = np.asarray(array[part])
        # Training casts float64 to float32, so the two are equal.
        rows = rows.astype("float32") if rows.dtype == np.float64 else rows
        dtype = rows.dtype
        values.update(repr(rows.tolist()).encode() if dtype.hasobject else rows.tobytes())
    return f"{count:,} rows of {shape[1:]} {dtype}, values {values.hexdigest()[:8]}"
