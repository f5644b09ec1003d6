"""Describe all parts of a model as plain data, and make fingerprints of such descriptions.

Keras's configurations are not enough: `Huber` of Keras 3.15 leaves out its `delta`, a function is
only a name in a configuration, and some parts have none. So the description of a part has its
attributes. That of a function has its code, its defaults, and the closure and global variables that
it reads. Equal parts have equal descriptions in any process. `Description.uncertain` lists parts
that may differ although their descriptions are equal.
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

from kbatch import library_internals as internals

# Objects of these packages are described by their attributes. Their code does not change.
_LIBRARIES = ("kbatch", "keras", "numpy", "tensorflow")
# Modules without state. The description of one of their functions is its name.
_STATELESS = (
    *("keras", "tensorflow", "numpy", "math", "builtins", "functools", "operator", "itertools"),
    *("collections", "typing", "dataclasses", "abc", "enum"),
)
_DRAW_WORDS = ("random", "dropout")  # Functions with such names draw random numbers.
# With these names, a function can read values that its code does not name.
_DYNAMIC = {"eval", "exec", "getattr", "globals", "locals", "vars", "__dict__", "open", "id"}
# Types whose `repr` is a complete description.
_REPR_TYPES = (
    *(bytes, complex, range, slice, type(...), enum.Enum, Path),
    *(np.dtype, tf.DType, tf.TensorShape, tf.TensorSpec),
)
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
# Attributes that do not describe a part. Keras numbers names and draws seeds. Training, `compile`
# or a build sets the others.
_KERAS_STATE = frozenset(
    {"name", "path", "parent_path", "seed", "initial_seed", "called", "built"}
    | {"history", "steps_per_execution", "stop_training", "stop_predicting", "stop_evaluating"}
    | {"train_function", "test_function", "predict_function", "train_step", "test_step"}
    | {"eval_epoch_iterator", "dropout_mask", "recurrent_dropout_mask", "functional", "tracker"}
    | {"optimizer", "compile_config", "compiled_trainable_state", "trainable_variables_indices"}
    | {"loss", "jit_compile", "distribute_strategy", "distribution_strategy", "input_tensor"}
    | {f"exclude_from_weight_decay{part}" for part in ("", "_pattern", "_cache")}
)
# Attributes that all layers have and that hold objects, but belong to the description.
_LAYER_OBJECTS = ("activity_regularizer", "_dtype_policy")
# Only some rows are read of an array above this size, and no structure below this many levels.
_MOST_BYTES, _SAMPLED_ROWS, _MOST_LEVELS = 16 * 2**20, 256, 60


def model_fingerprint(model: keras.Model) -> str:
    """Return a text that is equal for models that differ only in the settings of their optimizer.

    It is the same in any process.
    """
    # Leave out settings that follow the batch size.
    description = Description(model, ("learning_rate", "momentum"))
    optimizer: Any = getattr(model, "optimizer", None)
    kind = name_of(type(getattr(optimizer, "inner_optimizer", optimizer)))
    policy = model.dtype_policy.name
    return digest([policy, kind, description.layers(), description.compiled()])


class Description:
    """Describes a model and what belongs to it as plain data."""

    def __init__(self, model: Any = None, without: Sequence[str] = ()):
        self.uncertain: list[str] = []  # Parts that may differ although they are described equally.
        self.functions: list[str] = []  # The names of the user's functions.
        self._model, self._without = model, frozenset(without)
        self._layers = [] if model is None else internals.layers_of(model)
        self._numbers = {id(layer): number for number, layer in enumerate(self._layers)}
        names = dict.fromkeys(layer.name for layer in self._layers)
        self._names = {name: f"layer {number}" for number, name in enumerate(names)}
        self._tracked: set[int] = set()  # Variables that layers, metrics and optimizers list.
        # The numbers of calls in a graph, by the `id` of an operation and the index of its call.
        self._calls: dict[tuple[int, int], int] = {}
        self._open: list[Any] = []  # Objects that are being described, from the outermost one.

    def layers(self) -> dict[str, Any]:
        """Describe the layers of the model, how they are connected, and their weights."""
        weights = self._model.weights
        return {
            "layers": [self._part(layer) for layer in self._layers],
            "graphs": [self._graph(layer) for layer in self._layers],
            "weights": [[list(w.shape), w.dtype, w.trainable] for w in weights],
            "rules": [
                self.of(getattr(weight, rule, None))
                for weight in weights
                for rule in ("regularizer", "constraint")
            ],
            "trainable": [list(weight.shape) for weight in self._model.trainable_weights],
        }

    def compiled(self) -> dict[str, Any]:
        """Describe the arguments of `compile`, without the optimizer."""
        arguments, model = internals.compile_arguments(self._model), self._model
        # The user may have set the loss after `compile`.
        arguments = {**arguments, "jit_compile": model.jit_compile, "loss": model.loss}
        return {name: self.of(value) for name, value in arguments.items() if name != "optimizer"}

    def of(self, value: Any, read: frozenset[str] | None = None) -> Any:
        """Describe a value. `read`: the attributes of a user's object to describe. If None, all."""
        if value is None or isinstance(value, bool):
            return value
        for kind in (int, float, str):
            if isinstance(value, kind):
                return self._names.get(value, str(value)) if kind is str else kind(value)
        if isinstance(value, _REPR_TYPES):
            return repr(value)
        if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "iloc"):
            return self._array(np.asarray(value))
        if isinstance(value, (keras.Variable, tf.Variable)):
            variable = ["variable", list(value.shape), str(value.dtype)]
            if id(value) in self._tracked:
                return variable
            self.uncertain.append("a variable")
            return [*variable, self.of(tf.convert_to_tensor(value))]
        too_deep = len(self._open) > _MOST_LEVELS
        if too_deep or any(value is outer for outer in self._open):
            self.uncertain += ["a deep structure"] if too_deep else []
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
            operation, call, output = internals.history_of(value)
            number = self._calls.get((id(operation), call))
            if number is None:
                self.uncertain.append("a tensor of another model")
            return ["output", number, output]
        if isinstance(value, functools.partial):
            called = self.of(value.func), self.of(value.args), self.of(value.keywords)
            return dict(zip(("is", "args", "keywords"), called, strict=True))
        if isinstance(value, types.ModuleType):
            return self._module(value, read)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(function := getattr(value, "python_function", None), types.FunctionType):
            self.uncertain.append(name_of(value))  # A `tf.function` keeps its traces.
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
        if _is_user_code(kind) or not known:
            self.uncertain.append(name_of(kind))
        # Leave out the attributes of TensorFlow's objects, which hold state outside Python, and of
        # objects of other packages, which may be counters or times.
        of_keras = any(_root(base) == "keras" for base in kind.__mro__)
        hidden = _root(kind) == "tensorflow" or not (known or _is_user_code(kind) or of_keras)
        if isinstance(value, keras.random.SeedGenerator):
            hidden = id(value.state) not in self._tracked
        if hidden:
            self.uncertain.append(name_of(kind))
            return {"is": name_of(kind)}
        if isinstance(value, (keras.Layer, keras.Metric, keras.optimizers.Optimizer)):
            self._tracked.update(map(id, value.variables))
        read = None if read is None else _reached(kind, read)
        return {"is": self._class(kind, read)} | {
            name: self.of(attribute, read)
            for name, attribute in _attributes(value).items()
            if self._is_described(value, name, attribute) and (read is None or name in read)
        }

    def _is_described(self, owner: Any, name: str, value: Any) -> bool:
        """Return whether an attribute belongs to a description. Results of training do not."""
        plain = name.lstrip("_")
        if plain in self._without or name.startswith(("_kbatch_", "_self_")):
            return False
        if hasattr(owner, "get_config"):
            if plain in _KERAS_STATE or isinstance(value, internals.Tracker):
                return plain == "optimizer" and not isinstance(owner, keras.Model)
            simple = value is None or isinstance(value, (bool, int, float, str))
            specific = name not in internals.bookkeeping_names() or name in _LAYER_OBJECTS
            if isinstance(owner, keras.Operation) and not (simple or specific):
                return False
        # Leave out variables that the weights already describe. An attribute of an unbuilt layer is
        # None, or a list without the variable.
        parts: Any = value.values() if isinstance(value, dict) else value
        parts = parts if isinstance(value, (list, tuple, dict)) else [value]
        return value is not None and any(id(part) not in self._tracked for part in parts)

    def _graph(self, layer: Any) -> Any:
        """Describe how operations are connected, or return None if the model is not functional."""
        calls = internals.calls_in(layer)
        if calls is None:
            return None
        self._calls |= {(id(op), index): number for number, (op, index, *_) in enumerate(calls)}
        nodes = [[self.of(part) for part in (op, *arguments)] for op, _, *arguments in calls]
        return nodes + [self.of(structure) for structure in internals.structures_of(layer)]

    def _array(self, array: np.ndarray) -> Any:
        if not array.shape:
            return [array.dtype.name, self.of(array.item())]
        if array.dtype.hasobject:
            return self.of(array.tolist())
        if array.nbytes > _MOST_BYTES:
            self.uncertain.append("a large array")
            array = array[np.unique(np.linspace(0, len(array) - 1, _SAMPLED_ROWS).astype(int))]
        values = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:8]
        return f"{array.dtype.name} of shape {array.shape}, values {values}"

    def _module(self, module: Any, read: frozenset[str] | None) -> Any:
        name = module.__name__
        if not _is_user_code(module):
            self._check_named(name)
            return name
        members = {key: vars(module)[key] for key in sorted(read or ()) if key in vars(module)}
        return {"is": name} | {key: self.of(value, read) for key, value in members.items()}

    def _named(self, value: Any) -> str:
        """Describe an object without attributes, such as a function not written in Python."""
        has_name, owner = hasattr(value, "__qualname__"), getattr(value, "__self__", None)
        name = name_of(value) if has_name else getattr(value, "__name__", None)
        if name is None or not (owner is None or isinstance(owner, types.ModuleType)):
            self.uncertain.append(name_of(value))
            return name_of(value)
        root = _root(value)
        self._check_named(name if name.startswith(f"{root}.") else f"{root}.{name}")
        return name

    def _check_named(self, name: str) -> None:
        """List a name as uncertain if its function may hold state or draw random numbers."""
        if name.split(".")[0] not in _STATELESS or _draws(name):
            self.uncertain.append(name)

    def _function(self, function: types.FunctionType) -> Any:
        """Describe a function by its code, its defaults and the values that it reads."""
        name, code = name_of(function), function.__code__
        description, values = {"is": name}, dict[str, Any]()
        read = None  # If the function is from a library, describe everything in its closure.
        if _is_user_code(function):
            self.functions.append(name)
            documented = bool(function.__doc__) and code.co_consts[:1] == (function.__doc__,)
            description["code"], names, attributes, modules = _code(code, documented)
            if _DYNAMIC & (names | attributes) or any(map(_draws, names | attributes)):
                self.uncertain.append(name)
            read = attributes | {"__call__"}
            arguments = code.co_varnames[: code.co_argcount]
            variables = function.__globals__
            values |= zip(arguments[::-1], (function.__defaults__ or ())[::-1], strict=False)
            values |= function.__kwdefaults__ or {}
            values |= {n: variables[n] for n in sorted(names & variables.keys())}
            values |= {f"import {n}": sys.modules.get(n, n) for n in sorted(modules)}
            values |= {key: value for key, value in vars(function).items() if key[0] != "_"}
        else:  # A decorator of a library may hold a function of the user.
            self._check_named(name)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        empty = types.CellType()  # The cell of a variable that has no value yet.
        values |= {key: cell.cell_contents for key, cell in cells if cell != empty}
        reads = {key: self.of(value, read) for key, value in values.items()}
        return description | ({"reads": reads} if reads else {})

    def _class(self, kind: type, read: frozenset[str] | None = None) -> Any:
        """Describe a class by its name, and a user's class also by its members in `read`."""
        name = name_of(kind)
        if not _is_user_code(kind):
            return name
        bases = [self._class(base, read) for base in kind.__bases__]
        description: dict[str, Any] = {"is": name, "bases": bases}
        for key, value in vars(kind).items():
            member = _member(value)
            hidden = key.startswith(("__", "_abc_")) and not isinstance(member, types.FunctionType)
            if not hidden and (read is None or key in read):
                description[key] = self.of(member, read)
        return description


