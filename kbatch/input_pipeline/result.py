"""The result of `profile_input_pipeline`: whether loading data limits training.

If the pipeline alone delivers p examples/s and the train step alone takes s examples/s, training
that overlaps both runs at min(p, s). If training ran faster, another program slowed the machine
while p or s was measured.

The long-run rate of a pipeline comes from one long reading. If the data come in chunks, such as
files, the batches of a chunk arrive quickly, and then there is a pause. A short reading sees only
one of the two. Suppose the reading delivers n examples in the time T, and its first batch has m
examples and arrives at the time t. Then the rate is between

    n / T  and  (n - m) / (T - t)

The lower bound counts the start as a pause that comes again, the upper bound as one that does not.
Over whole chunks or whole epochs both bounds are equal.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kbatch.analysis.intervals import Estimate, over_rounds, ranged_columns, ratio_over_rounds
from kbatch.page.numbers import format_number, percent, setting, speed_text
from kbatch.page.result import Result
from kbatch.records.machine import EnvironmentRecord
from kbatch.records.notes import Note

if TYPE_CHECKING:
    import pandas as pd

# Rates count as equal up to this ratio, because the measurement itself costs a few percent.
CLOSEST_RATIO = 1.05
# A rate of the long reading counts as equal up to this ratio, because it is measured only once.
_CLOSEST_ONCE = 1.1
# If rounds and long reading differ by more than this, they saw different data.
_AGREEING_RATIO = 1.3
# If training is faster than the pipeline or the train step alone by more, a rate is wrong.
_IMPOSSIBLE_RATIO = 1.1
_MUCH_WAITING = 0.2

Ends = tuple[float, float]

# Printed names of the three measurements.
PIPELINE, STEP, TOGETHER = "pipeline alone", "train step alone", "both together"


def input_verdict(ratio: Estimate[float] | None, *, long_run: Ends | None = None) -> str:
    """Return the verdict for the rate of the pipeline over the rate of the train step."""
    if ratio is None or ratio.ends is None:
        return "undetermined"
    if long_run is not None and not _agrees(ratio, long_run):
        return _verdict(long_run, closest=_CLOSEST_ONCE)
    verdict = _verdict(ratio.ends, closest=CLOSEST_RATIO)
    # The rounds always read the first batches of the data, which may differ from the others.
    if long_run is not None and (
        (verdict == "input-bound" and long_run[0] > 1)
        or (verdict == "compute-bound" and long_run[1] < 1)
    ):
        return "undetermined"
    return verdict


def _agrees(ratio: Estimate[float], long_run: Ends) -> bool:
    """Return whether a ratio and the bounds of a long reading differ by at most 1.3 times."""
    low, high = long_run
    return high <= _AGREEING_RATIO * ratio.value <= _AGREEING_RATIO**2 * low


def _verdict(ends: Ends, *, closest: float) -> str:
    low, high = ends
    if high < 1 / closest:
        return "input-bound"
    return "compute-bound" if low > closest else "undetermined"


@dataclasses.dataclass(frozen=True)
class LongRun:
    """One long reading of the pipeline alone, before the rounds."""

    basis: Literal["whole_epochs", "whole_chunks", "part_of_the_data"]
    examples: int  # With the first batch.
    duration_s: float  # Seconds, with the start of the pipeline.
    later_examples: int  # Without the first batch. 0 if whole epochs or chunks count.
    later_s: float  # Seconds after the first batch.
    first_batch_s: float  # Seconds from the start of the pipeline to its first batch.
    # Share of the time that equally long training waited. None if the rounds had the same rate.
    wait_share: float | None = None

    @property
    def bounds(self) -> Ends:
        """The bounds of the long-run rate in examples/s."""
        lowest = self.examples / self.duration_s
        if self.later_examples == 0:
            return lowest, lowest
        return lowest, max(lowest, self.later_examples / self.later_s)

    def agrees_with(self, rate: Estimate[float] | None) -> bool:
        """Return whether the rounds had about this rate. True without rounds."""
        return rate is None or _agrees(rate, self.bounds)


# Gaps of at least this share of the longest gap are pauses.
_PAUSE_SHARE = 0.5
_FEWEST_PAUSES = 3
# Whole chunks must take this share of the reading.
_CHUNKS_SHARE = 0.5


def long_run(
    examples: Sequence[int], arrivals_s: Sequence[float], *, epochs: Sequence[int]
) -> LongRun:
    """Count whole epochs. If there are none, count whole chunks, or else all that was read."""
    rows, times_s = np.asarray(examples), np.asarray(arrivals_s, float)
    first_s, last_s = float(times_s[0]), float(times_s[-1])

    def between(basis: Any, first: int, last: int) -> LongRun:
        counted, counted_s = int(rows[first:last].sum()), float(times_s[last] - times_s[first])
        return LongRun(basis, counted, counted_s, 0, 0.0, first_s)

    starts = np.flatnonzero(np.diff([-1, *epochs]))
    if len(starts) > 1:
        return between("whole_epochs", starts[0], starts[-1])
    gaps_s = np.diff([0.0, *times_s])
    pauses = np.flatnonzero(gaps_s >= _PAUSE_SHARE * gaps_s.max())
    first, last = pauses[0], pauses[-1]
    # If there is a pause before each batch, there are no chunks, but the rate is correct too.
    is_long = times_s[last] - times_s[first] >= _CHUNKS_SHARE * last_s
    if len(pauses) >= _FEWEST_PAUSES and is_long:
        return between("whole_chunks", first, last)
    later = int(rows[1:].sum())
    return LongRun("part_of_the_data", int(rows.sum()), last_s, later, last_s - first_s, first_s)


@dataclasses.dataclass(frozen=True)
class RateRecord:
    """The rounds of one measurement."""

    examples: tuple[int, ...]  #: Examples in each round.
    durations_s: tuple[float, ...]  #: Seconds of each round.
    wait_s: tuple[float, ...] = ()  #: Seconds of each round that training waited for data.

    @property
    def rates(self) -> tuple[float, ...]:
        """Examples per second of each round."""
        return tuple(n / s for n, s in zip(self.examples, self.durations_s, strict=True))

    @property
    def samples_per_second(self) -> Estimate[float] | None:
        """Examples per second, None without rounds."""
        return over_rounds(self.rates)

    @property
    def wait_share(self) -> float | None:
        """Share of the time spent waiting for data, from 0 to 1; None if not measured."""
        shares = [w / s for w, s in zip(self.wait_s, self.durations_s, strict=False)]
        return statistics.median(shares) if shares else None


@dataclasses.dataclass(frozen=True)
class StepSpan:
    """One step of training."""

    begin_s: float  # Seconds from the start of the timeline to the request for a batch.
    wait_s: float  # Seconds from the request to the arrival.
    compute_s: float  # Seconds of the train step after that.


@dataclasses.dataclass(frozen=True)
class ChangeRecord:
    """A change to the pipeline, tried or not."""

    name: Literal["prefetch", "parallel_map", "cache_in_memory", "more_workers"]
    code: str  # Code for the pipeline, or the settings of a `PyDataset`.
    condition: Note | None = None  # Requirement of the change. If None, there is none.
    reason: Note | None = None  # Why it was not tried. If None, it was tried.
    original: RateRecord | None = None  # Training without the change, if it was tried.
    changed: RateRecord | None = None  # Training with the change, in the same rounds.

    @property
    def title(self) -> str:
        """Its printed name."""
        return self.name.replace("_", " ")

    @property
    def gain(self) -> Estimate[float] | None:
        """Training speed with the change over the speed without it, None without rounds."""
        if self.changed is None or self.original is None:
            return None
        return ratio_over_rounds(self.changed.rates, self.original.rates)

    @property
    def outcome(self) -> str:
        """The result of the change, in a few words."""
        if self.reason is not None:
            return f"not tried: {self.reason}"
        if self.gain and (self.gain.high or math.inf) < 1 / CLOSEST_RATIO:
            return speed_text(self.gain.value)
        return "clear gain" if self.is_clear_gain else "no clear gain"

    @property
    def is_clear_gain(self) -> bool:
        """Whether the whole interval of the gain is above 5 %."""
        low = self.gain and self.gain.low
        return low is not None and low > CLOSEST_RATIO


@dataclasses.dataclass(frozen=True, repr=False)
class InputPipelineProfile(Result):
    """Whether the input pipeline or the train step limits training, and changes that help.

    Example:

    >>> profile = kbatch.profile_input_pipeline(model, dataset)
    >>> profile.verdict, profile.wait_share
    ('input-bound', 0.71)
    """

    batch_size: int  #: Examples in the batch of the train step.
    pipeline: RateRecord  #: The pipeline alone.
    step: RateRecord  #: The train step alone, on batches that are on the device.
    together: RateRecord  #: Training: both together.
    timeline: tuple[StepSpan, ...]  #: Consecutive steps of training, at most a second of them.
    changes: tuple[ChangeRecord, ...]  #: Changes to the pipeline, tried or not.
    noted: tuple[Note, ...]  #: Notes of the measurement.
    dtype_policy: str  #: Dtype policy of the model.
    time_budget_s: float  #: Time budget of the measurement, in seconds.
    environment: EnvironmentRecord  #: The machine and the software.
    long_run: LongRun | None = None  #: The long reading. None if rounds count whole epochs.
    #: Whether training had batches like the pipeline and the step alone.
    together_comparable: bool = True

    @property
    def verdict(self) -> str:
        """The limit of training: `"input-bound"`, `"compute-bound"` or `"undetermined"`."""
        if self.disturbed:
            return "undetermined"
        return input_verdict(self.ratio, long_run=self.long_run_ratio)

    @property
    def ratio(self) -> Estimate[float] | None:
        """Rate of the pipeline alone over the rate of the step alone, paired by round."""
        return ratio_over_rounds(self.pipeline.rates, self.step.rates)

    @property
    def disturbed(self) -> tuple[str, ...]:
        """Which of `"pipeline"` and `"step"` ran slower alone than in training."""
        if not self.together_comparable:
            return ()
        alone = {"step": self.step}
        if self.long_run is None:
            # Training may end before a pause of the pipeline, which a long reading would see.
            alone["pipeline"] = self.pipeline
        ratios = {n: ratio_over_rounds(self.together.rates, r.rates) for n, r in alone.items()}
        return tuple(
            name
            for name, over in ratios.items()
            if over and (over.value > _AGREEING_RATIO or (over.low or 0.0) > _IMPOSSIBLE_RATIO)
        )

    @property
    def long_run_ratio(self) -> Ends | None:
        """Bounds of the ratio of both rates in the long run."""
        ratio, pipeline = self.ratio, self.pipeline.samples_per_second
        if self.long_run is None or ratio is None or pipeline is None:
            return None
        # The ratio of the rounds is paired, so it is right even if the machine gets slower.
        low, high = (ratio.value * bound / pipeline.value for bound in self.long_run.bounds)
        return low, high

    @property
    def is_even(self) -> bool:
        """Whether the pipeline had about the same rate in the rounds and in the long reading."""
        return self.long_run is None or self.long_run.agrees_with(self.pipeline.samples_per_second)

    @property
    def wait_share(self) -> float | None:
        """Share of training time spent waiting for data, from 0 to 1."""
        if self.long_run is not None and self.long_run.wait_share is not None:
            return self.long_run.wait_share
        return self.together.wait_share

    def speeds(self) -> dict[str, Estimate[float]]:
        """Return the examples/s of the pipeline, the step, both together, and with each change.

        The speed of the train step is the median over the rounds. The others are this speed times
        their ratios to it, which are paired by round, so that they agree with the printed ratios.
        """
        step = self.step.samples_per_second
        if step is None:
            return {}
        speeds = {STEP: step}
        pairs = {PIPELINE: (self.pipeline, self.step), TOGETHER: (self.together, self.step)}
        for name, (rate, reference) in pairs.items():
            if (ratio := ratio_over_rounds(rate.rates, reference.rates)) is not None:
                speeds[name] = ratio.times(step.value)
        for change in self.changes:
            if change.gain is not None and TOGETHER in speeds:
                speeds[change.title] = change.gain.times(speeds[TOGETHER].value)
        return speeds

    @property
    def best_first(self) -> tuple[ChangeRecord, ...]:
        """The changes that were tried, ordered by the lower end of the interval of the gain."""
        tried = [change for change in self.changes if change.changed is not None]
        return tuple(sorted(tried, key=lambda c: (c.gain and c.gain.low) or 0.0, reverse=True))

    @property
    def title(self) -> str:
        """Heading of the printed page."""
        return "Input pipeline"

    @property
    def answer(self) -> str:
        """The verdict, its reason, and the change that helps most."""
        return f"{self.verdict[0].upper()}{self.verdict[1:]}: {self._reason()}."

    def _reason(self) -> str:
        ratio, run, waiting = self.ratio, self.long_run_ratio, self.wait_share or 0.0
        if self.disturbed:
            alone = " and ".join(f"the {name} alone" for name in self.disturbed)
            return (
                f"training was faster than {alone}, so another program slowed the machine; measure "
                "again on an idle machine or with a larger `time_budget_s`"
            )
        if ratio is None or ratio.ends is None:
            return "too few rounds for an interval; give a larger `time_budget_s`"
        if run is None or self.is_even:
            words = f"the pipeline alone is {speed_text(ratio, 'the train step')}"
        else:
            ends = " to ".join(dict.fromkeys(speed_text(end, "the train step") for end in run))
            words = f"in one long reading, the pipeline alone is {ends}"
        waits = f"training waits for data {percent(waiting)} of its time"
        no_overlap = f", but {waits}: loading and training do not overlap"
        no_overlap *= waiting > _MUCH_WAITING
        if self.verdict == "undetermined":
            low, high = ratio.ends
            if not self.is_even:
                return f"{words}, but it was too short to judge; give a larger `time_budget_s`"
            if low >= 1 / CLOSEST_RATIO and high <= CLOSEST_RATIO:
                return f"pipeline and train step are equally fast within 5 %{no_overlap}"
            return f"{words}, too close to decide{no_overlap}; give a larger `time_budget_s`"
        if self.verdict == "compute-bound":
            return f"{words}{no_overlap}"
        if (best := self._best_change()) is None or best.gain is None:
            return f"{words}, and {waits}"
        return f"{words}; with {best.title} training is {speed_text(best.gain)}"

    def _best_change(self) -> ChangeRecord | None:
        """Return the change to make, if training waits for data and a change clearly helps."""
        clear = [change for change in self.best_first if change.is_clear_gain]
        return clear[0] if clear and self.verdict == "input-bound" else None

    def table(self) -> "pd.DataFrame":
        """Return a row for each measurement and for each change to the pipeline."""
        import pandas as pd

        speeds = self.speeds()

        def row(name: str, rate: RateRecord | None, **more: object) -> dict[str, object]:
            speed, waits = speeds.get(name), rate and rate.wait_share
            return {
                **ranged_columns("samples/s", speed),
                "rounds": speed and speed.n,
                "waiting for data (%)": None if waits is None else 100 * waits,
                **more,
            }

        alone = {PIPELINE: self.pipeline, STEP: self.step, TOGETHER: self.together}
        rows = {name: row(name, rate, outcome="measured") for name, rate in alone.items()}
        for change in (*self.best_first, *(c for c in self.changes if c.changed is None)):
            gain = ranged_columns("times as fast", change.gain)
            more = {"code": change.code, "condition": change.condition, "outcome": change.outcome}
            rows[change.title] = row(change.title, change.changed, **gain, **more)
        columns = [name for cells in rows.values() for name in cells if name != "outcome"]
        columns = [*dict.fromkeys(columns), "outcome"]
        table = pd.DataFrame(list(rows.values()), columns=columns, index=list(rows))
        table.insert(0, "measured", table.index)
        best = self._best_change()
        table.attrs["answer"] = [] if best is None else [best.title]
        return table

    @property
    def settings(self) -> dict[str, str]:
        """The conditions of the measurement."""
        settings = {
            "batch size": f"{self.batch_size:,}",
            "dtype policy": self.dtype_policy,
            "time to measure": f"{setting(self.time_budget_s)} s",
        }
        if (run := self.long_run) is not None:
            basis = run.basis.replace("_", " ")
            settings["long reading"] = f"{format_number(run.duration_s)} s, {basis}"
        return settings
