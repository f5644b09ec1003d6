"""One clock for a whole recommendation: each measurement receives a part of what is left."""

import time
from collections.abc import Callable

from kbatch.recommendation.limits import INPUT, MEMORY, NOISE, SATURATION
from kbatch.recommendation.recommendation_record import OTHER_SIZES

# In the order in which they are made. What one leaves over, the later ones share.
_WEIGHTS = {MEMORY: 0.15, NOISE: 0.2, SATURATION: 0.15, INPUT: 0.1, OTHER_SIZES: 0.45}
# A training that was expected to end in time may take this share of the budget more.
_GRACE = 0.2


class BudgetClock:
    """The seconds of a whole call, starting processes and building graphs included.

    Args:
        budget_s: Seconds to spend.
        now: Returns the time, in seconds.

    Attributes:
        reserved_s: Seconds that are kept for what comes last.
    """

    def __init__(self, budget_s: float, now: Callable[[], float] = time.perf_counter):
        self.budget_s = budget_s
        self.reserved_s = 0.0
        self._now = now
        self._began_s = now()

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return max(0.0, self._began_s + self.budget_s - self.reserved_s - self._now())

    @property
    def most_s(self) -> float:
        """Seconds after which a training that has begun is ended."""
        return self.left_s + _GRACE * self.budget_s

    def part_s(self, measurement: str) -> float:
        """Return the seconds of a measurement: its share of what is left.

        Args:
            measurement: One of the limits, or `OTHER_SIZES`; those after it share the rest.
        """
        names = list(_WEIGHTS)
        later = names[names.index(measurement) :]
        return self.left_s * _WEIGHTS[measurement] / sum(_WEIGHTS[name] for name in later)
