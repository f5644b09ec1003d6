import keras
import numpy as np
import pytest
import tensorflow as tf
from fake_clock import FakeClock

from kbatch.training.dtype_policy import TIMED_POLICIES as POLICIES
from kbatch.training.dtype_policy import (
    _convolution,
    _product,
    float16_slowdown,
    measure_policy_speeds,
    slow_float16_text,
)


def ratios_of(step_s, **arguments):
    """The ratios of policies whose steps take what these functions return."""
    clock = FakeClock()

    def make_step(policy, width):
        return lambda: clock.sleep(step_s[policy]())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", clock)
        return measure_policy_speeds(make_step=make_step, **arguments)


def test_every_policy_is_timed_and_the_global_one_is_kept():
    before = keras.config.dtype_policy()
    ratios = measure_policy_speeds(rounds=2, width=16)
    assert list(ratios) == list(POLICIES)
    assert ratios["float32"] == 1.0
    assert all(ratio > 0 for ratio in ratios.values())
    assert keras.config.dtype_policy() == before


def test_a_ratio_is_the_median_over_the_rounds():
    """A round that was disturbed for one of them does not move it."""
    # Compiled, sized by a second call, then five rounds of one call.
    slow = iter([0.4, 0.4, 0.4, 0.4, 90.0, 0.4, 0.4])
    ratios = ratios_of(
        {"float32": lambda: 0.2, "mixed_float16": lambda: next(slow)}, policies=POLICIES[:2]
    )
    assert ratios == {"float32": 1.0, "mixed_float16": pytest.approx(0.5)}


def test_a_policy_that_is_far_too_slow_is_timed_once():
    calls = []

    def float16():
        calls.append(1)
        return 8.0

    ratios = ratios_of(
        {"float32": lambda: 0.01, "mixed_float16": float16, "mixed_bfloat16": lambda: 0.005}
    )
    assert len(calls) == 2  # One compiles.
    assert ratios["mixed_float16"] == pytest.approx(0.01 / 8)
    assert ratios["mixed_bfloat16"] == pytest.approx(2)


def test_bfloat16_is_left_out_where_the_device_cannot_compute_it():
    def fails():
        raise tf.errors.UnimplementedError(None, None, "no kernel")

    steps = {"float32": lambda: 0.01, "mixed_float16": lambda: 0.01, "mixed_bfloat16": fails}
    assert list(ratios_of(steps)) == ["float32", "mixed_float16"]
    with pytest.raises(tf.errors.UnimplementedError):
        ratios_of(steps | {"mixed_float16": fails})


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
        return {name: times[0] / s for name, s in zip(policies, times, strict=True)}

    monkeypatch.setattr("kbatch.training.dtype_policy.measure_policy_speeds", measured)
    assert float16_slowdown.__wrapped__() == 30
