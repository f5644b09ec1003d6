"""What limits training: the input pipeline or the train step.

With p examples/s of the pipeline alone and s of the train step alone, training that overlaps
both runs at min(p, s). Training that ran faster shows that p or s was disturbed while it was
measured.

The rate of a pipeline in the long run comes from one long reading of it. Where data come in chunks,
such as files, the batches of a chunk follow each other quickly and then there is a pause. A short
stretch shows the one or the other. With n examples until the time T, the first batch at t of m
examples,

    n / T  and  (n - m) / (T - t)

are bounds: the lower counts the start as a pause like others, the upper as one that does not come
again. Over whole chunks, or whole epochs, there is one value.
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

# Measuring costs each side a few percent of its own: rates that are closer are taken as equal.
CLOSEST_RATIO = 1.05
# The same for a long reading, which is one and has no rounds.
_CLOSEST_ONCE = 1.1
# Short blocks and a long reading that differ by more than this saw different things.
_AGREEING_RATIO = 1.3
# Training surely this much faster than one side alone cannot be.
_IMPOSSIBLE_RATIO = 1.1
_MUCH_WAITING = 0.2

Ends = tuple[float, float]

# What takes turns, as people read it.
PIPELINE, STEP, TOGETHER = "pipeline alone", "train step alone", "both together"


def input_verdict(ratio: Estimate[float] | None, *, long_run: Ends | None = None) -> str:
    """Say what limits training, from the pipeline's rate over that of the step."""
    if ratio is None or ratio.ends is None:
        return "undetermined"
    if long_run is not None and not _agrees(ratio, long_run):
        return _side(long_run, closest=_CLOSEST_ONCE)
    found = _side(ratio.ends, closest=CLOSEST_RATIO)
    # Rounds read the first batches of the data again and again, and these may be unlike the others.
    if long_run is not None and (
        (found == "input-bound" and long_run[0] > 1)
        or (found == "compute-bound" and long_run[1] < 1)
    ):
        return "undetermined"
    return found


def _agrees(ratio: Estimate[float], long_run: Ends) -> bool:
    """Return whether short rounds and a long reading gave about the same ratio."""
    low, high = long_run
    return high <= _AGREEING_RATIO * ratio.value <= _AGREEING_RATIO**2 * low


def _side(ends: Ends, *, closest: float) -> str:
    low, high = ends
    if high < 1 / closest:
        return "input-bound"
    return "compute-bound" if low > closest else "undetermined"


@dataclasses.dataclass(frozen=True)
class LongRun:
    """One long reading of the pipeline alone, before the rounds."""

    basis: Literal["whole_epochs", "whole_chunks", "part_of_the_data"]
    examples: int  # Of the first batch too.
    duration_s: float  # With the start of the pipeline.
    later_examples: int  # Without the first batch; 0 where whole epochs or chunks were counted.
    later_s: float  # After the first batch.
    first_batch_s: float  # From the start of the pipeline to its first batch.
    wait_share: float | None = None  # Of training as long, where rounds saw another rate.

    @property
    def bounds(self) -> Ends:
        """The lowest and the highest rate in the long run, examples/s."""
        lowest = self.examples / self.duration_s
        if self.later_examples == 0:
            return lowest, lowest
        return lowest, max(lowest, self.later_examples / self.later_s)

    def agrees_with(self, rate: Estimate[float] | None) -> bool:
        """Return whether rounds of the pipeline gave about its rate, true without rounds."""
        return rate is None or _agrees(rate, self.bounds)


# A pause is at least this share of the longest one.
_PAUSE_SHARE = 0.5
_FEWEST_PAUSES = 3
# Whole chunks must make up this share of the reading.
_CHUNKS_SHARE = 0.5


