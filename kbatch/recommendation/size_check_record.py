"""The record of a short training at another batch size, to the loss that a pilot came to."""

import dataclasses

from kbatch.analysis.learning_rate_records import LearningRateScaling
from kbatch.analysis.next_size import Tried

CHECK_ENDS = ("target", "lost", "budget", "diverged", "failed")


@dataclasses.dataclass(frozen=True)
class SizeCheck:
    """What a batch size needed to the target.

    Attributes:
        batch_size: In examples.
        micro_batch_size: Examples that went through the device at once.
        learning_rate: Learning rate at the first update, None where it is no scalar.
        updates: Updates that were made.
        loss: The loss after them, held-out or of training as in the pilot; None if not finite.
        trained_s: Seconds that it took after its first update.
        ended_by: One of `CHECK_ENDS`: it came to the target, was beaten already by another size,
            spent its time, its loss became NaN, or it failed, as for want of memory.
        scaling: How its settings followed the batch size; None where an earlier version of kbatch
            did not record it.
    """

    batch_size: int
    micro_batch_size: int
    learning_rate: float | None
    updates: int
    loss: float | None
    trained_s: float
    ended_by: str
    scaling: LearningRateScaling | None = None

    def __post_init__(self):
        if self.ended_by not in CHECK_ENDS:
            raise ValueError(
                f"`ended_by` must be one of {CHECK_ENDS}. Received: {self.ended_by!r}."
            )

    def as_tried(self, update_s: float) -> Tried:
        """Return it as a run of a search.

        Args:
            update_s: Seconds of an update of its size.
        """
        if self.ended_by in ("diverged", "failed"):
            return Tried(self.batch_size, None, None)
        cost = self.updates * update_s if self.reached else None
        return Tried(self.batch_size, cost, self.updates)

    @property
    def reached(self) -> bool:
        """Whether it came to the target."""
        return self.ended_by == "target"
