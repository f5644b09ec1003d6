"""One traced graph for the models of a search that train alike.

To build a small model and trace its step takes longer than some epochs of it. A graph takes batches
of any size, so that a search needs one, as long as what differs between sizes is read by the graph
and not written into it. Weights, the optimizer's state and its rate are variables already;
`GraphNumber` and `GraphCount` make variables of the other settings that follow the batch size.
"""

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


class GraphNumber(float):
    """A number that a traced graph reads again each time it runs, as it reads a variable.

    Python sees a float; where TensorFlow makes a tensor of it, it reads a variable. `1 - x`, by
    which moving averages are written, reads one of its own: it is rounded once, as in Python.
    """

    dtype = "float32"
    _variables: Any

    def __new__(cls, value: float, variables: Any = None):
        self = super().__new__(cls, value)
        with tf.init_scope():
            self._variables = variables or [
                tf.Variable(tf.constant(one, tf.float32), trainable=False)
                for one in (value, 1 - value)
            ]
        return self

    def changed(self, value: float) -> "GraphNumber":
        """Return the number that the graphs of this one read from now on."""
        for variable, one in zip(self._variables, (value, 1 - value), strict=True):
            variable.assign(one)
        return GraphNumber(value, self._variables)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.cast(self._variables[0].read_value(), dtype or tf.float32, name=name)

    def __rsub__(self, other: Any) -> Any:
        if tf.inside_function() and other == 1:
            return GraphNumber(1 - float(self), self._variables[::-1])
        return super().__rsub__(other)

    def __reduce__(self):
        return float, (float(self),)


class GraphCount(int):
    """A number of steps that a traced graph reads again each time it runs."""

    _variable: Any
    _after: Any

    def __new__(cls, value: int, variable: Any = None, *, after: Any = None):
        self = super().__new__(cls, value)
        self._after = after  # A variable: what a graph writes there is written before it reads.
        with tf.init_scope(), tf.device("CPU:0"):  # Loops are counted there.
            self._variable = variable
            if variable is None:
                self._variable = tf.Variable(tf.constant(value, tf.int32), trainable=False)
        return self

    def changed(self, value: int) -> "GraphCount":
        """Return the number that the graphs of this one read from now on."""
        self._variable.assign(value)
        return GraphCount(value, self._variable, after=self._after)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        written = [] if self._after is None else [tf.convert_to_tensor(self._after.value)]
        with tf.control_dependencies(written):
            return tf.cast(self._variable.read_value(), dtype or tf.int32, name=name)

    def __eq__(self, other: object) -> bool:
        # Keras asks while it traces whether it is 1, which makes a graph without a loop.
        return not tf.inside_function() and int(self) == other

    __hash__ = int.__hash__

    def __reduce__(self):
        return int, (int(self),)


def counted_steps(model: Any, steps: int) -> GraphCount:
    """Return a number of steps an execution, each of which asks for data when the last has ended.

    Else a step would ask while another computes, and seem to wait for data that the pipeline has
    time to make.
    """
    return GraphCount(steps, after=model.optimizer and model.optimizer.iterations)


# Seconds of an execution of several steps.
EXECUTION_S = 0.1


def execution_steps(
    step_s: float, epoch_steps: int | None, *, execution_s: float = EXECUTION_S
) -> int:
    """Return how many steps take about as long as an execution should, at most those of an epoch.

    Keras starts each execution from Python, which takes as long as the step itself where that is
    small. Beyond 100 ms that start no longer counts, and callbacks still act several times a
    second.
    """
    steps = max(1, round(execution_s / step_s))
    return steps if epoch_steps is None else min(epoch_steps, steps)


class OneGraph:
    """Keeps a model of a search under each policy, with its graphs, and gives it later states."""

    def __init__(self):
        # By policy: a model, and what it was when its graphs were not traced yet.
        self._kept: dict[str, tuple[Any, Any]] = {}

    def model(self, fresh: Any) -> Any:
        """Return a model that trains as `fresh` does: the one that is kept, or else `fresh`."""
        policy = fresh.dtype_policy.name
        if not can_share(fresh):
            self.forget()
            return fresh
        found = _description(fresh)
        kept, known = self._kept.get(policy, (None, None))
        if kept is not None and found == known and _is_as_kept(kept, known, fresh):
            _set_state(kept, fresh)
            return kept
        self._kept[policy] = fresh, found
        for owner, name in followed_settings(fresh):
            setattr(owner, name, GraphNumber(getattr(owner, name)))
        fresh.steps_per_execution = counted_steps(fresh, fresh.steps_per_execution)
        # A build function may return the model of another trial, with its graphs.
        fresh.train_function = fresh.test_function = fresh.predict_function = None
        return fresh

    def is_kept(self) -> bool:
        """Return whether the next model may be one that is kept."""
        return bool(self._kept)

    def forget(self, *, but: str | None = None) -> None:
        """Let the next model be the one that is kept, as after a failure, of all policies `but`."""
        self._kept = {policy: one for policy, one in self._kept.items() if policy == but}

    def __reduce__(self):
        return OneGraph, ()  # No model travels to another process.


def _is_as_kept(kept: Any, known: Any, fresh: Any) -> bool:
    """Return whether nobody has changed the kept model, and `fresh` has no part of it."""
    settings = [getattr(owner, name) for owner, name in followed_settings(kept)]
    parts = {id(part) for part in (*layers_of(kept), kept.optimizer)}
    return (
        not any(id(part) in parts for part in (*layers_of(fresh), fresh.optimizer))
        and all(isinstance(setting, GraphNumber) for setting in settings)
        and isinstance(kept.steps_per_execution, GraphCount)
        and can_share(kept)
        and _description(kept) == known
    )


def _description(model: Any) -> Any:
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


def _set_state(kept: Any, fresh: Any) -> None:
    """Give a model that was trained the state of one that was just built."""
    settings = zip(followed_settings(kept), followed_settings(fresh), strict=True)
    for (mine, name), (its, _) in settings:
        setattr(mine, name, getattr(mine, name).changed(getattr(its, name)))
    if kept.steps_per_execution != fresh.steps_per_execution:
        kept.predict_function = None  # Its kind follows the number of steps.
    kept.steps_per_execution = kept.steps_per_execution.changed(fresh.steps_per_execution)
    mine, its = kept.optimizer, fresh.optimizer
    if not mine.built:
        mine.build(kept.trainable_variables)
    if not its.built:  # The slots of a twin go at once, where `fresh` lives as long as its trial.
        its = type(its).from_config(its.get_config())
        its.build(fresh.trainable_variables)
    variables = zip(
        (*kept.variables, *mine.variables), (*fresh.variables, *its.variables), strict=True
    )
    for variable, other in variables:  # The rate is among them.
        variable.assign(other.value)
    kept.reset_metrics()
    kept.stop_training = False
