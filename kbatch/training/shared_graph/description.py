"""What is written into the graphs of a model, None where a graph may not be shared."""

import math
from typing import Any

import keras
import tensorflow as tf

from kbatch.library_internals import compile_arguments, excluded_from_decay, rate_of
from kbatch.training.fingerprint import Description
from kbatch.training.learning_rate import followed_settings
from kbatch.training.model import installed_step, replica_count, user_step

_KINDS = keras.optimizers
# Those whose arithmetic a `GraphNumber` was seen to pass through unchanged.
_OPTIMIZERS = (
    *(_KINDS.SGD, _KINDS.Adam, _KINDS.AdamW, _KINDS.Adamax, _KINDS.Nadam, _KINDS.RMSprop),
    *(_KINDS.Adagrad, _KINDS.Adadelta, _KINDS.Lion, _KINDS.Lamb),
)
# A fresh model is built beside the one that is kept: larger ones would need twice the memory.
_MOST_WEIGHTS = 2**26


def description(model: Any) -> dict[str, Any] | None:
    """Describe what is written into the graphs of a model, or return None if that is uncertain."""
    if not _trains_by_keras(model):
        return None
    settings = [(owner, name, getattr(owner, name)) for owner, name in followed_settings(model)]
    step, parts = installed_step(model), Description(model, ("learning_rate",))
    try:
        for owner, name, _ in settings:
            setattr(owner, name, 0.5)
        found = parts.layers()
        if parts.functions:  # Keras may call one of the user's own as often as it likes.
            return None
        found |= {"optimizer": parts.of(model.optimizer), "compiled": parts.compiled()}
    finally:
        for owner, name, value in settings:
            setattr(owner, name, value)
    if parts.uncertain:
        return None
    compiled = keras.tree.flatten(compile_arguments(model))
    names = [one.name for one in compiled if isinstance(one, keras.metrics.Metric)]
    if len(model.outputs) > 1:  # Their losses are named by them.
        names += model.output_names
    config = keras.config
    globals_read = (config.epsilon(), config.floatx(), config.image_data_format())
    flash = config.is_flash_attention_enabled()
    step_of = (type(step), getattr(step, "how", None))
    return found | {"names": names, "step": step_of, "globals": (*globals_read, flash)}


def _trains_by_keras(model: Any) -> bool:
    """Return whether Keras's own step and optimizer train a model, by numbers of float32."""
    if user_step(model) is not None or replica_count(model) > 1 or model.run_eagerly:
        return False
    if tf.config.functions_run_eagerly() or not model.built:
        return False
    if sum(math.prod(one.shape) for one in model.weights) > _MOST_WEIGHTS:
        return False
    if getattr(installed_step(model), "loss_denominator", None) is not None:
        return False
    optimizer: Any = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    rate = rate_of(optimizer)
    if type(optimizer) not in _OPTIMIZERS or not isinstance(rate, keras.Variable):
        return False
    # A `GraphNumber` is a float32.
    others = {"float16", "bfloat16", "float64"} & {weight.dtype for weight in model.weights}
    return not others and not excluded_from_decay(optimizer, model.trainable_variables)
