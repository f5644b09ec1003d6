"""The time of a search: its budget, the expected seconds of training runs, and the time left."""

import statistics
import time
from collections.abc import Callable, Mapping

from kbatch.page.numbers import duration_text, pluralize, setting
from kbatch.search import BASE_BATCH_SIZE

# A search may end late by this share of its budget.
_LATE = 0.05
# Seconds in which the first training run traces its graphs, on two cores of a server.
_FIRST_S = 0.6
# The number of the latest training runs that show how fast the machine is now.
_LATEST = 5
# The time left is shown after this many training runs. The first run also traces its graphs.
_FEWEST = 2
# Most searches take between these shares of the expected seconds.
_LOW, _HIGH = 0.75, 1.25


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
        #: The share of these seconds that train steps take, over all sizes.
        self.training_share = 1.0
        #: Complete training runs that are expected to follow, by batch size.
        self.trainings_left: Mapping[int, float] = {}
        #: Seconds in which XLA will compile the train steps of the runs that follow.
        self.compile_left_s = 0.0
        #: Most complete training runs of the search. If None, it is unknown.
        self.most_trainings: float | None = None
        self.earlier_s = 0.0  # Seconds of earlier calls of `search`.
        self.at_once = 1  # Training runs that run at the same time.
        self._now = now
        # For each run: its share of a complete run, and measured over expected seconds.
        self._ratios: list[tuple[float, float]] = []
        self._ended = 0  # Training runs that ended.
        self._measured_s: dict[int, float] = {}
        self._start_s = 0.0  # Seconds in which the process of the last run started.
        self.begin()

    def begin(self) -> None:
        self._began_s = self._lap_s = self._now()

    def left_s(self) -> float | None:
        """Return the seconds that are left of the budget. Without a budget, return None."""
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
        """Record the seconds of a training run whose epochs are a `share` of a complete run's.

        Its process took `start_s` more to start, whatever the length of the run. XLA took
        `compile_s` of its seconds, which later runs of its size do not take again.
        """
        self.compile_left_s = max(0.0, self.compile_left_s - compile_s)
        if share <= 0:
            return
        self._ended += 1
        seconds -= min(compile_s, seconds / 2)
        if self.expected_s and not self._measured_s:
            seconds -= min(_FIRST_S, seconds / 2)  # No later run traces the graphs.
        self._measured_s[batch_size], self._start_s = seconds / share, start_s
        left = self.trainings_left.get(batch_size, 0.0) - share
        self.trainings_left = {**self.trainings_left, batch_size: left}
        if expected_s := self.expected_s.get(batch_size):
            self._ratios.append((share, seconds / share / expected_s))

    def training_s(self, batch_size: int) -> float | None:
        """Return the seconds that a complete training run is expected to take now."""
        if (expected_s := self.expected_s.get(batch_size)) is not None:
            later = self._ratios[1:] or self._ratios or [(1.0, 1.0)]  # The first run traces.
            # The seconds outside the epochs are a larger share of short runs.
            ratios = [ratio for share, ratio in later if share > 0.5] or [r for _, r in later]
            return expected_s * statistics.median(ratios[-_LATEST:])
        measured = [*self._measured_s.values()]
        mean_s = statistics.fmean(measured) if measured else None
        return self._measured_s.get(batch_size, mean_s)

    def fits(self, batch_size: int, share: float = 1.0) -> bool:
        """Return whether a training run, or a share of it, can end in time.

        The first training run may always begin.
        """
        left_s, training_s = self.left_s(), self.training_s(batch_size)
        if left_s is None or not self._measured_s:
            return True
        run_s = left_s + _LATE * (self.budget_s or 0.0) - self._start_s
        return left_s > 0 and share * (training_s or 0.0) <= run_s

    def search_left_s(self) -> float | None:
        """Return the seconds until the search is expected to end. If unknown, return None.

        They follow from measured runs. The first run alone is not enough, because it traces. The
        rest of the budget is no forecast if no more runs are expected.
        """
        used_up = self.trainings_left and max(self.trainings_left.values()) <= 0
        if self._ended < _FEWEST or used_up:
            return None
        limits = [s for s in (self._expected_left_s(), self.left_s()) if s is not None]
        return max(0.0, min(limits)) if limits else None

    def _expected_left_s(self) -> float | None:
        """Return the seconds that the training runs which are expected to follow will take."""
        positive = {size: n for size, n in self.trainings_left.items() if n > 0}
        seconds = {size: self.training_s(size) for size in positive}
        if not seconds or None in seconds.values():
            return None
        # A race that trained one size more often than expected trains other sizes less often.
        share = max(0.0, sum(self.trainings_left.values())) / sum(positive.values())
        runs_s = sum(n * (self._start_s + (seconds[size] or 0.0)) for size, n in positive.items())
        first_s = _FIRST_S if self.expected_s and not self._measured_s else 0.0
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
