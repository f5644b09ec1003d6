import keras
import numpy as np
import pytest
import tensorflow as tf
from fake_clock import FakeClock

from kbatch.device.doctor import PolicySpeed
from kbatch.training.dtype_policy import TIMED_POLICIES as POLICIES
from kbatch.training.dtype_policy import (
    _convolution,
    _product,
    float16_slowdown,
    measure_policy_speeds,
    policy_finding,
    slow_float16_text,
)


def finding(float16, bfloat16):
    """The finding where the policies are so many times as fast as float32."""
    ratios = {"float32": 1.0, "mixed_float16": float16, "mixed_bfloat16": bfloat16}
    return policy_finding([PolicySpeed(name, (1 / r,)) for name, r in ratios.items()], "CPU")


@pytest.mark.parametrize(
    ("float16", "bfloat16", "status", "advice"),
    [
        (0.6, 0.5, "warning", "use float32 for speed, a mixed policy to save memory"),
        (0.6, 1.5, "warning", "use mixed_bfloat16 for speed"),
        (2.1, 2.0, "ok", "use mixed_float16 for speed"),
        (1.02, 0.97, "ok", "mixed_float16 saves memory, not time"),
        (0.6, 1.0, "warning", "mixed_bfloat16 saves memory, not time"),
    ],
)
def test_the_fast_policy_is_named(float16, bfloat16, status, advice):
    found = finding(float16, bfloat16)
    assert found.status == status
    assert found.text.endswith(advice)


def test_both_ratios_are_told():
    text = finding(0.6, 1.5).text
    assert "mixed_float16 0.60 times and mixed_bfloat16 1.50 times as fast as float32" in text
    assert "on this CPU" in text


def test_every_policy_is_timed_in_every_round_and_the_global_one_is_kept():
    before = keras.config.dtype_policy()
    speeds = measure_policy_speeds(rounds=2, width=16)
    assert [speed.dtype_policy for speed in speeds] == list(POLICIES)
    assert all(len(speed.step_times_s) == 2 for speed in speeds)
    assert all(time_s > 0 for speed in speeds for time_s in speed.step_times_s)
    assert keras.config.dtype_policy() == before


def test_a_policy_that_is_far_too_slow_is_timed_once(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr("time.perf_counter", clock)
    step_s = {"float32": 0.01, "mixed_float16": 8.0, "mixed_bfloat16": 0.005}

    def make_step(policy, width):
        return lambda: clock.sleep(step_s[policy])

    float32, float16, bfloat16 = measure_policy_speeds(make_step=make_step)
    assert [len(speed.step_times_s) for speed in (float32, float16, bfloat16)] == [5, 1, 5]
    assert float16.times_as_fast_as(float32) == pytest.approx(0.01 / 8)
    assert bfloat16.times_as_fast_as(float32) == pytest.approx(2)


def test_only_a_processor_that_is_far_slower_in_float16_is_told_of():
    assert slow_float16_text(9.0) is slow_float16_text(None) is None
    told = "float16 takes up to 520 times as long as float32 on this processor"
    assert slow_float16_text(520.3) == told


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="about processors")
@pytest.mark.parametrize("make_step", [_product, _convolution])
def test_float16_is_timed_on_what_float32_computes_too(make_step):
    float32, float16 = (make_step(policy, 4)() for policy in ("float32", "mixed_float16"))
    assert (float32.dtype, float16.dtype) == ("float32", "float16")
    off = np.linalg.norm(float16 - float32) / np.linalg.norm(float32)
    assert off < 5e-3  # A float16 has 11 bits, and sums of 256 are wrong in more of them.


def test_the_slower_of_products_and_convolutions_counts(monkeypatch):
    def measured(*, make_step, policies, **_):
        times = {_product: (1.0, 2.0), _convolution: (1.0, 30.0)}[make_step]
        return [PolicySpeed(name, (s,)) for name, s in zip(policies, times, strict=True)]

    monkeypatch.setattr("kbatch.training.dtype_policy.measure_policy_speeds", measured)
    assert float16_slowdown.__wrapped__() == 30
