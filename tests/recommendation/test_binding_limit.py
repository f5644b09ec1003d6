import itertools
import math

import pytest

from kbatch.analysis.intervals import Estimate
from kbatch.recommendation.limits import (
    INPUT,
    LIMITS,
    MEMORY,
    NOISE,
    SATURATION,
    binding_limits,
    relative_time,
    with_more_memory,
)
from kbatch.throughput.result import TimedUpdate

SIZES = [2**k for k in range(13)]
PER_EXAMPLE_S = 1e-5


def timed(batch_size, micro_batch_size, seconds):
    return TimedUpdate(batch_size, micro_batch_size, (0,), (seconds,))


def noise_scale(value=None, low=None, high=None, *, at_least=None):
    return Estimate(value, at_least or low or value, high or value)


def device(n_half, *, fits=SIZES[-1]):
    """Whole batches as far as they fit, and accumulated ones at the rate of the largest."""

    def time_s(size):
        return PER_EXAMPLE_S * (n_half + size)

    whole = [timed(b, b, time_s(b)) for b in SIZES if b <= fits]
    parts = [timed(b, fits, b // fits * time_s(fits)) for b in SIZES if b > fits]
    return whole + parts


def limits(updates, noise, *, saturation=None, input_rate=None):
    return binding_limits(
        updates,
        noise,
        saturation=saturation,
        rates=input_rate or (),
        without_memory_limit=with_more_memory(updates, largest_batch_size=SIZES[-1]),
    )


def exactly(value):
    return value, value


@pytest.mark.parametrize(
    ("n_half", "scale", "expected"),
    [
        (10, 1000, (SATURATION,)),
        (1000, 10, (NOISE,)),
        (11, 100, (SATURATION,)),
        (12, 100, (NOISE,)),
    ],
)
def test_the_first_of_saturation_and_noise_binds(n_half, scale, expected):
    found = limits(device(n_half), noise_scale(scale), saturation=exactly(9 * n_half))
    assert found == expected


def test_what_the_intervals_do_not_tell_apart_is_named_together():
    both = (SATURATION, NOISE)
    updates = device(100)
    assert limits(updates, noise_scale(90, 50, 150), saturation=exactly(100)) == both
    assert limits(updates, noise_scale(90), saturation=(50, 150)) == both
    assert limits(updates, noise_scale(90), saturation=None) == both
    assert limits(updates, noise_scale(at_least=20), saturation=exactly(100)) == both
    # A lower bound is enough where it lies above.
    assert limits(updates, noise_scale(at_least=200), saturation=exactly(100)) == (SATURATION,)


def test_memory_binds_where_more_of_it_would_help():
    assert limits(device(100, fits=8), noise_scale(1000), saturation=exactly(100)) == (MEMORY,)
    # One example each is worth little: a larger micro-batch would not help.
    assert limits(device(100, fits=64), noise_scale(2), saturation=exactly(100)) == (NOISE,)
    assert limits(device(1, fits=64), noise_scale(1000), saturation=exactly(1)) == (SATURATION,)


def test_the_pipeline_binds_where_a_faster_one_would_help():
    updates, noise = device(100), noise_scale(300)
    slow, fast, vague = exactly(20_000.0), exactly(200_000.0), (20_000.0, 200_000.0)
    assert limits(updates, noise, saturation=exactly(100), input_rate=slow) == (INPUT,)
    assert limits(updates, noise, saturation=exactly(100), input_rate=fast) == (SATURATION,)
    found = limits(updates, noise, saturation=exactly(100), input_rate=vague)
    assert found == (SATURATION, INPUT)


@pytest.mark.parametrize(
    ("share", "expected"), [(2.0, (MEMORY,)), (1.0, (MEMORY, INPUT)), (0.02, (INPUT,))]
)
def test_of_memory_and_pipeline_the_one_that_costs_more_binds_or_both(share, expected):
    updates, noise = device(500, fits=4), noise_scale(1000)
    rate = exactly(share * updates[2].samples_per_second)
    assert limits(updates, noise, saturation=exactly(500), input_rate=rate) == expected


def test_memory_and_pipeline_bind_exactly_where_their_removal_shortens_the_way():
    cases = itertools.product(
        [1, 30, 1000], [2, 100, 5000], [2, 64, 4096], [500.0, 20_000.0, 95_000.0, 1e7]
    )
    for n_half, scale, fits, rate in cases:
        updates, free = device(n_half, fits=fits), device(n_half)
        found = limits(
            updates, noise_scale(scale), saturation=exactly(n_half), input_rate=exactly(rate)
        )

        def least(ways, rate, scale=scale):
            return min(relative_time(w, noise_scale=scale, rate=rate) for w in ways)

        now = least(updates, rate)
        gains = {MEMORY: now / least(free, rate), INPUT: now / least(updates, math.inf)}
        if max(gains.values()) > 1.05:
            assert len(found) == 1
            assert gains[found[0]] == max(gains.values())
        elif now / least(free, math.inf) > 1.05:
            assert found == (MEMORY, INPUT)
        else:
            assert found == ((SATURATION,) if n_half < scale else (NOISE,))


def test_every_limit_can_bind():
    names = {
        *limits(device(10), noise_scale(1000), saturation=exactly(10)),
        *limits(device(1000), noise_scale(10), saturation=exactly(1000)),
        *limits(device(100, fits=2), noise_scale(1000), saturation=exactly(100)),
        *limits(device(10), noise_scale(50), saturation=exactly(10), input_rate=exactly(10.0)),
    }
    assert names == set(LIMITS)


def test_more_memory_goes_on_as_the_last_two_sizes_do():
    updates = device(100, fits=64)
    found = with_more_memory(updates, largest_batch_size=300)
    assert [u.batch_size for u in found] == [128, 256]
    for update in found:
        assert update.micro_batch_size == update.batch_size
        assert update.median_s == pytest.approx(PER_EXAMPLE_S * (100 + update.batch_size))
    assert with_more_memory(updates[:1], largest_batch_size=300) == ()
    falling = [timed(1, 1, 2.0), timed(2, 2, 1.9)]
    assert with_more_memory(falling, largest_batch_size=300) == ()


def test_infinite_noise_leaves_the_hardware():
    assert limits(device(100), noise_scale(at_least=math.inf), saturation=exactly(100)) == (
        SATURATION,
    )
