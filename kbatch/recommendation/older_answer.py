"""The answer of a recommendation whose file keeps none: version 0.1.0 derived it when it was read.

Its choice is repeated here and nowhere else. It named the smallest size whose forecast time was
within 2 % of the least, trained or not; with the pilot alone, by the noise scale.
"""

import math
from collections.abc import Sequence

from kbatch.analysis.learning_rates import capped_learning_rate_ratio, learning_rate_ratio
from kbatch.analysis.next_size import Tried, UpdatesForecast, forecast_updates
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.recommendation.batch_choice import (
    TIE,
    TimedUpdate,
    noise_bounds,
    relative_time,
    update_time_s,
)
from kbatch.recommendation.batch_decision import (
    NO_TIMES,
    UNTOLD,
    BatchDecision,
    TrainedRuns,
    critical_of,
    throughputs,
)
from kbatch.recommendation.pilot_record import PilotRecord
from kbatch.recommendation.time_in_fit import TimeInFit

# The most that a size might lose where the noise scale was unresolved.
_MOST_LOST = 0.25
# A run that missed the loss was taken to have needed twice what it had, give or take.
_MISSED_FACTOR, _MISSED = 2.0, 0.5


def older_answer(
    found: TrainedRuns, pilot: PilotRecord | None, *, base_batch_size: int, rule: str | None
) -> BatchDecision:
    """Repeat the choice of version 0.1.0.

    Args:
        found: What it measured.
        pilot: Its pilot, None without one.
        base_batch_size: Batch size that the learning rate suits, in examples.
        rule: How the learning rate follows the batch size.
    """
    ways = list(found.ways.values())
    if not ways:
        return BatchDecision(None, None, None, NO_TIMES, older=True)
    noise = NoiseScale(None, None, None, None, None, 0) if pilot is None else pilot.noise_scale
    runs = [_as_taken(run) for run in found.tried]
    forecast = forecast_updates(found.costs, runs) if len(runs) > 1 else None
    best = _by_runs(found, forecast) if forecast else _by_noise(ways, noise, found.in_fit)
    critical = critical_of(runs, forecast) if forecast else None
    rows = throughputs(found)
    if best is None or (pilot is not None and pilot.ended_by == "diverged"):
        micro = max(ways, key=lambda way: way.samples_per_second).micro_batch_size
        return BatchDecision(None, micro, None, UNTOLD, rows, critical=critical, older=True)
    sizes = {"batch_size": best.batch_size, "base_batch_size": base_batch_size, "rule": rule}
    scale = noise.at_least if noise.value is None else noise.value
    ratio = (
        learning_rate_ratio(**sizes)
        if forecast
        else capped_learning_rate_ratio(**sizes, noise_scale=scale)
    )
    best_sizes = best.batch_size, best.micro_batch_size
    return BatchDecision(*best_sizes, ratio, None, rows, critical=critical, older=True)


def _by_runs(found: TrainedRuns, forecast: UpdatesForecast) -> TimedUpdate | None:
    """Chooses by what the sizes needed that were trained."""
    largest = max(run.batch_size for run in found.tried if run.cost is not None)
    ways = [way for way in found.ways.values() if way.batch_size <= largest]
    times_s = [forecast.updates[w.batch_size] * update_time_s(w, found.in_fit) for w in ways]
    limit = (1 + TIE) * min(times_s, default=0.0)
    return next((w for w, time_s in zip(ways, times_s, strict=True) if time_s <= limit), None)


def _as_taken(run: Tried) -> Tried:
    if run.cost is not None or not run.updates:
        return run
    return Tried(run.batch_size, math.inf, _MISSED_FACTOR * run.updates, spread=_MISSED)


def _by_noise(
    ways: Sequence[TimedUpdate], noise: NoiseScale, in_fit: TimeInFit | None
) -> TimedUpdate | None:
    def time(way: TimedUpdate, scale: float) -> float:
        return relative_time(way, noise_scale=scale, in_fit=in_fit)

    def least(scale: float) -> float:
        return min(time(way, scale) for way in ways)

    value = noise.value
    if value is not None:
        return next(way for way in ways if time(way, value) <= (1 + TIE) * least(value))
    ends = noise_bounds(noise)
    lost = {way: max(time(way, end) / least(end) - 1 for end in ends) for way in ways}
    best = min(ways, key=lambda way: lost[way])
    return best if lost[best] <= _MOST_LOST else None
