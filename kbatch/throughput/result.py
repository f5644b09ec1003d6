"""The profile of a model's training: step time and memory by micro-batch size."""

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kbatch.analysis.batch_sizes import check_size
from kbatch.analysis.intervals import Estimate, ratio_over_rounds
from kbatch.analysis.line_fit import Line
from kbatch.analysis.rows import MEASURED, OUT_OF_MEMORY, Row, timed_rows
from kbatch.analysis.scaling_curve import (
    Latency,
    efficient_batch_size,
    fastest_batch_size,
    fit_latency,
    knee_batch_size,
)
from kbatch.memory.result import MemoryRecord, peaks_under
from kbatch.memory.search import MemoryFit, fit_memory
from kbatch.page.content import Figure
from kbatch.page.numbers import format_number, in_brackets, memory_text, percent, pluralize
from kbatch.page.result import Result
from kbatch.records.notes import Note, most_important
from kbatch.records.record import EnvironmentRecord

if TYPE_CHECKING:
    import pandas as pd

# A gain below this share is not worth a smaller micro-batch.
_NEGLIGIBLE = 0.02


@dataclasses.dataclass(frozen=True)
class TimedUpdate:
    """An update on a batch, whole or in parts, and its time in each round."""

    batch_size: int  #: Examples of the update.
    micro_batch_size: int  #: Examples that go through the device at once.
    rounds: tuple[int, ...] = ()  #: Number of each round that it was timed in.
    durations_s: tuple[float, ...] = ()  #: Median seconds of an update in each of them.
    steps_per_execution: int = 1  #: Updates that Keras started at once.
    #: "measured", "out of memory", or why it was not measured.
    outcome: str = MEASURED
    first_s: float | None = None  #: Seconds of the first call, with tracing and compiling.

    @property
    def measured(self) -> bool:
        """Whether there are times."""
        return self.outcome == MEASURED

    @property
    def accumulated(self) -> bool:
        """Whether it has several micro-batches."""
        return self.micro_batch_size < self.batch_size

    @property
    def median_s(self) -> float:
        """Seconds of the update, the median over the rounds."""
        return statistics.median(self.durations_s)

    @property
    def samples_per_second(self) -> float:
        """Examples per second at this median."""
        return self.batch_size / self.median_s

    @property
    def row(self) -> Row:
        """The seconds of a micro-batch, its share of the update."""
        share = self.micro_batch_size / self.batch_size
        times_s = [share * duration_s for duration_s in self.durations_s]
        steps = pluralize(self.steps_per_execution, "step")
        series = f"{steps} an execution"
        return Row.of(self.micro_batch_size, times_s, series=series, outcome=self.outcome)


