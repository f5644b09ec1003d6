"""Which batch size to use, when some were trained to the same loss.

What the sizes needed says more than the gradient noise scale: that is derived for a learning rate
which is the best at each size (McCandlish et al. 2018, arXiv:1812.06162, section 2.2). Where the
model's own is smaller, a larger batch, whose learning rate grows by rule, saves updates far beyond
the noise scale.
"""

import math
from collections.abc import Iterable

from kbatch.analysis.batch_choice import (
    TIE,
    BatchChoice,
    TimedUpdate,
    fastest_of_each,
    update_time_s,
)
from kbatch.analysis.goodput_search import SizeCosts, Tried, UpdatesForecast
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.analysis.time_in_fit import TimeInFit


def choose_by_forecast(
    updates: Iterable[TimedUpdate],
    forecast: UpdatesForecast,
    *,
    largest: int,
    in_fit: TimeInFit | None = None,
) -> BatchChoice:
    """Chooses the smallest size whose forecast time to the target is within 2 % of the least.

    Args:
        updates: The updates to choose from, of the forecast's sizes.
        forecast: What they need.
        largest: The largest size that came to the target: beyond it the learning rate that the
            rule gives is not tried, and may be too large for the model.
        in_fit: What an update takes in `fit` at the least; None for the train step alone.

    Returns:
        The choice; `smallest` and `largest` are the ends of the sizes that tie. There is no best
        one where every size is larger than `largest`.
    """
    ways = fastest_of_each(updates)
    times_s = {
        way.batch_size: forecast.updates[way.batch_size] * update_time_s(way, in_fit)
        for way in ways
        if way.batch_size <= largest
    }
    if not times_s:
        return BatchChoice(None, ways[0].batch_size, ways[-1].batch_size, None)
    limit = (1 + TIE) * min(times_s.values())
    best = next(way for way in ways if times_s.get(way.batch_size, math.inf) <= limit)
    tied = [*(size for size in forecast.tied if size <= largest), best.batch_size]
    return BatchChoice(best, min(tied), max(tied), None)


def faster_untrained(
    costs: SizeCosts, forecast: UpdatesForecast, *, runs: Iterable[Tried]
) -> tuple[int, ...]:
    """Gives the sizes above all that were trained whose forecast time is the least by 2 % or more.

    Args:
        costs: What updates of each size cost.
        forecast: What they need.
        runs: The runs so far.

    Returns:
        The sizes, ascending; none where a run could not be trained, as they are larger still.
    """
    given = tuple(runs)
    if any(run.updates is None for run in given):
        return ()
    largest = max(run.batch_size for run in given)
    times_s = {size: forecast.updates[size] * s for size, s in costs.update_costs.items()}
    known = [time_s for size, time_s in times_s.items() if size <= largest]
    limit = min(known, default=0.0) / (1 + TIE)
    return tuple(s for s in sorted(times_s) if s > largest and times_s[s] < limit)


def costs_of_updates(
    updates: Iterable[TimedUpdate], *, in_fit: TimeInFit | None = None
) -> SizeCosts:
    """Gives the seconds of an update of each size.

    Args:
        updates: The updates; the fastest of a size stands for it.
        in_fit: What an update takes in `fit` at the least, or None.
    """
    ways = fastest_of_each(updates)
    return SizeCosts({way.batch_size: update_time_s(way, in_fit) for way in ways})


def update_cost_at(costs: SizeCosts, batch_size: int) -> float:
    """Gives the seconds of an update of a size, by the two nearest ones where it was not timed.

    Args:
        costs: What updates of each size cost.
        batch_size: In examples.
    """
    known = costs.update_costs
    if batch_size in known:
        return known[batch_size]
    near = sorted(known, key=lambda size: abs(math.log(size / batch_size)))[:2]
    return TimeInFit.through({size: known[size] for size in near}).time_s(batch_size)


def critical_batch_size(forecast: UpdatesForecast, *, runs: int) -> NoiseScale:
    """Gives B_crit of the sizes that were trained in the place of the noise scale.

    Args:
        forecast: What sizes need.
        runs: How many were trained.
    """
    span = forecast.critical_interval
    return NoiseScale(forecast.critical, span, span.low, None, None, runs)
