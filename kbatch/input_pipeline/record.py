"""Records of what limits training: the input pipeline or the train step."""

import dataclasses
from typing import TYPE_CHECKING

from kbatch.analysis.intervals import Estimate, over_rounds, ratio_over_rounds
from kbatch.input_pipeline.rates import (
    CLOSEST_RATIO,
    Crossing,
    LongRun,
    agrees,
    crossing_batch_size,
    input_verdict,
    is_impossible,
)
from kbatch.page.section import SavedRecord
from kbatch.records.record import (
    SHORTEST_S,
    EnvironmentRecord,
    check_choice,
    check_ranges,
)

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True)
class RateRecord:
    """What one of the contenders did in each round."""

    examples: tuple[int, ...]  #: Examples in each round.
    durations_s: tuple[float, ...]  #: Seconds of each round.
    wait_s: tuple[float, ...] = ()  #: Of each round, spent waiting for a batch; or empty.
    #: Processor seconds of this process alone in each round, all cores; empty if not measured.
    cpu_s: tuple[float, ...] = ()
    #: Share of the time in which the GPU was busy, in a block after the rounds; or None.
    gpu_busy_share: float | None = None

    def __post_init__(self):
        rounds = len(self.durations_s)
        for name in ("examples", "wait_s", "cpu_s"):
            length = len(getattr(self, name))
            if length != rounds and (length or name == "examples"):
                raise ValueError(
                    f"`{name}` must have one value a round. Received: {length} values of {rounds} "
                    "rounds."
                )
        check_ranges(1, examples=self.examples)
        check_ranges(SHORTEST_S, durations_s=self.durations_s)

    @property
    def rates(self) -> tuple[float, ...]:
        """Examples per second of each round."""
        return tuple(n / s for n, s in zip(self.examples, self.durations_s, strict=True))

    @property
    def example_s(self) -> tuple[float, ...]:
        """Seconds an example of each round."""
        return tuple(s / n for n, s in zip(self.examples, self.durations_s, strict=True))

    @property
    def samples_per_second(self) -> Estimate[float] | None:
        """Examples per second, None without rounds."""
        return over_rounds(self.rates)

    @property
    def wait_share(self) -> float | None:
        """Share of the time spent waiting for data, from 0 to 1; None if not measured."""
        return sum(self.wait_s) / sum(self.durations_s) if self.wait_s else None

    @property
    def busy_cores(self) -> float | None:
        """Processor cores that were busy on average, None if not measured."""
        return sum(self.cpu_s) / sum(self.durations_s) if self.cpu_s else None


@dataclasses.dataclass(frozen=True)
class SmallerStepRecord:
    """The train step alone on a smaller batch."""

    batch_size: int
    rate: RateRecord  # In the rounds of the other contenders.

    def __post_init__(self):
        check_ranges(1, batch_size=self.batch_size)


@dataclasses.dataclass(frozen=True)
class LongRunRecord:
    """One long reading of the pipeline alone, before the rounds."""

    counted: LongRun
    first_batch_s: float  # From the start of the pipeline to its first batch.
    training_s: float | None = None  # Of training as long, where rounds saw another rate.
    training_wait_s: float | None = None  # Of these, waiting for a batch.

    @property
    def wait_share(self) -> float | None:
        """Share of that training spent waiting for data, from 0 to 1; None if not measured."""
        if not self.training_s or self.training_wait_s is None:
            return None
        return self.training_wait_s / self.training_s

    def agrees_with(self, pipeline: RateRecord) -> bool:
        """Return whether rounds of the pipeline gave about its rate, true without rounds."""
        rate = pipeline.samples_per_second
        return rate is None or agrees(rate, self.counted.bounds)


@dataclasses.dataclass(frozen=True)
class StepSpan:
    """One step of training."""

    begin_s: float  # From the start of the timeline to the request for a batch.
    wait_s: float  # Until the batch arrived.
    compute_s: float  # Of the train step after that.