@dataclasses.dataclass(frozen=True)
class TrainingProfile(Result):
    """Step time, throughput and memory of a model's training by micro-batch size.

    What follows from the measurement raises a `ValueError` where too little was measured for it.

    Example:

    >>> profile = kbatch.TrainingProfile.load("profile.json")
    >>> profile.micro_batch_size, profile.steps_per_execution, profile.gain
    """

    model_name: str  #: The model's name.
    dtype_policy: str  #: Policy of the model.
    jit_compile: bool  #: Whether XLA compiles the train step.
    #: By micro-batch size, ascending; where it was timed, several steps an execution behind one.
    updates: tuple[TimedUpdate, ...]
    memory: tuple[MemoryRecord, ...] = ()  #: Of each size that was probed.
    memory_limit_bytes: int | None = None  #: That the probes could take, None without probes.
    duration_s: float | None = None  #: Seconds that the measurement took.
    noted: tuple[Note, ...] = ()  #: What was noted while it was measured.
    environment: EnvironmentRecord | None = None  #: The machine, None if it was not recorded.

    def __repr__(self) -> str:
        sizes = [update.micro_batch_size for update in self.measured]
        between = f"micro-batch sizes {sizes[0]} to {sizes[-1]}" if sizes else "nothing measured"
        return f"<TrainingProfile {self.model_name!r}: {between}, {self.dtype_policy}>"

    @property
    def title(self) -> str:
        """What it is a result of."""
        return f"Training of {self.model_name} by micro-batch size"

    @property
    def answer(self) -> str:
        """The micro-batch to train with, and how fast it is."""
        if not self.measured:
            return "No step could be timed."
        size, steps, rate = self.micro_batch_size, self.steps_per_execution, self._chosen.row.rate
        assert rate is not None
        together = "" if steps == 1 else f" and {steps:,} steps an execution"
        speed = f"{format_number(rate.value)}{in_brackets(rate)} samples/s"
        than = ""
        if self.gain is not None:
            times, largest = format_number(self.gain.value), self.fastest_ways[-1].micro_batch_size
            than = f", {times}{in_brackets(self.gain)} times as fast as with {largest:,}"
        return f"Train with micro-batches of {size:,}{together}: {speed}{than}."

    def table(self) -> "pd.DataFrame":
        """Return what was measured, a row a size and number of steps an execution."""
        found = timed_rows(
            [update.row for update in self.updates], size="micro-batch size", time="step time"
        )
        found = found.rename(columns=lambda name: name.replace("step time", "micro-batch time"))
        steps = [update.steps_per_execution for update in self.updates]
        found.insert(1, "batch size", [update.batch_size for update in self.updates])
        found.insert(2, "steps per execution", steps)
        peaks = [self.memory_bytes.get(update.micro_batch_size) for update in self.updates]
        outcome = found.pop("outcome")
        found["first call (s)"] = [update.first_s for update in self.updates]
        found["peak memory (MiB)"] = [None if peak is None else peak / 2**20 for peak in peaks]
        found["outcome"] = outcome
        if not any(update.accumulated for update in self.updates):
            del found["batch size"]
        if set(steps) == {1}:
            del found["steps per execution"]
        if self.measured:
            found.attrs["answer"] = [self.updates.index(self._chosen)]
        return found

    @property
    def notes(self) -> tuple[Note, ...]:
        """At most three things that change what to do, the most important first."""
        return most_important(self.noted)

    def figures(self) -> tuple[Figure, ...]:
        """Return the figure of throughput, time and memory by micro-batch size."""
        if not self.measured:
            return ()
        from kbatch.throughput.figure import HEIGHT_IN, plot_training_profile

        draw = functools.partial(plot_training_profile, self)
        title = "Throughput, time and memory by micro-batch size"
        return (Figure("training-profile", title, HEIGHT_IN, draw),)

    @property
    def settings(self) -> dict[str, str]:
        """What it was measured with, and the lines through what was measured."""
        found = {
            "dtype policy": self.dtype_policy,
            "XLA": "yes" if self.jit_compile else "no",
            "memory limit": "n/a (not measured)",
        }
        if self.memory_limit_bytes is not None:
            found["memory limit"] = memory_text(self.memory_limit_bytes)
        if (memory := self.memory_fit) is not None:
            fixed, each = (
                memory_text(max(b, 0.0)) for b in (memory.fixed_bytes, memory.bytes_per_example)
            )
            found["memory of training"] = f"{fixed} and {each} an example"
        if self.has_fit:
            found["time of a micro-batch of B examples"] = self.line_text
            efficient = self.efficient
            if efficient.value is not None:
                found["90 % of the peak throughput"] = (
                    f"from {efficient.value:,.0f}{in_brackets(efficient)} examples on"
                )
        if self.duration_s is not None:
            found["measured in"] = f"{format_number(self.duration_s)} s"
        return found

    @property
    def line_text(self) -> str:
        """The fitted line in words, and how far times are off where it does not hold."""
        fit = self.step_time
        fixed, each = (format_number(1e3 * max(s, 0.0)) for s in (fit.intercept, fit.slope))
        off = "" if fit.holds is not False else f", off by up to {percent(fit.departure.worst)}"
        return f"{fixed} ms + {each} ms x B{off}"

    @property
    def measured(self) -> tuple[TimedUpdate, ...]:
        """The updates that have times."""
        return tuple(update for update in self.updates if update.measured)

    @property
    def fastest_ways(self) -> tuple[TimedUpdate, ...]:
        """Of each micro-batch size the number of steps an execution that is fastest, ascending."""
        ways: dict[int, TimedUpdate] = {}
        for update in sorted(self.measured, key=lambda one: (one.micro_batch_size, one.median_s)):
            ways.setdefault(update.micro_batch_size, update)
        return tuple(ways.values())

    @property
    def micro_batch_size(self) -> int:
        """The fastest size by the rounds that all have; of those that tie, the largest."""
        return self._chosen.micro_batch_size

    @property
    def steps_per_execution(self) -> int:
        """Steps of an execution at which it was fastest."""
        return self._chosen.steps_per_execution

    @property
    def gain(self) -> Estimate[float] | None:
        """Its speed over that of the largest size; None if it is that."""
        return choose_micro_batch(self._seconds_an_example)[1]

    @property
    def _chosen(self) -> TimedUpdate:
        size = choose_micro_batch(self._seconds_an_example)[0]
        return next(way for way in self.fastest_ways if way.micro_batch_size == size)

    @property
    def _seconds_an_example(self) -> dict[int, dict[int, float]]:
        return {
            way.micro_batch_size: {
                number: duration_s / way.batch_size
                for number, duration_s in zip(way.rounds, way.durations_s, strict=True)
            }
            for way in self.fastest_ways
        }

    @property
    def has_fit(self) -> bool:
        """Whether enough was measured for a fit: two sizes, and three rounds in all."""
        ways = self.fastest_ways
        return len(ways) >= 2 and sum(len(way.rounds) for way in ways) >= 3

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
    def _latency(self) -> Latency:
        ways = self.fastest_ways
        if not self.has_fit:
            raise ValueError(
                "A fit needs two measured micro-batch sizes with three rounds in all: measure "
                f"more sizes, or longer. Received: {len(ways)} sizes with "
                f"{sum(len(way.rounds) for way in ways)} rounds."
            )
        sizes = [way.micro_batch_size for way in ways for _ in way.rounds]
        shares = [way.micro_batch_size / way.batch_size for way in ways for _ in way.rounds]
        times_s = [duration_s for way in ways for duration_s in way.durations_s]
        return fit_latency(sizes, [p * t for p, t in zip(shares, times_s, strict=True)])

    @property
    def memory_bytes(self) -> dict[int, int]:
        """Most bytes held at once, weights included, of each size where it is known."""
        return peaks_under(self.dtype_policy, self.memory)

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

    @property
    def out_of_memory(self) -> tuple[int, ...]:
        """The sizes that ran out of memory."""
        return tuple(u.micro_batch_size for u in self.updates if u.outcome == OUT_OF_MEMORY)