def name_of(part: Any) -> str:
    """Return the full name of a function or a class, or of the class of another object."""
    # A generator has a `__qualname__` without a `__module__`.
    has_name = hasattr(part, "__qualname__") and hasattr(part, "__module__")
    named = part if has_name else type(part)
    return f"{named.__module__}.{named.__qualname__}"


def config_of(part: Any) -> dict[str, Any] | None:
    """Return the configuration of a part of a model, or None if it has none."""
    try:
        return part.get_config()
    except Exception:  # The user's `get_config` may never have been called, and raise anything.
        return None


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _draws(name: str) -> bool:
    return any(word in name.lower() for word in _DRAW_WORDS)


def _root(part: Any) -> str:
    """Return the top-level package of a module, a class, a function or an object."""
    module = isinstance(part, types.ModuleType)
    name = (not module and getattr(part, "__module__", None)) or getattr(part, "__name__", None)
    return (name if isinstance(name, str) else type(part).__module__).split(".")[0]


def _is_user_code(part: Any) -> bool:
    """Return whether a module, a class or a function belongs to no library."""
    return not _is_installed(_root(part))


@functools.cache
def _is_installed(root: str) -> bool:
    if root in (*_LIBRARIES, *_STATELESS) or root in sys.stdlib_module_names:
        return True
    place = getattr(sys.modules.get(root), "__file__", None) or ""
    return bool({"site-packages", "dist-packages"} & {*Path(place).parts})


