"""Share one traced graph among all models of a search that train in the same way.

Building a small model and tracing its train step takes longer than some epochs of training. A graph
accepts batches of any size, so one is enough for a search. `SharedGraph.model_for` returns a model
with that graph. After `SharedGraph.release`, the next model is a new one. The rules of sharing are
in this module only:

1. Two models share a graph if their descriptions are equal and certain. A description has
   everything that becomes a constant of the graph (`kbatch.training.fingerprint`).
2. A model shares nothing if a part cannot be described with certainty, or may have state that
   kbatch cannot reset: the user's own class, layer function or train step, a variable that no
   part of the model lists, a table, a random number in a loss, a learning rate schedule.
3. Values that may differ between batch sizes are variables, which the graph reads. Weights, the
   optimizer's state and its learning rate are variables in Keras. `GraphNumber` and `GraphCount`
   make variables of the other settings that follow the batch size.
4. Before a model trains again, all its variables get the values of a new model, and metrics are
   reset. A model that was changed after its graph was traced is not used again.
"""

import math
from typing import Any

import keras
import tensorflow as tf

from kbatch import library_internals as internals
from kbatch.training.fingerprint import Description
from kbatch.training.learning_rate import MOMENTA_NAME, followed_settings
from kbatch.training.model import installed_step, is_compiled, replica_count, user_step
from kbatch.training.steps_per_execution import GraphCount, counted_steps

Settings = list[tuple[Any, str]]  # The settings that follow the batch size: owners and names.

_KINDS = keras.optimizers
# Optimizers that compute the same with a `GraphNumber` as with a float, as tests show.
_OPTIMIZERS = (
    *(_KINDS.SGD, _KINDS.Adam, _KINDS.AdamW, _KINDS.Adamax, _KINDS.Nadam, _KINDS.RMSprop),
    *(_KINDS.Adagrad, _KINDS.Adadelta, _KINDS.Lion, _KINDS.Lamb),
)
_MOST_WEIGHTS = 2**26  # Larger models are not shared, because two of them would be in memory.


class SharedGraph:
    """Holds one traced model of a search for each dtype policy, and gives it new states."""

    def __init__(self):
        # By policy: a model, and its description before its graphs were traced.
        self._models: dict[str, tuple[Any, Any]] = {}

    def model_for(self, fresh: Any) -> Any:
        """Return the shared model with the state of the new model `fresh`, or else `fresh`."""
        policy, settings = fresh.dtype_policy.name, followed_settings(fresh)
        fresh_description = description(fresh, settings)
        if fresh_description is None:
            self.release()
            return fresh
        shared, traced = self._models.get(policy, (None, None))
        if shared is not None and fresh_description == traced:
            shared_settings = followed_settings(shared)
            parts = {id(part) for part in (*internals.layers_of(shared), shared.optimizer)}
            if (
                not any(
                    id(part) in parts for part in (*internals.layers_of(fresh), fresh.optimizer)
                )
                and all(isinstance(getattr(o, n), GraphNumber) for o, n in shared_settings)
                and isinstance(shared.steps_per_execution, GraphCount)
                and description(shared, shared_settings) == traced
            ):
                set_state(shared, shared_settings, fresh, settings)
                return shared
        self._models[policy] = fresh, fresh_description
        settings_to_variables(fresh, settings)
        return fresh

    def describe(self) -> None:
        """Describe the shared models again, after kbatch has changed their train steps."""
        for policy, (model, _) in self._models.items():
            self._models[policy] = model, description(model, followed_settings(model))

    def is_kept(self) -> bool:
        """Return whether the next model may be a shared one."""
        return bool(self._models)

    def release(self, *, except_policy: str | None = None) -> None:
        """Stop sharing all models, for example after a failure, except that of `except_policy`."""
        self._models = {name: v for name, v in self._models.items() if name == except_policy}

    def __reduce__(self):
        return SharedGraph, ()  # Models are not sent to another process.


