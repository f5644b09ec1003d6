"""A model under other dtype policies or quantised: copies, and how far their outputs differ."""

import contextlib
import functools
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.errors import InputError
from kbatch.inference.call_paths import InferenceInputs, fetched
from kbatch.library_internals import holds_variables, lambda_output_shape, layers_of, replaced
from kbatch.page.numbers import join_words
from kbatch.records.notes import Note
from kbatch.training.dtype_policy import POLICIES, PolicyUnsupported, dtype_policy_scope

INT8 = "int8"


def variants_of(
    model: keras.Model, inputs: InferenceInputs, dtype_policies: Any
) -> tuple[dict[str, keras.Model], dict[str, float | None], tuple[Note, ...]]:
    """Return the model under each policy, how its outputs differ from float32's, and notes."""
    names = (policy_of(model),) if dtype_policies is None else check_variants(dtype_policies)
    models: dict[str, keras.Model] = {}
    notes = []
    for name in names:
        try:
            models[name] = variant(model, name)
        except PolicyUnsupported as reason:
            notes.append(Note.of("policy_not_measured", policy=name, reason=str(reason)))
    if not models:
        raise InputError(
            "The model can be had under none of the policies: leave `dtype_policies` out to "
            f"measure it as it is. {' '.join(notes)} Received: dtype_policies={names}."
        )
    if inputs.note is not None:
        notes.append(inputs.note)
    if INT8 in models:
        layers = layers_with_weights(models[INT8])
        plain = [one.name for one in layers if INT8 not in one.dtype_policy.name]
        if plain:
            known = {"quantised": len(layers) - len(plain), "layers": len(layers)}
            notes.append(Note.of("not_quantised", **known, others=join_words(plain)))
    changes: dict[str, float | None] = {}
    others = {name: one for name, one in models.items() if name != "float32"}
    if others:
        with contextlib.suppress(PolicyUnsupported):  # Then there is nothing to compare with.
            reference = models.get("float32") or variant(model, "float32")
            expected = outputs_of(reference, inputs.rows)
            changes = {
                name: output_change(outputs_of(one, inputs.rows), expected)
                for name, one in others.items()
            }
    return models, changes, tuple(notes)


def check_variants(dtype_policies: Any) -> tuple[str, ...]:
    single = isinstance(dtype_policies, str) or not isinstance(dtype_policies, Iterable)
    names: tuple[Any, ...] = (dtype_policies,) if single else tuple(dtype_policies)
    known = all(name in (*POLICIES, INT8) for name in names)
    if not names or not known or len(set(names)) < len(names):
        raise InputError(
            f"`dtype_policies` must be at least one of {', '.join((*POLICIES, INT8))}, each once. "
            f"Received: dtype_policies={names!r}."
        )
    return names


def policy_of(model: keras.Model) -> str:
    """Name the policy that the layers with weights have; several are joined by `+`."""
    # Keras does not save the policy of the model itself: a loaded model has the global one.
    found = {layer.dtype_policy.name for layer in layers_with_weights(model)}
    return "+".join(sorted(found)) or model.dtype_policy.name


def variant(model: keras.Model, dtype_policy: str) -> keras.Model:
    """Return the model under a policy; the model itself stays as it is."""
    if dtype_policy == policy_of(model):
        return model
    if dtype_policy != INT8:
        return copy_under(model, dtype_policy)
    copy: Any = copy_under(model, "float32")
    with warnings.catch_warnings():
        # One warning for each layer without int8; `variants_of` counts what was quantised.
        warnings.simplefilter("ignore")
        copy.quantize(INT8)
    if not any(INT8 in layer.dtype_policy.name for layer in layers_with_weights(copy)):
        raise PolicyUnsupported(f"No layer of model {model.name!r} can be quantised to int8.")
    return copy


def output_change(outputs: Any, reference: Any) -> float | None:
    """Return the largest difference over the largest output; None if not finite or all zeros."""

    def flat(nested: Any) -> np.ndarray:
        leaves = keras.tree.flatten(nested)
        return np.concatenate([np.asarray(leaf, "float64").ravel() for leaf in leaves])

    expected = flat(reference)
    with np.errstate(invalid="ignore", divide="ignore"):
        change = float(np.max(np.abs(flat(outputs) - expected)) / np.max(np.abs(expected)))
    return change if np.isfinite(change) else None


