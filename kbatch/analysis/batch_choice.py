"""Which batch size comes to a target first, by step time, gradient noise and what `fit` adds.

Updates to a target are S(B) = S_min (1 + B_noise / B) (McCandlish et al. 2018, arXiv:1812.06162,
equation 2.11). A step takes t(B), and an update in `fit` no less than p(B), with the wait for data:

    T(B) = S_min max(t(B), p(B)) (1 + B_noise / B)

Where the noise scale is known to an interval, the most that a size may lose against the best one,
T(B) / min T - 1, is found at an end of it: T is linear in B_noise and min T, the least of linear
functions, concave, so their ratio has no maximum in between.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from kbatch.analysis.noise_scale import NoiseScale
from kbatch.analysis.time_in_fit import TimeInFit

# A difference of less than this share changes no decision on a batch size.
TIE = 0.02
# The most that a size may lose where the noise scale is unresolved.
MOST_LOST_UNRESOLVED = 0.25


@dataclasses.dataclass(frozen=True)
class TimedUpdate:
    """A way to make an update, and the time it takes.

    Attributes:
        batch_size: B, in examples.
        micro_batch_size: Examples that go through the device at once; B without accumulation.
        time_s: t, in seconds.
    """

    batch_size: int
    micro_batch_size: int
    time_s: float

    def __post_init__(self):
        if not 1 <= self.micro_batch_size <= self.batch_size or not 0 < self.time_s < math.inf:
            raise ValueError(
                "An update has 1 <= micro_batch_size <= batch_size and takes a positive time. "
                f"Received: batch_size={self.batch_size}, "
                f"micro_batch_size={self.micro_batch_size}, time_s={self.time_s}."
            )

    @property
    def accumulated(self) -> bool:
        """Whether the batch goes through the device in parts."""
        return self.micro_batch_size < self.batch_size

    @property
    def samples_per_second(self) -> float:
        """B / t."""
        return self.batch_size / self.time_s


@dataclasses.dataclass(frozen=True)
class BatchChoice:
    """The batch size to use, as far as it can be told.

    Attributes:
        best: The update of the least time to a target at the noise scale's value; where that is
            unresolved, the one that loses least at the worse end of what it may be, None if that
            is more than 25 %.
        smallest: The best batch size at the lower end of the noise scale's interval, in examples.
        largest: The best batch size at the upper end, likewise.
        most_lost: The largest share by which `best` may be slower than the best size at any noise
            scale in the interval; None without `best`.
    """

    best: TimedUpdate | None
    smallest: int
    largest: int
    most_lost: float | None


def choose_batch(
    updates: Iterable[TimedUpdate], noise: NoiseScale, *, in_fit: TimeInFit | None = None
) -> BatchChoice:
    """Chooses the batch size that comes to a target first, the smaller one of two equals.

    Sizes within 2 % of each other are equal: the smaller one needs fewer examples.

    Example:

    >>> updates = [TimedUpdate(b, b, 1e-3 + 1e-5 * b) for b in (16, 32, 64, 128, 256)]
    >>> choose_batch(updates, noise).best.batch_size  # sqrt(a / b * B_noise), B_noise = 160
    128

    Args:
        updates: The updates to choose from, at least one; several of one batch size may differ in
            their micro-batch, and the fastest stands for the size.
        noise: The gradient noise scale, resolved or with a lower bound alone.
        in_fit: What an update takes in `fit` at the least; None for the train step alone.

    Returns:
        The choice.

    Raises:
        ValueError: If there is no update.
    """
    ways = fastest_of_each(updates)
    ends = noise_bounds(noise)
    smallest, largest = (_best(ways, scale, in_fit).batch_size for scale in ends)

    def lost(way: TimedUpdate) -> float:
        return max(
            relative_time(way, noise_scale=scale, in_fit=in_fit) / _least_time(ways, scale, in_fit)
            - 1
            for scale in ends
        )

    if noise.value is not None:
        best = _best(ways, noise.value, in_fit)
        return BatchChoice(best, smallest, largest, lost(best))
    best = min(ways, key=lost)
    if lost(best) > MOST_LOST_UNRESOLVED:
        return BatchChoice(None, smallest, largest, None)
    return BatchChoice(best, smallest, largest, lost(best))


def noise_bounds(noise: NoiseScale) -> tuple[float, float]:
    """Gives the least and the largest noise scale that the measurement allows, in examples.

    Args:
        noise: The noise scale.

    Returns:
        The ends of its interval; for an unresolved one its lower bound, or 0, and infinity.
    """
    if noise.value is None or noise.interval is None:
        return noise.at_least or 0.0, math.inf
    return noise.interval.low, noise.interval.high


def fastest_of_each(updates: Iterable[TimedUpdate]) -> tuple[TimedUpdate, ...]:
    """Gives the fastest update of each batch size, ascending; the larger micro-batch of equals.

    Raises:
        ValueError: If there is none.
    """
    by_size: dict[int, list[TimedUpdate]] = {}
    for update in updates:
        by_size.setdefault(update.batch_size, []).append(update)
    if not by_size:
        raise ValueError("`updates` must hold at least one timed update. Received: none.")
    return tuple(_fastest(by_size[size]) for size in sorted(by_size))


def relative_time(
    update: TimedUpdate, *, noise_scale: float, in_fit: TimeInFit | None = None
) -> float:
    """Computes the time to a target, in units that are the same for all batch sizes.

    Args:
        update: The update.
        noise_scale: B_noise, in examples; infinity where all examples count fully.
        in_fit: What an update takes in `fit` at the least, or None.

    Returns:
        T over S_min (1 + B_noise): the time for as much progress as an example at batch size 1
        makes.

    Raises:
        ValueError: If the noise scale is negative.
    """
    if not noise_scale >= 0:
        raise ValueError(
            f"`noise_scale` must not be negative. Received: noise_scale={noise_scale}."
        )
    time_s = update_time_s(update, in_fit)
    if noise_scale == math.inf:
        return time_s / update.batch_size
    return time_s * (1 + noise_scale / update.batch_size) / (1 + noise_scale)


def update_time_s(update: TimedUpdate, in_fit: TimeInFit | None = None) -> float:
    """Gives max(t, p(B)): the train step, or what `fit` takes.

    Where the batch goes through the device in parts, it is t and what `fit` adds.

    Args:
        update: The update.
        in_fit: What an update takes in `fit` at the least, or None.
    """
    if in_fit is None:
        return update.time_s
    return in_fit.update_s(update.time_s, update.batch_size, in_parts=update.accumulated)


def relative_updates(batch_size: int, other_size: int, *, noise_scale: float) -> float:
    """Computes the updates to a target at one batch size over those at another.

    Args:
        batch_size: In examples.
        other_size: In examples.
        noise_scale: B_noise, in examples; may be infinite.
    """
    if noise_scale == math.inf:
        return other_size / batch_size
    return (1 + noise_scale / batch_size) / (1 + noise_scale / other_size)


def accumulation_gain(
    updates: Iterable[TimedUpdate], *, noise_scale: float, in_fit: TimeInFit | None = None
) -> float | None:
    """Computes by what share accumulation shortens the way to a target on this device.

    Args:
        updates: The updates to choose from.
        noise_scale: B_noise, in examples; may be infinite.
        in_fit: What an update takes in `fit` at the least, or None.

    Returns:
        The least time without accumulation over the least time of the fastest ways, those among
        which `choose_batch` chooses, less one; None where nothing was measured with it or without.
    """
    given = tuple(updates)
    plain = [update for update in given if not update.accumulated]
    if not plain or len(plain) == len(given):
        return None
    least = [_least_time(ways, noise_scale, in_fit) for ways in (plain, fastest_of_each(given))]
    return least[0] / least[1] - 1


def _best(ways: Sequence[TimedUpdate], noise_scale: float, in_fit: TimeInFit | None) -> TimedUpdate:
    limit = (1 + TIE) * _least_time(ways, noise_scale, in_fit)
    return next(
        way for way in ways if relative_time(way, noise_scale=noise_scale, in_fit=in_fit) <= limit
    )


def _least_time(ways: Sequence[TimedUpdate], noise_scale: float, in_fit: TimeInFit | None) -> float:
    return min(relative_time(w, noise_scale=noise_scale, in_fit=in_fit) for w in ways)


def _fastest(updates: Sequence[TimedUpdate]) -> TimedUpdate:
    limit = (1 + TIE) * min(update.time_s for update in updates)
    near = [update for update in updates if update.time_s <= limit]
    return max(near, key=lambda update: update.micro_batch_size)
