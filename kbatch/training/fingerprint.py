"""What distinguishes one model from another: all that its parts hold, as plain data.

A configuration is no full description: `Huber` of Keras 3.15 leaves out its `delta`, a function is
only a name in it, and some parts have none. So a part is described by its attributes, and a
function by its code, its defaults and the closure and global variables that it reads. Equal parts
have equal descriptions in any process. `Description.uncertain` lists what may differ although its
description does not.
"""

import argparse
import dis
import enum
import functools
import hashlib
import inspect
import json
import sys
import types
from collections import deque
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.library_internals import (
    bookkeeping_names,
    calls_in,
    compile_arguments,
    history_of,
    is_tracker,
    layers_of,
    structures_of,
)

# Objects of these describe themselves by their attributes; their code is that of their version.
_LIBRARIES = ("kbatch", "keras", "numpy", "tensorflow")
# Modules that hold no state, so that their name and that of a function describes it.
_STATELESS = (
    *("keras", "tensorflow", "numpy", "math", "builtins", "functools", "operator", "itertools"),
    *("collections", "typing", "dataclasses", "abc", "enum"),
)
_DRAWING = ("random", "dropout")
# By these a function reads what its code does not name.
_DYNAMIC = {"eval", "exec", "getattr", "globals", "locals", "vars", "__dict__", "open", "id"}
_TEXTS = (
    *(bytes, complex, range, slice, type(...), enum.Enum, Path),
    *(np.dtype, tf.DType, tf.TensorShape, tf.TensorSpec),
)
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
# Keras counts up names and draws seeds that are not given; training sets the others.
_OF_KERAS = frozenset(
    {"name", "path", "parent_path", "seed", "initial_seed", "called", "built"}
    | {"history", "steps_per_execution", "stop_training", "stop_predicting", "stop_evaluating"}
    | {"train_function", "test_function", "predict_function", "train_step", "test_step"}
    | {"eval_epoch_iterator", "dropout_mask", "recurrent_dropout_mask", "functional", "tracker"}
    | {"optimizer", "compile_config", "compiled_trainable_state", "trainable_variables_indices"}
    | {"loss", "jit_compile", "distribute_strategy", "distribution_strategy", "input_tensor"}
    | {f"exclude_from_weight_decay{part}" for part in ("", "_pattern", "_cache")}
)
# Attributes of each layer that are more than plain values.
_OF_EACH_LAYER = ("activity_regularizer", "_dtype_policy")
# Larger arrays are read at some rows, and deeper structures not at all.
_MOST_BYTES, _MOST_ROWS, _DEEPEST = 16 * 2**20, 256, 60


def model_fingerprint(model: keras.Model) -> str:
    """Return a text that is equal for models that differ at most in their optimizer's settings.

    It is the same in any process.
    """
    # These follow the batch size.
    parts = Description(model, ("learning_rate", "momentum"))
    optimizer: Any = getattr(model, "optimizer", None)
    kind = type(getattr(optimizer, "inner_optimizer", optimizer))
    return digest([model.dtype_policy.name, name_of(kind), parts.layers(), parts.compiled()])


