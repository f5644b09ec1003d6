import math

import numpy as np
import pytest

from kbatch.analysis.intervals import Interval
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.analysis.size_costs import TimedRounds, size_cost
from kbatch.analysis.time_in_fit import TimeInFit

RESOLVED = NoiseScale(100.0, Interval(50.0, 200.0), 50.0, 1.0, 1.0, 9)
BOUNDED = NoiseScale(None, None, 50.0, 1.0, 1.0, 9)
SPREAD = np.array([1.0, 1.02, 0.98, 1.01, 0.99])


def timed(batch_size, time_s):
    return TimedRounds(batch_size, batch_size, (0, 1, 2, 3, 4), tuple(time_s * SPREAD))


def cost(batch_size, time_s, noise=RESOLVED, **given):
    arguments = {"noise": noise, "updates": 1000.0, "updates_at": 32} | given
    return size_cost(timed(batch_size, time_s), timed(128, 0.01), **arguments)


def test_a_size_against_itself_costs_nothing_more():
    same = cost(128, 0.01)
    assert same.relative_time.value == 1
    assert same.relative_time.interval == Interval(1.0, 1.0)
    assert same.samples_per_second.value == pytest.approx(12_800)


def test_updates_and_times_follow_the_curve():
    found = cost(256, 0.015)
    updates = 1000 * (1 + 100 / 256) / (1 + 100 / 32)
    assert found.updates.value == pytest.approx(updates)
    assert found.seconds.value == pytest.approx(updates * 0.015)
    relative = 1.5 * (1 + 100 / 256) / (1 + 100 / 128)
    assert found.relative_time.value == pytest.approx(relative)


@pytest.mark.parametrize("size", [8, 32, 128, 1024])
def test_every_noise_scale_in_the_interval_lies_within_the_costs(size):
    found = cost(size, 1e-3 + 1e-5 * size)
    for scale in np.geomspace(50, 200, 20):
        updates = 1000 * (1 + scale / size) / (1 + scale / 32)
        assert found.updates.interval.low <= updates * (1 + 1e-12)
        assert found.updates.interval.high >= updates * (1 - 1e-12)
    assert found.seconds.interval.low < found.seconds.value < found.seconds.interval.high


def test_an_unresolved_noise_scale_leaves_intervals():
    found = cost(256, 0.015, noise=BOUNDED)
    assert found.updates.value is None
    assert found.relative_time.value is None
    low, high = 1000 / 8, 1000 * (1 + 50 / 256) / (1 + 50 / 32)
    assert (found.updates.interval.low, found.updates.interval.high) == pytest.approx((low, high))
    assert math.isfinite(found.seconds.interval.high)


def test_a_slow_pipeline_bounds_the_throughput():
    found = cost(256, 0.015, in_fit=TimeInFit.through({1: 1e-3}))
    assert found.samples_per_second.value == pytest.approx(1000)
    assert found.relative_time.value == pytest.approx(2 * (1 + 100 / 256) / (1 + 100 / 128))


def test_sizes_are_compared_within_a_round():
    drifting = TimedRounds(64, 64, (0, 1, 2, 3), (0.01, 0.02, 0.04, 0.08))
    twice = TimedRounds(64, 64, (3, 2, 1, 9), (0.16, 0.08, 0.04, 99.0))
    found = size_cost(twice, drifting, noise=RESOLVED, updates=10.0, updates_at=32)
    assert found.relative_time.value == pytest.approx(2)
    assert found.relative_time.interval.low == pytest.approx(2)


def test_too_few_rounds_have_no_interval():
    few = TimedRounds(64, 64, (0, 1), (0.01, 0.011))
    found = size_cost(few, few, noise=RESOLVED, updates=10.0, updates_at=32)
    assert found.seconds.interval is None
    assert found.seconds.value > 0
    with pytest.raises(ValueError, match="rounds that they have in common"):
        other = TimedRounds(64, 64, (5, 6), (0.01, 0.011))
        size_cost(few, other, noise=RESOLVED, updates=10.0, updates_at=32)


@pytest.mark.parametrize("rounds", [(), (0, 1, 2)])
def test_durations_need_their_rounds(rounds):
    with pytest.raises(ValueError, match="a duration in each of its rounds"):
        TimedRounds(64, 64, rounds, (0.01,) if rounds else ())
