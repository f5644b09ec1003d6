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
from collections.abc import Iterable, Sequence

from kbatch.analysis.intervals import Estimate
from kbatch.input_pipeline.result import CLOSEST_RATIO
from kbatch.memory.result import MemoryRecord
from kbatch.memory.search import MEMORY_WINDOW, SURE_SHARE, fit_memory
from kbatch.throughput.result import TimedUpdate

MEMORY = "memory"
SATURATION = "hardware saturation"
NOISE = "gradient noise"
INPUT = "input pipeline"
LIMITS = (MEMORY, SATURATION, NOISE, INPUT)
# Updates whose times differ by less than this share are equally fast.
_TIE = 0.02
# Where the learning rate is not the best one of each size, or under Adam, sizes turn out as if the
# noise scale were a few times larger or smaller (arXiv:2505.23971).
_NOISE_FACTOR = 4


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


def relative_time(update: TimedUpdate, *, noise_scale: float, rate: float = math.inf) -> float:
    """Compute the time to a goal, in units that are the same for all batch sizes.

    `rate` is what the input pipeline delivers, in examples/s.
    """
    time_s = max(update.median_s, update.batch_size / rate)
    if noise_scale == math.inf:
        return time_s / update.batch_size
    return time_s * (1 + noise_scale / update.batch_size) / (1 + noise_scale)


def fastest_of_each(updates: Iterable[TimedUpdate]) -> tuple[TimedUpdate, ...]:
    """Return the fastest update of each batch size, ascending; the larger micro-batch of equals."""
    ways: dict[int, list[TimedUpdate]] = {}
    for update in sorted(updates, key=lambda way: (way.batch_size, way.median_s)):
        ways.setdefault(update.batch_size, []).append(update)
    # The first of each size is its fastest.
    near = (
        [w for w in same if w.median_s <= (1 + _TIE) * same[0].median_s] for same in ways.values()
    )
    return tuple(max(same, key=lambda way: way.micro_batch_size) for same in near)


def noise_bounds(noise: Estimate[float | None]) -> tuple[float, float]:
    """Return the least and the largest noise scale that the measurement allows, in examples."""
    return noise.low or 0.0, math.inf if noise.high is None else noise.high


def starting_size(
    ways: Sequence[TimedUpdate], *, noise_scale: float, rate: float = math.inf
) -> int:
    """Return the smallest batch size that is about as fast to a goal as the best one."""
    times = {way.batch_size: relative_time(way, noise_scale=noise_scale, rate=rate) for way in ways}
    return min(size for size, time in times.items() if time <= CLOSEST_RATIO * min(times.values()))


def sizes_to_search(
    ways: Sequence[TimedUpdate],
    noise: Estimate[float | None],
    *,
    base_batch_size: int,
    rates: Sequence[float] = (),
) -> tuple[int, ...]:
    """Return the sizes that may train best, ascending: the base size and one more at each end."""
    likely = noise.low or 0.0 if noise.value is None else noise.value
    scales = (*noise_bounds(noise), likely / _NOISE_FACTOR, likely * _NOISE_FACTOR)
    cases = itertools.product(scales, rates or (math.inf,))
    starts = [starting_size(ways, noise_scale=scale, rate=rate) for scale, rate in cases]
    sizes = [way.batch_size for way in ways]
    first, last = sizes.index(min(starts)), sizes.index(max(starts))
    around = sizes[max(0, first - 1) : last + 2]
    ends = [*around, *(size for size in sizes if size == base_batch_size)]
    return tuple(size for size in sizes if min(ends) <= size <= max(ends))


def binding_limits(
    updates: Iterable[TimedUpdate],
    noise: Estimate[float | None],
    *,
    saturation: tuple[float, float] | None,
    rates: Sequence[float] = (),
    without_memory_limit: Iterable[TimedUpdate] = (),
) -> tuple[str, ...]:
    """Return which limit binds, for all that the measurements allow."""
    ways = fastest_of_each(updates)
    free = fastest_of_each((*ways, *without_memory_limit))

    def binding(scale: float, rate: float) -> set[str]:
        def least(of: Sequence[TimedUpdate], rate: float) -> float:
            return min(relative_time(way, noise_scale=scale, rate=rate) for way in of)

        now = least(ways, rate)
        gains = {MEMORY: now / least(free, rate), INPUT: now / least(ways, math.inf)}
        limit = max(gains, key=lambda name: gains[name])
        if gains[limit] > CLOSEST_RATIO:
            return {limit}
        if now / least(free, math.inf) > CLOSEST_RATIO:
            return {MEMORY, INPUT}  # Each hides what the removal of the other would give.
        if saturation is None:
            return {SATURATION, NOISE}
        return {SATURATION if end < scale else NOISE for end in saturation}

    cases = itertools.product(noise_bounds(noise), rates or (math.inf,))
    found = set().union(*itertools.starmap(binding, cases))
    return tuple(limit for limit in LIMITS if limit in found)


def with_more_memory(
    updates: Iterable[TimedUpdate], *, largest_batch_size: int
) -> tuple[TimedUpdate, ...]:
    """Extrapolate what a step on a whole batch would take if more examples fitted at once."""
    # Each further example takes as long as those between the two largest that went through whole.
    whole = [update for update in fastest_of_each(updates) if not update.accumulated]
    if len(whole) < 2:
        return ()
    before, last = whole[-2:]
    example_s = (last.median_s - before.median_s) / (last.batch_size - before.batch_size)
    found, size = [], 2 * last.batch_size
    while example_s > 0 and size <= largest_batch_size:
        time_s = last.median_s + example_s * (size - last.batch_size)
        found.append(TimedUpdate(size, size, (0,), (time_s,)))
        size *= 2
    return tuple(found)