class Description:
    """Describes a model and what belongs to it as plain data."""

    def __init__(self, model: Any = None, without: Sequence[str] = ()):
        self.uncertain: list[str] = []  # What is described by its kind alone.
        self.functions: list[str] = []  # Of the user's own.
        self._model, self._without = model, frozenset(without)
        self._layers = [] if model is None else layers_of(model)
        self._numbers = {id(layer): number for number, layer in enumerate(self._layers)}
        names = dict.fromkeys(layer.name for layer in self._layers)
        self._names = {name: f"layer {number}" for number, name in enumerate(names)}
        self._tracked: set[int] = set()  # Variables that their owner lists as its own.
        self._calls: dict[tuple[int, int], int] = {}  # Numbers, by operation and call of it.
        self._open: list[Any] = []  # Objects that are being described.

    def layers(self) -> dict[str, Any]:
        """Describe the layers of the model, how they are connected, and their weights."""
        weights = self._model.weights
        return {
            "layers": [self._part(layer) for layer in self._layers],
            "graphs": [self._graph(layer) for layer in self._layers],
            "weights": [[list(one.shape), one.dtype, one.trainable] for one in weights],
            "rules": [
                self.of(getattr(one, rule, None))
                for one in weights
                for rule in ("regularizer", "constraint")
            ],
            "trainable": [list(weight.shape) for weight in self._model.trainable_weights],
        }

    def compiled(self) -> dict[str, Any]:
        """Describe what the model was compiled with except its optimizer."""
        given = {**compile_arguments(self._model), "jit_compile": self._model.jit_compile}
        given["loss"] = self._model.loss  # It may have been set since then.
        return {name: self.of(value) for name, value in given.items() if name != "optimizer"}

    def of(self, value: Any, read: frozenset[str] | None = None) -> Any:
        """Describe a value; of an object of the user's own all, or the attributes that are read."""
        if value is None or isinstance(value, bool):
            return value
        for kind in (int, float, str):
            if isinstance(value, kind):
                return self._names.get(value, str(value)) if kind is str else kind(value)
        if isinstance(value, _TEXTS):
            return repr(value)
        if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "iloc"):
            return self._array(np.asarray(value))
        if isinstance(value, (keras.Variable, tf.Variable)):
            found = ["variable", list(value.shape), str(value.dtype)]
            if id(value) in self._tracked:
                return found
            self.uncertain.append("a variable")
            return [*found, self.of(tf.convert_to_tensor(value))]
        if len(self._open) > _DEEPEST or any(value is one for one in self._open):
            self.uncertain += ["a deep structure"] if len(self._open) > _DEEPEST else []
            return name_of(value)
        self._open.append(value)
        try:
            return self._composed(value, read)
        finally:
            self._open.pop()

    def _composed(self, value: Any, read: frozenset[str] | None) -> Any:
        if isinstance(value, Mapping):
            plain = {k if isinstance(k, str) else digest(self.of(k)): v for k, v in value.items()}
            return {self._names.get(k, k): self.of(plain[k], read) for k in sorted(plain)}
        if isinstance(value, (list, tuple, deque)):
            return [self.of(item, read) for item in value]
        if isinstance(value, Set):
            return sorted((self.of(item, read) for item in value), key=digest)
        if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):  # Not one of a graph.
            return self._array(value.numpy())
        if tf.is_tensor(value) and (flat := tf.nest.flatten(value, expand_composites=True))[1:]:
            return [name_of(value), *map(self.of, flat)]
        if isinstance(value, keras.KerasTensor):
            return self._place(value)
        if isinstance(value, functools.partial):
            called = self.of(value.func), self.of(value.args), self.of(value.keywords)
            return dict(zip(("is", "args", "keywords"), called, strict=True))
        if isinstance(value, types.ModuleType):
            return self._module(value, read)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(function := getattr(value, "python_function", None), types.FunctionType):
            self.uncertain.append(name_of(value))  # A `tf.function` keeps what it has traced.
            return {"is": self.of(function)}
        if isinstance(value, types.MethodType):
            owner = self.of(value.__self__, frozenset({value.__func__.__name__}))
            return {"is": self.of(value.__func__), "of": owner}
        if isinstance(value, type):
            return self._class(value, read)
        if not hasattr(value, "__dict__") and not _attributes(value):
            return self._named(value)
        if isinstance(value, keras.Layer):
            if id(value) in self._numbers:
                return f"layer {self._numbers[id(value)]}"
            self.uncertain.append("a layer of another model")
            return [name_of(value), [list(weight.shape) for weight in value.weights]]
        return self._part(value, read)

    def _part(self, value: Any, read: frozenset[str] | None = None) -> dict[str, Any]:
        """Describe an object by its class and its attributes."""
        kind = type(value)
        known = _root(kind) in (*_LIBRARIES, *_STATELESS) or kind in _NAMESPACES
        if _is_own(kind) or not known:
            self.uncertain.append(name_of(kind))
        # TensorFlow keeps what its tables hold, and other packages may count or take the time.
        of_keras = any(_root(one) == "keras" for one in kind.__mro__)
        hidden = _root(kind) == "tensorflow" or not (known or _is_own(kind) or of_keras)
        if isinstance(value, keras.random.SeedGenerator):
            hidden = id(value.state) not in self._tracked
        if hidden:
            self.uncertain.append(name_of(kind))
            return {"is": name_of(kind)}
        if isinstance(value, (keras.Layer, keras.Metric, keras.optimizers.Optimizer)):
            self._tracked.update(map(id, value.variables))
        read = None if read is None else _reached(kind, read)
        found = {
            name: self.of(one, read)
            for name, one in _attributes(value).items()
            if self._counts(value, name, one) and (read is None or name in read)
        }
        return {"is": self._class(kind, read)} | found

    def _counts(self, owner: Any, name: str, value: Any) -> bool:
        """Return whether an attribute belongs to a description: not what training makes."""
        plain = name.lstrip("_")
        if plain in self._without or name.startswith(("_kbatch_", "_self_")):
            return False
        if hasattr(owner, "get_config"):
            if plain in _OF_KERAS or is_tracker(value):
                return plain == "optimizer" and not isinstance(owner, keras.Model)
            simple = value is None or isinstance(value, (bool, int, float, str))
            own = name not in bookkeeping_names() or name in _OF_EACH_LAYER
            if isinstance(owner, keras.Operation) and not (simple or own):
                return False
        # A variable that is made later is None or not in its list before.
        parts: Any = value.values() if isinstance(value, dict) else value
        parts = parts if isinstance(value, (list, tuple, dict)) else [value]
        return value is not None and any(id(part) not in self._tracked for part in parts)

    def _graph(self, layer: Any) -> Any:
        """Describe how operations are connected. If the model is not functional, return None."""
        calls = calls_in(layer)
        if calls is None:
            return None
        self._calls |= {(id(one), index): n for n, (one, index, *_) in enumerate(calls)}
        made = [[self.of(part) for part in (one, *arguments)] for one, _, *arguments in calls]
        return made + [self.of(one) for one in structures_of(layer)]

    def _place(self, tensor: Any) -> Any:
        operation, call, output = history_of(tensor)
        number = self._calls.get((id(operation), call))
        if number is None:
            self.uncertain.append("a tensor of another model")
        return ["output", number, output]

    def _array(self, array: np.ndarray) -> Any:
        if not array.shape:
            return [array.dtype.name, self.of(array.item())]
        if array.dtype.hasobject:
            return self.of(array.tolist())
        if array.nbytes > _MOST_BYTES:
            self.uncertain.append("a large array")
            array = array[np.unique(np.linspace(0, len(array) - 1, _MOST_ROWS).astype(int))]
        values = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:8]
        return f"{array.dtype.name} of shape {array.shape}, values {values}"

    def _module(self, module: Any, read: frozenset[str] | None) -> Any:
        name = module.__name__
        if not _is_own(module):
            self._check_named(name)
            return name
        held = {key: vars(module)[key] for key in sorted(read or ()) if key in vars(module)}
        return {"is": name} | {key: self.of(value, read) for key, value in held.items()}

    def _named(self, value: Any) -> str:
        """Describe what has no attributes, such as a function that is not written in Python."""
        whole, owner = hasattr(value, "__qualname__"), getattr(value, "__self__", None)
        name = name_of(value) if whole else getattr(value, "__name__", None)
        if name is None or not (owner is None or isinstance(owner, types.ModuleType)):
            self.uncertain.append(name_of(value))
            return name_of(value)
        root = _root(value)
        self._check_named(name if name.startswith(f"{root}.") else f"{root}.{name}")
        return name

    def _check_named(self, name: str) -> None:
        """Note what a name does not describe for certain, as it may hold state or draw."""
        if name.split(".")[0] not in _STATELESS or _draws(name):
            self.uncertain.append(name)

    def _function(self, function: types.FunctionType) -> Any:
        """Describe a function by its code, its defaults and what it reads."""
        name, code = name_of(function), function.__code__
        found, held, read = {"is": name}, dict[str, Any](), None  # All of what it holds.
        if _is_own(function):
            self.functions.append(name)
            documented = bool(function.__doc__) and code.co_consts[:1] == (function.__doc__,)
            found["code"], names, attributes, modules = _code(code, documented)
            if _DYNAMIC & (names | attributes) or any(map(_draws, names | attributes)):
                self.uncertain.append(name)
            read = attributes | {"__call__"}
            arguments = code.co_varnames[: code.co_argcount]
            held |= zip(arguments[::-1], (function.__defaults__ or ())[::-1], strict=False)
            held |= function.__kwdefaults__ or {}
            held |= {
                n: function.__globals__[n] for n in sorted(names & function.__globals__.keys())
            }
            held |= {f"import {one}": sys.modules.get(one, one) for one in sorted(modules)}
            held |= {key: value for key, value in vars(function).items() if key[0] != "_"}
        else:  # A decorator of a library may hold a function of the user's own.
            self._check_named(name)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        empty = types.CellType()  # As of a variable that has no value yet.
        held |= {one: cell.cell_contents for one, cell in cells if cell != empty}
        reads = {key: self.of(value, read) for key, value in held.items()}
        return found | ({"reads": reads} if reads else {})

    def _class(self, kind: type, read: frozenset[str] | None = None) -> Any:
        """Describe a class: of the user's own by its members too, all or those that are read."""
        name = name_of(kind)
        if not _is_own(kind):
            return name
        bases = [self._class(base, read) for base in kind.__bases__]
        found: dict[str, Any] = {"is": name, "bases": bases}
        for key, value in vars(kind).items():
            member = _member(value)
            hidden = key.startswith(("__", "_abc_")) and not isinstance(member, types.FunctionType)
            if not hidden and (read is None or key in read):
                found[key] = self.of(member, read)
        return found


