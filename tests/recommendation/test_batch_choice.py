import itertools
import math

import numpy as np
import pytest

from kbatch.analysis.goodput import best_batch_size, goodput
from kbatch.analysis.intervals import Interval
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.recommendation.limits import (
    TimedUpdate,
    TimeInFit,
    fastest_of_each,
    noise_bounds,
    relative_time,
    update_time_s,
)

SIZES = [2**k for k in range(12)]


def noise_scale(value=None, low=None, high=None, *, at_least=None):
    interval = None if value is None else Interval(low or value, high or value)
    return NoiseScale(value, interval, low if value else at_least, 1.0, 1.0, 9)


def on_a_line(overhead_s=1e-3, per_example_s=1e-5, sizes=SIZES):
    return [TimedUpdate(size, size, overhead_s + per_example_s * size) for size in sizes]


def best_at(updates, scale, in_fit=None):
    return min(
        updates, key=lambda way: relative_time(way, noise_scale=scale, in_fit=in_fit)
    ).batch_size


def random_updates(seed):
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.uniform(0.1, 3, len(SIZES)))
    return [TimedUpdate(b, b, float(t)) for b, t in zip(SIZES, times, strict=True)]


def test_the_size_is_the_closed_form_on_the_grid():
    for n_half, scale in itertools.product([3.0, 50.0, 900.0], [1.0, 40.0, 300.0, 4000.0]):
        updates = on_a_line(1e-5 * n_half, 1e-5)
        chosen = best_at(updates, scale)
        exact = best_batch_size(overhead_s=1e-5 * n_half, per_example_s=1e-5, noise_scale=scale)
        assert abs(math.log2(chosen / min(exact, SIZES[-1]))) <= 0.6


def test_the_size_does_not_fall_when_the_noise_grows():
    for seed in range(20):
        updates = random_updates(seed)
        scales = [0.0, 0.1, 1, 5, 20, 60, 200, 700, 3000, 1e5, 1e9]
        sizes = [best_at(updates, scale) for scale in scales]
        assert sizes == sorted(sizes)


def test_a_pipeline_of_one_rate_never_asks_for_a_larger_batch():
    for seed, rate in itertools.product(range(20), [0.5, 2.0, 20.0, 400.0]):
        updates = random_updates(seed)
        slowed = best_at(updates, 100.0, in_fit=TimeInFit({1: 1 / rate}))
        assert slowed <= best_at(updates, 100.0)


def test_times_are_one_over_goodput():
    for update, scale in itertools.product(on_a_line(), [0.0, 3.0, 500.0]):
        value = goodput(update.batch_size, update.time_s, noise_scale=scale, base_batch_size=1)
        assert relative_time(update, noise_scale=scale) == pytest.approx(1 / value)
    endless = relative_time(update, noise_scale=math.inf)
    assert endless == pytest.approx(relative_time(update, noise_scale=1e12))


def test_a_pipeline_makes_an_update_last():
    update = TimedUpdate(100, 100, 0.5)
    assert update_time_s(update) == 0.5 == update_time_s(update, TimeInFit({50: 0.3, 150: 0.7}))
    assert update_time_s(update, TimeInFit({50: 0.55, 150: 1.45})) == pytest.approx(1.0)


def test_the_bounds_of_a_noise_scale():
    assert noise_bounds(noise_scale(5.0, 3.0, 9.0)) == (3.0, 9.0)
    assert noise_bounds(noise_scale(at_least=3.0)) == (3.0, math.inf)
    assert noise_bounds(noise_scale()) == (0.0, math.inf)


def test_the_fastest_micro_batch_stands_for_a_size_and_the_larger_of_equals():
    updates = [
        TimedUpdate(64, 64, 1.0),
        TimedUpdate(64, 16, 0.5),
        TimedUpdate(64, 32, 0.505),
        TimedUpdate(32, 32, 0.4),
    ]
    assert [(u.batch_size, u.micro_batch_size) for u in fastest_of_each(updates)] == [
        (32, 32),
        (64, 32),
    ]
    assert fastest_of_each([]) == ()