def _member(value: Any) -> Any:
    """Return the function of a method or a property. Another value stays as it is."""
    return getattr(value, "__func__", getattr(value, "fget", value))


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including its slots."""
    state: Any = object.__getstate__(value)
    in_dict, in_slots = state if isinstance(state, tuple) else (state, None)
    return (in_slots or {}) | (in_dict or {})


def _reached(kind: type, read: frozenset[str]) -> frozenset[str] | None:
    """Return the attributes that methods of these names read, or None if they could read any."""
    if any(_root(base) in _LIBRARIES for base in kind.__mro__):
        return None
    reached: set[str] = set()
    waiting = set(read)
    while waiting:
        name = waiting.pop()
        reached.add(name)
        member = _member(inspect.getattr_static(kind, name, None))
        if isinstance(member, types.FunctionType):
            _, names, attributes, _ = _code(member.__code__, False)
            if _DYNAMIC & (names | attributes):
                return None
            waiting |= attributes - reached
    return frozenset(reached)


@functools.lru_cache(maxsize=1024)
def _code(
    code: types.CodeType, documented: bool
) -> tuple[str, frozenset[str], frozenset[str], frozenset[str]]:
    """Return a text for the code, and the names, attributes and modules that the code reads."""
    codes, bodies = [code], []
    for body in codes:  # Grows by the code of inner functions.
        consts: list[Any] = []
        for constant in body.co_consts[1 if documented and body is code else 0 :]:
            if isinstance(constant, types.CodeType):
                codes.append(constant)
                consts.append("code")
            else:  # The order of a set differs between processes.
                is_set = isinstance(constant, frozenset)
                consts.append(sorted(map(repr, constant)) if is_set else repr(constant))
        arguments = body.co_varnames[: body.co_argcount + body.co_kwonlyargcount]
        counts = (body.co_argcount, body.co_posonlyargcount, body.co_kwonlyargcount, body.co_flags)
        bytecode = (body.co_code.hex(), body.co_exceptiontable.hex())
        bodies.append((*bytecode, consts, body.co_names, arguments, body.co_freevars, counts))
    instructions = [op for body in codes for op in dis.get_instructions(body)]

    def read_by(*operations: str) -> frozenset[str]:
        return frozenset(op.argval for op in instructions if op.opname in operations)

    # Another version of Python compiles the same source to another bytecode.
    python = ".".join(map(str, sys.version_info[:2]))
    return (
        f"{digest(bodies)} of Python {python}",
        read_by("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"),
        read_by("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"),
        read_by("IMPORT_NAME"),
    )
