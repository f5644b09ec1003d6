"""What decides the results of a search, described so that another search differs from it.

Equal things must have equal descriptions in any process, or a search could not go on: data are
described by their shapes, dtypes and values, of large arrays those of rows at fixed places; a
dataset, which may shuffle, by its spec and length; an object by its class and configuration.
"""

import dataclasses
import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.training.data.forms import is_composite
from kbatch.training.data.training_data import FitCall
from kbatch.training.fingerprint import config_of, described, model_description

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


def model_facts(model: keras.Model, *, with_policy: bool = True) -> dict[str, str]:
    found = model_description(model, without=() if with_policy else ("dtype", "policy"))
    optimizer: Any = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    del found["optimizer"]  # Here without the loss scaling around it.
    # A `fit` of the user's own may compile the model.
    config = {} if optimizer is None else config_of(optimizer) or {}
    compiled = found.pop("compiled")
    weights = sum(int(np.prod(weight.shape)) for weight in model.weights)
    size = f"{len(model.layers)} layers and {weights:,} weights"
    facts = {
        "model": f"{type(model).__name__} of {size} ({_digest(found)})",
        "optimizer": type(optimizer).__name__,
    }
    kept = ((name, value) for name, value in config.items() if name != "name")
    facts |= {f"optimizer.{name}": _text(value, within=True) for name, value in kept}
    return facts | {f"compile({name})": _text(value) for name, value in compiled.items()}


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


def _text(value: Any, *, within: bool = False) -> str:
    """Return a value as text that is equal in any process, cut to a readable length."""
    plain = described(keras.tree.map_structure(_leaf, value), {}, ("name",), within=within)
    text = plain if isinstance(plain, str) else repr(plain)
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[: _LONGEST_TEXT - 30]}... ({_digest(text)})"


def _leaf(value: Any) -> Any:
    """Return what is described of a value: of data a text, of other things what they hold."""
    if isinstance(value, (bytes, complex, range, Path)):
        return repr(value)
    if isinstance(value, tf.data.Dataset):
        length = int(value.cardinality())
        elements = "an unknown number of" if length < 0 else f"{length:,}"
        return f"a dataset of {elements} elements {value.element_spec}"
    if hasattr(value, "iloc") or (hasattr(value, "shape") and hasattr(value, "dtype")):
        return _array_text(value)
    return vars(value) if dataclasses.is_dataclass(value) else value


def _array_text(leaf: Any) -> Any:
    """Describe an array by its values: of a large one by some rows, first and last included."""
    shape = tuple(leaf.shape)
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


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:8]
