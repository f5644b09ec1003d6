"""The dtype policy under which a model is built and trained."""

import contextlib
from collections.abc import Iterator, Sequence

import keras

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16", "float64")


def check_dtype_policies(dtype_policy: str | Sequence[str]) -> tuple[str, ...]:
    """Checks that Keras knows a dtype policy, or each of several.

    Raises:
        ValueError: If it does not, or none is given.
    """
    policies = (dtype_policy,) if isinstance(dtype_policy, str) else tuple(dtype_policy)
    if not policies or not set(policies) <= set(POLICIES):
        raise ValueError(
            f"`dtype_policy` must be at least one of {', '.join(POLICIES)}. "
            f"Received: dtype_policy={dtype_policy!r}."
        )
    return policies


@contextlib.contextmanager
def dtype_policy_scope(policy: str) -> Iterator[None]:
    """Sets Keras's global dtype policy and puts it back afterwards.

    keras-tuner clears Keras's session before each build, which resets the policy: set before the
    search, it would be lost in every trial.

    Args:
        policy: Name of a dtype policy.
    """
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def check_active_policy(model: keras.Model, policy: str) -> None:
    """Checks that a built model really runs under a policy.

    Raises:
        ValueError: If it does not, or float16 gradients would underflow for want of a loss
            scale.
    """
    layers = [layer for layer in model._flatten_layers(include_self=False) if layer.weights]
    used = {layer.dtype_policy.name for layer in layers}
    active = model.dtype_policy.name
    if used and policy not in used:
        active = ", ".join(sorted(used))
    if active != policy:
        raise ValueError(
            "The model is not built under the dtype policy of its trial: leave the policy out "
            "of the build function and give it as `dtype_policy` to `BatchSizeHyperModel`. "
            f"Received: policy of the model={active!r}, of the trial={policy!r}."
        )
    if policy == "mixed_float16" and not loss_scaled(model):
        raise ValueError(
            "mixed_float16 needs a loss scale and the model has none: leave out "
            "`auto_scale_loss=False` in `compile`. "
            f"Received: optimizer={type(model.optimizer).__name__}."
        )


def loss_scaled(model: keras.Model) -> bool:
    """Tells whether the optimizer scales the loss."""
    return isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
