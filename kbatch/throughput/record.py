"""The profile of a model's training: step time and memory by micro-batch size."""

import dataclasses
import statistics
from typing import TYPE_CHECKING

from kbatch.analysis.batch_sizes import check_size
from kbatch.analysis.intervals import Estimate, median_interval
from kbatch.analysis.line_fit import Line
from kbatch.analysis.scaling_curve import (
    Latency,
    efficient_batch_size,
    fastest_batch_size,
    fit_latency,
    knee_batch_size,
)
from kbatch.memory.search import MemoryFit, fit_memory
from kbatch.page.section import SavedRecord
from kbatch.records.record import (
    SHORTEST_S,
    EnvironmentRecord,
    check_choice,
    check_ranges,
)
from kbatch.throughput.choice import MicroBatchChoice, choose_micro_batch

if TYPE_CHECKING:
    import pandas


POINT_OUTCOMES = ("measured", "out_of_memory", "not_run")


@dataclasses.dataclass(frozen=True)
class TrainingPoint:
    """The train steps of one micro-batch size."""

    micro_batch_size: int  #: Examples that go through the device at once.
    batch_size: int  #: Examples of a step, an optimizer update: more where it accumulates.
    outcome: str  #: One of `POINT_OUTCOMES`.
    reason: str | None = None  #: Why it was not measured, or left the rounds early; else None.
    first_step_s: float | None = None  #: Seconds of the first step, with tracing and compiling.
    steps: int = 0  #: Steps that count.
    rounds: tuple[int, ...] = ()  #: Number of each round that it was timed in.
    step_times_s: tuple[float, ...] = ()  #: Median seconds of a step in each of them.
    peak_memory_bytes: int | None = None  #: Most held at once, weights included; None if unknown.

    def __post_init__(self) -> None:
        check_choice(POINT_OUTCOMES, outcome=self.outcome)
        check_ranges(1, micro_batch_size=self.micro_batch_size)
        check_ranges(self.micro_batch_size, batch_size=self.batch_size)
        rounds, times = len(self.rounds), len(self.step_times_s)
        if rounds != times or self.measured != bool(times):
            raise ValueError(
                "There are step times, one a round, if, and only if, they were measured. "
                f"Received: outcome={self.outcome!r}, {rounds} rounds, {times} step times."
            )
        check_ranges(SHORTEST_S, step_times_s=self.step_times_s)
        check_ranges(0, first_step_s=self.first_step_s, peak_memory_bytes=self.peak_memory_bytes)

    @property
    def measured(self) -> bool:
        """Whether there are times."""
        return self.outcome == "measured"

    @property
    def accumulated(self) -> bool:
        """Whether a step has several micro-batches."""
        return self.micro_batch_size < self.batch_size

    @property
    def step_time_s(self) -> float | None:
        """Median over the rounds of the seconds of a step."""
        return statistics.median(self.step_times_s) if self.measured else None

    @property
    def step_time_interval_s(self) -> Estimate[float] | None:
        """The 95 % interval of that median, None from fewer than six rounds."""
        return median_interval(self.step_times_s)

    @property
    def micro_batch_times_s(self) -> tuple[float, ...]:
        """Seconds of a micro-batch, one value a round: its share of the examples of the step."""
        share = self.micro_batch_size / self.batch_size
        return tuple(share * step_s for step_s in self.step_times_s)

    @property
    def samples_per_second(self) -> float | None:
        """Examples per second at the median step time."""
        return None if self.step_time_s is None else self.batch_size / self.step_time_s

    @property
    def samples_per_second_interval(self) -> Estimate[float] | None:
        """The 95 % interval of that rate, None from fewer than six rounds."""
        return median_interval([self.batch_size / step_s for step_s in self.step_times_s])

    @property
    def compile_s(self) -> float | None:
        """Seconds of the first step beyond a later one: tracing and compiling."""
        if self.first_step_s is None or self.step_time_s is None:
            return None
        return max(0.0, self.first_step_s - self.step_time_s)