def choose_micro_batch(
    times_s: Mapping[int, Mapping[int, float]],
) -> tuple[int, Estimate[float] | None]:
    """Choose the fastest of sizes that took turns; return it, and its gain over the largest.

    Sizes of a round met the same machine, so what counts is the ratio of their times, round by
    round. A larger size that the noise, or less than 2 %, parts from the fastest is preferred: it
    makes fewer micro-batches of a batch, and the whole batch at once needs no accumulation.
    """
    numbers = sorted(set.intersection(*map(set, times_s.values()))) if times_s else []
    if not numbers:
        raise ValueError(
            "A choice needs sizes with at least one round that all have: leave out what was not "
            f"timed. Received: rounds={ {size: list(each) for size, each in times_s.items()} }."
        )
    common_s = {size: [each[n] for n in numbers] for size, each in times_s.items()}
    medians_s = {size: statistics.median(each) for size, each in common_s.items()}
    fastest = min(medians_s, key=lambda size: (medians_s[size], -size))
    larger = sorted((size for size in common_s if size > fastest), reverse=True)
    tied = (size for size in larger if not _slower(common_s[size], common_s[fastest]))
    chosen, largest = next(tied, fastest), max(common_s)
    gain = None if chosen == largest else ratio_over_rounds(common_s[largest], common_s[chosen])
    return chosen, gain


def _slower(times_s: Sequence[float], reference_s: Sequence[float]) -> bool:
    """Return whether it is slower for certain; with too few rounds nothing is."""
    ratio = ratio_over_rounds(times_s, reference_s)
    return ratio is not None and (ratio.low or 0.0) > 1 and ratio.value > 1 + _NEGLIGIBLE
