"""The limit that binds: what keeps a larger batch from coming to a target sooner.

Memory and the input pipeline bind where the way to a target would be shorter without them. Else
a larger batch gains by throughput and loses by gradient noise, and the one binds that comes first
on the batch axis: saturation, where the device runs at 90 % of its peak, or the noise scale, from
which on more than half of a batch's examples are wasted. With t(B) = a + b B, n_half = a / b,

    T(B) = S_min (a + b B) (1 + B_noise / B)        least at B = sqrt(n_half B_noise)

and saturation lies at 9 n_half: it comes first where the best batch runs at three quarters of the
peak or more, and twice as large a one at less than 1.15 times its throughput.
"""

import itertools
from collections.abc import Iterable, Sequence

from kbatch.analysis.intervals import Interval
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.input_pipeline.rates import CLOSEST_RATIO
from kbatch.recommendation.choice import (
    TimedUpdate,
    TimeInFit,
    fastest_of_each,
    noise_bounds,
    relative_time,
)

MEMORY = "memory"
SATURATION = "hardware saturation"
NOISE = "gradient noise"
INPUT = "input pipeline"
LIMITS = (MEMORY, SATURATION, NOISE, INPUT)


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
    found: set[str] = set()
    for scale, in_fit in itertools.product(noise_bounds(noise), spans_in_fit or (None,)):
        found |= _binding_at(ways, free, scale, (in_fit, own_time), saturation)
    return tuple(limit for limit in LIMITS if limit in found)


def with_more_memory(
    updates: Iterable[TimedUpdate], *, largest_batch_size: int
) -> tuple[TimedUpdate, ...]:
    """Extrapolate what a step on a whole batch would take if more examples fitted at once.

    Assumes that each further example takes as long as those between the two largest batches that
    went through the device whole.
    """
    whole = [update for update in fastest_of_each(updates) if not update.accumulated]
    if len(whole) < 2:
        return ()
    last, before = whole[-1], whole[-2]
    per_example_s = (last.time_s - before.time_s) / (last.batch_size - before.batch_size)
    if per_example_s <= 0:
        return ()
    sizes = itertools.takewhile(
        lambda size: size <= largest_batch_size,
        (last.batch_size * 2**k for k in itertools.count(1)),
    )
    return tuple(
        TimedUpdate(size, size, last.time_s + per_example_s * (size - last.batch_size))
        for size in sizes
    )


def _binding_at(
    ways: Sequence[TimedUpdate],
    free: Sequence[TimedUpdate],
    noise_scale: float,
    times: tuple[TimeInFit | None, TimeInFit | None],
    saturation: Interval | None,
) -> set[str]:
    in_fit, own_time = times
    least = _least(ways, noise_scale, in_fit)
    gains = {
        MEMORY: least / _least(free, noise_scale, in_fit),
        INPUT: least / _least(ways, noise_scale, own_time),
    }
    limit = max(gains, key=lambda name: gains[name])
    if gains[limit] > CLOSEST_RATIO:
        return {limit}
    if least / _least(free, noise_scale, own_time) > CLOSEST_RATIO:
        return {MEMORY, INPUT}  # Each hides what the removal of the other would give.
    if saturation is None:
        return {SATURATION, NOISE}
    first = {size < noise_scale for size in (saturation.low, saturation.high)}
    return {SATURATION if saturated else NOISE for saturated in first}


def _least(ways: Sequence[TimedUpdate], noise_scale: float, in_fit: TimeInFit | None) -> float:
    return min(relative_time(w, noise_scale=noise_scale, in_fit=in_fit) for w in ways)
