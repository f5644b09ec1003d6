"""What decides the results of a search, described so that another search differs from it.

Equal things must have equal descriptions in any process, or no search could continue: data are
described by their shapes, dtypes and values, of large arrays those of rows at fixed places; a
dataset, which may shuffle, by its spec and length; an object by its class and configuration.
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

# They change what is shown, or are checked elsewhere.
_DECIDES_NOTHING = ("verbose", "callbacks", "batch_size", "validation_batch_size")
# They write what training showed.
_WRITERS = (
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
)
_SHOWS = ("filepath", "filename", "log_dir", "path", "directory", "folder", "file", "verbose")
# Arrays up to this size are read whole, larger ones at some rows.
_MOST_BYTES, _MOST_ROWS = 16 * 2**20, 256
_LONGEST_TEXT = 100
_DESCRIBED = (
    *(bool, int, float, str, bytes, complex, range, Path, type),
    *(types.FunctionType, types.MethodType, functools.partial),
)
# What a policy that was not given decides, of a model.
_OF_POLICY = ("dtype", "dtype_policy")
_OF_LOSS_SCALE = ("initial_scale", "dynamic_growth_steps")


def model_facts(model: keras.Model, *, with_policy: bool = True) -> dict[str, str]:
    """Describe a model by its layers, its optimizer and what it was compiled with, all by name."""
    parts = Description(model, () if with_policy else _OF_POLICY)
    found = parts.layers()
    layers, rules = found.pop("layers"), found.pop("rules")
    optimizer: Any = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    weights = sum(int(np.prod(weight.shape)) for weight in model.weights)
    size = f"{len(model.layers)} layers and {weights:,} weights"
    structure = digest([found, model.dtype_policy.name if with_policy else None])
    facts = {"model": f"{type(model).__name__} of {size} ({structure})"}
    for number, layer in enumerate(layers):
        kind = layer["is"] if isinstance(layer["is"], str) else layer["is"]["is"]
        facts[f"model.layer {number}"] = f"{kind.rpartition('.')[2]} ({digest(layer)})"
    facts["model.rules of weights"] = digest(rules)
    # A `fit` of the user's own may compile the model.
    facts |= _named("optimizer", parts.of(optimizer))
    if optimizer is not None:
        excluded = excluded_from_decay(optimizer, model.trainable_variables)
        facts["optimizer.excluded from weight decay"] = _text(excluded)
    if isinstance(scaled := model.optimizer, keras.optimizers.LossScaleOptimizer):
        # A policy adds one with the defaults.
        for name, one in inspect.signature(type(scaled).__init__).parameters.items():
            if (value := getattr(scaled, name, None)) != one.default and name in _OF_LOSS_SCALE:
                facts[f"optimizer.{name}"] = _text(value)
    config = {} if optimizer is None else config_of(optimizer) or {}
    facts |= {f"optimizer.{name}": _text(one) for name, one in config.items() if name != "name"}
    others = [one for one in optimizers_of(model) if one not in (optimizer, model.optimizer)]
    facts |= {f"optimizer {n + 2}": _text(parts.of(one)) for n, one in enumerate(others)}
    for name, value in parts.compiled().items():
        facts |= _named(f"compile({name})", value)
    return facts


def _named(name: str, described: Any, *, depth: int = 4) -> dict[str, str]:
    """Name each part of a description, so that a difference names the part that differs."""
    if not isinstance(described, dict) or depth == 0:
        return {name: _shortened(described)}
    if "is" in described and not isinstance(described["is"], str):  # Such as a partial function.
        found = _named(name, described["is"], depth=depth - 1)
    else:
        found = {name: described.get("is", "given").rpartition(".")[2]}
    for key, value in described.items():
        if key != "is":
            found |= _named(f"{name}.{key.lstrip('_')}", value, depth=depth - 1)
    return found


def space_facts(space: Any) -> dict[str, str]:
    """Describe the hyperparameters of a search except the batch size, which may gain values."""
    found: dict[str, list[str]] = {}
    for parameter in space.space:
        config = parameter.get_config()
        name = config.pop("name")
        if name != "batch_size":
            kept = {key: value for key, value in config.items() if value not in (None, [])}
            found.setdefault(name, []).append(_text([type(parameter).__name__, kept]))
    return {f"hyperparameter {name!r}": " or ".join(each) for name, each in found.items()}


def fit_facts(call: FitCall) -> dict[str, str]:
    """Describe what `fit` is given: data, their lengths, callbacks and other arguments."""
    facts = {
        name: _text(value)
        for name, value in call.named.items()
        if name not in _DECIDES_NOTHING and value is not None
    }
    for callback in call.callbacks:
        kind = type(callback)
        if kind not in _WRITERS and not kind.__module__.startswith("kbatch.search."):  # A plot.
            name, given = f"callback {kind.__name__}", _text(_given_to(callback) or "given")
            facts[name] = f"{facts[name]}; {given}" if name in facts else given
    return facts


def objective_facts(objective: Any) -> dict[str, str]:
    parts = getattr(objective, "objectives", [objective])
    return {"objective": " and ".join(f"{part.name} ({part.direction})" for part in parts)}


def _given_to(callback: Any) -> dict[str, Any]:
    """Return what the constructor of a callback was given, where that is kept by its name."""
    held = vars(callback)
    # The target or the budget of one of kbatch's.
    found: dict[str, Any] = {n: v for n, v in held.items() if dataclasses.is_dataclass(v)}
    for name in inspect.signature(type(callback).__init__).parameters:
        value = held.get(name, held.get(f"_{name}"))
        if value is not None and name not in _SHOWS and not isinstance(value, Path):
            found[name] = value
    return found


def _text(value: Any) -> str:
    """Return a value as text that is equal in any process, cut to a readable length."""
    return _shortened(Description().of(keras.tree.map_structure(_leaf, value)))


def _shortened(described: Any) -> str:
    text = described if isinstance(described, str) else repr(described)
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[: _LONGEST_TEXT - 30]}... ({digest(text)})"


def _leaf(value: Any) -> Any:
    """Return what is described of a value: of data a text, of other things what they hold."""
    if isinstance(value, tf.data.Dataset):
        length = int(value.cardinality())
        elements = "an unknown number of" if length < 0 else f"{length:,}"
        return f"a dataset of {elements} elements {value.element_spec}"
    if hasattr(value, "iloc") or (hasattr(value, "shape") and hasattr(value, "dtype")):
        return _array_text(value)
    if dataclasses.is_dataclass(value):
        return vars(value)
    # Other objects may hold what differs in each process, such as a time or an open file.
    known = value is None or isinstance(value, _DESCRIBED) or hasattr(value, "get_config")
    return value if known else name_of(value)


def _array_text(leaf: Any) -> Any:
    """Describe an array by its values: of a large one by some rows, first and last included."""
    shape = tuple(leaf.shape)
    if hasattr(leaf, "tocsr"):  # A sparse matrix of SciPy.
        leaf = leaf.tocsr()
        return [shape, *map(_array_text, (leaf.data, leaf.indices, leaf.indptr))]
    if is_composite(leaf):
        return f"{type(leaf).__name__} of shape {shape}"
    if not shape:
        value = (leaf.numpy() if hasattr(leaf, "numpy") else np.asarray(leaf)).item()
        return value if isinstance(value, (bool, int, float, str)) else repr(value)
    count, by_place = shape[0], getattr(leaf, "iloc", leaf)
    row_bytes = max(1, np.asarray(by_place[:1]).nbytes)
    places = [slice(None)]
    if count * row_bytes > _MOST_BYTES:
        most = int(np.clip(_MOST_BYTES // row_bytes, 2, _MOST_ROWS))
        found = np.unique(np.linspace(0, count - 1, most).astype(int)).tolist()
        places = [slice(place, place + 1) for place in found]
    taken, dtype = hashlib.sha256(), None
    for place in places:
        rows = np.asarray(by_place[place])
        # Training casts it so, whichever of them was given.
        rows = rows.astype("float32") if rows.dtype == np.float64 else rows
        dtype = rows.dtype
        taken.update(repr(rows.tolist()).encode() if dtype.hasobject else rows.tobytes())
    return f"{count:,} rows of {shape[1:]} {dtype}, values {taken.hexdigest()[:8]}"
