"""The plan of a search: what is settled once, before its first training."""

import dataclasses
import math

from kbatch.records.notes import Note

PLAN_NAME = "kbatch-plan.json"


@dataclasses.dataclass(frozen=True)
class StepSeconds:
    """Seconds of a train step at up to two batch sizes: those of others lie on their line."""

    batch_sizes: tuple[int, ...] = ()  # Empty where no step could be timed.
    step_s: tuple[float, ...] = ()

    def at(self, batch_size: int) -> float:
        """Return the seconds of a step; infinite where none was timed."""
        if not self.batch_sizes:
            return math.inf
        sizes, seconds = self.batch_sizes, self.step_s
        slope = (seconds[-1] - seconds[0]) / max(1, sizes[-1] - sizes[0])
        return seconds[0] + max(0.0, slope) * (batch_size - sizes[0])


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all executions of a search have in common, as it was found before the first of them."""

    number: int  #: From 1; each change makes a further plan, and executions name theirs.
    dtype_policy: str | None  #: Policy of all trials; None where it is a hyperparameter.
    #: Most examples that go through a device at once; None for whole batches of any size.
    micro_batch_size: int | None
    #: Why it is that size: cut as "given", or "cut" to fit; whole, since the largest "fits" or the
    #: model cannot be cut, which has its "own step" or was "compiled late".
    reason: str
    largest_batch_size: int  #: For which the micro-batch was found.
    model: str  #: Fingerprint of the model that it was made with.
    #: Whether cut batches were seen to train as whole ones do; None where none is cut.
    parts_equal: bool | None = None
    parts_note: Note | None = None  #: What differs there; None where nothing does.
    notes: tuple[Note, ...] = ()  #: What a reader of all executions must know of it.
    step_seconds: StepSeconds | None = None  #: None where no step was to be timed.
    duration_s: float = 0.0  #: Seconds that making it took.