def long_run(
    examples: Sequence[int], arrivals_s: Sequence[float], *, epochs: Sequence[int]
) -> LongRun:
    """Count whole epochs or whole chunks, else the part that was read."""
    rows, times_s = np.asarray(examples), np.asarray(arrivals_s, float)
    first_s, last_s = float(times_s[0]), float(times_s[-1])

    def between(basis: Any, first: int, last: int) -> LongRun:
        """Count from the first batch of the first part to that of the last part."""
        counted, counted_s = int(rows[first:last].sum()), float(times_s[last] - times_s[first])
        return LongRun(basis, counted, counted_s, 0, 0.0, first_s)

    starts = np.flatnonzero(np.diff([-1, *epochs]))
    if len(starts) > 1:
        return between("whole_epochs", starts[0], starts[-1])
    gaps_s = np.diff([0.0, *times_s])
    pauses = np.flatnonzero(gaps_s >= _PAUSE_SHARE * gaps_s.max())
    first, last = pauses[0], pauses[-1]
    # Where every batch is a pause of its own there are no chunks, and this is the plain rate.
    whole = times_s[last] - times_s[first] >= _CHUNKS_SHARE * last_s
    if len(pauses) >= _FEWEST_PAUSES and whole:
        return between("whole_chunks", first, last)
    later = int(rows[1:].sum())
    return LongRun("part_of_the_data", int(rows.sum()), last_s, later, last_s - first_s, first_s)


@dataclasses.dataclass(frozen=True)
class RateRecord:
    """What one of the contenders did in each round."""

    examples: tuple[int, ...]  #: Examples in each round.
    durations_s: tuple[float, ...]  #: Seconds of each round.
    wait_s: tuple[float, ...] = ()  #: Of each round, spent waiting for a batch; or empty.

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

    begin_s: float  # From the start of the timeline to the request for a batch.
    wait_s: float  # Until the batch arrived.
    compute_s: float  # Of the train step after that.


@dataclasses.dataclass(frozen=True)
class ChangeRecord:
    """A change to the pipeline, tried or not."""

    name: Literal["prefetch", "parallel_map", "cache_in_memory", "more_workers"]
    code: str  # What to put into the pipeline, or the settings of a `PyDataset`.
    condition: Note | None = None  # What must hold for it. If None, nothing must.
    reason: Note | None = None  # Why it was not tried. If None, it was.
    original: RateRecord | None = None  # Training on the pipeline as it is, where it was tried.
    changed: RateRecord | None = None  # In the same rounds.

    @property
    def title(self) -> str:
        """Its name as people read it."""
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
        """Whether the whole interval of the gain lies above 5 %, the closest that counts."""
        low = self.gain and self.gain.low
        return low is not None and low > CLOSEST_RATIO


