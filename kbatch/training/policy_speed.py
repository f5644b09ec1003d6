"""How fast dtype policies are on this device."""

import functools
import random
import time
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from kbatch.device.examination import Finding, PolicySpeed
from kbatch.document.number_text import readable
from kbatch.training.dtype_policy import dtype_policy_scope

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
# Ratios nearer to 1 than this are not worth a change of policy.
_SAME_SPEED = 0.1
# Least seconds that a policy runs in a round.
_BLOCK_S = 0.15
# A policy whose step takes longer is timed once: the answer is clear.
_SLOW_S = 1.0
# From so many times the time of float32 on, float16 is no choice for a processor.
_FAR_SLOWER = 10.0


def measure_policy_speeds(
    *,
    rounds: int = 5,
    width: int | None = None,
    make_step: Callable[[str, int], Callable[[], object]] | None = None,
    policies: Sequence[str] = POLICIES,
) -> tuple[PolicySpeed, ...]:
    """Times a train step of a dense net under each policy, in turns.

    Nearly all of the step is products of square matrices, where policies differ most. A net of
    other layers, or one too small for the device, gains or loses less.

    Args:
        rounds: How many rounds; in each every policy has one turn.
        width: Units of a layer and examples in a batch; 4096 on a GPU and 512 on a CPU if None.
        make_step: Returns the step of a policy and a width, None for that of the dense net.
        policies: Names of the policies.
    """
    make_step = make_step or _train_step
    if width is None:
        width = 4096 if tf.config.list_physical_devices("GPU") else 512
    steps = {policy: make_step(policy, width) for policy in policies}
    times_s: dict[str, list[float]] = {policy: [] for policy in policies}
    calls: dict[str, int] = {}
    for policy, step in steps.items():
        step()  # Compilation is no part of a step.
        step_s = _time_s(step, 1)
        if step_s > _SLOW_S:
            times_s[policy].append(step_s)  # Many a CPU multiplies halves without its vector units.
        else:
            calls[policy] = max(1, round(_BLOCK_S / step_s))
    order = random.Random(0)
    for _ in range(rounds):
        for policy in order.sample(list(calls), len(calls)):
            times_s[policy].append(_time_s(steps[policy], calls[policy]))
    return tuple(PolicySpeed(policy, tuple(times_s[policy])) for policy in policies)


@functools.cache
def float16_slowdown() -> float | None:
    """Return how many times as long as in float32 a matrix product takes in float16 on the CPU.

    It takes about half a second, starts TensorFlow's devices and is done once in a process. None
    where there is a GPU.
    """
    if tf.config.list_physical_devices("GPU"):
        return None
    float32, float16 = measure_policy_speeds(
        rounds=1, width=256, make_step=_product, policies=("float32", "mixed_float16")
    )
    return 1 / float16.times_as_fast_as(float32)


def slow_float16_text(slowdown: float | None) -> str | None:
    """Return what to know of a processor that computes float16 far slower, None of another one.

    Args:
        slowdown: What `float16_slowdown` returned.
    """
    if slowdown is None or slowdown <= _FAR_SLOWER:
        return None
    return f"float16 takes {readable(slowdown, 2)} times as long as float32 on this processor"


def policy_finding(speeds: Sequence[PolicySpeed], device: str) -> Finding:
    """Says which policy is fast.

    Args:
        speeds: Float32's first.
        device: What they were measured on, such as `"CPU"`.

    Returns:
        A warning where mixed_float16, the default of a search, is slower than float32.
    """
    reference, *others = speeds
    ratios = {speed.dtype_policy: speed.times_as_fast_as(reference) for speed in others}
    measured = " and ".join(f"{name} {ratio:.2f} times" for name, ratio in ratios.items())
    text = f"{measured} as fast as {reference.dtype_policy} on this {device}"
    best = max(ratios, key=ratios.__getitem__)
    if ratios[best] > 1 + _SAME_SPEED:
        advice = f"use {best} for speed"
    elif max(ratios.values()) < 1 - _SAME_SPEED:
        advice = f"use {reference.dtype_policy} for speed, a mixed policy to save memory"
    else:
        advice = f"{best} saves memory, not time"
    slow = ratios.get("mixed_float16", 1.0) < 1 - _SAME_SPEED
    return Finding("dtype policy", "warning" if slow else "ok", f"{text}: {advice}")


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


def _product(policy: str, width: int) -> Callable[[], object]:
    values = np.random.default_rng(0).normal(size=(width, width))
    matrix = tf.constant(values, keras.DTypePolicy(policy).compute_dtype)
    return lambda: tf.linalg.matmul(matrix, matrix).numpy()


def _time_s(step: Callable[[], object], calls: int) -> float:
    started_s = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - started_s) / calls
