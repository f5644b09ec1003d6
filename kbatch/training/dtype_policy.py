"""The dtype policy and the seed under which a model is built."""

import contextlib
import operator
import random
from collections.abc import Iterator, Sequence

import keras
import numpy as np

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
def building_under(policy: str, seed: int | None) -> Iterator[None]:
    """Sets the global dtype policy and the seeds, and puts them back afterwards.

    TensorFlow's own global seed cannot be read; keras-tuner resets it before the next build.

    keras-tuner clears Keras's session before each build, which resets both: set before the
    search, they would be lost in every trial.

    Args:
        policy: Name of a dtype policy.
        seed: Seed of Python, NumPy and Keras, None to leave them alone.
    """
    before = keras.config.dtype_policy()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    keras.config.set_dtype_policy(policy)
    try:
        if seed is not None:
            keras.utils.set_random_seed(seed)
        yield
    finally:
        keras.config.set_dtype_policy(before)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def check_seed(seed: int | None) -> int | None:
    """Checks that a seed is None or an integer of at least 0.

    Raises:
        ValueError: If it is not.
    """
    if seed is None:
        return None
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or operator.index(seed) < 0:
        raise ValueError(
            f"`seed` must be None or an integer of at least 0. Received: seed={seed!r}."
        )
    return operator.index(seed)


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
