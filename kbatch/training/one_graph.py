"""One traced graph for all batch sizes: a model that trains again like one that was just built.

To build a small model and trace its step takes longer than some epochs of it. A graph takes batches
of any size, so that a search needs one, as long as what differs between sizes is read by the graph
and not written into it. Weights, the optimizer's state and its rate are variables already;
`GraphNumber` and `GraphCount` make variables of the other settings that follow the batch size.
"""

from typing import Any

import keras
import tensorflow as tf

from kbatch.library_internals import compile_arguments, layers_of, rate_of
from kbatch.training.fingerprint import model_description, own_code
from kbatch.training.learning_rate import followed_settings
from kbatch.training.model import installed_step, replica_count, user_step

# What kbatch leaves in a model and its layers begins so.
_KBATCH = "_kbatch_"
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

    def __new__(cls, value: int, variable: Any = None):
        self = super().__new__(cls, value)
        with tf.init_scope(), tf.device("CPU:0"):  # Loops are counted there.
            self._variable = variable
            if variable is None:
                self._variable = tf.Variable(tf.constant(value, tf.int32), trainable=False)
        return self

    def changed(self, value: int) -> "GraphCount":
        """Return the number that the graphs of this one read from now on."""
        self._variable.assign(value)
        return GraphCount(value, self._variable)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.cast(self._variable.read_value(), dtype or tf.int32, name=name)

    def __eq__(self, other: object) -> bool:
        # Keras asks while it traces whether it is 1, which makes a graph without a loop.
        return not tf.inside_function() and int(self) == other

    __hash__ = int.__hash__

    def __reduce__(self):
        return int, (int(self),)


class OneGraph:
    """Keeps the first model of a search with its graphs, and gives it the state of later ones."""

    def __init__(self):
        self._kept: Any = None

    def model(self, fresh: Any) -> Any:
        """Return a model that trains as `fresh` does: the one that is kept, or else `fresh`."""
        if not can_share(fresh):
            self._kept = None
            return fresh
        # A callback may have changed what is kept.
        if self._kept is None or _description(self._kept) != _description(fresh):
            self._kept = fresh
            for owner, name in followed_settings(fresh):
                setattr(owner, name, GraphNumber(getattr(owner, name)))
            fresh.steps_per_execution = GraphCount(fresh.steps_per_execution)
        elif fresh is not self._kept:
            _set_state(self._kept, fresh)
        return self._kept

    def forget(self) -> None:
        """Let the next model be the one that is kept, as after a failure."""
        self._kept = None

    def __reduce__(self):
        return OneGraph, ()  # No model travels to another process.


def _description(model: Any) -> Any:
    """Describe what is written into the graphs of a model."""
    settings = [(owner, name, getattr(owner, name)) for owner, name in followed_settings(model)]
    step = installed_step(model)
    try:
        for owner, name, _ in settings:
            setattr(owner, name, 0.5)
        return model_description(model, with_rate=False), type(step), getattr(step, "how", None)
    finally:
        for owner, name, value in settings:
            setattr(owner, name, value)


def can_share(model: Any) -> bool:
    """Return whether all state of a model is in variables that can be set back."""
    if user_step(model) is not None or replica_count(model) > 1 or model.run_eagerly:
        return False
    # Kinds of the user's own may keep state anywhere.
    if not model.built or not all(_is_keras(one) for one in layers_of(model)):
        return False
    if any(own_code(layer) is not None for layer in layers_of(model)):  # A `Lambda`.
        return False
    optimizer: Any = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    rate = rate_of(optimizer)
    if type(optimizer) not in _OPTIMIZERS or not isinstance(rate, keras.Variable):
        return False
    if any(weight.dtype != "float32" for weight in model.trainable_weights):
        return False
    compiled = compile_arguments(model)
    parts = [keras.tree.flatten(v) for name, v in compiled.items() if name != "optimizer"]
    return all(_is_keras(one) or hasattr(one, "__code__") for each in parts for one in each)


def _is_keras(part: Any) -> bool:
    kind = part if isinstance(part, type) else type(part)
    return kind.__module__.split(".")[0] in ("keras", "builtins")


def _set_state(kept: Any, fresh: Any) -> None:
    """Give a model that was trained the state of one that was just built."""
    for mine, its in zip(layers_of(kept), layers_of(fresh), strict=True):
        for name in [name for name in vars(mine) if name.startswith(_KBATCH)]:
            del vars(mine)[name]
        vars(mine).update({n: value for n, value in vars(its).items() if n.startswith(_KBATCH)})
    settings = zip(followed_settings(kept), followed_settings(fresh), strict=True)
    for (mine, name), (its, _) in settings:
        setattr(mine, name, getattr(mine, name).changed(getattr(its, name)))
    kept.steps_per_execution = kept.steps_per_execution.changed(fresh.steps_per_execution)
    for model in (kept, fresh):
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
    _assign(kept.variables, fresh.variables)
    # The rate is among them.
    _assign(kept.optimizer.variables, fresh.optimizer.variables)
    kept.reset_metrics()
    kept.stop_training = False


def _assign(variables: Any, values: Any) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value.value)