@dataclasses.dataclass(frozen=True)
class RemedyRecord:
    """A change to the pipeline that was tried."""

    name: str  # In a few words.
    code: str  # The line that makes it.
    condition: str | None  # What must hold for it, None if nothing must.
    original: RateRecord  # Training on the pipeline as it is.
    changed: RateRecord  # In the same rounds.

    @property
    def gain(self) -> Estimate[float] | None:
        """Training speed with the change over the speed without it, None without rounds."""
        return ratio_over_rounds(self.changed.rates, self.original.rates)

    @property
    def is_clear_gain(self) -> bool:
        """Whether the whole interval of the gain lies above 5 %, the closest that counts."""
        gain = self.gain
        return gain is not None and (gain.low or 0.0) > CLOSEST_RATIO


@dataclasses.dataclass(frozen=True)
class UntriedRecord:
    """A change to the pipeline that was not tried."""

    name: str  # In a few words.
    code: str  # The line that would make it.
    reason: str  # Why it was not tried.


@dataclasses.dataclass(frozen=True)
class CostRecord:
    """What a part of making a batch of arrays costs."""

    name: str  # In a few words.
    durations_s: tuple[float, ...]  # A batch, one value a round.

    @property
    def batch_s(self) -> Estimate[float] | None:
        """Seconds a batch, None without rounds."""
        return over_rounds(self.durations_s)


SOURCES = ("tf.data.Dataset", "PyDataset", "arrays")


