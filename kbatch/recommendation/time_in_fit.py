"""The time from update to update in `fit`, by the size of the batch.

Beside the train step it holds what Keras does for each update, which does not grow with the batch,
the wait for data, and a batch's share of what each epoch takes to start, which do: seconds at one
batch size say nothing of another.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Self


@dataclasses.dataclass(frozen=True)
class TimeInFit:
    """The time of an update: straight lines through the times of one or two batch sizes.

    Attributes:
        smaller_size: A batch size, in examples.
        smaller_s: Seconds that it takes.
        larger_size: A larger one; the same where only one was measured, which is taken to have no
            fixed part.
        larger_s: Seconds that it takes.
        beside: What `fit` adds to the step of a batch that goes through the device in parts: the
            lines are of whole batches, whose step takes another time. None where not known.
        example_s: Seconds that the data take an example, at the least.
    """

    smaller_size: int
    smaller_s: float
    larger_size: int
    larger_s: float
    beside: "TimeInFit | None" = None
    example_s: float = 0.0

    @classmethod
    def through(
        cls,
        times_s: Mapping[int, float],
        *,
        beside: "TimeInFit | None" = None,
        example_s: float = 0.0,
    ) -> Self:
        """Makes it from measured times.

        Args:
            times_s: Seconds of an update by its batch size in examples, of one or two sizes.
            beside: What `fit` adds to the step of a batch in parts, None where not known.
            example_s: Seconds that the data take an example, at the least.

        Raises:
            ValueError: If there are none or more than two, or one is not positive.
        """
        known = sorted(times_s.items())
        if not 1 <= len(known) <= 2 or not all(b >= 1 and 0 < s < math.inf for b, s in known):
            raise ValueError(
                "A time in `fit` goes through positive times of one or two batch sizes. "
                f"Received: times_s={dict(known)}."
            )
        return cls(*known[0], *known[-1], beside, example_s)

    def time_s(self, batch_size: int) -> float:
        """Gives the seconds of an update; outside of the sizes no part is below 0."""
        return max(self._line_s(batch_size), self.example_s * batch_size)

    def update_s(self, step_s: float, batch_size: int, *, in_parts: bool) -> float:
        """Gives the seconds of an update in `fit` whose train step takes so long.

        Args:
            step_s: Seconds of the train step alone.
            batch_size: In examples.
            in_parts: Whether the batch goes through the device in parts.
        """
        if in_parts and self.beside is not None:
            return max(step_s + self.beside.time_s(batch_size), self.example_s * batch_size)
        return max(step_s, self.time_s(batch_size))

    def _line_s(self, batch_size: int) -> float:
        slope = self._slope
        if batch_size > self.larger_size:
            return self.larger_s + max(0.0, slope) * (batch_size - self.larger_size)
        if batch_size > self.smaller_size:
            return self.smaller_s + slope * (batch_size - self.smaller_size)
        fixed_s = min(max(0.0, self.smaller_s - slope * self.smaller_size), self.smaller_s)
        return fixed_s + (self.smaller_s - fixed_s) * batch_size / self.smaller_size

    @property
    def _slope(self) -> float:
        """Seconds an example."""
        if self.larger_size == self.smaller_size:
            return self.larger_s / self.larger_size
        return (self.larger_s - self.smaller_s) / (self.larger_size - self.smaller_size)