def name_of(part: Any) -> str:
    """Return the full name of a function or a class, or that of the class of another object."""
    # A generator has the one name without the other.
    whole = hasattr(part, "__qualname__") and hasattr(part, "__module__")
    named = part if whole else type(part)
    return f"{named.__module__}.{named.__qualname__}"


def config_of(part: Any) -> dict[str, Any] | None:
    """Return the configuration of a part of a model, None where Keras has none."""
    try:
        return part.get_config()
    except Exception:  # `fit` never calls it, so that one of your own may raise anything.
        return None


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _draws(name: str) -> bool:
    return any(word in name.lower() for word in _DRAWING)


def _root(part: Any) -> str:
    """Return the name of the package that a module, a class, a function or an object is of."""
    module = isinstance(part, types.ModuleType)
    name = (not module and getattr(part, "__module__", None)) or getattr(part, "__name__", None)
    return (name if isinstance(name, str) else type(part).__module__).split(".")[0]


def _is_own(part: Any) -> bool:
    """Return whether the user has written a module, a class or a function."""
    return not _is_installed(_root(part))


@functools.cache
def _is_installed(root: str) -> bool:
    if root in (*_LIBRARIES, *_STATELESS) or root in sys.stdlib_module_names:
        return True
    place = getattr(sys.modules.get(root), "__file__", None) or ""
    return bool({"site-packages", "dist-packages"} & {*Path(place).parts})


