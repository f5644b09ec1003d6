"""One traced graph for the models of a search that train alike.

To build a small model and trace its step takes longer than some epochs of it. A graph takes batches
of any size, so that a search needs one. `SharedGraph.model_for` returns a model with that graph,
and `SharedGraph.release` lets the next model be a fresh one. Only this module uses its rules:

1. A graph is shared if the description of what is written into it is equal and certain. A part is
   described by all that it holds (`kbatch.training.fingerprint`).
2. Nothing is shared if a part cannot be described for certain, or may have state that kbatch
   cannot set back: a class, a layer function or a train step of the user's own, a variable that no
   part of the model lists, a table, a random number in a loss, a schedule of the learning rate.
3. What may differ between sizes is read by the graph and not written into it: weights, the
   optimizer's state and its learning rate are variables already. `GraphNumber` and `GraphCount`
   make variables of the other settings that follow the batch size.
4. Before a model trains again, all its variables get the values of the fresh model, and metrics are
   reset. A model that somebody has changed since it was traced is not used again.
"""

import math
from typing import Any

import keras
import tensorflow as tf

from kbatch.library_internals import (
    compile_arguments,
    excluded_from_decay,
    layers_of,
    rate_of,
    replaced,
)
from kbatch.training.fingerprint import Description
from kbatch.training.learning_rate import REMEMBERED, followed_settings
from kbatch.training.model import installed_step, is_compiled, replica_count, user_step
from kbatch.training.steps_per_execution import GraphCount, counted_steps

Settings = list[tuple[Any, str]]  # Those that follow the batch size: an owner and a name each.

_KINDS = keras.optimizers
# Those whose arithmetic a `GraphNumber` was seen to pass through unchanged.
_OPTIMIZERS = (
    *(_KINDS.SGD, _KINDS.Adam, _KINDS.AdamW, _KINDS.Adamax, _KINDS.Nadam, _KINDS.RMSprop),
    *(_KINDS.Adagrad, _KINDS.Adadelta, _KINDS.Lion, _KINDS.Lamb),
)
# A fresh model is built beside the one that is kept: larger ones would need twice the memory.
_MOST_WEIGHTS = 2**26


class SharedGraph:
    """Keeps a model of a search under each policy, with its graphs, and gives it later states."""

    def __init__(self):
        # By policy: a model, and what it was when its graphs were not traced yet.
        self._kept: dict[str, tuple[Any, Any]] = {}

    def model_for(self, fresh: Any) -> Any:
        """Return a model that trains as `fresh` does: the one that is kept, or else `fresh`."""
        policy, settings = fresh.dtype_policy.name, followed_settings(fresh)
        found = description(fresh, settings)
        if found is None:
            self.release()
            return fresh
        kept, known = self._kept.get(policy, (None, None))
        if kept is not None and found == known:
            of_kept = followed_settings(kept)
            if _is_as_kept(kept, of_kept, known, fresh):
                set_state(kept, of_kept, fresh, settings)
                return kept
        self._kept[policy] = fresh, found
        read_settings(fresh, settings)
        return fresh

    def describe(self) -> None:
        """Describe the kept models as they are, after kbatch itself has changed their steps."""
        for policy, (model, _) in self._kept.items():
            self._kept[policy] = model, description(model, followed_settings(model))

    def is_kept(self) -> bool:
        """Return whether the next model may be one that is kept."""
        return bool(self._kept)

    def release(self, *, but: str | None = None) -> None:
        """Let the next model be a fresh one, as after a failure, of all policies `but`."""
        self._kept = {policy: one for policy, one in self._kept.items() if policy == but}

    def __reduce__(self):
        return SharedGraph, ()  # No model travels to another process.


