"""Dtype policies: the scope of one, a model's copy under another, and their speed here."""

import contextlib
import functools
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.device.failures import COLOURS, ran_out_of_memory
from kbatch.library_internals import holds_variables, lambda_output_shape, layers_of, replaced
from kbatch.training.state import updates_made

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16", "float64")


def check_dtype_policies(dtype_policy: str | Sequence[str]) -> tuple[str, ...]:
    policies = (dtype_policy,) if isinstance(dtype_policy, str) else tuple(dtype_policy)
    if not policies or not set(policies) <= set(POLICIES):
        raise ValueError(
            f"`dtype_policy` must be at least one of {', '.join(POLICIES)}. "
            f"Received: dtype_policy={dtype_policy!r}."
        )
    return policies


@contextlib.contextmanager
def dtype_policy_scope(policy: str) -> Iterator[None]:
    """Set Keras's global dtype policy, and put it back; what half precision raises is named."""
    # keras-tuner clears Keras's session before each build: a policy set before a search would be
    # lost in every trial.
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    except Exception as error:
        if (text := _refusal(error, policy)) is not None:
            raise PolicyUnsupported(text) from error
        raise
    finally:
        keras.config.set_dtype_policy(before)


# How TensorFlow names the types; its graph names that of any operation in brackets.
_HALF = re.compile(r"float16|\bhalf\b|OpKernel.*DT_HALF", re.DOTALL)


def _refusal(error: Exception, policy: str) -> str | None:
    """Describe what cannot compute in half precision, None where that is not what went wrong."""
    said, _, _ = COLOURS.sub("", str(error)).partition("Arguments received by")
    found = "16" in policy and not isinstance(error, PolicyUnsupported) and _HALF.search(said)
    if not found or ran_out_of_memory(error, smaller_worked=True):
        return None
    layer = re.search(r"when calling (.+?\.call)\b", said)
    lines = (line.strip() for line in said.splitlines() if _HALF.search(line))
    return (
        f"{f'`{layer[1]}`' if layer else 'A layer, loss or metric'} cannot compute under {policy}: "
        'cast its constants, `tf.cast(constant, x.dtype)`, or give it `dtype="float32"`. '
        f"Received: {type(error).__name__}: {next(lines, said)[:200]}"
    )


def check_own_dtypes(model: Any, policy: str) -> None:
    """Check that not every layer leaves the policy of its model by a dtype of its own."""
    given = isinstance(model, keras.Model) and model.dtype_policy.name == policy != "float32"
    if given and _policies_used(model) == {"float32"}:
        raise PolicyUnsupported('every layer with weights has `dtype="float32"` of its own')


def _policies_used(model: keras.Model) -> set[str]:
    layers = [layer for layer in layers_of(model, include_self=False) if layer.weights]
    return {layer.dtype_policy.name for layer in layers}


def check_active_policy(model: keras.Model, policy: str) -> None:
    used = _policies_used(model)
    active = model.dtype_policy.name
    if used and policy not in used:
        active = ", ".join(sorted(used))
    if active != policy:
        raise ValueError(
            "The model must have the dtype policy of its trial: do not set a policy in the build "
            "function, give it as `dtype_policy` to `BatchSizeHyperModel`. For a model which is "
            "loaded, give the policy that it was saved with. "
            f"Received: policy of the model={active!r}, of the trial={policy!r}."
        )
    if policy == "mixed_float16" and not loss_scaled(model):
        raise ValueError(
            "mixed_float16 needs a loss scale and the model has none: leave out "
            "`auto_scale_loss=False` in `compile`. "
            f"Received: optimizer={type(model.optimizer).__name__}."
        )


def loss_scaled(model: keras.Model) -> bool:
    return isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def check_loss_is_scaled(model: Any) -> None:
    """Check that a train step of the user's own, which was traced, scales its loss in float16."""
    if loss_scaled(model) and not getattr(model, "scales_loss", True):
        raise PolicyUnsupported(
            "Its `train_step` does not scale the loss, so that float16 would divide each gradient "
            "by the loss scale: take the gradient of `self.optimizer.scale_loss(loss)`"
        )


def skips_all_updates(model: Any) -> bool:
    """Return whether the loss scale has skipped every update so far, since each overflowed."""
    # Overflows alone lower the scale; a step of the user's own may use other optimizers.
    optimizer = model.optimizer
    if updates_made(model) or not (loss_scaled(model) and optimizer.built):
        return False
    return float(optimizer.dynamic_scale) < optimizer.initial_scale


def overflows(model: Any) -> int:
    """Return how often overflows have halved the loss scale, net of what raised it again."""
    optimizer = model.optimizer
    if not (loss_scaled(model) and optimizer.built):
        return 0
    return max(0, round(math.log2(optimizer.initial_scale / float(optimizer.dynamic_scale))))


class PolicyUnsupported(ValueError):
    """A model that cannot be had under a policy; the message says why."""


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


TIMED_POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
# Seconds that the steps of a policy are timed for, and at least one: many a CPU multiplies halves
# without its vector units.
_TIMED_S = 0.5


def measure_policy_speeds(*, width: int | None = None) -> dict[str, float]:
    """Time a train step under each policy: how many times as fast it is as in float32.

    The step is that of a dense net, nearly all matrix products, at its fastest. A device that
    cannot compute in bfloat16 has no ratio of it.
    """
    if width is None:
        width = 4096 if tf.config.list_physical_devices("GPU") else 512
    fastest_s: dict[str, float] = {}
    for policy in TIMED_POLICIES:
        step = _train_step(policy, width)
        try:
            step()  # Compilation is no part of a step.
        except tf.errors.OpError:
            if policy != "mixed_bfloat16":
                raise
            continue
        times_s: list[float] = []
        while sum(times_s) < _TIMED_S:
            started_s = time.perf_counter()
            step()
            times_s.append(time.perf_counter() - started_s)
        fastest_s[policy] = min(times_s)
    return {policy: fastest_s["float32"] / own_s for policy, own_s in fastest_s.items()}


def _train_step(policy: str, width: int) -> Callable[[], object]:
    rng = np.random.default_rng(0)
    x = tf.constant(rng.normal(size=(width, width)), tf.float32)
    y = tf.constant(rng.integers(0, 10, width))
    with dtype_policy_scope(policy):
        layers = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
        output = keras.layers.Dense(10, dtype="float32")
        model = keras.Sequential([keras.Input((width,)), *layers, output])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
    return lambda: model.train_on_batch(x, y)
