"""Which batch size to use: how long each one takes to a loss, and the least expected time.

The time from update to update in `fit`, by the size of the batch.

Beside the train step it holds what Keras does for each update, which does not grow with the batch,
the wait for data, and a batch's share of what each epoch takes to start, which do: seconds at one
batch size say nothing of another.

How long a batch size takes to a target, by step time, gradient noise and what `fit` adds.

Updates to a target are S(B) = S_min (1 + B_noise / B) (McCandlish et al. 2018, arXiv:1812.06162,
equation 2.11). A step takes t(B), and an update in `fit` no less than p(B), with the wait for data:

    T(B) = S_min max(t(B), p(B)) (1 + B_noise / B)

Which batch size to use: the least expected time to a loss, of the sizes that came to it.

    expected time = updates to the loss x time of an update in `fit`

The updates are those of the goodput model (`goodput_search`), which every run so far corrects: one
run a size is off by a tenth, and its neighbours say so too. A size that was not trained has a
forecast and no evidence: the learning rate that the rule gives it may be too large for the model.
So it is never the answer; where it may be faster, it is named beside the answer.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from kbatch.analysis.intervals import Interval, over_rounds, ratio_over_rounds
from kbatch.analysis.next_size import (
    SizeCosts,
    SizeForecast,
    Tried,
    UpdatesForecast,
    forecast_updates,
    outlook_of,
)
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.throughput.record import TimedRounds


@dataclasses.dataclass(frozen=True)
class TimeInFit:
    """The time of an update: straight lines through the times of one or two batch sizes.

    Attributes:
        smaller_size: A batch size, in examples.
        smaller_s: Seconds that it takes.
        larger_size: A larger one; the same where only one was measured, which is taken to have no
            fixed part.
        larger_s: Seconds that it takes.
        beside: What `fit` adds to the step of a batch that goes through the device in parts: the
            lines are of whole batches, whose step takes another time. None where not known.
        example_s: Seconds that the data take an example, at the least.
    """

    smaller_size: int
    smaller_s: float
    larger_size: int
    larger_s: float
    beside: "TimeInFit | None" = None
    example_s: float = 0.0

    @classmethod
    def through(
        cls,
        times_s: Mapping[int, float],
        *,
        beside: "TimeInFit | None" = None,
        example_s: float = 0.0,
    ) -> Self:
        """Make it from measured times."""
        known = sorted(times_s.items())
        if not 1 <= len(known) <= 2 or not all(b >= 1 and 0 < s < math.inf for b, s in known):
            raise ValueError(
                "A time in `fit` goes through positive times of one or two batch sizes. "
                f"Received: times_s={dict(known)}."
            )
        return cls(*known[0], *known[-1], beside, example_s)

    def time_s(self, batch_size: int) -> float:
        """Return the seconds of an update; outside of the sizes no part is below 0."""
        return max(self._line_s(batch_size), self.example_s * batch_size)

    def update_s(self, step_s: float, batch_size: int, *, in_parts: bool) -> float:
        """Return the seconds of an update in `fit` whose train step takes so long."""
        if in_parts and self.beside is not None:
            return max(step_s + self.beside.time_s(batch_size), self.example_s * batch_size)
        return max(step_s, self.time_s(batch_size))

    def _line_s(self, batch_size: int) -> float:
        slope = self._slope
        if batch_size > self.larger_size:
            return self.larger_s + max(0.0, slope) * (batch_size - self.larger_size)
        if batch_size > self.smaller_size:
            return self.smaller_s + slope * (batch_size - self.smaller_size)
        fixed_s = min(max(0.0, self.smaller_s - slope * self.smaller_size), self.smaller_s)
        return fixed_s + (self.smaller_s - fixed_s) * batch_size / self.smaller_size

    @property
    def _slope(self) -> float:
        """Seconds an example."""
        if self.larger_size == self.smaller_size:
            return self.larger_s / self.larger_size
        return (self.larger_s - self.smaller_s) / (self.larger_size - self.smaller_size)


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
    """Return the least and the largest noise scale that the measurement allows, in examples."""
    if noise.value is None or noise.interval is None:
        return noise.at_least or 0.0, math.inf
    return noise.interval.low, noise.interval.high


def fastest_of_each(updates: Iterable[TimedUpdate]) -> tuple[TimedUpdate, ...]:
    """Return the fastest update of each batch size, ascending; the larger micro-batch of equals."""
    by_size: dict[int, list[TimedUpdate]] = {}
    for update in updates:
        by_size.setdefault(update.batch_size, []).append(update)
    if not by_size:
        raise ValueError("`updates` must hold at least one timed update. Received: none.")
    return tuple(_fastest(by_size[size]) for size in sorted(by_size))


def relative_time(
    update: TimedUpdate, *, noise_scale: float, in_fit: TimeInFit | None = None
) -> float:
    """Compute the time to a target, in units that are the same for all batch sizes."""
    if not noise_scale >= 0:
        raise ValueError(
            f"`noise_scale` must not be negative. Received: noise_scale={noise_scale}."
        )
    time_s = update_time_s(update, in_fit)
    if noise_scale == math.inf:
        return time_s / update.batch_size
    return time_s * (1 + noise_scale / update.batch_size) / (1 + noise_scale)


def update_time_s(update: TimedUpdate, in_fit: TimeInFit | None = None) -> float:
    """Return max(t, p(B)): the train step, or what `fit` takes.

    Where the batch goes through the device in parts, it is t and what `fit` adds.
    """
    if in_fit is None:
        return update.time_s
    return in_fit.update_s(update.time_s, update.batch_size, in_parts=update.accumulated)


def _fastest(updates: Sequence[TimedUpdate]) -> TimedUpdate:
    limit = (1 + TIE) * min(update.time_s for update in updates)
    near = [update for update in updates if update.time_s <= limit]
    return max(near, key=lambda update: update.micro_batch_size)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its uncertainty.

    Attributes:
        value: The number, None where unknown.
        interval: Its interval of 95 % confidence or more, None where unknown.
    """

    value: float | None
    interval: Interval | None