def _member(value: Any) -> Any:
    """Return the function of a method or a property, else the value itself."""
    return getattr(value, "__func__", getattr(value, "fget", value))


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots."""
    state: Any = object.__getstate__(value)
    in_dict, in_slots = state if isinstance(state, tuple) else (state, None)
    return (in_slots or {}) | (in_dict or {})


def _reached(kind: type, read: frozenset[str]) -> frozenset[str] | None:
    """Return the attributes that methods of these names read, None where that may be all."""
    if any(_root(one) in _LIBRARIES for one in kind.__mro__):
        return None
    known: set[str] = set()
    waiting = set(read)
    while waiting:
        name = waiting.pop()
        known.add(name)
        member = _member(inspect.getattr_static(kind, name, None))
        if isinstance(member, types.FunctionType):
            _, names, attributes, _ = _code(member.__code__, False)
            if _DYNAMIC & (names | attributes):
                return None
            waiting |= attributes - known
    return frozenset(known)


@functools.lru_cache(maxsize=1024)
def _code(
    code: types.CodeType, documented: bool
) -> tuple[str, frozenset[str], frozenset[str], frozenset[str]]:
    """Return what code does as text, and the names, attributes and modules that it reads."""
    codes, bodies = [code], []
    for one in codes:  # With those of the functions within it.
        consts: list[Any] = []
        for constant in one.co_consts[1 if documented and one is code else 0 :]:
            if isinstance(constant, types.CodeType):
                codes.append(constant)
                consts.append("code")
            else:  # The order of a set is another one in each process.
                is_set = isinstance(constant, frozenset)
                consts.append(sorted(map(repr, constant)) if is_set else repr(constant))
        arguments = one.co_varnames[: one.co_argcount + one.co_kwonlyargcount]
        counts = (one.co_argcount, one.co_posonlyargcount, one.co_kwonlyargcount, one.co_flags)
        does = (one.co_code.hex(), one.co_exceptiontable.hex())
        bodies.append((*does, consts, one.co_names, arguments, one.co_freevars, counts))
    instructions = [found for one in codes for found in dis.get_instructions(one)]

    def read_by(*operations: str) -> frozenset[str]:
        return frozenset(found.argval for found in instructions if found.opname in operations)

    python = ".".join(map(str, sys.version_info[:2]))  # Another one has other code for the same.
    return (
        f"{digest(bodies)} of Python {python}",
        read_by("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"),
        read_by("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"),
        read_by("IMPORT_NAME"),
    )
