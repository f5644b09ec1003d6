import itertools
import math

import numpy as np
import pytest

from kbatch.analysis.goodput import goodput
from kbatch.analysis.intervals import Estimate
from kbatch.recommendation.limits import (
    fastest_of_each,
    noise_bounds,
    relative_time,
    sizes_to_search,
    starting_size,
)
from kbatch.throughput.result import TimedUpdate

SIZES = [2**k for k in range(12)]
SCALES = [0.0, 0.1, 1, 5, 20, 60, 200, 700, 3000, 1e5, 1e9, math.inf]


def timed(batch_size, micro_batch_size, seconds):
    return TimedUpdate(batch_size, micro_batch_size, (0,), (seconds,))


def noise_scale(value=None, low=None, high=None, *, at_least=None):
    return Estimate(value, at_least or low or value, high or value)


def on_a_line(n_half=100.0, per_example_s=1e-5):
    return [timed(size, size, per_example_s * (n_half + size)) for size in SIZES]


def random_updates(seed):
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.uniform(0.1, 3, len(SIZES)))
    return [timed(b, b, float(t)) for b, t in zip(SIZES, times, strict=True)]


def test_the_start_is_the_smallest_that_is_about_as_fast_as_the_closed_form():
    for n_half, scale in itertools.product([3.0, 50.0, 900.0], [1.0, 40.0, 300.0, 4000.0]):
        exact = max(1.0, math.sqrt(n_half * scale))
        start = starting_size(on_a_line(n_half), noise_scale=scale)
        assert -2 <= math.log2(start / min(exact, SIZES[-1])) <= 0.6


def test_the_start_is_about_as_fast_as_any_and_no_smaller_size_is():
    for seed, scale, rate in itertools.product(range(20), SCALES, [0.5, 20.0, math.inf]):
        ways = random_updates(seed)
        times = [relative_time(way, noise_scale=scale, rate=rate) for way in ways]
        start = starting_size(ways, noise_scale=scale, rate=rate)
        near = [
            way.batch_size for way, t in zip(ways, times, strict=True) if t <= 1.05 * min(times)
        ]
        assert start == near[0]


def test_the_start_does_not_fall_when_the_noise_grows():
    for seed, rate in itertools.product(range(20), [0.5, 20.0, math.inf]):
        sizes = [starting_size(random_updates(seed), noise_scale=s, rate=rate) for s in SCALES]
        assert sizes == sorted(sizes)


def test_a_slower_pipeline_never_asks_for_a_larger_batch():
    for seed, scale in itertools.product(range(20), SCALES):
        ways = random_updates(seed)
        rates = [0.5, 2.0, 20.0, 400.0, math.inf]
        sizes = [starting_size(ways, noise_scale=scale, rate=rate) for rate in rates]
        assert sizes == sorted(sizes)


def test_the_range_holds_the_base_size_and_the_start_of_every_noise_scale_that_may_be():
    for seed, base in itertools.product(range(10), (1, 32, 2048)):
        ways, noise = random_updates(seed), noise_scale(60.0, 40.0, 300.0)
        found = sizes_to_search(ways, noise, base_batch_size=base)
        starts = [starting_size(ways, noise_scale=scale) for scale in (15, 40, 60, 240, 300)]
        assert {base, *starts} <= set(found)
        assert list(found) == [b for b in SIZES if found[0] <= b <= found[-1]]


def test_the_range_has_one_more_size_at_each_end():
    ways = on_a_line()
    ends = [starting_size(ways, noise_scale=scale) for scale in (25, 400)]
    found = sizes_to_search(ways, noise_scale(100.0), base_batch_size=64)
    assert (found[0], found[-1]) == (ends[0] // 2, 2 * ends[1])
    # A wide interval counts more than the factor.
    wide = sizes_to_search(ways, noise_scale(100.0, 1.0, 1e6), base_batch_size=64)
    assert wide[0] < found[0] < found[-1] < wide[-1]


def test_nothing_known_of_the_noise_leaves_the_sizes_up_to_saturation():
    ways = on_a_line(20.0)
    found = sizes_to_search(ways, noise_scale(), base_batch_size=32)
    saturated = starting_size(ways, noise_scale=math.inf)
    assert (found[0], found[-1]) == (1, 2 * saturated)
    known = sizes_to_search(ways, noise_scale(at_least=400.0), base_batch_size=64)
    assert (known[0], known[-1]) == (starting_size(ways, noise_scale=100.0) // 2, found[-1])


def test_every_rate_that_the_data_may_have_counts():
    ways, noise = on_a_line(), noise_scale(2000.0)
    slow, fast = (sizes_to_search(ways, noise, base_batch_size=64, rates=[r]) for r in (5e3, 1e6))
    both = sizes_to_search(ways, noise, base_batch_size=64, rates=[5e3, 1e6])
    assert both == tuple(b for b in SIZES if slow[0] <= b <= fast[-1])
    assert slow[-1] < fast[-1]


def test_times_are_one_over_goodput():
    for update, scale in itertools.product(on_a_line(), [0.0, 3.0, 500.0]):
        value = goodput(update.batch_size, update.median_s, noise_scale=scale, base_batch_size=1)
        assert relative_time(update, noise_scale=scale) == pytest.approx(1 / value)
    endless = relative_time(update, noise_scale=math.inf)
    assert endless == pytest.approx(relative_time(update, noise_scale=1e12))


def test_a_pipeline_makes_an_update_last():
    update = timed(100, 100, 0.5)
    plain = relative_time(update, noise_scale=7.0)
    assert relative_time(update, noise_scale=7.0, rate=201.0) == plain
    assert relative_time(update, noise_scale=7.0, rate=100.0) == pytest.approx(2 * plain)


def test_the_bounds_of_a_noise_scale():
    assert noise_bounds(noise_scale(5.0, 3.0, 9.0)) == (3.0, 9.0)
    assert noise_bounds(noise_scale(at_least=3.0)) == (3.0, math.inf)
    assert noise_bounds(noise_scale()) == (0.0, math.inf)


def test_the_fastest_micro_batch_stands_for_a_size_and_the_larger_of_equals():
    updates = [
        timed(64, 64, 1.0),
        timed(64, 16, 0.5),
        timed(64, 32, 0.505),
        timed(32, 32, 0.4),
    ]
    assert [(u.batch_size, u.micro_batch_size) for u in fastest_of_each(updates)] == [
        (32, 32),
        (64, 32),
    ]
    assert fastest_of_each([]) == ()