TARGET, CUT_SHORT, DIVERGED = "target", "cut short", "diverged"
# Why no size can be named.
NO_TIMES, NO_PILOT, PILOT_DIVERGED = "no times", "no pilot", "pilot diverged"
FEW_UPDATES, NO_PROGRESS, UNTOLD = "few updates", "no progress", "untold"
# A size is tried where it may be faster by this; the next one upwards is this many times as large.
_WORTH, _STEP = 1.05, 4
_BUDGETS = (1, 1.5, 2, 3, 4, 6, 8, 10)
_UNKNOWN = Estimate(None, None)


@dataclasses.dataclass(frozen=True)
class SizeOutlook:
    """What is known of a batch size that was timed.

    Attributes:
        batch_size: In examples.
        micro_batch_size: Examples that go through the device at once.
        ended_by: How its training ended: `"target"`, `"cut short"` or `"diverged"`, also for a
            failure; None where it was not trained.
        samples_per_second: Throughput in `fit`.
        updates: Updates to the target, by all runs; where its own was cut short, those it had.
        seconds: Seconds to the target; where its run was cut short, those of its updates.
        relative_time: These seconds over the answer's.
    """

    batch_size: int
    micro_batch_size: int
    ended_by: str | None
    samples_per_second: Estimate
    updates: Estimate = _UNKNOWN
    seconds: Estimate = _UNKNOWN
    relative_time: Estimate = _UNKNOWN


@dataclasses.dataclass(frozen=True)
class UntestedSize:
    """A size that did not reach the target, and may be faster than the answer.

    Attributes:
        batch_size: In examples.
        speedup: The answer's seconds over those that are expected of it.
        most_speedup: The same at the end of the 95 % interval.
        budget_s: A budget that is enough to train it, None where a larger one would not help.
    """

    batch_size: int
    speedup: float
    most_speedup: float
    budget_s: float | None = None


@dataclasses.dataclass(frozen=True)
class BatchDecision:
    """The batch size to use, and what it was chosen from.

    Attributes:
        batch_size: The size of the least expected time, of those that came to the target; None
            where none can be named.
        micro_batch_size: Examples that go through the device at once; without a batch size those
            of the largest throughput, None where nothing was timed.
        learning_rate_ratio: Factor of the model's learning rate, None without a batch size.
        missing: Why there is no batch size: `"no times"`, `"no pilot"`, `"pilot diverged"`,
            `"few updates"` or `"no progress"`, `"untold"` of an older version; None where there is
            one.
        sizes: All sizes that were timed, ascending.
        as_good: Sizes that came to the target too, and may take no more than 5 % longer.
        untested: Sizes that may be faster by more than 5 %, the most promising first.
        critical: B_crit by the sizes that were trained; None where the pilot was the only one.
        older: Whether it is computed as the version did that wrote the file, which stored none.
    """

    batch_size: int | None
    micro_batch_size: int | None
    learning_rate_ratio: float | None
    missing: str | None
    sizes: tuple[SizeOutlook, ...] = ()
    as_good: tuple[int, ...] = ()
    untested: tuple[UntestedSize, ...] = ()
    critical: NoiseScale | None = None
    older: bool = False


