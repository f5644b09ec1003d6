import numpy as np
import pytest

from kbatch.analysis.learning_rate import (
    FOLLOWERS,
    check_followers,
    scale_beta_2,
    scale_momentum,
    scale_weight_decay,
)

SIZES = {"batch_size": 256, "base_batch_size": 64}


@pytest.mark.parametrize("scale", [scale_beta_2, scale_momentum])
@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999])
@pytest.mark.parametrize(("size", "base"), [(512, 64), (8, 64), (64, 64)])
def test_an_average_forgets_an_example_as_fast_at_every_size(scale, decay, size, base):
    scaled = scale(decay, batch_size=size, base_batch_size=base)
    # What is left after 512 examples.
    np.testing.assert_allclose(scaled ** (512 / size), decay ** (512 / base))


@pytest.mark.parametrize("beta_1", [0.0, 0.5, 0.9, 0.95])
@pytest.mark.parametrize("beta_2", [0.3, 0.95, 0.99, 0.999])
def test_the_second_moment_never_forgets_faster_than_adam_can_bear(beta_1, beta_2):
    sizes = [2**k for k in range(15)]
    scaled = [scale_beta_2(beta_2, beta_1, batch_size=size, base_batch_size=16) for size in sizes]
    assert scaled[4] == beta_2
    assert scaled == sorted(scaled, reverse=True)
    # Settings of the user's own are not made better, and not worse.
    bearable = np.sqrt(beta_2) > beta_1
    assert all(np.sqrt(np.float32(one)) > np.float32(beta_1) for one in scaled) or not bearable
    free = [scale_beta_2(beta_2, batch_size=size, base_batch_size=16) for size in sizes]
    clear = [one > beta_1**2 + 0.02 for one in free]
    np.testing.assert_array_equal(np.compress(clear, scaled), np.compress(clear, free))


@pytest.mark.parametrize("ratio", [1.0, 2.0, 4.0])
@pytest.mark.parametrize(("size", "base"), [(1024, 64), (8, 64), (64, 64)])
def test_weights_decay_by_the_same_share_over_an_epoch(ratio, size, base):
    rate, decay, examples = 1e-4, 0.004, 10_240
    scaled = scale_weight_decay(
        decay, batch_size=size, base_batch_size=base, learning_rate_ratio=ratio
    )
    np.testing.assert_allclose(
        (1 - ratio * rate * scaled) ** (examples / size),
        (1 - rate * decay) ** (examples / base),
        rtol=1e-7,
    )
    # Bergsma et al. (2025): tau = B / (eta lambda D).
    np.testing.assert_allclose(size / (ratio * rate * scaled), base / (rate * decay))


@pytest.mark.parametrize("ratio", [1.0, 32.0, 1024.0])
def test_an_update_takes_no_more_than_the_whole_weight(ratio):
    sizes = {"batch_size": 2**16, "base_batch_size": 64, "learning_rate_ratio": ratio}
    scaled = scale_weight_decay(0.1, **sizes, learning_rate=0.1)
    np.testing.assert_allclose(0.1 * ratio * scaled, 1)
    # Without the learning rate it is not known what an update takes, and a small one takes less.
    np.testing.assert_allclose(scale_weight_decay(0.1, **sizes), 102.4 / ratio)
    np.testing.assert_allclose(scale_weight_decay(0.1, **sizes, learning_rate=1e-3), 102.4 / ratio)
    # A setting of the user's own that takes more is left as it is.
    own = scale_weight_decay(20.0, **sizes | {"batch_size": 64}, learning_rate=0.1)
    np.testing.assert_allclose(own, 20 / ratio)


@pytest.mark.parametrize("decay", [-0.1, 1.01])
def test_a_share_that_is_kept_lies_between_none_and_all(decay):
    with pytest.raises(ValueError, match=f"beta_2={decay}"):
        scale_beta_2(decay, **SIZES)
    with pytest.raises(ValueError, match=f"momentum={decay}"):
        scale_momentum(decay, **SIZES)


def test_a_learning_rate_of_nothing_has_no_timescale():
    with pytest.raises(ValueError, match="learning_rate_ratio=0"):
        scale_weight_decay(0.004, **SIZES, learning_rate_ratio=0.0)


def test_what_follows_is_named_once_and_in_order():
    assert check_followers(["weight_decay", "beta_2", "beta_2"], "f") == ("beta_2", "weight_decay")
    assert check_followers((), "f") == ()
    assert check_followers(FOLLOWERS, "f") == FOLLOWERS


@pytest.mark.parametrize(
    ("names", "kind"),
    [("beta_2", TypeError), (None, TypeError), (["momentum"], ValueError), ([2], ValueError)],
)
def test_what_cannot_follow_is_refused(names, kind):
    with pytest.raises(kind, match=r"`follow_batch_size` must be .* or \(\) for none. Received: "):
        check_followers(names, "follow_batch_size")
