"""What a batch size costs against another one: samples/s, updates, time to a target.

Updates follow S(B) = S_min (1 + B_noise / B) (McCandlish et al. 2018, arXiv:1812.06162, equation
2.11) from those that one run needed. An interval joins the ends of its parts, which is wider than
95 % asks for: nothing is assumed on how their errors go together.
"""

import dataclasses
import math

from kbatch.analysis.batch_choice import noise_bounds, relative_updates
from kbatch.analysis.goodput_search import UpdatesForecast
from kbatch.analysis.intervals import Interval
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.analysis.round_ratios import RoundEstimate, over_rounds, ratio_over_rounds
from kbatch.analysis.time_in_fit import TimeInFit


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its uncertainty.

    Attributes:
        value: The number; None where the noise scale is unresolved.
        interval: Its interval of 95 % confidence or more, None where unknown.
    """

    value: float | None
    interval: Interval | None


@dataclasses.dataclass(frozen=True)
class SizeCost:
    """What a batch size costs.

    Attributes:
        batch_size: In examples.
        micro_batch_size: Examples that go through the device at once.
        samples_per_second: Throughput, with the wait for the input pipeline.
        updates: Updates to the target.
        seconds: Seconds to the target.
        relative_time: Seconds to the target over those of the size that it is compared with.
    """

    batch_size: int
    micro_batch_size: int
    samples_per_second: RoundEstimate
    updates: Estimate
    seconds: Estimate
    relative_time: Estimate


@dataclasses.dataclass(frozen=True)
class TimedRounds:
    """An update that was timed in rounds.

    Attributes:
        batch_size: In examples.
        micro_batch_size: Examples that go through the device at once.
        rounds: Number of each round that it was timed in.
        durations_s: Seconds of the update in each of them.
    """

    batch_size: int
    micro_batch_size: int
    rounds: tuple[int, ...]
    durations_s: tuple[float, ...]

    def __post_init__(self):
        if not self.rounds or len(self.rounds) != len(self.durations_s):
            raise ValueError(
                "A timed update has a duration in each of its rounds, one at least. Received: "
                f"{len(self.rounds)} rounds, {len(self.durations_s)} durations."
            )


def size_cost(
    timed: TimedRounds,
    reference: TimedRounds,
    *,
    noise: NoiseScale,
    updates: float,
    updates_at: int,
    in_fit: TimeInFit | None = None,
    forecast: UpdatesForecast | None = None,
) -> SizeCost:
    """Computes what a batch size costs.

    Args:
        timed: The size.
        reference: The size that it is compared with, in the rounds that both have in common.
        noise: The gradient noise scale.
        updates: Updates that one run needed to the target.
        updates_at: Batch size of that run, in examples.
        in_fit: What an update takes in `fit` at the least; None for the train step alone.
        forecast: What sizes need, where several were trained: then it tells the updates, not the
            noise scale.

    Returns:
        The cost.

    Raises:
        ValueError: If they have no round in common.
    """
    by_round, reference_by_round = (_by_round(one, in_fit) for one in (timed, reference))
    size, durations_s = timed.batch_size, list(by_round.values())
    rate = over_rounds([size / duration_s for duration_s in durations_s])
    time_s = over_rounds(durations_s)
    common = [number for number in by_round if number in reference_by_round]
    ratio = ratio_over_rounds(
        [by_round[number] for number in common], [reference_by_round[number] for number in common]
    )
    if rate is None or time_s is None or ratio is None:
        raise ValueError(
            "Two sizes are compared by the rounds that they have in common. Received: rounds "
            f"{timed.rounds} and {reference.rounds}."
        )
    if forecast is None:
        needed = _scaled(noise, updates, size, updates_at)
        relative = _scaled(noise, 1.0, size, reference.batch_size)
    else:
        needed = Estimate(forecast.updates[size], forecast.intervals[size])
        relative = _forecast_ratio(forecast, size, reference.batch_size)
    return SizeCost(
        size,
        timed.micro_batch_size,
        rate,
        needed,
        seconds=_product(needed, time_s),
        relative_time=_product(relative, ratio),
    )


def _by_round(timed: TimedRounds, in_fit: TimeInFit | None) -> dict[int, float]:
    by_round = dict(zip(timed.rounds, timed.durations_s, strict=True))
    if in_fit is None:
        return by_round
    size, in_parts = timed.batch_size, timed.micro_batch_size < timed.batch_size
    return {n: in_fit.update_s(s, size, in_parts=in_parts) for n, s in by_round.items()}


def _scaled(noise: NoiseScale, updates: float, batch_size: int, other_size: int) -> Estimate:
    """Gives the updates at a size from those at another; they are monotone in the noise scale."""

    def at(scale: float) -> float:
        return updates * relative_updates(batch_size, other_size, noise_scale=scale)

    ends = sorted(at(scale) for scale in noise_bounds(noise))
    return Estimate(None if noise.value is None else at(noise.value), Interval(*ends))


def _forecast_ratio(forecast: UpdatesForecast, batch_size: int, other_size: int) -> Estimate:
    """Gives the updates at a size over those at another; their errors are taken as independent."""
    ratio = forecast.updates[batch_size] / forecast.updates[other_size]
    if batch_size == other_size:
        return Estimate(ratio, Interval(ratio, ratio))
    halves = [
        math.log(forecast.intervals[size].high / forecast.updates[size])
        for size in (batch_size, other_size)
    ]
    factor = math.exp(math.hypot(*halves))
    return Estimate(ratio, Interval(ratio / factor, ratio * factor))


def _product(estimate: Estimate, factor: RoundEstimate) -> Estimate:
    value = None if estimate.value is None else estimate.value * factor.value
    if estimate.interval is None or factor.interval is None:
        return Estimate(value, None)
    low = estimate.interval.low * factor.interval.low
    return Estimate(value, Interval(low, estimate.interval.high * factor.interval.high))