class TrainedRuns(NamedTuple):
    """What was measured: the evidence for a decision.

    Attributes:
        rounds: The updates that were timed, all in the same rounds.
        in_fit: What an update takes in `fit`; None for the train step alone.
        tried: The runs, the pilot's first; none where that came to no loss.
    """

    rounds: Sequence[TimedRounds]
    in_fit: TimeInFit | None
    tried: Sequence[Tried]

    @property
    def ways(self) -> dict[int, TimedUpdate]:
        """The fastest way of each size, ascending."""
        if not self.rounds:
            return {}
        times = (TimedUpdate(t.batch_size, t.micro_batch_size, t.median_s) for t in self.rounds)
        return {way.batch_size: way for way in fastest_of_each(times)}

    @property
    def costs(self) -> SizeCosts:
        """Seconds of an update of each size in `fit`, the pilot's too where it was not timed."""
        costs = {b: update_time_s(way, self.in_fit) for b, way in self.ways.items()}
        for run in self.tried[:1]:
            costs.setdefault(run.batch_size, _between(costs, run.batch_size))
        return SizeCosts(dict(sorted(costs.items())))


def decide(
    found: TrainedRuns,
    *,
    rate_ratio: Callable[[int], float],
    missing: str | None = None,
    budget_s: float = 0.0,
    short_s: Mapping[int, float] | None = None,
) -> BatchDecision:
    """Choose the batch size with the least expected time, the smaller one of two equals."""
    ways = found.ways
    missing = missing or (None if ways else NO_TIMES)
    if missing is None and not any(run.cost is not None for run in found.tried):
        missing = NO_PILOT
    if missing is not None:
        fastest = max(ways.values(), key=lambda w: w.samples_per_second, default=None)
        micro = fastest and fastest.micro_batch_size
        return BatchDecision(None, micro, None, missing, throughputs(found))
    costs = found.costs
    forecast = forecast_updates(costs, found.tried)
    if forecast is None:
        raise AssertionError("A run came to the target.")
    times_s = {size: forecast.updates[size] * s for size, s in costs.update_costs.items()}
    reached = sorted(run.batch_size for run in found.tried if run.cost is not None)
    best = min(reached, key=lambda size: (times_s[size], size))
    sizes = tuple(_row(found, size, forecast=forecast, best=best) for size in costs.update_costs)
    outlooks = outlook_of(costs, found.tried, best=best)
    return BatchDecision(
        batch_size=best,
        micro_batch_size=next(row.micro_batch_size for row in sizes if row.batch_size == best),
        learning_rate_ratio=rate_ratio(best),
        missing=None,
        sizes=sizes,
        as_good=tuple(b for b in reached if b != best and outlooks[b].may_tie),
        untested=_untested(found.tried, outlooks, budget_s=budget_s, short_s=short_s or {}),
        critical=critical_of(found.tried, forecast),
    )


def promising_sizes(found: TrainedRuns) -> list[int]:
    """List the sizes that are worth training next, the one to train first in front.

    Those that may be more than 5 % faster by all runs, the largest expected gain first. But where
    the best size so far is the largest that was trained, four times that size or a larger one is
    first: the noise scale is often far too small under adaptive optimizers, and only a run shows
    where larger batches get worse.
    None is trained twice, or as large as one that failed or diverged.
    """
    reached = [run for run in found.tried if run.cost is not None]
    if not reached:
        return []
    best = min(reached, key=lambda run: run.cost or 0.0).batch_size
    outlooks = outlook_of(found.costs, found.tried, best=best)
    trained = {run.batch_size for run in found.tried}
    worth = [b for b in _promising(found.tried, outlooks) if b not in trained]
    worth.sort(key=lambda size: -outlooks[size].gain)
    beyond = _beyond(found, best) if best == max(trained) else None
    if beyond is None or (worth and worth[0] > beyond):
        return worth
    return [beyond, *(size for size in worth if size != beyond)]


def _beyond(found: TrainedRuns, best: int) -> int | None:
    """Return the size nearest to four times the best one, None where none is faster an example."""
    example_s = {size: seconds / size for size, seconds in found.costs.update_costs.items()}
    # Updates never shrink by more than the batch grows.
    faster = [b for b, s in example_s.items() if b > best and s < example_s[best] / _WORTH]
    return min(faster, key=lambda size: abs(math.log(size / (_STEP * best))), default=None)


def throughputs(found: TrainedRuns) -> tuple[SizeOutlook, ...]:
    """Return what is known of the sizes where their trainings are not compared."""
    return tuple(_row(found, size) for size in found.ways)


def critical_of(tried: Sequence[Tried], forecast: UpdatesForecast) -> NoiseScale | None:
    """Return B_crit by the sizes that were trained; None where the pilot was the only one."""
    told = [run for run in tried if run.updates]
    if len(told) < 2:
        return None
    span = forecast.critical_interval
    return NoiseScale(forecast.critical, span, span.low, None, None, len(told))


