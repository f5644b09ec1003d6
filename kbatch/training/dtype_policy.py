"""Dtype policies: the scope of one, and whether a model trains under it."""

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
    # Keras keeps the policy of the float type before, once a layer has been made under it.
    name, floatx = keras.config.dtype_policy().name, keras.config.floatx()
    return floatx if name == "float32" else name


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
    except Exception as error:  # Layers raise errors of any kind; the text says what it is.
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
    if layer is None and _raised_by_user(error):
        return None
    lines = (line.strip() for line in said.splitlines() if _HALF.search(line))
    return (
        f"{f'`{layer[1]}`' if layer else 'A layer, loss or metric'} cannot compute under {policy}: "
        'cast its constants, `tf.cast(constant, x.dtype)`, or give it `dtype="float32"`. '
        f"Received: {type(error).__name__}: {next(lines, said)[:200]}"
    )


def _raised_by_user(error: Exception) -> bool:
    """Return whether a `raise` outside of Keras and TensorFlow made an error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    # What a function of Python became in a graph passes on what an operation has raised.
    in_library = re.search(r"site-packages.(keras|tensorflow)\b|__autograph_", last.filename)
    return in_library is None and re.search(r"\braise\b", last.line or "") is not None


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
