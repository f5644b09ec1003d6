"""The seconds of a recommendation, shared out among its measurements, and what became of each."""

import time
from collections.abc import Callable
from typing import TypeVar

from kbatch.device.failures import ran_out_of_memory
from kbatch.document.numbers import pluralize
from kbatch.errors import InputError
from kbatch.recommendation.limits import INPUT, MEMORY, NOISE, OTHER_SIZES, SATURATION
from kbatch.training.data.sample_rows import DataEnded

# The line before each measurement, in the order in which they are made, and its share of the
# budget: what one leaves over, the later ones share.
_MEASUREMENTS = {
    MEMORY: ("memory: how many examples fit at once", 0.15),
    NOISE: ("gradient noise: a pilot", 0.2),
    SATURATION: ("hardware saturation: the time of an update by batch size", 0.15),
    INPUT: ("input pipeline: what it delivers", 0.1),
    OTHER_SIZES: (f"{OTHER_SIZES}: short trainings to the pilot's loss", 0.45),
}
# Of the budget, to time the sizes, however late it is: without it nothing can be compared.
_LEAST_TIMING = 0.04
# A training that was expected to end in time may take this share of the budget more.
_GRACE = 0.2
# The call ends within so many budgets.
_MOST_SPENT = 1.5

Result = TypeVar("Result")


class Budget:
    """The seconds of a whole call, starting processes and building graphs included."""

    def __init__(
        self,
        budget_s: float,
        now: Callable[[], float] | None = None,
        *,
        on_progress: Callable[[str], None] | None = None,
    ):
        self.budget_s = budget_s
        self.reserved_s = 0.0  # For what comes last.
        self.durations_s: dict[str, float] = {}  # That each measurement took.
        self.unknown: dict[str, str] = {}  # Why a measurement failed.
        self._now = now or time.perf_counter  # As the measurements read it, also from a fake.
        self._say = on_progress or (lambda line: None)
        self._began_s = self._now()

    def run(self, name: str, measure: Callable[[], Result]) -> Result:
        """Make a measurement whose errors are the user's to mend."""
        self._say(_MEASUREMENTS[name][0])
        began_s = self._now()
        try:
            return measure()
        finally:
            self.durations_s[name] = self._now() - began_s

    def try_run(self, name: str, measure: Callable[[], Result]) -> Result | None:
        """Make a measurement; that data or memory do not allow it is a result."""
        try:
            return self.run(name, measure)
        except Exception as error:
            self.unknown[name] = reason_of(error)
            return None

    @property
    def left_s(self) -> float:
        return max(0.0, self._began_s + self.budget_s - self.reserved_s - self._now())

    @property
    def most_s(self) -> float:
        """Seconds after which a training that has begun is ended."""
        return self.left_s + _GRACE * self.budget_s

    def holds(self, seconds: float) -> bool:
        """Return whether something would end while the call may last, in its budget or not."""
        return self._now() + seconds <= self._began_s + _MOST_SPENT * self.budget_s

    def part_s(self, name: str) -> float:
        """Return the seconds of a measurement: its share of what is left."""
        shares = {each: share for each, (_, share) in _MEASUREMENTS.items()}
        names = list(shares)
        later = sum(shares[each] for each in names[names.index(name) :])
        least_s = _LEAST_TIMING * self.budget_s if name == SATURATION else 0.0
        return max(self.left_s * shares[name] / later, least_s if self.holds(least_s) else 0.0)


def reason_of(error: Exception) -> str:
    """Describe in a clause why data or memory do not allow a measurement; raise other errors."""
    if isinstance(error, InputError):
        text = str(error).strip().rstrip(".")
        return text[:1].lower() + text[1:]
    if isinstance(error, DataEnded):
        return f"the data ended after {pluralize(error.rows, 'example')} of a batch"
    if ran_out_of_memory(error):
        return "it ran out of memory"
    raise error