def outputs_of(model: Any, batch: Any) -> Any:
    """Run a model eagerly on a batch."""
    return fetched(model(batch, training=False))


def copy_under(model: keras.Model, dtype_policy: str) -> keras.Model:
    """Copy a model; layers get the policy unless they compute whole numbers or text."""
    under_policy = functools.partial(_layer_under, policy=dtype_policy)
    try:
        # Layers that make others themselves leave them to the global policy.
        compiled = [one for one in layers_of(model) if getattr(one, "compiled", False)]
        # Keras would compile the copy of a `Sequential`, for which it may not know the loss.
        not_compiled = replaced((one, "compiled", False) for one in compiled)
        with dtype_policy_scope(dtype_policy), not_compiled:
            copy = keras.models.clone_model(model, clone_function=under_policy, recursive=True)
        copy.set_weights(model.get_weights())
        _give_state(model, copy)
    # What a layer raises that has no config or refuses the dtype in it, that makes other weights
    # than it had (`set_weights`), or whose first weights cannot be drawn in the dtype (the last).
    except (ValueError, TypeError, NotImplementedError, tf.errors.InvalidArgumentError) as error:
        raise PolicyUnsupported(
            f"A copy under {dtype_policy} cannot be made of model {model.name!r}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    others = [
        one.name for one in layers_with_weights(copy) if one.dtype_policy.name != dtype_policy
    ]
    if others:
        raise PolicyUnsupported(
            f"A copy under {dtype_policy} cannot be made of model {model.name!r}: layers keep a "
            f"policy of their own: {', '.join(others)}."
        )
    return copy


def layers_with_weights(model: Any) -> list[Any]:
    """Return the layers that hold weights themselves, not only in layers within them."""
    return [layer for layer in layers_of(model) if holds_variables(layer)]


def _layer_under(layer: Any, policy: str) -> Any:
    own = getattr(layer, "dtype_policy", None)
    # An operator between tensors, such as `+`, has no policy; one on whole numbers needs its own.
    if isinstance(layer, keras.layers.InputLayer) or own is None or own.name not in POLICIES:
        return type(layer).from_config(layer.get_config())
    if isinstance(layer, keras.layers.Lambda):
        # Read from a config, the function would have lost its module.
        return type(layer)(
            layer.function,
            output_shape=lambda_output_shape(layer),
            mask=layer.mask,
            arguments=layer.arguments,
            name=layer.name,
            dtype=policy,
        )
    return type(layer).from_config({**_with_policy(layer.get_config(), policy), "dtype": policy})


def _with_policy(config: Any, policy: str) -> Any:
    """Put a policy wherever a config, or one within it, has a policy; inputs have plain dtypes."""
    if isinstance(config, (list, tuple)):
        return type(config)(_with_policy(part, policy) for part in config)
    if not isinstance(config, dict):
        return config
    changed = {key: _with_policy(part, policy) for key, part in config.items()}
    own = config.get("dtype")
    if isinstance(own, dict):  # That of whole numbers stays.
        name = own.get("config", {}).get("name")
        changed["dtype"] = policy if name is None or "int" not in name.split("_")[0] else own
    return changed


def _give_state(model: Any, copy: Any) -> None:
    """Copy what layers hold beside weights, such as vocabularies, as Keras saves it."""
    pairs = zip(layers_of(model), layers_of(copy), strict=True)
    with tempfile.TemporaryDirectory(prefix="kbatch-") as folder:
        for number, (one, other) in enumerate(pairs):
            if type(one).load_own_variables is not keras.Layer.load_own_variables:
                store: dict[str, Any] = {}
                one.save_own_variables(store)
                other.load_own_variables(store)
            if hasattr(one, "save_assets"):
                place = Path(folder, str(number))
                place.mkdir()
                one.save_assets(str(place))
                other.load_assets(str(place))
