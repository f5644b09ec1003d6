"""Which batch size to use: the least expected time to a loss, of the sizes that reached it.

    expected time = updates to the loss x time of an update in `fit`

The updates are those of the goodput model (`analysis.next_size`), which every run so far corrects:
one run a size is off by a tenth, and its neighbours say so too. A size that was not trained has a
forecast and no evidence: the learning rate that the rule gives it may be too large for the model.
So it is never the answer; where it may be faster, it is named beside the answer.

`CandidateSearch` asks for the size to train next, `decide` makes the answer of all runs.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kbatch.analysis.intervals import Interval, RoundEstimate, over_rounds, ratio_over_rounds
from kbatch.analysis.learning_rate import learning_rate_ratio
from kbatch.analysis.next_size import (
    CostForecast,
    FinishedRun,
    SizeCosts,
    SizeForecast,
    forecast_updates,
    smallest_broken,
    untried,
)
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.document.numbers import format_number
from kbatch.recommendation.limits import TimedUpdate, TimeInFit, fastest_of_each, update_time_s
from kbatch.recommendation.pilot_record import PilotRecord, SizeCheck
from kbatch.throughput.record import TimedRounds

TARGET, CUT_SHORT, DIVERGED = "target", "cut short", "diverged"
# Why no size can be named, beside what a pilot lacks.
NO_TIMES, NO_PILOT, UNTOLD = "no times", "no pilot", "untold"
# A larger size is tried where its examples are faster by this, at best so many times as large.
_WORTH, _STEP = 1.05, 4
# A run that has cost this much more than the best one has lost, as in a search by goodput.
_LOST = 1.3
# Runs of one size at the most, where more of them may change the answer.
_MOST_RUNS = 4
# Of the logarithm of the pilot's updates: its own luck with the seed chose the target.
_PILOT_SPREAD = 0.16
_STRETCHES = 30
_BUDGETS = (1, 1.5, 2, 3, 4, 6, 8, 10)


@dataclasses.dataclass(frozen=True)
class Estimate:
    value: float | None
    interval: Interval | None  # Of 95 % confidence or more.


_UNKNOWN = Estimate(None, None)


@dataclasses.dataclass(frozen=True)
class SizeOutlook:
    """What is known of a batch size that was timed."""

    batch_size: int  #: In examples.
    micro_batch_size: int  #: Examples that go through the device at once.
    #: `"target"`, `"cut short"` or `"diverged"`, also for a failure; None without a training.
    ended_by: str | None
    samples_per_second: Estimate  #: Throughput in `fit`.
    updates: Estimate = _UNKNOWN  #: To the target, by all runs; of one cut short, those it had.
    seconds: Estimate = _UNKNOWN  #: To the target; of a run cut short, those of its updates.
    relative_time: Estimate = _UNKNOWN  #: These seconds over the answer's.


@dataclasses.dataclass(frozen=True)
class UntestedSize:
    """A size that did not reach the target, and may be faster than the answer."""

    batch_size: int  #: In examples.
    speedup: float  #: The answer's seconds over those that are expected of it.
    most_speedup: float  #: The same at the end of the 95 % interval.
    budget_s: float | None = None  #: Enough to train it, None where more would not help.


@dataclasses.dataclass(frozen=True)
class BatchDecision:
    """The batch size to use, and what it was chosen from."""

    batch_size: int | None  #: Of the least expected time to the target; None where none is named.
    micro_batch_size: int | None  #: Examples at once, the fastest without a batch size; or None.
    learning_rate_ratio: float | None  #: Of the model's own, None without a batch size.
    #: Why there is no batch size: `"no times"`, `"no pilot"`, `"pilot diverged"`, `"few updates"`
    #: or `"no progress"`, `"untold"` of an older version; None where there is one.
    missing: str | None
    sizes: tuple[SizeOutlook, ...] = ()  #: All sizes that were timed, ascending.
    as_good: tuple[int, ...] = ()  #: They reached the target, and may take at most 5 % longer.
    untested: tuple[UntestedSize, ...] = ()  #: May be over 5 % faster, the best hope first.
    critical: NoiseScale | None = None  #: B_crit by the trained sizes; None of the pilot alone.
    older: bool = False  #: Whether it is that of an older version, whose file stored none.


@dataclasses.dataclass(frozen=True)
class TrainedRuns:
    """What was measured: the evidence for a decision."""

    rounds: Sequence[TimedRounds]
    in_fit: TimeInFit | None  # None for the train step alone.
    tried: Sequence[FinishedRun]  # The pilot's first; none where that reached no loss.

    @functools.cached_property
    def ways(self) -> dict[int, TimedUpdate]:
        """The fastest way of each size, ascending."""
        times = (TimedUpdate(t.batch_size, t.micro_batch_size, t.median_s) for t in self.rounds)
        return {way.batch_size: way for way in fastest_of_each(times)}

    @functools.cached_property
    def costs(self) -> SizeCosts:
        """Seconds of an update of each size in `fit`, the pilot's too where it was not timed."""
        costs = {b: update_time_s(way, self.in_fit) for b, way in self.ways.items()}
        for size in [run.batch_size for run in self.tried[:1] if run.batch_size not in costs]:
            # Read off the two nearest sizes that were timed.
            near = sorted(costs, key=lambda timed: abs(math.log(timed / size)))[:2]
            costs[size] = TimeInFit({b: costs[b] for b in near}).time_s(size)
        return SizeCosts(dict(sorted(costs.items())))

    @functools.cached_property
    def forecast(self) -> CostForecast | None:
        """What every size needs to the target; None where no run reached it."""
        return forecast_updates(self.costs, self.tried)

    @functools.cached_property
    def reached(self) -> list[int]:
        """The sizes that reached the target, ascending."""
        return sorted({run.batch_size for run in self.tried if run.cost is not None})

    @functools.cached_property
    def best(self) -> int:
        """The size of the least expected time, the smaller of equals; needs one that reached it."""
        assert self.forecast is not None
        updates, costs = self.forecast.updates, self.costs.update_costs
        return min(self.reached, key=lambda size: (updates[size] * costs[size], size))

    @property
    def critical(self) -> NoiseScale | None:
        """B_crit by the sizes that were trained; None where the pilot was the only one."""
        count = len({run.batch_size for run in self.tried if run.updates})
        if count < 2 or self.forecast is None:
            return None
        span = self.forecast.critical_interval
        return NoiseScale(self.forecast.critical, span, span.low, None, None, count)

    def times_s(self, size: int) -> dict[int, float]:
        """Return the seconds of an update of a size in `fit`, by the round."""
        way = self.ways.get(size)
        return {
            number: update_time_s(TimedUpdate(size, timed.micro_batch_size, step_s), self.in_fit)
            for timed in self.rounds
            if way is not None
            and (timed.batch_size, timed.micro_batch_size) == (size, way.micro_batch_size)
            for number, step_s in zip(timed.rounds, timed.durations_s, strict=True)
        }

    def outlook(self, size: int, best: int | None = None) -> SizeOutlook:
        """Describe a size, and compare it with the best one where there is one."""
        way, seconds, forecast = self.ways.get(size), self.costs.update_costs, self.forecast
        by_round = self.times_s(size)
        rates = over_rounds([size / s for s in by_round.values()])
        rate = Estimate(size / seconds[size], rates and rates.interval)
        row = SizeOutlook(size, way.micro_batch_size if way else size, None, rate)
        if best is None or forecast is None:
            return row
        updates, intervals = forecast.updates, forecast.intervals
        best_s = updates[best] * seconds[best]
        runs = [run for run in self.tried if run.batch_size == size]
        run = max(runs, key=lambda run: (run.cost is not None, run.updates or 0.0), default=None)
        if run is not None and not run.updates:
            return dataclasses.replace(row, ended_by=DIVERGED)
        if run is not None and run.cost is None:
            had_s = (run.updates or 0.0) * seconds[size]
            return dataclasses.replace(
                row,
                ended_by=CUT_SHORT,
                updates=Estimate(run.updates, None),
                seconds=Estimate(had_s, None),
                relative_time=Estimate(had_s / best_s, None),
            )
        relative = Estimate(1.0, Interval(1.0, 1.0))
        if size != best:
            # In the rounds that both were timed in; the errors of their updates are independent.
            ends = (math.log(intervals[b].high / updates[b]) for b in (size, best))
            factor, ratio = math.exp(math.hypot(*ends)), updates[size] / updates[best]
            other = self.times_s(best)
            pairs = [(s, other[number]) for number, s in by_round.items() if number in other]
            relative = _product(
                updates[size] * seconds[size] / best_s,
                Interval(ratio / factor, ratio * factor),
                ratio_over_rounds([s for s, _ in pairs], [s for _, s in pairs]),
            )
        to_target_s, times_s = updates[size] * seconds[size], over_rounds([*by_round.values()])
        return dataclasses.replace(
            row,
            ended_by=TARGET if run else None,
            updates=Estimate(updates[size], intervals[size]),
            seconds=_product(to_target_s, intervals[size], times_s),
            relative_time=relative,
        )

    def promising(self, best: int) -> dict[int, SizeForecast]:
        """Forecast the sizes that did not reach the target and may be faster than the best one."""
        if self.forecast is None:
            return {}
        end = smallest_broken(self.tried)
        return {
            size: outlook
            for size, outlook in self.forecast.against(best).items()
            if size not in self.reached and size < end and outlook.may_gain
        }

    def worth_training(self) -> list[int]:
        """List the sizes that are worth training next, the one to train first in front."""
        # Those that may be more than 5 % faster, the largest expected gain first, then the sizes
        # next to the best one, which the model may misjudge. But where the best size so far is the
        # largest that was trained, about four times that is first: the noise scale is often far too
        # small under adaptive optimizers, and only a run shows where larger batches get worse.
        if self.forecast is None:
            return []
        best, outlooks = self.best, self.promising(self.best)
        new = untried(self.costs, self.tried)
        worth = sorted(outlooks.keys() & new, key=lambda size: (-outlooks[size].gain, size))
        example_s = {size: seconds / size for size, seconds in self.costs.update_costs.items()}
        sizes = sorted(example_s)
        at, end = sizes.index(best), smallest_broken(self.tried)
        beside = [size for size in sizes[max(0, at - 1) : at + 2] if size in new and size < end]
        faster = (b for b in beside if b < best or example_s[b] < example_s[best] / _WORTH)
        worth += [size for size in faster if size not in worth]
        # Updates never shrink by more than the batch grows.
        beyond = [b for b, s in example_s.items() if b > best and s < example_s[best] / _WORTH]
        if best < max(one.batch_size for one in self.tried) or not beyond:
            return worth
        first = min(beyond, key=lambda size: abs(math.log(size / (_STEP * best))))
        return worth if worth and worth[0] > first else [first, *(b for b in worth if b != first)]

    def worth_repeating(self) -> list[int]:
        """List the best size and those that may be as good, the one with the fewest runs first."""
        if self.forecast is None:
            return []
        made = Counter(run.batch_size for run in self.tried)
        outlooks, end = self.forecast.against(self.best), smallest_broken(self.tried)
        few = [size for size in made if size < end and made[size] < _MOST_RUNS]
        near = [size for size in few if outlooks[size].may_tie]
        return sorted(near, key=lambda size: (made[size], -outlooks[size].gain))


