"""The record of a recommendation: what was measured, and the batch size that follows from it."""

import dataclasses
import functools
import math
from collections.abc import Mapping

from kbatch.analysis.learning_rate import learning_rate_ratio
from kbatch.analysis.next_size import FinishedRun
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.analysis.scaling_curve import BatchAnswer, Latency, efficient_batch_size, fit_latency
from kbatch.input_pipeline.record import InputPipelineProfile
from kbatch.memory.record import MaxBatchSizeResult
from kbatch.recommendation.choice import NO_TIMES, UNTOLD, BatchDecision, TrainedRuns, trained_runs
from kbatch.recommendation.limits import (
    TIE,
    TimedUpdate,
    binding_limits,
    fastest_of_each,
    noise_bounds,
    relative_time,
    update_time_s,
    with_more_memory,
)
from kbatch.recommendation.pilot_record import (
    PILOT_DIVERGED,
    FitLines,
    FitTime,
    PilotRecord,
    SizeCheck,
    fit_lines,
)
from kbatch.records.record import EnvironmentRecord, SavedRecord
from kbatch.throughput.record import TimedRounds

_UNRESOLVED = NoiseScale(None, None, None, None, None, 0)
_NO_ANSWER = BatchDecision(None, None, None, None, older=True)


@dataclasses.dataclass(frozen=True)
class Recommendation(SavedRecord):
    """The limits of the batch size, which of them binds, and the sizes to use."""

    model_name: str  #: Name of the model.
    optimizer: str  #: Class name of the optimizer, without the loss-scale wrapper.
    dtype_policy: str  #: Policy of the model.
    base_batch_size: int  #: Batch size that the model's own learning rate suits, in examples.
    base_learning_rate: float | None  #: At the first update; None where it is no scalar.
    scheduled: bool  #: Whether a schedule gives it.
    learning_rate_rule: str | None  #: `"linear"`, `"sqrt"` or None: how it follows the batch size.
    examples: int | None  #: Training examples, None where the data do not tell.
    timings: tuple[TimedRounds, ...]  #: Of updates, all in the same shuffled rounds.
    memory: MaxBatchSizeResult | None  #: The search for the largest batch, or None.
    pilot: PilotRecord | None  #: The training that measured the noise scale, or None.
    pipeline: InputPipelineProfile | None  #: What the data deliver at one batch size, or None.
    #: Why one of `LIMITS` was not measured, and why no further one of `OTHER_SIZES` was trained.
    unknown: Mapping[str, str]
    durations_s: Mapping[str, float]  #: Seconds that each of these measurements took, by its name.
    budget_s: float  #: Seconds that it was given.
    notes: tuple[str, ...] = ()  #: What a reader of the numbers must know.
    environment: EnvironmentRecord | None = None  #: The machine and the software.
    checks: tuple[SizeCheck, ...] = ()  #: Short trainings at other sizes, to the pilot's loss.
    fit_times: tuple[FitTime, ...] = ()  #: What `fit` takes at one or two batch sizes.
    #: The answer that page, table and figure show; of a file without one, its version's.
    decision: BatchDecision = _NO_ANSWER

    def __post_init__(self):
        if self.decision == _NO_ANSWER:
            object.__setattr__(self, "decision", _older_answer(self))

    def __repr__(self) -> str:
        if self.batch_size is None:
            return f"<Recommendation: no batch size, {len(self.unknown)} limits unknown>"
        rate = "" if self.learning_rate is None else f", learning rate {self.learning_rate:.3g}"
        return (
            f"<Recommendation: batch size {self.batch_size}, micro-batch size "
            f"{self.micro_batch_size}{rate}; {' or '.join(self.binding)} binds>"
        )

    def __str__(self) -> str:
        from kbatch.recommendation.report import recommendation_text  # It imports this module.

        return recommendation_text(self)

    @property
    def batch_size(self) -> int | None:
        """Examples of an update; None where no size can be named."""
        return self.decision.batch_size

    @property
    def micro_batch_size(self) -> int | None:
        """Examples that go through the device at once, as in `BatchDecision`."""
        return self.decision.micro_batch_size

    @property
    def learning_rate(self) -> float | None:
        """Learning rate at the first update; None without a batch size or where it is no scalar."""
        ratio = self.decision.learning_rate_ratio
        if self.base_learning_rate is None or ratio is None:
            return None
        return self.base_learning_rate * ratio

    def learning_rate_ratio(self, batch_size: int) -> float:
        """Return the factor of the learning rate at a batch size, by the rule."""
        base, rule = self.base_batch_size, self.learning_rate_rule
        return learning_rate_ratio(batch_size=batch_size, base_batch_size=base, rule=rule)

    @property
    def binding(self) -> tuple[str, ...]:
        """The limit that binds; several where they cannot be separated, none without timings."""
        if not self.updates:
            return ()
        largest = max(update.batch_size for update in self.updates) if self.memory_ends else 0
        return binding_limits(
            self.updates,
            self.critical,
            saturation=self.saturation and self.saturation.interval,
            spans_in_fit=self.in_fit.ends,
            own_time=self.in_fit.own,
            without_memory_limit=with_more_memory(self.updates, largest_batch_size=largest),
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
        return fastest_of_each(self.updates)

    @functools.cached_property
    def updates(self) -> tuple[TimedUpdate, ...]:
        """The timed updates with their median times."""
        return tuple(
            TimedUpdate(t.batch_size, t.micro_batch_size, t.median_s) for t in self.timings
        )

    @property
    def diverged(self) -> bool:
        """Whether the loss of the pilot became NaN."""
        return self.pilot is not None and self.pilot.missing == PILOT_DIVERGED

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
        """The smallest micro-batch of 90 % of the device's peak throughput; None if unknown.

        Read off single times of each size it has no interval, and is no more than a guess.
        """
        if self.step_time is None:
            return None
        found = efficient_batch_size(self.step_time, share=0.9)
        return None if found.batch_size is not None and found.interval is None else found

    @property
    def memory_ends(self) -> bool:
        """Whether memory, and not the data or the sizes asked for, end the sizes that fit."""
        largest = max((t.batch_size for t in self.timings), default=0)
        return self.memory is not None and self.memory.max_batch_size < largest

    @property
    def duration_s(self) -> float:
        """Seconds that all measurements took."""
        return sum(self.durations_s.values())


# The most that a size might lose where the noise scale was unresolved.
_MOST_LOST = 0.25
# A run that missed the loss was taken to have needed twice what it had, give or take.
_MISSED_FACTOR, _MISSED = 2.0, 0.5


def _older_answer(found: Recommendation) -> BatchDecision:
    """Repeat the choice of version 0.1.0, whose files keep no answer."""
    # It named the smallest size whose forecast time was within 2 % of the least, trained or not;
    # with the pilot alone, by the noise scale.
    pilot, noise, in_fit = found.pilot, found.noise_scale, found.in_fit.line
    made = trained_runs(found.timings, in_fit=in_fit, pilot=pilot, checks=found.checks)
    tried = [
        FinishedRun(run.batch_size, math.inf, _MISSED_FACTOR * run.updates, spread=_MISSED)
        if run.cost is None and run.updates
        else run
        for run in made.tried
    ]
    runs = TrainedRuns(found.timings, in_fit, tried)
    ways = list(runs.ways.values())
    if not ways:
        return BatchDecision(None, None, None, NO_TIMES, older=True)

    if len(runs.tried) > 1 and runs.forecast:
        scale, updates = ways[-1].batch_size, runs.forecast.updates
        candidates = [way for way in ways if way.batch_size <= max(made.reached)]
        ends = [{way: updates[way.batch_size] * update_time_s(way, in_fit) for way in candidates}]
    else:
        # The learning rate went no further than the noise scale.
        scale = max(found.base_batch_size, round(noise.value or noise.at_least or 0))
        candidates = ways
        scales = noise_bounds(noise) if noise.value is None else (noise.value,)
        ends = [
            {way: relative_time(way, noise_scale=one, in_fit=in_fit) for way in ways}
            for one in scales
        ]
    lost = {way: max(one[way] / min(one.values()) - 1 for one in ends) for way in candidates}
    allowed = TIE if len(ends) == 1 else min(lost.values())
    near = [way for way in candidates if lost[way] <= allowed <= _MOST_LOST]
    best = near[0] if near else None
    rows = tuple(map(runs.outlook, runs.ways))
    if best is None or found.diverged:
        micro = max(ways, key=lambda way: way.samples_per_second).micro_batch_size
        sizes, ratio, missing = (None, micro), None, UNTOLD
    else:
        sizes, missing = (best.batch_size, best.micro_batch_size), None
        ratio = found.learning_rate_ratio(min(best.batch_size, scale))
    return BatchDecision(*sizes, ratio, missing, rows, critical=runs.critical, older=True)
