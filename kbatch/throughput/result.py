"""The profile of a model's training by micro-batch size."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kbatch.analysis.intervals import Estimate, ratio_over_rounds
from kbatch.analysis.scaling_curve import (
    Latency,
    Timed,
    efficient_batch_size,
    fit_rounds,
    timed_columns,
)
from kbatch.memory.result import MemoryRecord, peaks_under
from kbatch.page.numbers import format_number, in_brackets, memory_text, percent, speed_text
from kbatch.page.result import Result
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note

if TYPE_CHECKING:
    import pandas as pd

# A gain below this share is not worth a smaller micro-batch.
_NEGLIGIBLE = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedUpdate(Timed):
    """Updates on batches that go through the device at once."""

    steps_per_execution: int = 1  #: Updates that Keras started at once.
    reason: Note | None = None  #: Why they have no times. If None, they have.


@dataclasses.dataclass(frozen=True, repr=False)
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
    noted: tuple[Note, ...] = ()  #: What was noted while it was measured.
    environment: EnvironmentRecord | None = None  #: The machine, None if it was not recorded.

    @property
    def title(self) -> str:
        """What it is a result of."""
        return f"Training of {self.model_name} by micro-batch size"

    @property
    def answer(self) -> str:
        """The micro-batch to train with, and how fast it is."""
        if not (ways := fastest_ways(self.updates)):
            return "No step could be timed."
        chosen, gain = self._choice()
        steps, rate = chosen.steps_per_execution, chosen.rate
        assert rate is not None
        together = "" if steps == 1 else f" and {steps:,} steps an execution"
        speed = f"{format_number(rate.value)}{in_brackets(rate)} samples/s"
        than = "" if gain is None else f", {speed_text(gain, f'with {ways[-1].batch_size:,}')}"
        return f"Train with micro-batches of {chosen.batch_size:,}{together}: {speed}{than}."

    def table(self) -> "pd.DataFrame":
        """Return what was measured, a row a size and number of steps an execution."""
        import pandas as pd

        peaks = peaks_under(self.dtype_policy, self.memory)
        found = pd.DataFrame(
            {
                "micro-batch size": update.batch_size,
                "steps per execution": update.steps_per_execution,
                **timed_columns(update, "micro-batch time"),
                "first call (s)": update.first_call_s,
                "peak memory (MiB)": (peak := peaks.get(update.batch_size)) and peak / 2**20,
                "outcome": update.reason or update.outcome,
            }
            for update in self.updates
        )
        if all(update.steps_per_execution == 1 for update in self.updates):
            del found["steps per execution"]
        if fastest_ways(self.updates):
            found.attrs["answer"] = [self.updates.index(self._choice()[0])]
        return found

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
        if (line := self.line_text) is not None:
            found["time of a micro-batch of B examples"] = line
            efficient = self.efficient
            if efficient.value is not None:
                found["90 % of the peak throughput"] = (
                    f"from {efficient.value:,.0f}{in_brackets(efficient)} examples on"
                )
        return found

    @property
    def line_text(self) -> str | None:
        """The fitted line in words, and how far times are off if it does not hold.

        None if too little was measured: a fit takes two sizes, and three rounds in all.
        """
        ways = fastest_ways(self.updates)
        if len(ways) < 2 or sum(len(way.times_s) for way in ways) < 3:
            return None
        fit = self.latency.line
        fixed, each = (format_number(1e3 * max(s, 0.0)) for s in (fit.intercept, fit.slope))
        off = "" if fit.holds is not False else f", off by up to {percent(fit.worst)}"
        return f"{fixed} ms + {each} ms x B{off}"

    @property
    def micro_batch_size(self) -> int:
        """The fastest size by the rounds that all have; of those that tie, the largest."""
        return self._choice()[0].batch_size

    @property
    def steps_per_execution(self) -> int:
        """Steps of an execution at which that size was fastest."""
        return self._choice()[0].steps_per_execution

    @property
    def gain(self) -> Estimate[float] | None:
        """Speed of that size over the speed of the largest; None where it is the largest."""
        return self._choice()[1]

    def _choice(self) -> tuple[TimedUpdate, Estimate[float] | None]:
        return choose_micro_batch(fastest_ways(self.updates))

    @property
    def efficient(self) -> Estimate[float | None]:
        """The smallest size with 90 % of the peak throughput, where the plateau begins."""
        return efficient_batch_size(self.latency)

    @property
    def latency(self) -> Latency:
        """The fit of the seconds of a micro-batch, by the fastest way of each size."""
        return fit_rounds(fastest_ways(self.updates))


def fastest_ways(updates: Sequence[TimedUpdate]) -> tuple[TimedUpdate, ...]:
    """Choose of each size that was timed the fastest number of steps an execution, ascending."""
    timed = (update for update in updates if update.measured)
    ways: dict[int, TimedUpdate] = {}
    for update in sorted(timed, key=lambda one: (one.batch_size, one.median_s)):
        ways.setdefault(update.batch_size, update)
    return tuple(ways.values())


def choose_micro_batch(ways: Sequence[TimedUpdate]) -> tuple[TimedUpdate, Estimate[float] | None]:
    """Choose the fastest of ascending sizes that took turns, and its gain over the largest.

    Sizes of a round met the same machine, so what counts is the ratio of their times, round by
    round. A larger size that the noise, or less than 2 %, parts from the fastest is preferred: it
    makes fewer micro-batches of a batch, and the whole batch at once needs no accumulation.
    """
    # All begin in the first round, and some leave before the last.
    common = min((len(way.times_s) for way in ways), default=0)
    if not common:
        raise ValueError(
            "A choice needs sizes with at least one round that all have: measure longer. "
            f"Received: rounds={[(way.batch_size, len(way.times_s)) for way in ways]}."
        )
    times_s = [[s / way.batch_size for s in way.times_s[:common]] for way in ways]  # Of an example.
    medians_s = [statistics.median(each) for each in times_s]
    fastest = medians_s.index(min(medians_s))
    larger = range(len(ways) - 1, fastest, -1)
    tied = (i for i in larger if not _slower(times_s[i], times_s[fastest]))
    chosen = next(tied, fastest)
    last = chosen == len(ways) - 1
    return ways[chosen], None if last else ratio_over_rounds(times_s[-1], times_s[chosen])


def _slower(times_s: Sequence[float], reference_s: Sequence[float]) -> bool:
    """Return whether it is slower for certain; with too few rounds nothing is."""
    ratio = ratio_over_rounds(times_s, reference_s)
    return ratio is not None and (ratio.low or 0.0) > 1 and ratio.value > 1 + _NEGLIGIBLE