@dataclasses.dataclass(frozen=True, repr=False)
class InputPipelineProfile(Result):
    """What limits training: the input pipeline or the train step."""

    batch_size: int  #: Examples in the batch of the train step.
    pipeline: RateRecord  #: The pipeline alone.
    step: RateRecord  #: The train step alone, on some of the batches read, held on the device.
    together: RateRecord  #: Training: both together.
    timeline: tuple[StepSpan, ...]  #: Steps of training in a row, of a second or less.
    changes: tuple[ChangeRecord, ...]  #: Changes to the pipeline, tried and not.
    noted: tuple[Note, ...]  #: What was noted while it was measured.
    dtype_policy: str  #: Dtype policy of the model.
    time_budget_s: float  #: Seconds that the measurement was given.
    environment: EnvironmentRecord  #: The machine and the software.
    long_run: LongRun | None = None  #: A long reading; None if rounds count whole epochs.
    #: Whether both together had batches like those of pipeline and step alone.
    together_comparable: bool = True

    @property
    def verdict(self) -> str:
        """What limits training: `"input-bound"`, `"compute-bound"` or `"undetermined"`."""
        if self.disturbed:
            return "undetermined"
        return input_verdict(self.ratio, long_run=self.long_run_ratio)

    @property
    def ratio(self) -> Estimate[float] | None:
        """Rate of the pipeline alone over that of the step alone, paired by round."""
        return ratio_over_rounds(self.pipeline.rates, self.step.rates)

    @property
    def disturbed(self) -> tuple[str, ...]:
        """Which of `"pipeline"` and `"step"` ran slower alone than together, which cannot be."""
        if not self.together_comparable:
            return ()
        alone = {"step": self.step}
        if self.long_run is None:
            # Else training may end before a pause of the pipeline; the long reading checks it.
            alone["pipeline"] = self.pipeline
        ratios = {n: ratio_over_rounds(self.together.rates, r.rates) for n, r in alone.items()}
        return tuple(
            name
            for name, over in ratios.items()
            if over and (over.value > _AGREEING_RATIO or (over.low or 0.0) > _IMPOSSIBLE_RATIO)
        )

    @property
    def long_run_ratio(self) -> Ends | None:
        """The least and the most that the ratio of both rates is over a long reading."""
        ratio, pipeline = self.ratio, self.pipeline.samples_per_second
        if self.long_run is None or ratio is None or pipeline is None:
            return None
        # By way of the rounds' own ratio: its pairs hold where the machine drifts.
        low, high = (ratio.value * bound / pipeline.value for bound in self.long_run.bounds)
        return low, high

    @property
    def is_even(self) -> bool:
        """Whether short rounds of the pipeline gave about the rate of a long reading."""
        return self.long_run is None or self.long_run.agrees_with(self.pipeline.samples_per_second)

    @property
    def wait_share(self) -> float | None:
        """Share of training spent waiting for data, from 0 to 1."""
        if self.long_run is not None and self.long_run.wait_share is not None:
            return self.long_run.wait_share
        return self.together.wait_share

    def speeds(self) -> dict[str, Estimate[float]]:
        """Return the examples/s of the pipeline, the step, both together, and with each change.

        The speed of the train step is its median over the rounds. All others follow from it by
        ratios that are paired by round. So two speeds have the ratio that the page names.
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
        """The changes that were tried, by the lower end of their gain's interval."""
        tried = [change for change in self.changes if change.changed is not None]
        return tuple(sorted(tried, key=lambda c: (c.gain and c.gain.low) or 0.0, reverse=True))

    @property
    def title(self) -> str:
        """What it is a result of."""
        return "Input pipeline"

    @property
    def answer(self) -> str:
        """The verdict, what it rests on, and the change that helps most."""
        return f"{self.verdict[0].upper()}{self.verdict[1:]}: {self._why()}."

    def _why(self) -> str:
        ratio, run, waiting = self.ratio, self.long_run_ratio, self.wait_share
        if self.disturbed:
            alone = " and ".join(f"the {name} alone" for name in self.disturbed)
            return (
                f"both together ran faster than {alone}, which cannot be; measure again on an idle "
                "machine or with a larger `time_budget_s`"
            )
        if ratio is None or ratio.ends is None:
            return "too few rounds for an interval; give a larger `time_budget_s`"
        if run is None or self.is_even:
            found = f"the pipeline alone is {speed_text(ratio, 'the train step')}"
        else:
            ends = " to ".join(dict.fromkeys(speed_text(end, "the train step") for end in run))
            found = f"over one long reading the pipeline alone is {ends}"
        waits = f"training waits for data {percent(waiting or 0.0)} of its time"
        apart = f", but {waits}: nothing overlaps them" * ((waiting or 0.0) > _MUCH_WAITING)
        if self.verdict == "undetermined":
            low, high = ratio.ends
            if not self.is_even:
                return f"{found}, with too few pauses to see; give a larger `time_budget_s`"
            if low >= 1 / CLOSEST_RATIO and high <= CLOSEST_RATIO:
                return f"pipeline and train step are equally fast within 5 %{apart}"
            return f"{found}, which does not decide it{apart}; give a larger `time_budget_s`"
        if self.verdict == "compute-bound":
            return f"{found}{apart}"
        if (best := self._best_change()) is None or best.gain is None:
            return f"{found}, and {waits}"
        return f"{found}; with {best.title} training is {speed_text(best.gain)}"

    def _best_change(self) -> ChangeRecord | None:
        """Return the change to make, None if training does not wait or none surely helps."""
        sure = [change for change in self.best_first if change.is_clear_gain]
        return sure[0] if sure and self.verdict == "input-bound" else None

    def table(self) -> "pd.DataFrame":
        """Return what was measured, and what each change to the pipeline gained."""
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
            gained = ranged_columns("times as fast", change.gain)
            more = {"code": change.code, "condition": change.condition, "outcome": change.outcome}
            rows[change.title] = row(change.title, change.changed, **gained, **more)
        columns = [name for one in rows.values() for name in one if name != "outcome"]
        columns = [*dict.fromkeys(columns), "outcome"]
        table = pd.DataFrame(list(rows.values()), columns=columns, index=list(rows))
        table.insert(0, "measured", table.index)
        best = self._best_change()
        table.attrs["answer"] = [] if best is None else [best.title]
        return table

    @property
    def settings(self) -> dict[str, str]:
        """What it was measured with."""
        found = {
            "batch size": f"{self.batch_size:,}",
            "dtype policy": self.dtype_policy,
            "time to measure": f"{setting(self.time_budget_s)} s",
        }
        if (run := self.long_run) is not None:
            found["long reading"] = (
                f"{format_number(run.duration_s)} s, {run.basis.replace('_', ' ')}"
            )
        return found
