"""How the learning rate, and what follows it, change with the batch size."""

import itertools

import numpy as np
import pytest

from kbatch.analysis.learning_rate import (
    check_followers,
    check_rule,
    learning_rate_ratio,
    scale_beta_2,
    scale_learning_rate,
    scale_momentum,
    scale_weight_decay,
)

RULES = ["linear", "sqrt", None]
SIZES = {"batch_size": 256, "base_batch_size": 64}


@pytest.mark.parametrize("rule", RULES)
def test_scale_learning_rate_in_two_steps_equals_one_step(rule):
    for a, b, c in itertools.permutations([1, 24, 1000]):
        first = scale_learning_rate(0.1, batch_size=b, base_batch_size=a, rule=rule)
        through = scale_learning_rate(first, batch_size=c, base_batch_size=b, rule=rule)
        direct = scale_learning_rate(0.1, batch_size=c, base_batch_size=a, rule=rule)
        np.testing.assert_allclose(through, direct)
    assert scale_learning_rate(0.3, batch_size=48, base_batch_size=48, rule=rule) == 0.3


def test_learning_rate_ratio_sqrt_squared_is_linear():
    sizes = {"batch_size": 96, "base_batch_size": 32}
    assert learning_rate_ratio(**sizes, rule="linear") == 3
    np.testing.assert_allclose(learning_rate_ratio(**sizes, rule="sqrt") ** 2, 3)
    assert learning_rate_ratio(**sizes, rule=None) == 1


@pytest.mark.parametrize("scale", [scale_beta_2, scale_momentum])
@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999])
@pytest.mark.parametrize(("size", "base"), [(512, 64), (8, 64)])
def test_scaled_decays_keep_their_half_life_in_examples(scale, decay, size, base):
    scaled = scale(decay, batch_size=size, base_batch_size=base)
    # The share that is left after 512 examples.
    np.testing.assert_allclose(scaled ** (512 / size), decay ** (512 / base))


@pytest.mark.parametrize("beta_1", [0.0, 0.5, 0.9, 0.95])
@pytest.mark.parametrize("beta_2", [0.3, 0.95, 0.99, 0.999])
def test_scale_beta_2_stays_above_beta_1_squared(beta_1, beta_2):
    """Test a bound below which Adam is unstable (arXiv:2603.02092)."""
    sizes = [2**k for k in range(15)]
    scaled = [scale_beta_2(beta_2, beta_1, batch_size=size, base_batch_size=16) for size in sizes]
    assert scaled[4] == beta_2
    assert scaled == sorted(scaled, reverse=True)
    # The user's own unstable settings stay as they are.
    stable = np.sqrt(beta_2) > beta_1
    assert all(np.sqrt(np.float32(b)) > np.float32(beta_1) for b in scaled) or not stable
    free = [scale_beta_2(beta_2, batch_size=size, base_batch_size=16) for size in sizes]
    clear = [b > beta_1**2 + 0.02 for b in free]
    np.testing.assert_array_equal(np.compress(clear, scaled), np.compress(clear, free))
    unstable = beta_1**2 / 2
    assert scale_beta_2(unstable, beta_1, batch_size=1024, base_batch_size=64) == unstable


@pytest.mark.parametrize("ratio", [1.0, 4.0])
@pytest.mark.parametrize(("size", "base"), [(1024, 64), (8, 64)])
def test_scale_weight_decay_keeps_the_share_of_an_epoch(ratio, size, base):
    rate, decay, examples = 1e-4, 0.004, 10_240
    sizes = {"batch_size": size, "base_batch_size": base}
    scaled = scale_weight_decay(decay, **sizes, learning_rate_ratio=ratio)
    share = (1 - ratio * rate * scaled) ** (examples / size)
    np.testing.assert_allclose(share, (1 - rate * decay) ** (examples / base), rtol=1e-7)
    # Bergsma et al. (2025): tau = B / (eta lambda D).
    np.testing.assert_allclose(size / (ratio * rate * scaled), base / (rate * decay))


@pytest.mark.parametrize("ratio", [1.0, 32.0, 1024.0])
def test_scale_weight_decay_takes_at_most_the_whole_weight(ratio):
    sizes = {"batch_size": 2**16, "base_batch_size": 64, "learning_rate_ratio": ratio}
    scaled = scale_weight_decay(0.1, **sizes, learning_rate=0.1)
    np.testing.assert_allclose(0.1 * ratio * scaled, 1)
    # If the learning rate is unknown or small, there is no limit.
    np.testing.assert_allclose(scale_weight_decay(0.1, **sizes), 102.4 / ratio)
    np.testing.assert_allclose(scale_weight_decay(0.1, **sizes, learning_rate=1e-3), 102.4 / ratio)
    # A larger decay of the user's own stays as it is.
    larger = scale_weight_decay(20.0, **sizes | {"batch_size": 64}, learning_rate=0.1)
    np.testing.assert_allclose(larger, 20 / ratio)


def test_check_followers_returns_one_order():
    assert check_followers(["weight_decay", "beta_2", "beta_2"]) == ("beta_2", "weight_decay")


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda: check_rule("cubic", "scaling"), ValueError, "scaling='cubic'"),
        (lambda: scale_learning_rate(0.1, **SIZES, rule="cubic"), ValueError, "rule='cubic'"),
        (
            lambda: scale_learning_rate(0.1, batch_size=0, base_batch_size=8, rule="linear"),
            ValueError,
            "batch_size=0",
        ),
        (lambda: scale_beta_2(1.01, **SIZES), ValueError, "beta_2=1.01"),
        (lambda: check_followers("beta_2"), TypeError, "follow"),
        (lambda: check_followers(["momentum"]), ValueError, "follow"),
    ],
)
def test_bad_rules_sizes_and_followers_are_refused(call, error, word):
    with pytest.raises(error, match=word):
        call()
