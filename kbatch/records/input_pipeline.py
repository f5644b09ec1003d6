"""The record of what limits training: the input pipeline or the train step."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from kbatch.analysis.input_bound import (
    Crossing,
    crossing_batch_size,
    input_verdict,
    overlapped_rate,
    serial_rate,
)
from kbatch.analysis.round_ratios import RoundEstimate, over_rounds, ratio_over_rounds
from kbatch.records.environment import EnvironmentRecord
from kbatch.records.json_files import read_record, write_record

if TYPE_CHECKING:
    import pandas as pd

SOURCES = ("tf.data.Dataset", "PyDataset", "arrays")


@dataclasses.dataclass(frozen=True)
class RateRecord:
    """What one of the contenders did in each round.

    Attributes:
        examples: Examples in each round.
        durations_s: Seconds of each round.
        wait_s: Seconds of each round spent waiting for a batch; empty where nothing else was
            done.
        cpu_s: Processor seconds of this process in each round, over all cores; those of worker
            processes are not in it. Empty if not measured.
        gpu_busy_share: Share of each round in which some kernel ran on the GPU, from 0 to 1;
            empty if not measured.
    """

    examples: tuple[int, ...]
    durations_s: tuple[float, ...]
    wait_s: tuple[float, ...] = ()
    cpu_s: tuple[float, ...] = ()
    gpu_busy_share: tuple[float, ...] = ()

    def __post_init__(self):
        rounds = len(self.durations_s)
        for name in ("examples", "wait_s", "cpu_s", "gpu_busy_share"):
            length = len(getattr(self, name))
            if length != rounds and not (length == 0 and name != "examples"):
                raise ValueError(
                    f"`{name}` must have one value a round. Received: {length} values of {rounds} "
                    "rounds."
                )

    @property
    def rates(self) -> tuple[float, ...]:
        """Examples per second of each round."""
        return tuple(n / s for n, s in zip(self.examples, self.durations_s, strict=True))

    @property
    def example_s(self) -> tuple[float, ...]:
        """Seconds an example of each round."""
        return tuple(s / n for n, s in zip(self.examples, self.durations_s, strict=True))

    @property
    def samples_per_second(self) -> RoundEstimate | None:
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
class StepSpan:
    """One step of training.

    Attributes:
        begin_s: Seconds from the start of the timeline to the request for a batch.
        wait_s: Seconds until the batch arrived.
        compute_s: Seconds of the train step after that.
    """

    begin_s: float
    wait_s: float
    compute_s: float


@dataclasses.dataclass(frozen=True)
class RemedyRecord:
    """A change to the pipeline that was tried.

    Attributes:
        name: The change in a few words.
        code: The line of code that makes it.
        condition: What must hold for it, None if nothing must.
        original: Training on the pipeline as it is.
        changed: Training on the changed pipeline, in the same rounds.
    """

    name: str
    code: str
    condition: str | None
    original: RateRecord
    changed: RateRecord

    @property
    def gain(self) -> RoundEstimate | None:
        """Training speed with the change over the speed without it, None without rounds."""
        return ratio_over_rounds(self.changed.rates, self.original.rates)


@dataclasses.dataclass(frozen=True)
class UntriedRecord:
    """A change to the pipeline that was not tried.

    Attributes:
        name: The change in a few words.
        code: The line of code that would make it.
        reason: Why it was not tried.
    """

    name: str
    code: str
    reason: str


@dataclasses.dataclass(frozen=True)
class CostRecord:
    """What a part of making a batch of arrays costs.

    Attributes:
        name: The part in a few words.
        durations_s: Seconds a batch, one value a round.
    """

    name: str
    durations_s: tuple[float, ...]

    @property
    def batch_s(self) -> RoundEstimate | None:
        """Seconds a batch, None without rounds."""
        return over_rounds(self.durations_s)


@dataclasses.dataclass(frozen=True)
class InputPipelineProfile:
    """What limits training: the input pipeline or the train step.

    Attributes:
        source: One of `SOURCES`.
        batch_size: Examples in the batch of the train step.
        pipeline: The pipeline alone.
        step: The train step alone, on one batch held on the device.
        together: Training: both together.
        smaller_size: Examples in the smaller batch, None for a batch of one example.
        smaller_step: The train step alone on the smaller batch, likewise.
        first_batch_s: Seconds from the start of the pipeline to its first batch, each time.
        timeline: Consecutive steps of training, about one second of them.
        remedies: Changes to the pipeline that were tried.
        untried: Changes that were not tried.
        costs: What slicing and copying cost, for arrays.
        notes: What a reader of the numbers must know.
        dtype_policy: Dtype policy of the model.
        budget_s: Seconds that the measurement was given.
        environment: The machine and the software.
    """

    source: str
    batch_size: int
    pipeline: RateRecord
    step: RateRecord
    together: RateRecord
    smaller_size: int | None
    smaller_step: RateRecord | None
    first_batch_s: tuple[float, ...]
    timeline: tuple[StepSpan, ...]
    remedies: tuple[RemedyRecord, ...]
    untried: tuple[UntriedRecord, ...]
    costs: tuple[CostRecord, ...]
    notes: tuple[str, ...]
    dtype_policy: str
    budget_s: float
    environment: EnvironmentRecord

    def __post_init__(self):
        if self.source not in SOURCES:
            raise ValueError(f"`source` must be one of {SOURCES}. Received: {self.source!r}.")
        rounds = {len(r.durations_s) for r in (self.pipeline, self.step, self.together)}
        if len(rounds) != 1:
            raise ValueError(
                "Pipeline, step and both together must have been measured in the same rounds. "
                f"Received: {sorted(rounds)} rounds."
            )

    @property
    def verdict(self) -> str:
        """What limits training: `"input-bound"`, `"compute-bound"` or `"undetermined"`."""
        return input_verdict(self.ratio)

    @property
    def ratio(self) -> RoundEstimate | None:
        """Rate of the pipeline alone over that of the step alone, paired by round."""
        return ratio_over_rounds(self.pipeline.rates, self.step.rates)

    @property
    def wait_share(self) -> float | None:
        """Share of a step of training spent waiting for data, from 0 to 1."""
        return self.together.wait_share

    @property
    def crossing(self) -> Crossing | None:
        """The batch size at which pipeline and step take as long, None if not measured."""
        if self.smaller_step is None or self.smaller_size is None:
            return None
        return crossing_batch_size(
            batch_size=self.batch_size,
            smaller_size=self.smaller_size,
            step_s=[self.batch_size * s for s in self.step.example_s],
            smaller_step_s=[self.smaller_size * s for s in self.smaller_step.example_s],
            example_s=self.pipeline.example_s,
        )

    @property
    def overlapped(self) -> float | None:
        """Examples per second of training that overlapped both wholly."""
        rates = self._rates()
        return rates and overlapped_rate(*rates)

    @property
    def serial(self) -> float | None:
        """Examples per second of training that did one after the other."""
        rates = self._rates()
        return rates and serial_rate(*rates)

    @property
    def best_first(self) -> tuple[RemedyRecord, ...]:
        """The remedies that were tried, by the lower end of their gain's interval."""
        return tuple(sorted(self.remedies, key=_sure_gain, reverse=True))

    def to_dataframe(self) -> "pd.DataFrame":
        """Makes a table with a row for each contender and round.

        The columns are `contender` (`"pipeline"`, `"step"`, `"together"`, `"smaller step"`, and
        for each remedy its name and the original beside it), `round`, `examples`, `duration_s`,
        `samples_per_second`, `wait_s` and `cpu_s`.
        """
        import pandas as pd

        columns = ["contender", "round", "examples", "duration_s", "samples_per_second"]
        rows = [row for name, rate in self._contenders() for row in _rows(name, rate)]
        return pd.DataFrame(rows, columns=[*columns, "wait_s", "cpu_s"])

    def save(self, path: str | Path) -> None:
        """Writes the record as JSON.

        Args:
            path: File to write; its folder is made if it is missing.

        Raises:
            OSError: If it cannot be written, with what to do.
        """
        write_record(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> "InputPipelineProfile":
        """Reads a record that `save` wrote.

        Raises:
            RecordError: If the file is broken, of a newer kbatch or holds something else.
        """
        return read_record(cls, Path(path))

    def _rates(self) -> tuple[float, float] | None:
        pipeline, step = self.pipeline.samples_per_second, self.step.samples_per_second
        return (pipeline.value, step.value) if pipeline and step else None

    def _contenders(self) -> list[tuple[str, RateRecord]]:
        found = [("pipeline", self.pipeline), ("step", self.step), ("together", self.together)]
        if self.smaller_step is not None:
            found.append(("smaller step", self.smaller_step))
        for remedy in self.remedies:
            found += [
                (f"original beside {remedy.name}", remedy.original),
                (remedy.name, remedy.changed),
            ]
        return found


def _sure_gain(remedy: RemedyRecord) -> tuple[float, float]:
    gain = remedy.gain
    if gain is None:
        return 0.0, 0.0
    return (gain.interval.low if gain.interval else 0.0), gain.value


def _rows(name: str, rate: RateRecord) -> list[tuple[object, ...]]:
    rounds = range(len(rate.durations_s))
    return [
        (
            name,
            i,
            rate.examples[i],
            rate.durations_s[i],
            rate.rates[i],
            rate.wait_s[i] if rate.wait_s else None,
            rate.cpu_s[i] if rate.cpu_s else None,
        )
        for i in rounds
    ]
