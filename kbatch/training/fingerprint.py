"""What distinguishes one model from another: its configuration, weights and compilation."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from kbatch.library_internals import compile_arguments, layers_of
from kbatch.training.state import optimizers_of


def model_fingerprint(model: keras.Model) -> str:
    """Return a text that is equal for models that differ at most in their optimizer's settings.

    It is the same in any process.
    """
    # These follow the batch size.
    found = model_description(model, without=("learning_rate", "momentum"))
    del found["other optimizers"]
    optimizer: Any = getattr(model, "optimizer", None)
    found["optimizer"] = name_of(type(getattr(optimizer, "inner_optimizer", optimizer)))
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def model_description(model: keras.Model, *, without: Sequence[str]) -> dict[str, Any]:
    """Describe what a compiled model is and how it trains, equal in any process.

    Parts of these names are left out.
    """
    target: Any = model
    parts = layers_of(target)
    # Operations such as a sum of two tensors are no layers, and counted up as these are.
    operations = [o for part in parts for o in getattr(part, "operations", ())]
    counted = dict.fromkeys(part.name for part in (*parts, *operations))
    names = {name: f"layer {i}" for i, name in enumerate(counted)}
    compiled = compile_arguments(target)
    compiled.pop("optimizer", None)

    def own_described(value: Any) -> Any:
        # Keras counts names up, and draws seeds that are not given.
        return described(value, names, ("name", "seed", *without))

    own = (target.optimizer, getattr(target.optimizer, "inner_optimizer", None))
    others = [one for one in optimizers_of(target) if all(one is not known for known in own)]
    found = {
        "model": own_described(model),
        "weights": [
            (tuple(one.shape), one.dtype, one.trainable, *map(own_described, rules_of(one)))
            for one in target.weights
        ],
        "trainable": [tuple(weight.shape) for weight in target.trainable_weights],
        "policy": target.dtype_policy.name,
        "optimizer": own_described(target.optimizer),
        "other optimizers": sorted(map(own_described, others), key=json.dumps),
        "compiled": own_described(compiled | {"jit_compile": target.jit_compile}),
    }
    return {name: value for name, value in found.items() if name not in without}


def described(
    value: Any, names: dict[str, str], dropped: Sequence[str], *, within: bool = False
) -> Any:
    """Return plain data: never a `repr`, which may hold an address in memory.

    `names` are others for texts, and keys in `dropped` are left out `within` configurations.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        kept = {str(k): item for k, item in value.items() if not (within and k in dropped)}
        return {k: described(kept[k], names, dropped, within=within) for k in sorted(kept)}
    if isinstance(value, (list, tuple)):
        return [described(item, names, dropped, within=within) for item in value]
    if hasattr(value, "get_config") and not isinstance(value, type):
        config = config_of(value)
        if config is None:  # Its weights and layers still describe it.
            config = getattr(value, "layers", [])
        return [name_of(type(value)), described(config, names, dropped, within=True)]
    return name_of(value)


def config_of(part: Any) -> dict[str, Any] | None:
    """Return the configuration of a part of a model, None where Keras has none."""
    try:
        return part.get_config()
    # Keras refuses with the first to describe a subclass without a `get_config` of its own, and
    # with the others parts that it cannot serialize.
    except (NotImplementedError, TypeError, ValueError):
        return None


def name_of(part: Any) -> str:
    """Return the full name of a function or a class, or that of the class of another object."""
    # A generator has the one name without the other.
    whole = hasattr(part, "__qualname__") and hasattr(part, "__module__")
    named = part if whole else type(part)
    return f"{named.__module__}.{named.__qualname__}"


def rules_of(weight: Any) -> tuple[Any, Any]:
    return getattr(weight, "regularizer", None), getattr(weight, "constraint", None)
