"""A model under other dtype policies, or quantised, with the same weights."""

import warnings
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.profiling.inference_paths import fetched
from kbatch.records.inference_measurements import OutputChange
from kbatch.training.dtype_policy import check_dtype_policies, dtype_policy_scope
from kbatch.training.errors import InputError

INT8 = "int8"


class NoVariant(ValueError):
    """A model that cannot be had under a policy; the message says why."""


def check_variants(dtype_policies: Any) -> tuple[str, ...]:
    """Checks the names of dtype policies, or `"int8"`.

    Raises:
        InputError: If one is unknown or repeated.
    """
    single = isinstance(dtype_policies, str) or not isinstance(dtype_policies, Iterable)
    names: tuple[Any, ...] = (dtype_policies,) if single else tuple(dtype_policies)
    if not names or len(set(names)) < len(names):
        raise InputError(
            "`dtype_policies` must be at least one policy, each once. "
            f"Received: dtype_policies={names!r}."
        )
    policies = [name for name in names if name != INT8]
    if policies:
        check_dtype_policies(policies)
    return names


def policy_of(model: keras.Model) -> str:
    """Names the policy that the layers with weights have; several are joined by `+`.

    The policy of the model itself may be another: Keras does not save it, and a model that was
    loaded has the global one.
    """
    found = {layer.dtype_policy.name for layer in _layers_with_weights(model)}
    return "+".join(sorted(found)) or model.dtype_policy.name


def variant(model: keras.Model, dtype_policy: str) -> keras.Model:
    """Gives the model under a policy; the model itself stays as it is.

    All layers get the policy, those with one of their own as well.

    Args:
        model: A built model.
        dtype_policy: Name of a dtype policy, or `"int8"` for Keras's quantisation.

    Raises:
        NoVariant: If it cannot be.
    """
    if dtype_policy == policy_of(model):
        return model
    if dtype_policy == INT8:
        return _quantised(_cloned(model, "float32"))
    return _cloned(model, dtype_policy)


def output_change(
    outputs: Any, reference: Any, dtype_policy: str, *, examples: int
) -> OutputChange:
    """Compares outputs with those in float32.

    Args:
        outputs: Nested arrays.
        reference: The same in float32.
        dtype_policy: What the outputs were computed under.
        examples: How many examples they are of.
    """
    found, expected = _flat(outputs), _flat(reference)
    difference = np.abs(found - expected)
    return OutputChange(
        dtype_policy=dtype_policy,
        examples=examples,
        largest=_finite(np.max(difference)),
        mean=_finite(np.mean(difference)),
        largest_relative=_finite(np.max(difference) / np.max(np.abs(expected))),
        mean_relative=_finite(np.mean(difference) / np.mean(np.abs(expected))),
    )


def outputs_of(model: Any, batch: Any) -> Any:
    """Runs a model eagerly on a batch."""
    return fetched(model(batch, training=False))


def _flat(outputs: Any) -> np.ndarray:
    leaves = [np.asarray(leaf, "float64").ravel() for leaf in keras.tree.flatten(outputs)]
    return np.concatenate(leaves)


def _finite(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _cloned(model: keras.Model, policy: str) -> keras.Model:
    def under_policy(layer: Any) -> Any:
        if isinstance(layer, keras.layers.InputLayer):
            return layer.__class__.from_config(layer.get_config())
        config = _with_policy(layer.get_config(), policy)
        return layer.__class__.from_config({**config, "dtype": policy})

    try:
        # Layers that make others themselves leave them to the global policy.
        with dtype_policy_scope(policy):
            clone = keras.models.clone_model(model, clone_function=under_policy, recursive=True)
        clone.set_weights(model.get_weights())
    # What a layer raises that has no config or refuses the dtype in it, that makes other weights
    # than it had (`set_weights`), or whose first weights cannot be drawn in the dtype (the last).
    except (ValueError, TypeError, NotImplementedError, tf.errors.InvalidArgumentError) as error:
        raise NoVariant(
            f"A copy under {policy} cannot be made of model {model.name!r}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    others = [one.name for one in _layers_with_weights(clone) if one.dtype_policy.name != policy]
    if others:
        raise NoVariant(
            f"A copy under {policy} cannot be made of model {model.name!r}: layers keep a policy "
            f"of their own: {', '.join(others)}."
        )
    return clone


def _with_policy(config: Any, policy: str) -> Any:
    """Puts a policy wherever a config, or one within it, has a policy; inputs have plain dtypes."""
    if isinstance(config, (list, tuple)):
        return type(config)(_with_policy(part, policy) for part in config)
    if not isinstance(config, dict):
        return config
    return {
        key: policy if key == "dtype" and isinstance(part, dict) else _with_policy(part, policy)
        for key, part in config.items()
    }


def _layers_with_weights(model: Any) -> list[Any]:
    """Gives the layers that hold weights themselves, not only in layers within them."""
    layers = model._flatten_layers()
    return [one for one in layers if one._trainable_variables or one._non_trainable_variables]


def _quantised(model: Any) -> keras.Model:
    with warnings.catch_warnings():
        # One warning for each layer without int8; what was quantised is counted below.
        warnings.simplefilter("ignore")
        model.quantize(INT8)
    layers = [layer for layer in model._flatten_layers(include_self=False) if layer.weights]
    if not any(INT8 in layer.dtype_policy.name for layer in layers):
        raise NoVariant(f"No layer of model {model.name!r} can be quantised to int8.")
    return model