@dataclasses.dataclass(frozen=True)
class TrainingProfile(SavedRecord):
    """Step time, throughput and memory of a model's training by micro-batch size.

    What follows from the measurement raises a `ValueError` where too little was measured for it.

    Example:

    >>> profile = kbatch.TrainingProfile.load("profile.json")
    >>> profile.efficient.value, profile.fastest.value
    """

    model_name: str  #: The model's name.
    dtype_policy: str  #: Policy of the model.
    jit_compile: bool  #: Whether XLA compiles the train step.
    points: tuple[TrainingPoint, ...]  #: One a micro-batch size, ascending.
    memory_limit_bytes: int | None = None  #: That the probes could take, None without probes.
    duration_s: float | None = None  #: Seconds that the measurement took.
    notes: tuple[str, ...] = ()  #: What a reader of the figures must know.
    environment: EnvironmentRecord | None = None  #: The machine, None if it was not recorded.

    def __post_init__(self) -> None:
        sizes = [point.micro_batch_size for point in self.points]
        if sizes != sorted(set(sizes)):
            raise ValueError(
                "The points of a profile ascend by micro-batch size, one a size. "
                f"Received: micro-batch sizes={sizes}."
            )

    def __repr__(self) -> str:
        sizes = [point.micro_batch_size for point in self.measured]
        between = f"micro-batch sizes {sizes[0]} to {sizes[-1]}" if sizes else "nothing measured"
        return f"<TrainingProfile {self.model_name!r}: {between}, {self.dtype_policy}>"

    @property
    def measured(self) -> tuple[TrainingPoint, ...]:
        """The points that have times."""
        return tuple(point for point in self.points if point.measured)

    @property
    def has_fit(self) -> bool:
        """Whether enough was measured for a fit: two sizes, and three rounds in all."""
        return len(self.measured) >= 2 and sum(len(p.rounds) for p in self.measured) >= 3

    @property
    def step_time(self) -> Line:
        """The fit t = a + b B of the seconds of a micro-batch, its share of the update included."""
        return self._latency.line

    @property
    def peak_samples_per_second(self) -> Estimate[float | None]:
        """The throughput 1 / b that the fit reaches with unboundedly large micro-batches."""
        return self._latency.peak_throughput

    @property
    def knee(self) -> Estimate[float | None]:
        """The size of the largest throughput over step time."""
        return knee_batch_size(self._latency)

    @property
    def efficient(self) -> Estimate[float | None]:
        """The smallest size with 90 % of the peak throughput, where the plateau begins."""
        return efficient_batch_size(self._latency)

    @property
    def fastest(self) -> Estimate[float | None]:
        """The measured size of the largest throughput; its interval holds those that tie."""
        return fastest_batch_size(self._latency)

    @property
    def choice(self) -> MicroBatchChoice:
        """The fastest size by the rounds that all have; of those that tie, the largest."""
        return choose_micro_batch(
            {
                p.micro_batch_size: {
                    number: step_s / p.batch_size
                    for number, step_s in zip(p.rounds, p.step_times_s, strict=True)
                }
                for p in self.measured
            }
        )

    @property
    def memory_bytes(self) -> dict[int, int]:
        """Peak memory of each size where it is known."""
        known = {p.micro_batch_size: p.peak_memory_bytes for p in self.points}
        return {size: peak for size, peak in known.items() if peak is not None}

    @property
    def memory_fit(self) -> MemoryFit | None:
        """The line through the memory, None from fewer than two sizes."""
        return fit_memory(self.memory_bytes)

    def predict_memory_bytes(self, micro_batch_size: int) -> float:
        """Estimate the bytes of a micro-batch from the line through two known sizes or more."""
        fit = self.memory_fit
        if fit is None:
            raise ValueError(
                "A line needs the memory of two sizes: profile with `measure_memory=True`. "
                f"Received: memory of {len(self.memory_bytes)} sizes."
            )
        return fit.predict(check_size(micro_batch_size, "micro_batch_size"))

    def to_dataframe(self) -> "pandas.DataFrame":
        """Make a table, one row a micro-batch size; what is unknown is missing."""
        import pandas

        def row(point: TrainingPoint) -> dict[str, object]:
            step, rate = point.step_time_interval_s, point.samples_per_second_interval
            return {
                "micro_batch_size": point.micro_batch_size,
                "batch_size": point.batch_size,
                "outcome": point.outcome,
                "samples_per_second": point.samples_per_second,
                "samples_per_second_low": rate and rate.low,
                "samples_per_second_high": rate and rate.high,
                "step_time_s": point.step_time_s,
                "step_time_low_s": step and step.low,
                "step_time_high_s": step and step.high,
                "rounds": len(point.rounds),
                "steps": point.steps,
                "first_step_s": point.first_step_s,
                "compile_s": point.compile_s,
                "peak_memory_bytes": point.peak_memory_bytes,
                "reason": point.reason,
            }

        return pandas.DataFrame([row(point) for point in self.points])

    @property
    def _latency(self) -> Latency:
        points = self.measured
        sizes = [p.micro_batch_size for p in points for _ in p.rounds]
        if not self.has_fit:
            raise ValueError(
                "A fit needs two measured micro-batch sizes with three rounds in all: measure "
                f"more sizes, or longer. Received: {len(points)} sizes with {len(sizes)} rounds."
            )
        return fit_latency(sizes, [s for p in points for s in p.micro_batch_times_s])


@dataclasses.dataclass(frozen=True)
class TimedRounds:
    batch_size: int
    micro_batch_size: int
    rounds: tuple[int, ...]  # Number of each round that it was timed in.
    durations_s: tuple[float, ...]  # Of the update in each of them.

    def __post_init__(self):
        if not self.rounds or len(self.rounds) != len(self.durations_s):
            raise ValueError(
                "A timed update has a duration in each of its rounds, one at least. Received: "
                f"{len(self.rounds)} rounds, {len(self.durations_s)} durations."
            )
        check_ranges(1, micro_batch_size=self.micro_batch_size)
        check_ranges(self.micro_batch_size, batch_size=self.batch_size)
        check_ranges(SHORTEST_S, durations_s=self.durations_s)

    @property
    def median_s(self) -> float:
        """Seconds of the update, the median over the rounds."""
        return statistics.median(self.durations_s)

    @property
    def samples_per_second(self) -> float:
        """Examples per second at this median."""
        return self.batch_size / self.median_s

    @property
    def accumulated(self) -> bool:
        """Whether it has several micro-batches."""
        return self.micro_batch_size < self.batch_size
