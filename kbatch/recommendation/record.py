"""The record of a recommendation: what was measured, and the batch size that follows from it.

The answer of a recommendation whose file keeps none: version 0.1.0 derived it when it was read.

Its choice is repeated here and nowhere else. It named the smallest size whose forecast time was
within 2 % of the least, trained or not; with the pilot alone, by the noise scale.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Mapping, Sequence

from kbatch.analysis.intervals import Interval
from kbatch.analysis.learning_rate import capped_learning_rate_ratio, learning_rate_ratio
from kbatch.analysis.next_size import Tried, UpdatesForecast, forecast_updates
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.analysis.scaling_curve import BatchAnswer, Latency, efficient_batch_size, fit_latency
from kbatch.input_pipeline.record import InputPipelineProfile
from kbatch.memory.record import MaxBatchSizeResult
from kbatch.recommendation.choice import (
    NO_TIMES,
    TIE,
    UNTOLD,
    BatchDecision,
    TimedUpdate,
    TimeInFit,
    TrainedRuns,
    critical_of,
    fastest_of_each,
    noise_bounds,
    relative_time,
    throughputs,
    update_time_s,
)
from kbatch.recommendation.limits import binding_limits, with_more_memory
from kbatch.recommendation.pilot_record import FitLines, FitTime, PilotRecord, SizeCheck, fit_lines
from kbatch.records.environment import EnvironmentRecord
from kbatch.records.record import SavedRecord, ShownRecord
from kbatch.throughput.record import TimedRounds

# What is measured beside the limits: short trainings.
OTHER_SIZES = "other batch sizes"
# Looked up when a recommendation is printed, so that it is read without what writes; as in
# `shown_record`.
_PAGE = "kbatch.recommendation.report"
_UNRESOLVED = NoiseScale(None, None, None, None, None, 0)
_NO_ANSWER = BatchDecision(None, None, None, None, older=True)


@dataclasses.dataclass(frozen=True)
class Recommendation(SavedRecord, ShownRecord):
    """The limits of the batch size, which of them binds, and the sizes to use.

    Attributes:
        model_name: Name of the model.
        optimizer: Class name of the optimizer, without the loss-scale wrapper.
        dtype_policy: Policy of the model.
        base_batch_size: Batch size that the model's own learning rate suits, in examples.
        base_learning_rate: That learning rate, at the first update; None where it is no scalar.
        scheduled: Whether a schedule gives it.
        learning_rate_rule: `"linear"`, `"sqrt"` or None: how it follows the batch size.
        examples: Training examples, None where the data do not tell.
        timings: The updates that were timed, all in the same shuffled rounds.
        memory: The search for the largest batch that fits, None where there was none.
        pilot: The training that measured the gradient noise scale, None where there was none.
        pipeline: What the input pipeline delivers, at one batch size; None where not measured.
        unknown: Why a limit, one of `kbatch.recommendation.limits.LIMITS`, was not measured, and
            why no further one of `OTHER_SIZES` was trained.
        durations_s: Seconds that each of these measurements took, by its name.
        budget_s: Seconds that it was given.
        notes: What a reader of the numbers must know.
        environment: The machine and the software.
        checks: Short trainings at other sizes, to the loss that the pilot came to.
        fit_times: What `fit` takes at one or two batch sizes.
        decision: The answer, which page, table and figure show; in a file without one, the answer
            of the version that wrote it.
    """

    model_name: str
    optimizer: str
    dtype_policy: str
    base_batch_size: int
    base_learning_rate: float | None
    scheduled: bool
    learning_rate_rule: str | None
    examples: int | None
    timings: tuple[TimedRounds, ...]
    memory: MaxBatchSizeResult | None
    pilot: PilotRecord | None
    pipeline: InputPipelineProfile | None
    unknown: Mapping[str, str]
    durations_s: Mapping[str, float]
    budget_s: float
    notes: tuple[str, ...] = ()
    environment: EnvironmentRecord | None = None
    checks: tuple[SizeCheck, ...] = ()
    fit_times: tuple[FitTime, ...] = ()
    decision: BatchDecision = _NO_ANSWER

    def __post_init__(self):
        if self.decision != _NO_ANSWER:
            return
        found = trained_runs(
            self.timings, in_fit=self.in_fit.line, pilot=self.pilot, checks=self.checks
        )
        base, rule = self.base_batch_size, self.learning_rate_rule
        answer = older_answer(found, self.pilot, base_batch_size=base, rule=rule)
        object.__setattr__(self, "decision", answer)

    def __repr__(self) -> str:
        """Sum the recommendation up in a line."""
        if self.batch_size is None:
            return f"<Recommendation: batch size not told, {len(self.unknown)} limits unknown>"
        rate = "" if self.learning_rate is None else f", learning rate {self.learning_rate:.3g}"
        return (
            f"<Recommendation: batch size {self.batch_size}, micro-batch size "
            f"{self.micro_batch_size}{rate}; {' or '.join(self.binding)} binds>"
        )

    def __str__(self) -> str:
        """Write the recommendation as a page: the answer, why, and how sure it is."""
        return importlib.import_module(_PAGE).recommendation_text(self)

    @property
    def batch_size(self) -> int | None:
        """Examples of an update; None where no size can be named."""
        return self.decision.batch_size

    @property
    def micro_batch_size(self) -> int | None:
        """Examples that go through the device at once: the fastest that fits for the batch size.

        Where no batch size can be named, the one with the largest throughput.
        """
        return self.decision.micro_batch_size

    @property
    def learning_rate(self) -> float | None:
        """Learning rate at the first update; None without a batch size or where it is no scalar."""
        ratio = self.decision.learning_rate_ratio
        if self.base_learning_rate is None or ratio is None:
            return None
        return self.base_learning_rate * ratio

    def learning_rate_ratio(self, batch_size: int) -> float:
        """Return the factor of the learning rate at a batch size, by the rule.

        Args:
            batch_size: In examples.
        """
        return learning_rate_ratio(
            batch_size=batch_size,
            base_batch_size=self.base_batch_size,
            rule=self.learning_rate_rule,
        )

    @property
    def binding(self) -> tuple[str, ...]:
        """The limit that binds; several where they cannot be told apart, none without timings."""
        if not self.updates:
            return ()
        saturation = self.saturation
        beyond = () if not self.memory_ends else self._with_more_memory
        return binding_limits(
            self.updates,
            self.critical,
            saturation=_interval(saturation) if saturation else None,
            spans_in_fit=self.in_fit.ends,
            own_time=self.in_fit.own,
            without_memory_limit=beyond,
        )

    @functools.cached_property
    def noise_scale(self) -> NoiseScale:
        """The gradient noise scale; unresolved without a pilot."""
        return _UNRESOLVED if self.pilot is None else self.pilot.noise_scale

    @property
    def critical(self) -> NoiseScale:
        """B_crit of the sizes that were trained; the noise scale where it was the pilot alone."""
        return self.decision.critical or self.noise_scale

    @property
    def fastest(self) -> tuple[TimedUpdate, ...]:
        """The fastest way of each batch size, ascending."""
        return fastest_of_each(self.updates) if self.updates else ()

    @functools.cached_property
    def updates(self) -> tuple[TimedUpdate, ...]:
        """The timed updates with their median times."""
        return tuple(
            TimedUpdate(t.batch_size, t.micro_batch_size, t.median_s) for t in self.timings
        )

    @property
    def diverged(self) -> bool:
        """Whether the loss of the pilot became NaN."""
        return self.pilot is not None and self.pilot.ended_by == "diverged"

    @functools.cached_property
    def in_fit(self) -> FitLines:
        """What an update takes in `fit`, by the batch size."""
        return fit_lines(self.fit_times, self.pipeline)

    @functools.cached_property
    def step_time(self) -> Latency | None:
        """The time of a step over the micro-batch size; None from too few measurements."""
        whole = [t for t in self.timings if t.micro_batch_size == t.batch_size]
        sizes = [t.batch_size for t in whole for _ in t.durations_s]
        if len(whole) < 2 or len(sizes) < 3:
            return None
        return fit_latency(sizes, [s for t in whole for s in t.durations_s])

    @property
    def saturation(self) -> BatchAnswer | None:
        """The smallest micro-batch of 90 % of the device's peak throughput; None if unknown."""
        return None if self.step_time is None else efficient_batch_size(self.step_time, share=0.9)

    @property
    def memory_ends(self) -> bool:
        """Whether memory, and not the data or the sizes asked for, end the sizes that fit."""
        largest = max((t.batch_size for t in self.timings), default=0)
        return self.memory is not None and self.memory.max_batch_size < largest

    @property
    def duration_s(self) -> float:
        """Seconds that all measurements took."""
        return sum(self.durations_s.values())

    @property
    def _with_more_memory(self) -> tuple[TimedUpdate, ...]:
        largest = max(update.batch_size for update in self.updates)
        return with_more_memory(self.updates, largest_batch_size=largest)


def _interval(answer: BatchAnswer) -> Interval | None:
    if answer.interval is not None:
        return answer.interval
    size = answer.batch_size
    return None if size is None else Interval(float(size), float(size))


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
    first = Tried(pilot.batch_size, 0.0, needed, noise.value, noise.at_least)
    # What the pilot's size takes is read off the others where it was not timed.
    costs = TrainedRuns(timings, in_fit, (first,)).costs.update_costs
    first = dataclasses.replace(first, cost=needed * costs[pilot.batch_size])
    others = (check.as_tried(costs[check.batch_size]) for check in checks)
    return TrainedRuns(timings, in_fit, (first, *others))


# The most that a size might lose where the noise scale was unresolved.
_MOST_LOST = 0.25
# A run that missed the loss was taken to have needed twice what it had, give or take.
_MISSED_FACTOR, _MISSED = 2.0, 0.5


def older_answer(
    found: TrainedRuns, pilot: PilotRecord | None, *, base_batch_size: int, rule: str | None
) -> BatchDecision:
    """Repeat the choice of version 0.1.0."""
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
    """Choose by what the sizes needed that were trained."""
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
