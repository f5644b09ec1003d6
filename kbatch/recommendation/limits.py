"""Which limit keeps a larger batch from being better, and the sizes that a search should try.

Updates to a goal are S(B) = S_min (1 + B_noise / B) (McCandlish et al. 2018, arXiv:1812.06162,
equation 2.11). An update takes t(B) on the device, and no less than B / p where the input pipeline
delivers p examples/s:

    T(B) = S_min max(t(B), B / p) (1 + B_noise / B)

Memory and the input pipeline bind where the way to a goal would be shorter without them. Else
a larger batch gains by throughput and loses by gradient noise, and the one binds that comes first
on the batch axis: saturation, where the device runs at 90 % of its peak, or the noise scale, from
which on more than half of a batch's examples are wasted. With t(B) = a + b B, n_half = a / b, T(B)
is least at B = sqrt(n_half B_noise), and saturation lies at 9 n_half: it comes first where the best
batch runs at three quarters of the peak or more, and twice as large a one at less than 1.15 times
its throughput.

The size to start with is the smallest of at most 1.05 times the least T(B). It never falls as the
noise scale grows, so a range of noise scales gives a range of sizes.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from kbatch.analysis.intervals import Estimate
from kbatch.input_pipeline.result import CLOSEST_RATIO
from kbatch.memory.result import MemoryRecord
from kbatch.memory.search import MEMORY_WINDOW, SURE_SHARE, fit_memory

MEMORY = "memory"
SATURATION = "hardware saturation"
NOISE = "gradient noise"
INPUT = "input pipeline"
LIMITS = (MEMORY, SATURATION, NOISE, INPUT)
# Where the learning rate is not the best one of each size, or under Adam, sizes turn out as if the
# noise scale were a few times larger or smaller (arXiv:2505.23971).
_NOISE_FACTOR = 4

# Seconds of an update by batch size, ascending.
UpdateTimes = Mapping[int, float]


def most_at_once(records: Sequence[MemoryRecord], limit_bytes: int) -> int | None:
    """Return up to how many examples fit in memory at once, by the line through those measured.

    None where memory hardly grows with the batch, so that nothing shows an end.
    """
    most_bytes = MEMORY_WINDOW[1] * limit_bytes
    peaks = {one.batch_size: one.peak_bytes for one in records if one.peak_bytes}
    line, ran = fit_memory(peaks), max((b for b, m in peaks.items() if m <= most_bytes), default=1)
    out = [one.batch_size for one in records if one.outcome == "out_of_memory"]
    if line is None or (line.bytes_per_example <= 0 and not out):
        return None
    # A line is trusted up to the window only where sizes were measured until memory ended them.
    in_time = all(one.peak_bytes or one.refusal for one in records)
    share = MEMORY_WINDOW[1] if in_time else SURE_SHARE
    likely = max(ran, int(line.largest_within(share * limit_bytes)))
    return min([likely, *(size - 1 for size in out)])


def times_to_goal(
    times_s: UpdateTimes, *, noise_scale: float, rate: float = math.inf
) -> dict[int, float]:
    """Compute the time to a goal of each batch size, all in the same unit.

    `rate` is what the input pipeline delivers, in examples/s.
    """
    found = {}
    for size, update_s in times_s.items():
        wait_s = max(update_s, size / rate)
        noisy = noise_scale == math.inf
        found[size] = wait_s * (1 / size if noisy else (1 + noise_scale / size) / (1 + noise_scale))
    return found


def noise_bounds(noise: Estimate[float | None]) -> tuple[float, float]:
    """Return the least and the largest noise scale that the measurement allows, in examples."""
    return noise.low or 0.0, math.inf if noise.high is None else noise.high


def starting_size(times_s: UpdateTimes, *, noise_scale: float, rate: float = math.inf) -> int:
    """Return the smallest batch size that is about as fast to a goal as the best one."""
    goal = times_to_goal(times_s, noise_scale=noise_scale, rate=rate)
    return min(size for size, time in goal.items() if time <= CLOSEST_RATIO * min(goal.values()))


def sizes_to_search(
    times_s: UpdateTimes,
    noise: Estimate[float | None],
    *,
    base_batch_size: int,
    rates: Iterable[float] = (math.inf,),
) -> tuple[int, ...]:
    """Return the sizes that may train best, ascending: the base size and one more at each end."""
    likely = noise.low or 0.0 if noise.value is None else noise.value
    scales = (*noise_bounds(noise), likely / _NOISE_FACTOR, likely * _NOISE_FACTOR)
    cases = itertools.product(scales, rates)
    starts = [starting_size(times_s, noise_scale=scale, rate=rate) for scale, rate in cases]
    sizes = list(times_s)
    first, last = sizes.index(min(starts)), sizes.index(max(starts))
    around = sizes[max(0, first - 1) : last + 2]
    ends = [*around, *(size for size in sizes if size == base_batch_size)]
    return tuple(size for size in sizes if min(ends) <= size <= max(ends))


def binding_limits(
    times_s: UpdateTimes,
    noise: Estimate[float | None],
    *,
    saturation: tuple[float, float] | None,
    rates: Iterable[float] = (math.inf,),
    without_memory_limit: UpdateTimes,
) -> tuple[str, ...]:
    """Return which limit binds, for all that the measurements allow."""
    free_s = {**without_memory_limit}
    for size, time_s in times_s.items():
        free_s[size] = min(time_s, free_s.get(size, math.inf))

    def binding(scale: float, rate: float) -> set[str]:
        def least(of: UpdateTimes, rate: float) -> float:
            return min(times_to_goal(of, noise_scale=scale, rate=rate).values())

        now = least(times_s, rate)
        gains = {MEMORY: now / least(free_s, rate), INPUT: now / least(times_s, math.inf)}
        limit = max(gains, key=lambda name: gains[name])
        if gains[limit] > CLOSEST_RATIO:
            return {limit}
        if now / least(free_s, math.inf) > CLOSEST_RATIO:
            return {MEMORY, INPUT}  # Each hides what the removal of the other would give.
        if saturation is None:
            return {SATURATION, NOISE}
        return {SATURATION if end < scale else NOISE for end in saturation}

    found = set().union(*itertools.starmap(binding, itertools.product(noise_bounds(noise), rates)))
    return tuple(limit for limit in LIMITS if limit in found)


def with_more_memory(whole_s: UpdateTimes, *, largest_batch_size: int) -> dict[int, float]:
    """Extrapolate what larger batches would take if they went through at once, as others did."""
    # Each further example takes as long as those between the two largest.
    if len(whole_s) < 2:
        return {}
    (before, before_s), (last, last_s) = list(whole_s.items())[-2:]
    example_s = (last_s - before_s) / (last - before)
    found, size = {}, 2 * last
    while example_s > 0 and size <= largest_batch_size:
        found[size] = last_s + example_s * (size - last)
        size *= 2
    return found