def _product(value: float, first: Interval, second: RoundEstimate | None) -> Estimate:
    found = second and second.interval
    if found is None:
        return Estimate(value, None)
    return Estimate(value, Interval(first.low * found.low, first.high * found.high))


def trained_runs(
    timings: Sequence[TimedRounds],
    *,
    in_fit: TimeInFit | None,
    pilot: PilotRecord | None,
    checks: Sequence[SizeCheck],
) -> TrainedRuns:
    """Collect the evidence for a batch size: the pilot, and the trainings to its loss."""
    if pilot is None or not timings:
        return TrainedRuns(timings, in_fit, ())
    noise, needed = pilot.noise_scale, pilot.updates_to_target
    first = FinishedRun(
        pilot.batch_size, 0.0, needed, noise.value, noise.at_least, spread=_PILOT_SPREAD
    )
    costs = TrainedRuns(timings, in_fit, (first,)).costs.update_costs
    first = dataclasses.replace(first, cost=needed * costs[pilot.batch_size])
    others = (check.as_run(costs[check.batch_size]) for check in checks)
    return TrainedRuns(timings, in_fit, (first, *others))


def decide(
    found: TrainedRuns,
    *,
    base_batch_size: int,
    rule: str | None,
    missing: str | None = None,
    budget_s: float = 0.0,
    short_s: Mapping[int, float] | None = None,
) -> BatchDecision:
    """Choose the batch size with the least expected time, the smaller one of two equals."""
    missing = missing or (None if found.ways else NO_TIMES) or (None if found.reached else NO_PILOT)
    forecast = found.forecast if missing is None else None
    if forecast is None:
        fastest = max(found.ways.values(), key=lambda w: w.samples_per_second, default=None)
        micro = fastest and fastest.micro_batch_size
        return BatchDecision(None, micro, None, missing, tuple(map(found.outlook, found.ways)))
    best, short_s = found.best, short_s or {}
    sizes = tuple(found.outlook(size, best) for size in found.costs.update_costs)
    outlooks, promising = forecast.against(best), found.promising(best)

    def budget(size: int) -> float | None:
        if short_s.get(size, 0.0) <= 0:
            return None
        # The pilot takes a part of what is added too.
        seconds = budget_s + 2 * short_s[size]
        unit = 10.0 ** math.floor(math.log10(seconds))
        return next(step * unit for step in _BUDGETS if step * unit >= seconds * (1 - 1e-9))

    ratio = learning_rate_ratio(batch_size=best, base_batch_size=base_batch_size, rule=rule)
    return BatchDecision(
        batch_size=best,
        micro_batch_size=next(row.micro_batch_size for row in sizes if row.batch_size == best),
        learning_rate_ratio=ratio,
        missing=None,
        sizes=sizes,
        as_good=tuple(b for b in found.reached if b != best and outlooks[b].may_tie),
        untested=tuple(
            UntestedSize(size, one.speedup, one.most_speedup, budget(size))
            for size, one in sorted(promising.items(), key=lambda item: -item[1].speedup)
        ),
        critical=found.critical,
    )


