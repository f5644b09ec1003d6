import keras
import pytest
import tensorflow as tf
from fake_clock import FakeClock

from kbatch.training.dtype_policy import TIMED_POLICIES as POLICIES
from kbatch.training.dtype_policy import measure_policy_speeds


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
        {
            "float32": lambda: 0.2,
            "mixed_float16": lambda: next(slow),
            "mixed_bfloat16": lambda: 0.2,
        }
    )
    assert ratios["mixed_float16"] == pytest.approx(0.5)


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
