"""Set a dtype policy while a model is built, and check that the model trains under it."""

import contextlib
import math
import re
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from kbatch.device.failures import COLOURS, ran_out_of_memory
from kbatch.errors import PolicyUnsupported
from kbatch.library_internals import layers_of
from kbatch.training.model import loss_scaled, updates_made

HALF = "mixed_float16"
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16", "float64")


def global_policy() -> str:
    """Return the name of the dtype policy that `keras.config` sets for new layers."""
    # If a layer was made before the float type changed, Keras still returns the old policy.
    name, floatx = keras.config.dtype_policy().name, keras.config.floatx()
    return floatx if name == "float32" else name


def check_dtype_policies(dtype_policy: str | Sequence[str]) -> tuple[str, ...]:
    policies = (dtype_policy,) if isinstance(dtype_policy, str) else tuple(dtype_policy)
    if not policies or not set(policies) <= set(POLICIES):
        raise ValueError(
            f"`dtype_policy` must be one or more of {', '.join(POLICIES)}. "
            f"Received: dtype_policy={dtype_policy!r}."
        )
    return policies


@contextlib.contextmanager
def dtype_policy_scope(policy: str) -> Iterator[None]:
    """Set Keras's global dtype policy within a context.

    An error that half precision causes becomes a `PolicyUnsupported`, which names the layer.
    """
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    except Exception as error:  # Layers raise errors of any type: only the text shows the cause.
        if (text := _refusal(error, policy)) is not None:
            raise PolicyUnsupported(text) from error
        raise
    finally:
        keras.config.set_dtype_policy(before)


# TensorFlow's names of half-precision dtypes. DT_HALF is in errors about missing operations.
_HALF_NAMES = re.compile(r"float16|\bhalf\b|OpKernel.*DT_HALF", re.DOTALL)


def _refusal(error: Exception, policy: str) -> str | None:
    """Describe the layer that cannot compute in half precision, or return None."""
    text, _, _ = COLOURS.sub("", str(error)).partition("Arguments received by")
    is_half = "16" in policy and _HALF_NAMES.search(text)
    if not is_half or isinstance(error, PolicyUnsupported):
        return None
    layer = re.search(r"when calling (.+?\.call)\b", text)
    raised_by_user = layer is None and _raised_by_user(error)
    if raised_by_user or ran_out_of_memory(error, smaller_worked=True):
        return None
    lines = (line.strip() for line in text.splitlines() if _HALF_NAMES.search(line))
    return (
        f"{f'`{layer[1]}`' if layer else 'A layer, loss or metric'} cannot compute under {policy}: "
        'cast its constants, `tf.cast(constant, x.dtype)`, or give it `dtype="float32"`. '
        f"Received: {type(error).__name__}: {next(lines, text)[:200]}"
    )


def _raised_by_user(error: Exception) -> bool:
    """Return whether a `raise` statement outside Keras and TensorFlow raised an error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    # Code that AutoGraph has converted passes on the errors of operations.
    in_library = re.search(r"site-packages.(keras|tensorflow)\b|__autograph_", last.filename)
    return in_library is None and re.search(r"\braise\b", last.line or "") is not None


def check_own_dtypes(model: Any, policy: str) -> None:
    """Raise PolicyUnsupported if every layer has its own float32 dtype and ignores the policy."""
    follows = isinstance(model, keras.Model) and model.dtype_policy.name == policy != "float32"
    if follows and _policies_used(model) == {"float32"}:
        raise PolicyUnsupported('every layer with weights has its own `dtype="float32"`')


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
            "The model must have the dtype policy of its trial: give `dtype_policy` to "
            "`BatchSizeHyperModel`, and set no policy in the build function. If this function "
            "loads a saved model, give the policy of that model. "
            f"Received: policy of the model={active!r}, of the trial={policy!r}."
        )
    if policy == "mixed_float16" and not loss_scaled(model):
        raise ValueError(
            "mixed_float16 requires a loss scale: leave out `auto_scale_loss=False` in `compile`. "
            f"Received: optimizer={type(model.optimizer).__name__}."
        )


def check_loss_is_scaled(model: Any) -> None:
    """Raise PolicyUnsupported if the user's train step was traced and does not scale its loss."""
    if loss_scaled(model) and not getattr(model, "scales_loss", True):
        raise PolicyUnsupported(
            "`train_step` must take the gradient of `self.optimizer.scale_loss(loss)`, because "
            "in float16 the optimizer divides each gradient by the loss scale"
        )


def skips_all_updates(model: Any) -> bool:
    """Return whether every update so far overflowed, so that the loss scale skipped it."""
    # A custom step may use another optimizer, so also check that overflows have lowered the scale.
    optimizer = model.optimizer
    if updates_made(model) or not (loss_scaled(model) and optimizer.built):
        return False
    return bool(keras.ops.convert_to_numpy(optimizer.dynamic_scale) < optimizer.initial_scale)


def overflows(model: Any) -> int:
    """Return how often overflows have halved the loss scale, minus how often it has doubled."""
    optimizer = model.optimizer
    if not (loss_scaled(model) and optimizer.built):
        return 0
    scale = keras.ops.convert_to_numpy(optimizer.dynamic_scale)  # `float` fails on replicas.
    return max(0, round(math.log2(optimizer.initial_scale / scale)))
