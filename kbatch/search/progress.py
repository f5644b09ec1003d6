"""Progress of a search: a line a trial that stays, and a live line with the time left."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from kbatch.search.fit_reporter import FitProgress
from kbatch.search.live_line import LiveLine, live_line
from kbatch.search.progress_text import duration, epoch_line, live_figures, trial_line, trial_name
from kbatch.study.trial import TrialRecord


class SearchProgress:
    """Shows how far a search is; a context manager around it.

    Args:
        verbose: 0 for nothing, 1 for trials, 2 for epochs too.
        open_line: Gives the line to show it on.
        now: Gives the time, in seconds.
    """

    def __init__(
        self,
        verbose: int = 1,
        *,
        open_line: Callable[[], LiveLine] = live_line,
        now: Callable[[], float] = time.monotonic,
    ):
        self._verbose = verbose
        self._open_line = open_line
        self._now = now
        self._line: LiveLine | None = None
        self._name = ""
        self._trials_left: int | None = None
        self._durations_s: list[float] = []
        self._begun_s = 0.0
        self._first: tuple[float, float] | None = None
        self._memory_bytes: int | None = None

    def __enter__(self) -> "SearchProgress":
        if self._verbose:
            self._line = self._open_line()
        return self

    def __exit__(self, *error: object) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def trial_begins(
        self, values: Mapping[str, Any], *, ended: int | None, left: int | None
    ) -> None:
        """Shows that a trial begins.

        Args:
            values: Its hyperparameters.
            ended: How many trials of the search have ended, None where it is not known.
            left: How many have not, this one included, likewise.
        """
        if ended is None or left is None:
            self._name = trial_name(values, None, None)
        else:
            self._name = trial_name(values, ended + 1, ended + left)
        self._trials_left, self._begun_s = left, self._now()
        self._first = self._memory_bytes = None
        if self._line is not None:
            self._line.update(self._name, None, "starting")

    def show(self, progress: FitProgress) -> None:
        """Shows how far the trial is."""
        self._memory_bytes = max(self._memory_bytes or 0, progress.memory_bytes)
        if self._line is None:
            return
        if progress.epoch_ended and self._verbose > 1:
            self._line.print(epoch_line(self._name, progress))
        trial_left_s = self._trial_left_s(progress.share)
        figures = live_figures(
            progress, trial_left_s=trial_left_s, search_left_s=self._search_left_s(trial_left_s)
        )
        self._line.update(self._name, progress.share, figures)

    def trial_ends(self, record: TrialRecord | None) -> None:
        """Prints the line of a trial that stays."""
        duration_s = self._now() - self._begun_s
        self._durations_s.append(duration_s - _search_s(record))
        if self._line is None:
            return
        text = trial_line(
            self._name, record, duration_s=duration_s, memory_bytes=self._memory_bytes
        )
        left = None if self._line.changes else self._search_left_s(trial_left_s=0.0)
        self._line.print(text + (f"; about {duration(left)} left" if left else ""))

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        if self._line is not None:
            self._line.print(text)

    def _trial_left_s(self, share: float) -> float | None:
        """Extrapolates from the first that was told: building and tracing came before it."""
        if self._first is None:
            self._first = self._now(), share
        first_s, first_share = self._first
        if share <= first_share:
            return None
        return (self._now() - first_s) * (1 - share) / (share - first_share)

    def _search_left_s(self, trial_left_s: float | None) -> float | None:
        """Extrapolates from the trials that this search has finished."""
        if not self._durations_s or self._trials_left is None:
            return None
        mean_s = sum(self._durations_s) / len(self._durations_s)
        if trial_left_s is None:
            trial_left_s = max(0.0, mean_s - (self._now() - self._begun_s))
        return trial_left_s + mean_s * (self._trials_left - 1)


def _search_s(record: TrialRecord | None) -> float:
    """Sums what the search for the micro-batch size took: later trials know it."""
    executions = record.executions if record else ()
    return sum(execution.micro_batch_search_s or 0.0 for execution in executions)
