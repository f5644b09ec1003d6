"""An update that was timed in rounds, and a number with its uncertainty."""

import dataclasses

from kbatch.analysis.intervals import Interval


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with its uncertainty.

    Attributes:
        value: The number, None where unknown.
        interval: Its interval of 95 % confidence or more, None where unknown.
    """

    value: float | None
    interval: Interval | None
