import itertools

import numpy as np
import pytest

from kbatch.analysis.goodput import statistical_efficiency
from kbatch.analysis.learning_rate import (
    check_rule,
    learning_rate_ratio,
    scale_learning_rate,
)

RULES = [
    {"rule": "linear"},
    {"rule": "sqrt"},
    {"rule": None},
    {"rule": "noise", "noise_scale": 100.0},
    {"rule": "noise", "noise_scale": 100.0, "adaptive": True},
]
# Batch sizes far apart.
SIZES = {"batch_size": 4096, "base_batch_size": 32}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("a", "b", "c"), list(itertools.permutations([1, 24, 1000])))
def test_two_steps_give_the_same_as_one(rule, a, b, c):
    through = scale_learning_rate(
        scale_learning_rate(0.1, batch_size=b, base_batch_size=a, **rule),
        batch_size=c,
        base_batch_size=b,
        **rule,
    )
    direct = scale_learning_rate(0.1, batch_size=c, base_batch_size=a, **rule)
    np.testing.assert_allclose(through, direct)


@pytest.mark.parametrize("rule", RULES)
def test_the_base_size_keeps_its_learning_rate(rule):
    assert scale_learning_rate(0.3, batch_size=48, base_batch_size=48, **rule) == 0.3


@pytest.mark.parametrize(("adaptive", "plain"), [(False, "linear"), (True, "sqrt")])
def test_far_below_the_noise_scale_the_noise_rule_is_the_plain_rule(adaptive, plain):
    ratio = learning_rate_ratio(**SIZES, rule="noise", noise_scale=1e12, adaptive=adaptive)
    np.testing.assert_allclose(ratio, learning_rate_ratio(**SIZES, rule=plain), rtol=1e-6)


def test_past_the_noise_scale_the_noise_rule_stops():
    ratios = [
        learning_rate_ratio(batch_size=b, base_batch_size=32, rule="noise", noise_scale=96.0)
        for b in (32, 96, 960, 96_000, 10**9)
    ]
    assert ratios == sorted(ratios)
    np.testing.assert_allclose(ratios[-1], (96 + 32) / 32, rtol=1e-6)


def test_at_the_noise_scale_the_learning_rate_is_half_its_largest():
    at, far = (
        scale_learning_rate(0.1, batch_size=b, base_batch_size=1, rule="noise", noise_scale=96.0)
        for b in (96, 10**9)
    )
    np.testing.assert_allclose(at, far / 2, rtol=1e-6)


def test_without_noise_every_size_keeps_the_learning_rate():
    assert learning_rate_ratio(**SIZES, rule="noise", noise_scale=0.0) == 1


def test_the_gain_is_kappa_times_the_statistical_efficiency():
    gain = learning_rate_ratio(**SIZES, rule="noise", noise_scale=96.0)
    efficiency = statistical_efficiency(4096, noise_scale=96, base_batch_size=32)
    np.testing.assert_allclose(gain, 128 * efficiency)


def test_the_gain_is_adascales_ratio_of_second_moments():
    variance, squared_norm = 9.6, 0.1
    second_moments = [squared_norm + variance / b for b in (32, 4096)]
    gain = learning_rate_ratio(**SIZES, rule="noise", noise_scale=variance / squared_norm)
    np.testing.assert_allclose(gain, second_moments[0] / second_moments[1])


def test_for_adam_the_noise_rule_is_the_square_root():
    plain, adaptive = (
        learning_rate_ratio(**SIZES, rule="noise", noise_scale=96.0, adaptive=adaptive)
        for adaptive in (False, True)
    )
    np.testing.assert_allclose(adaptive**2, plain)


@pytest.mark.parametrize("noise_scale", [None, -1.0, np.nan, np.inf])
def test_the_noise_rule_needs_a_noise_scale(noise_scale):
    with pytest.raises(ValueError, match=f"needs `noise_scale`.*noise_scale={noise_scale}"):
        scale_learning_rate(0.1, **SIZES, rule="noise", noise_scale=noise_scale)


def test_a_rule_has_a_name():
    with pytest.raises(ValueError, match=r"'noise' .*scaling='cubic'"):
        check_rule("cubic", "scaling")


def test_without_a_rule_every_size_keeps_the_learning_rate():
    assert scale_learning_rate(0.3, batch_size=4096, base_batch_size=1, rule=None) == 0.3


def test_the_square_root_rule_squared_is_the_linear_rule():
    sizes = {"batch_size": 96, "base_batch_size": 32}
    assert learning_rate_ratio(**sizes, rule="linear") == 3
    np.testing.assert_allclose(learning_rate_ratio(**sizes, rule="sqrt") ** 2, 3)


def test_an_unknown_rule_is_named():
    with pytest.raises(ValueError, match=r"`rule` must be .*rule='cubic'"):
        scale_learning_rate(0.1, batch_size=2, base_batch_size=1, rule="cubic")


@pytest.mark.parametrize(("batch_size", "base_batch_size"), [(0, 8), (8, 0), (-8, 8)])
def test_sizes_must_be_positive(batch_size, base_batch_size):
    with pytest.raises(ValueError, match=f"batch_size={batch_size}"):
        scale_learning_rate(
            0.1, batch_size=batch_size, base_batch_size=base_batch_size, rule="linear"
        )
