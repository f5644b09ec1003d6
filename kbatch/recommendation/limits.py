"""What an update of each batch size costs, and which limit keeps a larger one from being better.

Updates to a target are S(B) = S_min (1 + B_noise / B) (McCandlish et al. 2018, arXiv:1812.06162,
equation 2.11). A step takes t(B), and an update in `fit` no less than p(B), with the wait for data:

    T(B) = S_min max(t(B), p(B)) (1 + B_noise / B)

Memory and the input pipeline bind where the way to a target would be shorter without them. Else
a larger batch gains by throughput and loses by gradient noise, and the one binds that comes first
on the batch axis: saturation, where the device runs at 90 % of its peak, or the noise scale, from
which on more than half of a batch's examples are wasted. With t(B) = a + b B, n_half = a / b, T(B)
is least at B = sqrt(n_half B_noise), and saturation lies at 9 n_half: it comes first where the best
batch runs at three quarters of the peak or more, and twice as large a one at less than 1.15 times
its throughput.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kbatch.analysis.intervals import Interval
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.input_pipeline.rates import CLOSEST_RATIO

MEMORY = "memory"
SATURATION = "hardware saturation"
NOISE = "gradient noise"
INPUT = "input pipeline"
LIMITS = (MEMORY, SATURATION, NOISE, INPUT)
# What is measured beside the limits: short trainings.
OTHER_SIZES = "other batch sizes"
# A difference of less than this share changes no decision on a batch size.
TIE = 0.02


@dataclasses.dataclass(frozen=True)
class TimeInFit:
    """The time from update to update in `fit`: lines through times of one or two batch sizes."""

    times_s: Mapping[int, float]  # Positive, by batch size; a single one has no fixed part.
    # What `fit` adds to the step of a batch that goes through the device in parts: the lines are of
    # whole batches, whose step takes another time. None where not known.
    beside: "TimeInFit | None" = None
    example_s: float = 0.0  # That the data take an example, at the least.

    def time_s(self, batch_size: int) -> float:
        """Return the seconds of an update; outside of the sizes no part is below 0."""
        sizes = sorted(self.times_s)
        times_s = [self.times_s[size] for size in sizes]
        smaller, larger = (0, *sizes)[-2:]
        slope = (times_s[-1] - (0.0, *times_s)[-2]) / (larger - smaller)
        fixed_s = min(max(0.0, times_s[0] - slope * sizes[0]), times_s[0])
        line_s = float(np.interp(batch_size, [0, *sizes], [fixed_s, *times_s]))
        line_s += max(0.0, slope) * max(0, batch_size - larger)
        return max(line_s, self.example_s * batch_size)


@dataclasses.dataclass(frozen=True)
class TimedUpdate:
    """A way to make an update, and the time t that it takes."""

    batch_size: int
    micro_batch_size: int
    time_s: float

    @property
    def accumulated(self) -> bool:
        return self.micro_batch_size < self.batch_size

    @property
    def samples_per_second(self) -> float:
        return self.batch_size / self.time_s


def update_time_s(update: TimedUpdate, in_fit: TimeInFit | None = None) -> float:
    """Return max(t, p(B)), or for a batch that goes through in parts t and what `fit` adds."""
    if in_fit is None:
        return update.time_s
    if update.accumulated and in_fit.beside is not None:
        added_s = in_fit.beside.time_s(update.batch_size)
        return max(update.time_s + added_s, in_fit.example_s * update.batch_size)
    return max(update.time_s, in_fit.time_s(update.batch_size))


def relative_time(
    update: TimedUpdate, *, noise_scale: float, in_fit: TimeInFit | None = None
) -> float:
    """Compute the time to a target, in units that are the same for all batch sizes."""
    time_s = update_time_s(update, in_fit)
    if noise_scale == math.inf:
        return time_s / update.batch_size
    return time_s * (1 + noise_scale / update.batch_size) / (1 + noise_scale)


def fastest_of_each(updates: Iterable[TimedUpdate]) -> tuple[TimedUpdate, ...]:
    """Return the fastest update of each batch size, ascending; the larger micro-batch of equals."""
    ways: dict[int, list[TimedUpdate]] = {}
    for update in sorted(updates, key=lambda way: (way.batch_size, way.time_s)):
        ways.setdefault(update.batch_size, []).append(update)
    # The first of each size is its fastest.
    near = ([w for w in same if w.time_s <= (1 + TIE) * same[0].time_s] for same in ways.values())
    return tuple(max(same, key=lambda way: way.micro_batch_size) for same in near)


def noise_bounds(noise: NoiseScale) -> tuple[float, float]:
    """Return the least and the largest noise scale that the measurement allows, in examples."""
    if noise.value is None or noise.interval is None:
        return noise.at_least or 0.0, math.inf
    return noise.interval.low, noise.interval.high


def binding_limits(
    updates: Iterable[TimedUpdate],
    noise: NoiseScale,
    *,
    saturation: Interval | None,
    spans_in_fit: Sequence[TimeInFit] = (),
    own_time: TimeInFit | None = None,
    without_memory_limit: Iterable[TimedUpdate] = (),
) -> tuple[str, ...]:
    """Return which limit binds, for all that the measurements allow."""
    ways = fastest_of_each(updates)
    free = fastest_of_each((*ways, *without_memory_limit))

    def binding(scale: float, in_fit: TimeInFit | None) -> set[str]:
        def least(of: Sequence[TimedUpdate], time: TimeInFit | None) -> float:
            return min(relative_time(way, noise_scale=scale, in_fit=time) for way in of)

        now = least(ways, in_fit)
        gains = {MEMORY: now / least(free, in_fit), INPUT: now / least(ways, own_time)}
        limit = max(gains, key=lambda name: gains[name])
        if gains[limit] > CLOSEST_RATIO:
            return {limit}
        if now / least(free, own_time) > CLOSEST_RATIO:
            return {MEMORY, INPUT}  # Each hides what the removal of the other would give.
        if saturation is None:
            return {SATURATION, NOISE}
        return {SATURATION if end < scale else NOISE for end in (saturation.low, saturation.high)}

    cases = itertools.product(noise_bounds(noise), spans_in_fit or (None,))
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
    example_s = (last.time_s - before.time_s) / (last.batch_size - before.batch_size)
    found, size = [], 2 * last.batch_size
    while example_s > 0 and size <= largest_batch_size:
        time_s = last.time_s + example_s * (size - last.batch_size)
        found.append(TimedUpdate(size, size, time_s))
        size *= 2
    return tuple(found)
