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
    """Times of train steps of one batch size and one number of steps per execution."""

    steps_per_execution: int = 1  #: Keras's `steps_per_execution`.
    reason: Note | None = None  #: Why it was not timed. None if it was.


@dataclasses.dataclass(frozen=True, repr=False)
class TrainingProfile(Result):
    """Step time, throughput and memory of a model's training by micro-batch size.

    A property raises a `ValueError` if too little was measured to compute it.

    Example:

    >>> profile = kbatch.TrainingProfile.load("profile.json")
    >>> profile.micro_batch_size, profile.steps_per_execution, profile.gain
    """

    model_name: str  #: The model's name.
    dtype_policy: str  #: Policy of the model.
    jit_compile: bool  #: Whether XLA compiles the train step.
    #: Times by ascending size. Each size may have a second entry with several steps per execution.
    updates: tuple[TimedUpdate, ...]
    memory: tuple[MemoryRecord, ...] = ()  #: Memory of each size; empty if it was not measured.
    memory_limit_bytes: int | None = None  #: Limit of the memory; None if it was not measured.
    noted: tuple[Note, ...] = ()  #: Notes about the measurement.
    environment: EnvironmentRecord | None = None  #: The machine, None if it was not recorded.

    @property
    def title(self) -> str:
        """The title of the result."""
        return f"Training of {self.model_name} by micro-batch size"

    @property
    def answer(self) -> str:
        """The micro-batch size to train with, and its speed."""
        if not (ways := fastest_ways(self.updates)):
            return "No step could be timed."
        chosen, gain = self._choice()
        steps, rate = chosen.steps_per_execution, chosen.rate
        assert rate is not None
        several = "" if steps == 1 else f" and {steps:,} steps per execution"
        speed = f"{format_number(rate.value)}{in_brackets(rate)} samples/s"
        than = "" if gain is None else f", {speed_text(gain, f'with {ways[-1].batch_size:,}')}"
        return f"Train with micro-batches of {chosen.batch_size:,}{several}: {speed}{than}."

    def table(self) -> "pd.DataFrame":
        """Return a table with one row for each size and number of steps per execution."""
        import pandas as pd

        peaks = peaks_under(self.dtype_policy, self.memory)
        table = pd.DataFrame(
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
            del table["steps per execution"]
        if fastest_ways(self.updates):
            table.attrs["answer"] = [self.updates.index(self._choice()[0])]
        return table

    @property
    def settings(self) -> dict[str, str]:
        """Conditions of the measurement, and the fitted line."""
        limit_bytes = self.memory_limit_bytes
        settings = {
            "dtype policy": self.dtype_policy,
            "XLA": "yes" if self.jit_compile else "no",
            "memory limit": memory_text(limit_bytes) if limit_bytes else "n/a (not measured)",
        }
        if (line := self.line_text) is not None:
            settings["time of a micro-batch of B examples"] = line
            efficient = self.efficient
            if efficient.value is not None:
                settings["90 % of the peak throughput"] = (
                    f"from {efficient.value:,.0f}{in_brackets(efficient)} examples on"
                )
        return settings

    @property
    def line_text(self) -> str | None:
        """The fitted line as text, and its largest error if the line does not hold.

        None if there are fewer than two sizes, or fewer than three rounds in total.
        """
        ways = fastest_ways(self.updates)
        if len(ways) < 2 or sum(len(way.times_s) for way in ways) < 3:
            return None
        fit = self.latency.line
        fixed_ms, slope_ms = (format_number(1e3 * max(s, 0.0)) for s in (fit.intercept, fit.slope))
        error = "" if fit.holds is not False else f", off by up to {percent(fit.worst)}"
        return f"{fixed_ms} ms + {slope_ms} ms x B{error}"

    @property
    def micro_batch_size(self) -> int:
        """The fastest micro-batch size. If several are equally fast, the largest of them."""
        return self._choice()[0].batch_size

    @property
    def steps_per_execution(self) -> int:
        """The fastest number of steps per execution at `micro_batch_size`."""
        return self._choice()[0].steps_per_execution

    @property
    def gain(self) -> Estimate[float] | None:
        """Speed at `micro_batch_size` over the speed at the largest size; None if equal."""
        return self._choice()[1]

    def _choice(self) -> tuple[TimedUpdate, Estimate[float] | None]:
        return choose_micro_batch(fastest_ways(self.updates))

    @property
    def efficient(self) -> Estimate[float | None]:
        """The smallest size that reaches 90 % of the peak throughput."""
        return efficient_batch_size(self.latency)

    @property
    def latency(self) -> Latency:
        """The line fitted to the times of a micro-batch, in seconds."""
        return fit_rounds(fastest_ways(self.updates))


def fastest_ways(updates: Sequence[TimedUpdate]) -> tuple[TimedUpdate, ...]:
    """Return the fastest number of steps per execution of each timed size, by ascending size."""
    timed = (update for update in updates if update.measured)
    ways: dict[int, TimedUpdate] = {}
    for update in sorted(timed, key=lambda update: (update.batch_size, update.median_s)):
        ways.setdefault(update.batch_size, update)
    return tuple(ways.values())


def choose_micro_batch(ways: Sequence[TimedUpdate]) -> tuple[TimedUpdate, Estimate[float] | None]:
    """Choose the fastest of ascending sizes, and compute its gain over the largest.

    Sizes are compared by the ratio of their times in each round, so that a drift of the machine
    cancels. A larger size is preferred if it is not certainly slower, or at most 2 % slower,
    because it cuts a batch into fewer micro-batches, or into none.
    """
    # All sizes begin in the first round, and some end before the last.
    common_rounds = min((len(way.times_s) for way in ways), default=0)
    if not common_rounds:
        raise ValueError(
            "Every batch size must have been timed at least once: give a larger `time_budget_s`. "
            f"Received: times by batch size: { {w.batch_size: len(w.times_s) for w in ways} }."
        )
    example_times_s = [[s / way.batch_size for s in way.times_s[:common_rounds]] for way in ways]
    medians_s = list(map(statistics.median, example_times_s))
    fastest = medians_s.index(min(medians_s))
    larger = range(len(ways) - 1, fastest, -1)
    tied = (i for i in larger if not _slower(example_times_s[i], example_times_s[fastest]))
    chosen = next(tied, fastest)
    if chosen == len(ways) - 1:
        return ways[chosen], None
    return ways[chosen], ratio_over_rounds(example_times_s[-1], example_times_s[chosen])


def _slower(times_s: Sequence[float], reference_s: Sequence[float]) -> bool:
    """Return whether the times are certainly longer, by more than a negligible share."""
    ratio = ratio_over_rounds(times_s, reference_s)
    return ratio is not None and (ratio.low or 0.0) > 1 and ratio.value > 1 + _NEGLIGIBLE
