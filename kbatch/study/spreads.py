"""Which spreads the numbers of a study have, for the words beside figures and tables."""

from collections.abc import Iterable
from typing import NamedTuple

from kbatch.analysis.intervals import FEWEST_VALUES
from kbatch.study.trial import TrialRecord


class Spreads(NamedTuple):
    """Which spreads there are among trials.

    Attributes:
        intervals: Whether a trial has executions enough for a 95 % interval.
        pairs: Whether a trial has several executions, but too few for an interval.
        single: Whether a trial has one execution.
        quartiles: Whether a trial of one execution has quartiles over its timing windows.
    """

    intervals: bool
    pairs: bool
    single: bool
    quartiles: bool


def spreads(trials: Iterable[TrialRecord]) -> Spreads:
    """Finds which spreads the trials have that completed."""
    completed = [trial for trial in trials if trial.status == "completed"]
    counts = {len(trial.executions) for trial in completed}
    single = [trial for trial in completed if len(trial.executions) == 1]
    return Spreads(
        intervals=any(count >= FEWEST_VALUES for count in counts),
        pairs=any(1 < count < FEWEST_VALUES for count in counts),
        single=bool(single),
        quartiles=any(trial.samples_per_second_interval for trial in single),
    )
