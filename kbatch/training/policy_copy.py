"""A copy of a model under another dtype policy, with the same weights and the same state."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from kbatch.training.dtype_policy import POLICIES, dtype_policy_scope


class NoVariant(ValueError):
    """A model that cannot be had under a policy; the message says why."""


def copy_under(model: keras.Model, dtype_policy: str) -> keras.Model:
    """Copies a model; all layers get the policy, those with one of their own as well.

    Layers that compute whole numbers or text, such as a hash or a vocabulary, keep their dtype.

    Args:
        model: A built model, which stays as it is.
        dtype_policy: Name of a dtype policy.

    Returns:
        The copy, not compiled.

    Raises:
        NoVariant: If it cannot be.
    """

    def under_policy(layer: Any) -> Any:
        return _layer_under(layer, dtype_policy)

    try:
        # Layers that make others themselves leave them to the global policy.
        with dtype_policy_scope(dtype_policy), _not_compiled(model):
            copy = keras.models.clone_model(model, clone_function=under_policy, recursive=True)
        copy.set_weights(model.get_weights())
        _give_state(model, copy)
    # What a layer raises that has no config or refuses the dtype in it, that makes other weights
    # than it had (`set_weights`), or whose first weights cannot be drawn in the dtype (the last).
    except (ValueError, TypeError, NotImplementedError, tf.errors.InvalidArgumentError) as error:
        raise NoVariant(
            f"A copy under {dtype_policy} cannot be made of model {model.name!r}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    others = [
        one.name for one in layers_with_weights(copy) if one.dtype_policy.name != dtype_policy
    ]
    if others:
        raise NoVariant(
            f"A copy under {dtype_policy} cannot be made of model {model.name!r}: layers keep a "
            f"policy of their own: {', '.join(others)}."
        )
    return copy


def layers_with_weights(model: Any) -> list[Any]:
    """Gives the layers that hold weights themselves, not only in layers within them."""
    layers = model._flatten_layers()
    return [one for one in layers if one._trainable_variables or one._non_trainable_variables]


@contextlib.contextmanager
def _not_compiled(model: Any) -> Iterator[None]:
    """Keeps Keras from compiling the copy of a `Sequential`, for which it may not know the loss."""
    compiled = [one for one in model._flatten_layers() if getattr(one, "compiled", False)]
    for one in compiled:
        one.compiled = False
    try:
        yield
    finally:
        for one in compiled:
            one.compiled = True


def _layer_under(layer: Any, policy: str) -> Any:
    own = getattr(layer, "dtype_policy", None)
    # An operator between tensors, such as `+`, has no policy; one on whole numbers needs its own.
    if isinstance(layer, keras.layers.InputLayer) or own is None or own.name not in POLICIES:
        return type(layer).from_config(layer.get_config())
    if isinstance(layer, keras.layers.Lambda):
        return _lambda_under(layer, policy)
    return type(layer).from_config({**_with_policy(layer.get_config(), policy), "dtype": policy})


def _lambda_under(layer: Any, policy: str) -> Any:
    """Copies a layer of a function: read from a config, the function would have lost its module."""
    return type(layer)(
        layer.function,
        output_shape=layer._output_shape,
        mask=layer.mask,
        arguments=layer.arguments,
        name=layer.name,
        dtype=policy,
    )


def _with_policy(config: Any, policy: str) -> Any:
    """Puts a policy wherever a config, or one within it, has a policy; inputs have plain dtypes."""
    if isinstance(config, (list, tuple)):
        return type(config)(_with_policy(part, policy) for part in config)
    if not isinstance(config, dict):
        return config
    return {
        key: policy if key == "dtype" and _is_policy(part) else _with_policy(part, policy)
        for key, part in config.items()
    }


def _is_policy(part: Any) -> bool:
    """Tells whether a part of a config is a policy, and not that of whole numbers."""
    if not isinstance(part, dict):
        return False
    name = part.get("config", {}).get("name")
    return name is None or "int" not in name.split("_")[0]


def _give_state(model: Any, copy: Any) -> None:
    """Gives layers what they hold beside weights, as vocabularies, by Keras's ways to save it."""
    pairs = zip(model._flatten_layers(), copy._flatten_layers(), strict=True)
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
