"""Records of what was measured of an input pipeline and a train step, round by round."""

import dataclasses

from kbatch.analysis.round_ratios import RoundEstimate, over_rounds, ratio_over_rounds
from kbatch.input_pipeline.long_run import LongRun
from kbatch.records.ranges import SHORTEST_S, check_ranges


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
        gpu_busy_share: Share of the time in which some kernel ran on the GPU, from 0 to 1, in a
            block of its own after the rounds; None if not measured.
    """

    examples: tuple[int, ...]
    durations_s: tuple[float, ...]
    wait_s: tuple[float, ...] = ()
    cpu_s: tuple[float, ...] = ()
    gpu_busy_share: float | None = None

    def __post_init__(self):
        rounds = len(self.durations_s)
        for name in ("examples", "wait_s", "cpu_s"):
            length = len(getattr(self, name))
            if length != rounds and not (length == 0 and name != "examples"):
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
class SmallerStepRecord:
    """The train step alone on a smaller batch.

    Attributes:
        batch_size: Examples in the batch.
        rate: What it did, in the rounds of the other contenders.
    """

    batch_size: int
    rate: RateRecord

    def __post_init__(self):
        check_ranges(1, batch_size=self.batch_size)


@dataclasses.dataclass(frozen=True)
class LongRunRecord:
    """One long reading of the pipeline alone, before the rounds.

    Attributes:
        counted: What it counted.
        first_batch_s: Seconds from the start of the pipeline to its first batch.
        training_s: Seconds of training as long, where rounds saw another rate; None if not
            measured.
        training_wait_s: Seconds of them spent waiting for a batch.
    """

    counted: LongRun
    first_batch_s: float
    training_s: float | None = None
    training_wait_s: float | None = None

    @property
    def wait_share(self) -> float | None:
        """Share of that training spent waiting for data, from 0 to 1; None if not measured."""
        if not self.training_s or self.training_wait_s is None:
            return None
        return self.training_wait_s / self.training_s


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