@dataclasses.dataclass(frozen=True)
class InputPipelineProfile(SavedRecord):
    """What limits training: the input pipeline or the train step."""

    source: str  #: One of `SOURCES`.
    batch_size: int  #: Examples in the batch of the train step.
    pipeline: RateRecord  #: The pipeline alone.
    step: RateRecord  #: The train step alone, on some of the batches read, held on the device.
    together: RateRecord  #: Training: both together.
    smaller_steps: tuple[SmallerStepRecord, ...]  #: The step on smaller batches, the largest first.
    first_batch_s: tuple[float, ...]  #: From the start of the pipeline to its first batch.
    timeline: tuple[StepSpan, ...]  #: Steps of training in a row, for a second or less.
    remedies: tuple[RemedyRecord, ...]  #: Changes to the pipeline that were tried.
    untried: tuple[UntriedRecord, ...]  #: Changes that were not tried.
    costs: tuple[CostRecord, ...]  #: What slicing and copying cost, for arrays.
    notes: tuple[str, ...]  #: What a reader of the numbers must know.
    dtype_policy: str  #: Dtype policy of the model.
    budget_s: float  #: Seconds that the measurement was given.
    environment: EnvironmentRecord  #: The machine and the software.
    long_run: LongRunRecord | None = None  #: A long reading; None if rounds count whole epochs.
    #: Whether both together had batches like those of pipeline and step alone; None if unknown.
    together_comparable: bool | None = None

    def __post_init__(self):
        check_choice(SOURCES, source=self.source)
        rounds = {len(r.durations_s) for r in (self.pipeline, self.step, self.together)}
        if len(rounds) != 1:
            raise ValueError(
                "Pipeline, step and both together must have been measured in the same rounds. "
                f"Received: {sorted(rounds)} rounds."
            )
        check_ranges(1, batch_size=self.batch_size)

    def __repr__(self) -> str:
        return f"<InputPipelineProfile: {self.verdict}, batch size {self.batch_size}>"

    @property
    def verdict(self) -> str:
        """What limits training: `"input-bound"`, `"compute-bound"` or `"undetermined"`."""
        return input_verdict(
            self.ratio,
            long_run=self.long_run_ratio,
            together=[ratio for _, ratio in self._together_over()],
        )

    @property
    def ratio(self) -> Estimate[float] | None:
        """Rate of the pipeline alone over that of the step alone, paired by round."""
        return ratio_over_rounds(self.pipeline.rates, self.step.rates)

    @property
    def disturbed(self) -> tuple[str, ...]:
        """Which of `"pipeline"` and `"step"` ran slower alone than together, which cannot be."""
        return tuple(name for name, ratio in self._together_over() if is_impossible(ratio))

    @property
    def long_run_ratio(self) -> tuple[float, float] | None:
        """The least and the most that the ratio of both rates is over a long reading."""
        ratio, pipeline = self.ratio, self.pipeline.samples_per_second
        if self.long_run is None or ratio is None or pipeline is None:
            return None
        # By way of the rounds' own ratio: its pairs hold where the machine drifts.
        low, high = self.long_run.counted.bounds
        return ratio.value * low / pipeline.value, ratio.value * high / pipeline.value

    @property
    def rate_bounds(self) -> tuple[float, float] | None:
        """The least and the most examples/s that it delivers, by a long reading if there is one."""
        if self.long_run is not None:
            return self.long_run.counted.bounds
        rate = self.pipeline.samples_per_second
        return rate and (rate.ends or (rate.value, rate.value))

    @property
    def is_even(self) -> bool:
        """Whether short rounds of the pipeline gave about the rate of a long reading."""
        return self.long_run is None or self.long_run.agrees_with(self.pipeline)

    @property
    def wait_share(self) -> float | None:
        """Share of training spent waiting for data, from 0 to 1."""
        over_long = self.long_run and self.long_run.wait_share
        return self.together.wait_share if over_long is None else over_long

    @property
    def crossing(self) -> Crossing | None:
        """The batch size from which on the pipeline is slower; None if too little is known."""
        if not self.smaller_steps or not self.is_even or self.disturbed:
            return None
        steps = [
            (self.batch_size, self.step),
            *((s.batch_size, s.rate) for s in self.smaller_steps),
        ]
        sizes = [size for size, rate in steps for _ in rate.example_s]
        times_s = [size * s for size, rate in steps for s in rate.example_s]
        return crossing_batch_size(sizes, times_s, example_s=self.pipeline.example_s)

    @property
    def overlapped(self) -> float | None:
        """Examples per second of training that overlapped both wholly."""
        rates = self._rates()
        return rates and min(rates)

    @property
    def serial(self) -> float | None:
        """Examples per second of training that did one after the other."""
        rates = self._rates()
        return rates and 1 / (1 / rates[0] + 1 / rates[1])

    @property
    def best_first(self) -> tuple[RemedyRecord, ...]:
        """The remedies that were tried, by the lower end of their gain's interval."""

        def sure_gain(remedy: RemedyRecord) -> tuple[float, float]:
            gain = remedy.gain
            return (gain.low or 0.0, gain.value) if gain else (0.0, 0.0)

        return tuple(sorted(self.remedies, key=sure_gain, reverse=True))

    def to_dataframe(self) -> "pd.DataFrame":
        """Make a table with a row for each contender and round.

        The columns are `contender` (`"pipeline"`, `"step"`, `"together"`, `"step on 16"` for a
        smaller batch, and for each remedy its name and the original beside it), `round`,
        `examples`, `duration_s`, `samples_per_second`, `wait_s` and `cpu_s`.
        """
        import pandas as pd

        contenders = [("pipeline", self.pipeline), ("step", self.step), ("together", self.together)]
        contenders += [(f"step on {s.batch_size}", s.rate) for s in self.smaller_steps]
        for remedy in self.remedies:
            contenders.append((f"original beside {remedy.name}", remedy.original))
            contenders.append((remedy.name, remedy.changed))
        rows = []
        for name, rate in contenders:
            unknown = (None,) * len(rate.durations_s)
            also = (rate.wait_s or unknown, rate.cpu_s or unknown)
            measured = zip(rate.examples, rate.durations_s, rate.rates, *also, strict=True)
            rows += [(name, number, *values) for number, values in enumerate(measured)]
        columns = ["contender", "round", "examples", "duration_s", "samples_per_second"]
        return pd.DataFrame(rows, columns=[*columns, "wait_s", "cpu_s"])

    def _together_over(self) -> list[tuple[str, Estimate[float]]]:
        """Rate of both together over that of each alone, by its name."""
        if self.together_comparable is False:
            return []
        alone = {"step": self.step}
        if self.long_run is None:
            # Else training may end before a pause of the pipeline; the long reading checks it.
            alone["pipeline"] = self.pipeline
        ratios = {n: ratio_over_rounds(self.together.rates, r.rates) for n, r in alone.items()}
        return [(name, ratio) for name, ratio in ratios.items() if ratio is not None]

    def _rates(self) -> tuple[float, float] | None:
        pipeline, step = self.pipeline.samples_per_second, self.step.samples_per_second
        usable = self.is_even and not self.disturbed
        return (pipeline.value, step.value) if pipeline and step and usable else None
