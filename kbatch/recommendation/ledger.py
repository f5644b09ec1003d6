"""What each measurement of a recommendation took, and why one told nothing."""

import time
from collections.abc import Callable
from typing import TypeVar

from kbatch.device.failures import ran_out_of_memory
from kbatch.document.number_text import counted
from kbatch.errors import InputError
from kbatch.recommendation.limits import INPUT, MEMORY, NOISE, SATURATION
from kbatch.recommendation.recommendation_record import OTHER_SIZES
from kbatch.training.data.data_source import DataEnded

_LINES = {
    MEMORY: "memory: how many examples fit at once",
    SATURATION: "hardware saturation: the time of an update by batch size",
    NOISE: "gradient noise: a pilot",
    INPUT: "input pipeline: what it delivers",
    OTHER_SIZES: f"{OTHER_SIZES}: short trainings to the pilot's loss",
}

Result = TypeVar("Result")


class Ledger:
    """What each measurement took, and why one told nothing.

    Args:
        on_progress: Receives a line before each measurement, or None.

    Attributes:
        durations_s: Seconds of each measurement, by its name.
        unknown: Why a limit could not be measured, by its name.
    """

    def __init__(self, on_progress: Callable[[str], None] | None):
        self.durations_s: dict[str, float] = {}
        self.unknown: dict[str, str] = {}
        self._tell = on_progress or (lambda line: None)

    def run(self, limit: str, measure: Callable[[], Result]) -> Result:
        """Makes a measurement whose errors are the user's to mend."""
        self._tell(_LINES[limit])
        began_s = time.perf_counter()
        try:
            return measure()
        finally:
            self.durations_s[limit] = time.perf_counter() - began_s

    def try_run(self, limit: str, measure: Callable[[], Result]) -> Result | None:
        """Makes a measurement; that data or memory do not allow it is a result."""
        try:
            return self.run(limit, measure)
        except Exception as error:
            reason = reason_of(error)
            if reason is None:
                raise
            self.unknown[limit] = reason
            return None


def reason_of(error: Exception) -> str | None:
    """Says why a measurement told nothing, in a clause.

    Args:
        error: What it raised.

    Returns:
        The reason; None for an error that is neither of the data nor of memory.
    """
    if isinstance(error, InputError):
        return _as_reason(str(error))
    if isinstance(error, DataEnded):
        return f"the data ended after {counted(error.rows, 'example')} of a batch"
    return "it ran out of memory" if ran_out_of_memory(error) else None


def _as_reason(message: str) -> str:
    """Makes a clause of an error's message."""
    text = message.strip().rstrip(".")
    return text[:1].lower() + text[1:]
