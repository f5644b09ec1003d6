"""Count the time of a search: its budget, the seconds of training runs, and the time left."""

import statistics
import time
from collections.abc import Callable, Mapping

from kbatch.page.numbers import duration_text, pluralize, setting
from kbatch.search import BASE_BATCH_SIZE

_LATE_SHARE = 0.05  # A search may exceed its budget by this share.
_TRACING_S = 0.6  # Seconds in which the first run traces its graphs, on two cores of a server.
_RECENT_RUNS = 5  # Number of the latest training runs that show how fast the machine is now.
_FEWEST_RUNS = 2  # Runs before the time left is shown. The first one also traces its graphs.
_LOW, _HIGH = 0.75, 1.25  # Most searches take between these shares of the expected seconds.


class SearchTime:
    """Counts the wall-clock seconds of a search, by a clock that cannot be set back.

    Args:
        budget_s: Seconds that the search may take. If None, it has no limit.
        now: Returns seconds that never decrease.
    """

    def __init__(self, budget_s: float | None = None, *, now: Callable[[], float] = time.monotonic):
        self.budget_s = budget_s
        #: Seconds of a complete training run that the plan expects, by batch size.
        self.expected_s: Mapping[int, float] = {}
        self.base_batch_size = BASE_BATCH_SIZE
        #: The share of `expected_s` that train steps take, over all sizes.
        self.training_share = 1.0
        #: Complete training runs that are expected to follow, by batch size.
        self.trainings_left: Mapping[int, float] = {}
        #: Seconds in which XLA will compile the train steps of the runs that follow.
        self.compile_left_s = 0.0
        #: Largest number of complete training runs of the search. If None, it is unknown.
        self.most_trainings: float | None = None
        self.earlier_s = 0.0  # Seconds of earlier calls of `search`.
        self.at_once = 1  # Training runs that run at the same time.
        self._now = now
        # For each run: its share of a complete run, and measured seconds over expected seconds.
        self._ratios: list[tuple[float, float]] = []
        self._ended = 0  # Training runs that ended.
        self._measured_s: dict[int, float] = {}  # Seconds of a complete run, by batch size.
        self._start_s = 0.0  # Seconds in which the process of the last run started.
        self.begin()

    def begin(self) -> None:
        self._began_s = self._lap_s = self._now()

    def left_s(self) -> float | None:
        """Return the seconds that are left of the budget, or None if there is no budget."""
        return None if self.budget_s is None else self.budget_s - self.spent_s()

    def spent_s(self) -> float:
        """Return the seconds since the search began."""
        return self._now() - self._began_s

    def lap(self) -> float:
        """Return the seconds since the last call, or since the search began."""
        before, self._lap_s = self._lap_s, self._now()
        return self._lap_s - before

    def ended(
        self,
        batch_size: int,
        share: float,
        seconds: float,
        start_s: float = 0.0,
        *,
        compile_s: float = 0.0,
    ) -> None:
        """Record a training run.

        Args:
            batch_size: Its batch size, in examples.
            share: Its epochs as a share of the epochs of a complete run.
            seconds: Its wall-clock seconds, without `start_s`.
            start_s: Further seconds in which its process started.
            compile_s: The part of `seconds` in which XLA compiled, once for each batch size.
        """
        self.compile_left_s = max(0.0, self.compile_left_s - compile_s)
        if share <= 0:
            return
        self._ended += 1
        seconds -= min(compile_s, seconds / 2)
        if self.expected_s and not self._measured_s:
            seconds -= min(_TRACING_S, seconds / 2)  # Later runs do not trace the graphs.
        self._measured_s[batch_size], self._start_s = seconds / share, start_s
        left = self.trainings_left.get(batch_size, 0.0) - share
        self.trainings_left = {**self.trainings_left, batch_size: left}
        if expected_s := self.expected_s.get(batch_size):
            self._ratios.append((share, seconds / share / expected_s))

    def training_s(self, batch_size: int) -> float | None:
        """Return the seconds that a complete training run is expected to take now."""
        if (expected_s := self.expected_s.get(batch_size)) is not None:
            later = self._ratios[1:] or self._ratios or [(1.0, 1.0)]  # Without the first run.
            # Seconds outside the epochs make the ratios of short runs too large.
            ratios = [ratio for share, ratio in later if share > 0.5] or [r for _, r in later]
            return expected_s * statistics.median(ratios[-_RECENT_RUNS:])
        measured = [*self._measured_s.values()]
        mean_s = statistics.fmean(measured) if measured else None
        return self._measured_s.get(batch_size, mean_s)

    def fits(self, batch_size: int, share: float = 1.0) -> bool:
        """Return whether a run, or this share of it, can end in time. The first run always fits."""
        left_s, training_s = self.left_s(), self.training_s(batch_size)
        if left_s is None or not self._measured_s:
            return True
        run_s = left_s + _LATE_SHARE * (self.budget_s or 0.0) - self._start_s
        return left_s > 0 and share * (training_s or 0.0) <= run_s

    def search_left_s(self) -> float | None:
        """Return the seconds until the search is expected to end, or None if they are unknown."""
        # If no run is expected but the search continues, the rest of the budget is no forecast.
        used_up = self.trainings_left and max(self.trainings_left.values()) <= 0
        if self._ended < _FEWEST_RUNS or used_up:
            return None
        limits = [s for s in (self._expected_left_s(), self.left_s()) if s is not None]
        return max(0.0, min(limits)) if limits else None

    def _expected_left_s(self) -> float | None:
        """Return the expected seconds of all runs that are left, or None if they are unknown."""
        positive = {size: n for size, n in self.trainings_left.items() if n > 0}
        seconds = {size: self.training_s(size) for size in positive}
        if not seconds or None in seconds.values():
            return None
        # If a race has trained a size more often than expected, other sizes have fewer runs left.
        share = max(0.0, sum(self.trainings_left.values())) / sum(positive.values())
        runs_s = sum(n * (self._start_s + (seconds[size] or 0.0)) for size, n in positive.items())
        first_s = _TRACING_S if self.expected_s and not self._measured_s else 0.0
        return first_s + self.compile_left_s + share * runs_s / self.at_once

    def price(self) -> str:
        """Describe the expected cost of the search, in training runs and in time."""
        trainings, seconds = sum(self.trainings_left.values()), self._expected_left_s()
        if not trainings:
            return "The search is complete: nothing to train."
        sizes = pluralize(len(self.trainings_left), "size")
        text = f"{sizes}, about {setting(round(trainings, 1))} complete trainings"
        if seconds is not None:
            text += f", {duration_text(_LOW * seconds, _HIGH * seconds)}"
        if self.budget_s is None:
            return f"{text}. `time_budget_s=` sets a limit."
        return f"{text}. The search ends after {duration_text(self.budget_s)} (`time_budget_s`)."
