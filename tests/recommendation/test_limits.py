"""The limit that binds, the size to start with, and the sizes to search."""

import itertools
import math

import numpy as np
import pytest

from kbatch.analysis.goodput import goodput
from kbatch.analysis.intervals import Estimate
from kbatch.memory.result import MemoryRecord
from kbatch.recommendation.result import (
    binding_limits,
    most_at_once,
    sizes_to_search,
    starting_size,
    times_to_goal,
)
from kbatch.records.notes import Note

SIZES = [2**k for k in range(13)]
SCALES = [0.0, 0.1, 1, 5, 20, 60, 200, 700, 3000, 1e5, 1e9, math.inf]
PER_EXAMPLE_S = 1e-5


def noise_scale(value=None, low=None, high=None, *, at_least=None):
    return Estimate(value, at_least or low or value, high or value)


def device(n_half, *, fits=SIZES[-1]):
    """Seconds of batches that fit in memory, and of larger ones in micro-batches."""
    return {b: b // min(b, fits) * PER_EXAMPLE_S * (n_half + min(b, fits)) for b in SIZES}


def random_times(seed):
    times = np.cumsum(np.random.default_rng(seed).uniform(0.1, 3, len(SIZES)))
    return dict(zip(SIZES, times.tolist(), strict=True))


def limits(times_s, noise, *, fits=SIZES[-1], saturation=None, input_rate=(math.inf, math.inf)):
    whole_s = {size: time_s for size, time_s in times_s.items() if size <= fits}
    return binding_limits(times_s, noise, whole_s=whole_s, saturation=saturation, rates=input_rate)


def exactly(value):
    return value, value


def test_binding_limits_names_all_that_the_intervals_allow():
    both, updates = ("saturation", "noise"), device(100)
    assert limits(updates, noise_scale(90, 50, 150), saturation=exactly(100)) == both
    assert limits(updates, noise_scale(90), saturation=(50, 150)) == both
    assert limits(updates, noise_scale(90), saturation=None) == both
    assert limits(updates, noise_scale(at_least=20), saturation=exactly(100)) == both
    # The lower bound of the noise is above the saturation, so the upper bound is not needed.
    assert limits(updates, noise_scale(at_least=200), saturation=exactly(100)) == ("saturation",)
    rates = {"input_rate": (20_000.0, 200_000.0)}
    vague = limits(updates, noise_scale(300), saturation=exactly(100), **rates)
    assert vague == ("saturation", "input")


def least(times_s, scale, rate):
    return min(times_to_goal(times_s, noise_scale=scale, rate=rate).values())


def test_binding_limits_memory_and_input_bind_if_removal_saves_time():
    bound = set()
    rates = [500.0, 20_000.0, 95_000.0, 1e7]
    cases = itertools.product([1, 30, 1000], [2, 100, 5000], [2, 64, 4096], rates)
    as_slow = 4 / device(500, fits=4)[4]  # The data are as slow as a device with little memory.
    for n_half, scale, fits, rate in [*cases, (500, 1000, 4, as_slow)]:
        times_s, free_s = device(n_half, fits=fits), device(n_half)
        measured = {"saturation": exactly(n_half), "input_rate": exactly(rate)}
        binding = limits(times_s, noise_scale(scale), fits=fits, **measured)
        now = least(times_s, scale, rate)
        gains = {
            "memory": now / least(free_s, scale, rate),
            "input": now / least(times_s, scale, math.inf),
        }
        if max(gains.values()) > 1.05:
            assert len(binding) == 1
            assert gains[binding[0]] == max(gains.values())
        elif now / least(free_s, scale, math.inf) > 1.05:
            assert binding == ("memory", "input")
        else:
            assert binding == (("saturation",) if n_half < scale else ("noise",))
        bound |= {binding}
    assert bound == {("memory",), ("input",), ("saturation",), ("noise",), ("memory", "input")}


def test_starting_size_is_the_smallest_of_the_fastest():
    for n_half, scale in itertools.product([3.0, 50.0, 900.0], [1.0, 40.0, 300.0, 4000.0]):
        exact = max(1.0, math.sqrt(n_half * scale))
        start = starting_size(device(n_half), noise_scale=scale)
        assert -2 <= math.log2(start / min(exact, SIZES[-1])) <= 0.6
    for seed, scale, rate in itertools.product(range(20), SCALES, [0.5, 20.0, math.inf]):
        times_s = random_times(seed)
        goal = times_to_goal(times_s, noise_scale=scale, rate=rate)
        start = starting_size(times_s, noise_scale=scale, rate=rate)
        assert start == next(b for b, t in goal.items() if t <= 1.05 * min(goal.values()))


def test_starting_size_grows_with_the_noise_and_the_rate():
    rates = [0.5, 2.0, 20.0, 400.0, math.inf]
    for seed in range(20):
        times_s = random_times(seed)
        sizes = [[starting_size(times_s, noise_scale=s, rate=r) for s in SCALES] for r in rates]
        assert sizes == [sorted(row) for row in sizes]
        assert [*zip(*sizes, strict=True)] == [tuple(sorted(c)) for c in zip(*sizes, strict=True)]


def test_sizes_to_search_contain_base_and_starting_sizes():
    for seed, base in itertools.product(range(10), (1, 32, 2048)):
        times_s, noise = random_times(seed), noise_scale(60.0, 40.0, 300.0)
        sizes = sizes_to_search(times_s, noise, base_batch_size=base)
        starts = [starting_size(times_s, noise_scale=scale) for scale in (15, 40, 60, 240, 300)]
        around = {max(1, min(starts) // 2), min(SIZES[-1], 2 * max(starts))}
        assert {base, *starts, *around} <= set(sizes)
        assert list(sizes) == [b for b in SIZES if sizes[0] <= b <= sizes[-1]]
    # An interval wider than the factor of four gives more sizes.
    times_s = device(100)
    narrow = sizes_to_search(times_s, noise_scale(100.0), base_batch_size=64)
    wide = sizes_to_search(times_s, noise_scale(100.0, 1.0, 1e6), base_batch_size=64)
    assert wide[0] < narrow[0] < narrow[-1] < wide[-1]
    slow, fast, both = (
        sizes_to_search(times_s, noise_scale(2000.0), base_batch_size=64, rates=rates)
        for rates in ((5e3, 5e3), (1e6, 1e6), (5e3, 1e6))
    )
    assert both == tuple(b for b in SIZES if slow[0] <= b <= fast[-1])


def test_times_to_goal():
    times_s = device(100)
    for scale in (0.0, 3.0, 500.0):
        values = [goodput(b, s, noise_scale=scale, base_batch_size=1) for b, s in times_s.items()]
        times = list(times_to_goal(times_s, noise_scale=scale).values())
        assert times == pytest.approx((1 + scale) / np.array(values))

    def time(**arguments):
        return times_to_goal({100: 0.5}, **arguments)[100]

    assert math.isfinite(time(noise_scale=math.inf))
    assert time(noise_scale=7.0, rate=201.0) == time(noise_scale=7.0)
    assert time(noise_scale=7.0, rate=100.0) == pytest.approx(2 * time(noise_scale=7.0))


def memory(*peaks, ended=None):
    """Sizes of 1, 4, 16, ... with these peaks in bytes, and how the next one ended."""
    records = [MemoryRecord("float32", 4**k, "fits", None, p) for k, p in enumerate(peaks)]
    return [*records, *([] if ended is None else [ended])]


OUT = MemoryRecord("float32", 64, "out_of_memory")
GUARDED = MemoryRecord("float32", 64, "not_run", Note.of("memory_time_spent"), guarded=True)
UNTIMED = MemoryRecord("float32", 64, "not_run", Note.of("memory_time_spent"))


@pytest.mark.parametrize(
    ("records", "most"),
    [
        (memory(125, 200, 500), 32),  # 100 + 25 n bytes, up to 90 % of 1,000.
        (memory(125, 200, 500, ended=GUARDED), 32),
        (memory(125, 200, 500, ended=UNTIMED), 16),  # Up to half of the limit, but 16 was run.
        (memory(125, 200, 500, ended=OUT), 32),
        (memory(101, 104, 116, ended=OUT), 63),  # Below the size that ran out of memory.
        (memory(100, 100, 100), None),
        (memory(125), None),
        (memory(125, ended=GUARDED), 1),
    ],
)
def test_most_at_once(records, most):
    assert most_at_once(records, 1000) == most