def _promising(tried: Sequence[Tried], outlooks: Mapping[int, SizeForecast]) -> list[int]:
    """List the sizes that did not come to the target, and may be faster than the best."""
    reached = {run.batch_size for run in tried if run.cost is not None}
    broken = min((run.batch_size for run in tried if not run.updates), default=math.inf)
    return [b for b, o in outlooks.items() if b not in reached and b < broken and o.may_gain]


def _untested(
    tried: Sequence[Tried],
    outlooks: Mapping[int, SizeForecast],
    *,
    budget_s: float,
    short_s: Mapping[int, float],
) -> tuple[UntestedSize, ...]:
    sizes = sorted(_promising(tried, outlooks), key=lambda size: -outlooks[size].speedup)
    return tuple(
        UntestedSize(
            size,
            outlooks[size].speedup,
            outlooks[size].most_speedup,
            # The pilot takes a part of what is added too.
            _round_budget(budget_s + 2 * short_s[size]) if short_s.get(size, 0.0) > 0 else None,
        )
        for size in sizes
    )


def _round_budget(seconds: float) -> float:
    unit = 10.0 ** math.floor(math.log10(seconds))
    return next(step * unit for step in _BUDGETS if step * unit >= seconds * (1 - 1e-9))


def _row(
    found: TrainedRuns,
    size: int,
    *,
    forecast: UpdatesForecast | None = None,
    best: int | None = None,
) -> SizeOutlook:
    way, by_round = found.ways.get(size), _by_round(found, size)
    costs = found.costs.update_costs
    rates = over_rounds([size / s for s in by_round.values()])
    micro = way.micro_batch_size if way else size
    rate = Estimate(size / costs[size], rates and rates.interval)
    if forecast is None or best is None:
        return SizeOutlook(size, micro, None, rate)
    run = next((run for run in found.tried if run.batch_size == size), None)
    best_s = forecast.updates[best] * costs[best]
    if run is not None and run.cost is None:
        if not run.updates:
            return SizeOutlook(size, micro, DIVERGED, rate)
        had_s = run.updates * costs[size]
        least = (run.updates, had_s, had_s / best_s)
        return SizeOutlook(size, micro, CUT_SHORT, rate, *(Estimate(v, None) for v in least))
    updates = forecast.updates[size]
    time_s = over_rounds(list(by_round.values()))
    seconds = _product(forecast.intervals[size], time_s and time_s.interval, updates * costs[size])
    return SizeOutlook(
        size,
        micro,
        TARGET if run else None,
        rate,
        Estimate(updates, forecast.intervals[size]),
        seconds,
        _relative(found, size, best, forecast),
    )


def _relative(found: TrainedRuns, size: int, best: int, forecast: UpdatesForecast) -> Estimate:
    """Compare with the answer, in the rounds that both were timed in."""
    costs, updates = found.costs.update_costs, forecast.updates
    value = updates[size] * costs[size] / (updates[best] * costs[best])
    if size == best:
        return Estimate(1.0, Interval(1.0, 1.0))
    # Their errors are taken as independent.
    factor = math.exp(
        math.hypot(*(math.log(forecast.intervals[b].high / updates[b]) for b in (size, best)))
    )
    ratio = updates[size] / updates[best]
    one, other = _by_round(found, size), _by_round(found, best)
    common = [number for number in one if number in other]
    times = ratio_over_rounds([one[n] for n in common], [other[n] for n in common])
    return _product(Interval(ratio / factor, ratio * factor), times and times.interval, value)


def _by_round(found: TrainedRuns, size: int) -> dict[int, float]:
    """Return the seconds of an update of a size in `fit`, by the round."""
    way = found.ways.get(size)
    return {
        number: update_time_s(TimedUpdate(size, timed.micro_batch_size, step_s), found.in_fit)
        for timed in found.rounds
        if way is not None
        and (timed.batch_size, timed.micro_batch_size) == (size, way.micro_batch_size)
        for number, step_s in zip(timed.rounds, timed.durations_s, strict=True)
    }


def _product(first: Interval, second: Interval | None, value: float) -> Estimate:
    if second is None:
        return Estimate(value, None)
    return Estimate(value, Interval(first.low * second.low, first.high * second.high))


def _between(costs: Mapping[int, float], batch_size: int) -> float:
    """Read the seconds of an update off the two nearest sizes that were timed."""
    near = sorted(costs, key=lambda size: abs(math.log(size / batch_size)))[:2]
    return TimeInFit.through({size: costs[size] for size in near}).time_s(batch_size)