def description(model: Any, settings: Settings) -> dict[str, Any] | None:
    """Describe all constants of a model's graphs, or return None if they are uncertain."""
    if not _trains_by_keras(model):
        return None
    step, parts = installed_step(model), Description(model, ("learning_rate",))
    with internals.replaced([(owner, name, 0.5) for owner, name in settings]):
        constants = parts.layers()
        if parts.functions:  # Keras may call the user's functions any number of times.
            return None
        constants |= {"optimizer": parts.of(model.optimizer), "compiled": parts.compiled()}
    if parts.uncertain:
        return None
    compiled = keras.tree.flatten(internals.compile_arguments(model))
    names = [metric.name for metric in compiled if isinstance(metric, keras.metrics.Metric)]
    if len(model.outputs) > 1:  # Keras names their losses after them.
        names += model.output_names
    config = keras.config
    globals_read = (config.epsilon(), config.floatx(), config.image_data_format())
    flash = config.is_flash_attention_enabled()
    step_of = (type(step), getattr(step, "accumulation", None), is_compiled(model))
    return constants | {"names": names, "step": step_of, "globals": (*globals_read, flash)}


def _trains_by_keras(model: Any) -> bool:
    """Return whether Keras's own step and optimizer train a model in float32."""
    eager = model.run_eagerly or tf.config.functions_run_eagerly()
    if user_step(model) is not None or replica_count(model) > 1 or eager or not model.built:
        return False
    optimizer: Any = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return (
        type(optimizer) in _OPTIMIZERS
        and isinstance(internals.rate_of(optimizer), keras.Variable)
        and not internals.excluded_from_decay(optimizer, model.trainable_variables)
        and getattr(installed_step(model), "loss_denominator", None) is None
        and sum(math.prod(weight.shape) for weight in model.weights) <= _MOST_WEIGHTS
        # A `GraphNumber` is a float32.
        and not {"float16", "bfloat16", "float64"} & {weight.dtype for weight in model.weights}
    )


class GraphNumber(float):
    """A number that a traced graph reads again each time it runs, like a variable.

    In Python it is a float. TensorFlow converts it by reading a variable. The difference `1 - x`,
    which moving averages use, has another variable, so that it is rounded once, as in Python.
    """

    dtype = "float32"
    _variables: Any

    def __new__(cls, value: float, variables: Any = None):
        self = super().__new__(cls, value)
        with tf.init_scope():
            self._variables = variables or [
                tf.Variable(tf.constant(number, tf.float32), trainable=False)
                for number in (value, 1 - value)
            ]
        return self

    def changed(self, value: float) -> "GraphNumber":
        """Change the value that graphs read from now on, and return it."""
        for variable, number in zip(self._variables, (value, 1 - value), strict=True):
            variable.assign(number)
        return GraphNumber(value, self._variables)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.cast(self._variables[0].read_value(), dtype or tf.float32, name=name)

    def __rsub__(self, other: Any) -> Any:
        if tf.inside_function() and other == 1:
            return GraphNumber(1 - float(self), self._variables[::-1])
        return super().__rsub__(other)

    def __reduce__(self):
        return float, (float(self),)


def settings_to_variables(model: Any, settings: Settings) -> None:
    """Replace settings that follow the batch size by variables, in a model that is not traced."""
    for owner, name in settings:
        setattr(owner, name, GraphNumber(getattr(owner, name)))
    model.steps_per_execution = counted_steps(model, model.steps_per_execution)
    # A build function may return the model of another trial, with its graphs.
    model.train_function = model.test_function = model.predict_function = None


def set_state(shared: Any, shared_settings: Settings, fresh: Any, settings: Settings) -> None:
    """Give the shared model the state of the new model `fresh`."""
    for (target, name), (source, _) in zip(shared_settings, settings, strict=True):
        setattr(target, name, getattr(target, name).changed(getattr(source, name)))
        if MOMENTA_NAME in vars(source):  # Otherwise, training would scale the layer again.
            vars(target)[MOMENTA_NAME] = vars(source)[MOMENTA_NAME]
    if shared.steps_per_execution != fresh.steps_per_execution:
        shared.predict_function = None  # It is another function for another number of steps.
    shared.steps_per_execution = shared.steps_per_execution.changed(fresh.steps_per_execution)
    target, source = shared.optimizer, fresh.optimizer
    if not target.built:
        target.build(shared.trainable_variables)
    if not source.built:  # Build a copy: `fresh` would keep its slots in memory during the trial.
        source = type(source).from_config(source.get_config())
        source.build(fresh.trainable_variables)
    # The learning rate is among the variables.
    values = *fresh.variables, *source.variables
    for variable, value in zip((*shared.variables, *target.variables), values, strict=True):
        variable.assign(value.value)
    shared.reset_metrics()
    shared.stop_training = False