class CheckPlan(NamedTuple):
    """How a size is trained: to a loss, held-out or of training, as the pilot was."""

    batch_size: int
    micro_batch_size: int
    base_batch_size: int
    rule: str | None
    target: float
    held_out: bool
    stretch: int  # Updates between two looks at the loss.
    most_updates: int  # After which another size has won.
    budget_s: float  # Building included.
    seed: int | None
    run: int = 0  # Its number among the runs of its size: each draws weights and order by itself.


class CandidateSearch:
    """Which sizes to train to the pilot's loss, while one may be better and time is left."""

    def __init__(
        self,
        timings: Sequence[TimedRounds],
        *,
        in_fit: TimeInFit | None,
        pilot: PilotRecord | None,
        base_batch_size: int,
        rule: str | None,
    ):
        self.checks: tuple[SizeCheck, ...] = ()
        self.ended: str | None = None  # Why they ended before the best size was found.
        self.short_s: dict[int, float] = {}  # What the budget lacked for sizes that may be faster.
        self._timings, self._in_fit, self._pilot = timings, in_fit, pilot
        self._settings = base_batch_size, rule
        self._build_s = (pilot and pilot.build_s) or 0.0
        self._failures: list[str] = []
        self._left_s = 0.0

    def ask(self, *, left_s: float, most_s: float) -> CheckPlan | None:
        """Return the run to make next, which is ended after `most_s`; None to stop."""
        pilot, self._left_s = self._pilot, left_s
        found = trained_runs(self._timings, in_fit=self._in_fit, pilot=pilot, checks=self.checks)
        if pilot is None or pilot.missing is not None or found.forecast is None:
            self.ended = "the pilot reached no loss that other sizes could be trained to"
            return None
        worth = found.worth_training() or found.worth_repeating()
        updates = found.forecast.updates
        needed_s = {b: self._build_s + _training_s(found, pilot, b, updates[b]) for b in worth}
        size = next((size for size, seconds in needed_s.items() if seconds <= left_s), None)
        if size is None:
            needed_s = {b: s for b, s in needed_s.items() if b in untried(found.costs, found.tried)}
            short = [
                f"batch size {size:,} would need about {format_number(seconds, 2)} s and "
                f"{format_number(left_s, 2)} s of `budget_s` were left"
                for size, seconds in list(needed_s.items())[:1]
            ]
            self.ended = "; ".join([*self._failures, *short]) or None
            self.short_s = {size: seconds - left_s for size, seconds in needed_s.items()}
            return None
        costs, best = found.costs.update_costs, found.best
        return CheckPlan(
            size,
            found.ways[size].micro_batch_size,
            *self._settings,
            target=pilot.target or 0.0,
            held_out=pilot.has_held_out,
            stretch=max(1, round(updates[size] / _STRETCHES)),
            most_updates=max(1, round(_LOST * updates[best] * costs[best] / costs[size])),
            budget_s=most_s,
            seed=pilot.seed,
            run=sum(run.batch_size == size for run in found.tried),
        )

    def tell(self, check: SizeCheck, *, left_s: float, failure: str | None = None) -> None:
        """Take the run that was asked for, why it failed, and the seconds that are left."""
        # The pilot may have been built while something else ran beside it.
        self._build_s = min(self._build_s, max(0.0, self._left_s - left_s - check.trained_s))
        self.checks = (*self.checks, check)
        if failure is not None:
            self._failures.append(f"at batch size {check.batch_size:,} {failure}")


def _training_s(found: TrainedRuns, pilot: PilotRecord, batch_size: int, updates: float) -> float:
    """Estimate the seconds of a run after its first update, looks at the held-out loss included."""
    looks_s = pilot.look_s or 0.0
    update_s, beside_s = found.ways[batch_size].time_s, 0.0
    if pilot.trained_s:
        # What an update of the pilot took beside its train step; a run starts no epochs.
        base = found.ways.get(pilot.batch_size)
        pilot_s = (pilot.trained_s - looks_s * len(pilot.stretches)) / pilot.updates
        beside_s = max(0.0, pilot_s - (base.time_s if base else 0.0))
    return updates * (update_s + beside_s) + _STRETCHES * looks_s
