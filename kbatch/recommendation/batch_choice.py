"""How long a batch size takes to a target, by step time, gradient noise and what `fit` adds.

Updates to a target are S(B) = S_min (1 + B_noise / B) (McCandlish et al. 2018, arXiv:1812.06162,
equation 2.11). A step takes t(B), and an update in `fit` no less than p(B), with the wait for data:

    T(B) = S_min max(t(B), p(B)) (1 + B_noise / B)
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from kbatch.analysis.noise_scale import NoiseScale
from kbatch.recommendation.time_in_fit import TimeInFit

# A difference of less than this share changes no decision on a batch size.
TIE = 0.02


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


def _fastest(updates: Sequence[TimedUpdate]) -> TimedUpdate:
    limit = (1 + TIE) * min(update.time_s for update in updates)
    near = [update for update in updates if update.time_s <= limit]
    return max(near, key=lambda update: update.micro_batch_size)