def _is_as_kept(kept: Any, settings: Settings, known: Any, fresh: Any) -> bool:
    """Return whether nobody has changed the kept model, and `fresh` has no part of it."""
    parts = {id(part) for part in (*layers_of(kept), kept.optimizer)}
    return (
        not any(id(part) in parts for part in (*layers_of(fresh), fresh.optimizer))
        and all(isinstance(getattr(owner, name), GraphNumber) for owner, name in settings)
        and isinstance(kept.steps_per_execution, GraphCount)
        and description(kept, settings) == known
    )


def description(model: Any, settings: Settings) -> dict[str, Any] | None:
    """Describe what is written into the graphs of a model, or return None if that is uncertain."""
    if not _trains_by_keras(model):
        return None
    step, parts = installed_step(model), Description(model, ("learning_rate",))
    with replaced([(owner, name, 0.5) for owner, name in settings]):
        found = parts.layers()
        if parts.functions:  # Keras may call one of the user's own as often as it likes.
            return None
        found |= {"optimizer": parts.of(model.optimizer), "compiled": parts.compiled()}
    if parts.uncertain:
        return None
    compiled = keras.tree.flatten(compile_arguments(model))
    names = [one.name for one in compiled if isinstance(one, keras.metrics.Metric)]
    if len(model.outputs) > 1:  # Their losses are named by them.
        names += model.output_names
    config = keras.config
    globals_read = (config.epsilon(), config.floatx(), config.image_data_format())
    flash = config.is_flash_attention_enabled()
    step_of = (type(step), getattr(step, "how", None), is_compiled(model))
    return found | {"names": names, "step": step_of, "globals": (*globals_read, flash)}


def _trains_by_keras(model: Any) -> bool:
    """Return whether Keras's own step and optimizer train a model, by numbers of float32."""
    eager = model.run_eagerly or tf.config.functions_run_eagerly()
    if user_step(model) is not None or replica_count(model) > 1 or eager or not model.built:
        return False
    optimizer: Any = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return (
        type(optimizer) in _OPTIMIZERS
        and isinstance(rate_of(optimizer), keras.Variable)
        and not excluded_from_decay(optimizer, model.trainable_variables)
        and getattr(installed_step(model), "loss_denominator", None) is None
        and sum(math.prod(one.shape) for one in model.weights) <= _MOST_WEIGHTS
        # A `GraphNumber` is a float32.
        and not {"float16", "bfloat16", "float64"} & {one.dtype for one in model.weights}
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


def read_settings(model: Any, settings: Settings) -> None:
    """Let the graphs of a model that is not traced yet read what follows the batch size."""
    for owner, name in settings:
        setattr(owner, name, GraphNumber(getattr(owner, name)))
    model.steps_per_execution = counted_steps(model, model.steps_per_execution)
    # A build function may return the model of another trial, with its graphs.
    model.train_function = model.test_function = model.predict_function = None


def set_state(kept: Any, of_kept: Settings, fresh: Any, of_fresh: Settings) -> None:
    """Give a model that was trained the state of one that was just built."""
    for (mine, name), (its, _) in zip(of_kept, of_fresh, strict=True):
        setattr(mine, name, getattr(mine, name).changed(getattr(its, name)))
        # A layer without this mark would be scaled again when training begins.
        vars(mine).update((key, value) for key, value in vars(its).items() if key == REMEMBERED)
    if kept.steps_per_execution != fresh.steps_per_execution:
        kept.predict_function = None  # Its kind follows the number of steps.
    kept.steps_per_execution = kept.steps_per_execution.changed(fresh.steps_per_execution)
    mine, its = kept.optimizer, fresh.optimizer
    if not mine.built:
        mine.build(kept.trainable_variables)
    if not its.built:  # The slots of a twin go at once, where `fresh` lives as long as its trial.
        its = type(its).from_config(its.get_config())
        its.build(fresh.trainable_variables)
    variables = (*kept.variables, *mine.variables), (*fresh.variables, *its.variables)
    for variable, other in zip(*variables, strict=True):  # The rate is among them.
        variable.assign(other.value)
    kept.reset_metrics()
    kept.stop_training = False
