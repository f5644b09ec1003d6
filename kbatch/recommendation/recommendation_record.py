"""The record of a recommendation: what was measured, and the batch size that follows from it."""

import dataclasses
import functools
import importlib
from collections.abc import Mapping, Sequence

from kbatch.analysis.intervals import Interval
from kbatch.analysis.latency import Latency, fit_latency
from kbatch.analysis.latency_batches import BatchAnswer, efficient_batch_size
from kbatch.analysis.learning_rates import learning_rate_ratio
from kbatch.analysis.next_size import Tried
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.input_pipeline.input_pipeline_record import InputPipelineProfile
from kbatch.memory.max_batch_record import MaxBatchSizeResult
from kbatch.recommendation.batch_choice import TimedUpdate, fastest_of_each
from kbatch.recommendation.batch_decision import BatchDecision, TrainedRuns
from kbatch.recommendation.fit_time import FitLines, FitTime, fit_lines
from kbatch.recommendation.limits import binding_limits, with_more_memory
from kbatch.recommendation.older_answer import older_answer
from kbatch.recommendation.pilot_record import PilotRecord
from kbatch.recommendation.size_check_record import SizeCheck
from kbatch.recommendation.time_in_fit import TimeInFit
from kbatch.records.environment import EnvironmentRecord
from kbatch.records.saved_record import SavedRecord
from kbatch.records.shown_record import ShownRecord
from kbatch.throughput.timed_rounds import TimedRounds

# What is measured beside the limits: short trainings.
OTHER_SIZES = "other batch sizes"
# Looked up when a recommendation is printed, so that it is read without what writes; as in
# `shown_record`.
_PAGE = "kbatch.recommendation.recommendation_text"
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
        pilot: The training that measured the gradient noise scale, likewise.
        pipeline: What the input pipeline delivers, at one batch size; None likewise.
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
        """Sums the recommendation up in a line."""
        if self.batch_size is None:
            return f"<Recommendation: batch size not told, {len(self.unknown)} limits unknown>"
        rate = "" if self.learning_rate is None else f", learning rate {self.learning_rate:.3g}"
        return (
            f"<Recommendation: batch size {self.batch_size}, micro-batch size "
            f"{self.micro_batch_size}{rate}; {' or '.join(self.binding)} binds>"
        )

    def __str__(self) -> str:
        """Writes the recommendation as a page: the answer, why, and how sure it is."""
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
        """Whether memory, and not the data or the sizes asked for, ends the sizes that fit."""
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
    """Collect the evidence for a batch size: the pilot, and the trainings to its loss.

    Args:
        timings: The updates that were timed.
        in_fit: What an update takes in `fit`; None for the train step alone.
        pilot: The training that set the loss, None without one.
        checks: The trainings at other sizes.
    """
    if pilot is None or not timings:
        return TrainedRuns(timings, in_fit, ())
    noise, needed = pilot.noise_scale, pilot.updates_to_target
    first = Tried(pilot.batch_size, 0.0, needed, noise.value, noise.at_least)
    # What the pilot's size takes is read off the others where it was not timed.
    costs = TrainedRuns(timings, in_fit, (first,)).costs.update_costs
    first = dataclasses.replace(first, cost=needed * costs[pilot.batch_size])
    others = (check.as_tried(costs[check.batch_size]) for check in checks)
    return TrainedRuns(timings, in_fit, (first, *others))
