"""A model under other dtype policies, or quantised, with the same weights."""

import warnings
from typing import Any

import keras
import numpy as np

from kbatch.profiling.inference_paths import fetched
from kbatch.records.inference_measurements import OutputChange
from kbatch.training.dtype_policy import check_dtype_policies
from kbatch.training.errors import InputError

INT8 = "int8"


class NoVariant(ValueError):
    """A model that cannot be had under a policy; the message says why."""


def check_variants(dtype_policies: Any) -> tuple[str, ...]:
    """Checks the names of dtype policies, or `"int8"`.

    Raises:
        InputError: If one is unknown or repeated.
    """
    names = (dtype_policies,) if isinstance(dtype_policies, str) else tuple(dtype_policies)
    if not names or len(set(names)) < len(names):
        raise InputError(
            "`dtype_policies` must be at least one policy, each once. "
            f"Received: dtype_policies={dtype_policies!r}."
        )
    policies = [name for name in names if name != INT8]
    if policies:
        check_dtype_policies(policies)
    return names


def variant(model: keras.Model, dtype_policy: str) -> keras.Model:
    """Gives the model under a policy; the model itself stays as it is.

    All layers get the policy, those with one of their own as well.

    Args:
        model: A built model.
        dtype_policy: Name of a dtype policy, or `"int8"` for Keras's quantisation.

    Raises:
        NoVariant: If it cannot be.
    """
    if dtype_policy == model.dtype_policy.name:
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
        return layer.__class__.from_config({**layer.get_config(), "dtype": policy})

    try:
        clone = keras.models.clone_model(model, clone_function=under_policy, recursive=True)
        clone.set_weights(model.get_weights())
    except (ValueError, TypeError, NotImplementedError) as error:
        raise NoVariant(
            f"A copy under {policy} cannot be made of model {model.name!r}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return clone


def _quantised(model: Any) -> keras.Model:
    with warnings.catch_warnings():
        # One warning for each layer without int8; what was quantised is counted below.
        warnings.simplefilter("ignore")
        model.quantize(INT8)
    layers = [layer for layer in model._flatten_layers(include_self=False) if layer.weights]
    if not any(INT8 in layer.dtype_policy.name for layer in layers):
        raise NoVariant(f"No layer of model {model.name!r} can be quantised to int8.")
    return model
