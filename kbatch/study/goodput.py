"""The record of a search by goodput: what updates cost, and why each size came next."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from kbatch.records.json_files import RecordError, read_record, write_record

GOODPUT_NAME = "kbatch-goodput.json"


@dataclasses.dataclass(frozen=True)
class SizeDecision:
    """Why a size was tried, or why no further one was.

    Attributes:
        batch_size: Size that came next, None where the search stopped.
        kind: `"pilot"` for a first size that kbatch chose, `"given"` for one that it did not;
            `"gain"`, `"no target yet"`; or `"separated"`, `"tie"`, `"all tried"`.
        best: Size of the best run until then, None where none came to the target.
        rival: The untried size that was most likely to be better, None without one.
        probability: Probability that it is by more than 5 %, None without a model.
        hyperparameters: The other hyperparameters, whose sizes are searched by themselves.
    """

    batch_size: int | None
    kind: str
    best: int | None = None
    rival: int | None = None
    probability: float | None = None
    hyperparameters: Mapping[str, bool | int | float | str | None] = dataclasses.field(
        default_factory=dict
    )


@dataclasses.dataclass(frozen=True)
class GoodputRecord:
    """What a search by goodput measured before its trials, and decided between them.

    Attributes:
        batch_sizes: The sizes to choose from, in examples.
        update_times_s: Seconds of an update of each, from the throughput sweep.
        extrapolated: Sizes whose seconds are those of the fitted line: they were not timed.
        sweep_s: Seconds that the sweep took.
        decisions: What was decided, in order.
    """

    batch_sizes: tuple[int, ...]
    update_times_s: tuple[float, ...]
    extrapolated: tuple[int, ...]
    sweep_s: float
    decisions: tuple[SizeDecision, ...] = ()

    def __post_init__(self):
        if len(self.batch_sizes) != len(self.update_times_s):
            raise ValueError(
                "`batch_sizes` and `update_times_s` must have the same length. Received: "
                f"{len(self.batch_sizes)} and {len(self.update_times_s)}."
            )

    def with_decision(self, decision: SizeDecision) -> "GoodputRecord":
        """Adds a decision, unless it is the last one already: a search that goes on repeats it."""
        if decision in self.decisions[-1:]:
            return self
        return dataclasses.replace(self, decisions=(*self.decisions, decision))


def read_goodput(project: Path) -> GoodputRecord | None:
    """Reads the record of a project directory; None where there is none or it is damaged."""
    file = project / GOODPUT_NAME
    if not file.exists():
        return None
    try:
        return read_record(GoodputRecord, file)
    except RecordError:
        return None  # It is measured anew.


def write_goodput(record: GoodputRecord, project: Path) -> None:
    """Writes the record into a project directory."""
    write_record(record, project / GOODPUT_NAME)
