"""Count the time of a search, print one line for each trial, and show the time that is left."""

import math
import statistics
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import keras

from kbatch.analysis.learning_rate import FACTOR_NAME, names_rate
from kbatch.page.numbers import duration_text, left_text, percent, pluralize, setting
from kbatch.progress import ConsoleLine, NotebookLine, errors_as_warnings, live_line
from kbatch.search import BASE_BATCH_SIZE
from kbatch.study.compared_trials import rate_factor, value_text
from kbatch.study.trial import TrialRecord
from kbatch.training.callbacks import numbers_of
from kbatch.training.learning_rate import peak_learning_rate
from kbatch.training.model import inner_optimizers

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
        n, sizes = setting(round(trainings, 1)), pluralize(len(self.trainings_left), "batch size")
        text = f"Plan: {sizes}, about {n} complete training{'' if n == '1' else 's'}"
        if seconds is not None:
            text += f", {duration_text(_LOW * seconds, _HIGH * seconds)}"
        if self.budget_s is None:
            return f"{text}. Give `time_budget_s` to limit the time."
        return f"{text}. The search ends after {duration_text(self.budget_s)} (`time_budget_s`)."


_SHORTEST_PAUSE_S = 0.2  # Seconds between two changes of the live line in an epoch.
_WRITE_EVERY_S = 30.0  # Seconds between two writes of the time left, while a trial runs.
_RATE = ", learning rate "
# Entries of the logs that are not shown, because they do not measure the quality of the model.
_NO_QUALITY = ("samples_per_second", "gradient_variance", "gradient_squared_norm", "learning_rate")


class SearchProgress:
    """Prints one line per trial, and a line that changes while a trial runs.

    Args:
        verbose: 0: print nothing. 1: print trials. 2: also print epochs.
        open_line: Function that opens the line that changes.
        now: Function that returns seconds that never decrease.
        search_left_s: Function that returns the expected seconds from the start of the running
            trial to the end of the search.
        write: Function that writes the seconds that are left to a file.
    """

    def __init__(
        self,
        verbose: int,
        *,
        open_line: Callable[[], ConsoleLine | NotebookLine] = live_line,
        now: Callable[[], float] = time.monotonic,
        search_left_s: Callable[[], float | None] = lambda: None,
        write: Callable[[float | None], None] = lambda left_s: None,
    ):
        self._verbose, self._open_line, self._now = verbose, open_line, now
        self._expect_left_s = search_left_s
        self._write, self._written_s = write, -math.inf  # And the time of the last write.
        self._line: ConsoleLine | NotebookLine | None = None
        self._name = ""  # Of the running trial, as it is printed.
        self.trials_ended = 0  # Including earlier calls. In a race, the number of training runs.
        self._failures: set[str] = set()  # Texts that were printed, so that each is printed once.
        self._began_s = 0.0
        # The time of the first report of the trial, and the share that was done then.
        self._first_report: tuple[float, float] | None = None
        self._total: int | None = None  # Trials of the search. If None, it is unknown.

    def __enter__(self) -> "SearchProgress":
        if self._verbose:
            with errors_as_warnings("The progress"):
                self._line = self._open_line()
        return self

    def __exit__(self, *error: object) -> None:
        with errors_as_warnings("The progress"):
            if self._line is not None:
                self._line.close()
        self._line = None

    def say(self, text: str) -> None:
        """Print a permanent line."""
        with errors_as_warnings("The progress"):
            if self._line is not None:
                self._line.print(text)

    def plan_begins(self) -> None:
        """Show that the plan of the search is being made."""
        self._began_s = self._now()
        self._write_left()
        self._update("plan", None, "timing the first updates")

    def trial_begins(
        self, values: Mapping[str, Any], *, total: int | None = None, took_s: float | None = None
    ) -> None:
        """Show that a trial begins. If `took_s` is given, only set its name and its duration."""
        number, self._total = self.trials_ended + 1, total
        place = f"training {number}" if total is None else f"trial {number}/{total}"
        shown = {n for n in values if n in ("batch_size", FACTOR_NAME) or names_rate(n)}
        others = (f"{n} {value_text(v)}" for n, v in values.items() if n not in shown)
        self._name = ", ".join([place, f"batch {values['batch_size']:>5}", *others])
        self._began_s = self._now() - (took_s or 0.0)
        if took_s is None:
            self._first_report = None
            self._write_left()
            self._update(self._name, None, "starting")

    def run_begins(self, learning_rate: float | None) -> None:
        """Show the learning rate of a training run, which is known once the model is built."""
        name = self._name.partition(_RATE)[0]
        self._name = f"{name}{_RATE}{setting(learning_rate)}" if learning_rate else name

    def show_counts(self, submitted: int, *, ended: int) -> None:
        """Show how many trials are submitted to an executor, and how many have ended."""
        self._write_left(_WRITE_EVERY_S)
        left = self._search_left_s(trial_left_s=0.0)
        counts = [f"{submitted} submitted", f"{ended} done"]
        counts += [] if left is None else [left_text(left)]
        self._update("search", None, ", ".join(counts))

    def show(self, share: float, metrics: Mapping[str, float], *, ended: str | None = None) -> None:
        """Show the share of a trial that is done, and the metrics of its last epoch.

        If an epoch has just ended, `ended` is its name, which is printed on a line of its own.
        """
        self._write_left(_WRITE_EVERY_S)
        if self._line is None:
            return
        figures = _figures(metrics.get("samples_per_second"), metrics)
        if ended is not None and self._verbose > 1:
            self.say(", ".join([self._name, ended, *figures]))
        if self._first_report is None:
            self._first_report = self._now(), share
        # Only the progress since the first report counts, because building came before it.
        first_s, first_share = self._first_report
        gained, trial_left_s = share - first_share, None
        left = [percent(share)]
        if gained > 0:
            trial_left_s = (self._now() - first_s) * (1 - share) / gained
            left.append(left_text(trial_left_s))
        search_left_s = self._search_left_s(trial_left_s)
        if search_left_s is not None:
            left.append(f"search {left_text(search_left_s)}")
        self._update(self._name, share, ", ".join([*left, *figures]))

    def trial_ends(self, record: TrialRecord | None) -> None:
        duration_s = self._now() - self._began_s
        self.trials_ended += 1
        self._write_left()
        if self._line is None:
            return
        name, end = self._name.partition(_RATE)[0], ending(record)
        if record and (rate := record.learning_rate):
            name += f"{_RATE}{setting(rate)}"
        elif record and FACTOR_NAME in record.hyperparameters:
            name += f"{_RATE}{setting(rate_factor(record))} times your scaled rate"
        if record and record.failure:
            end = f"{record.outcome} as before" if end in self._failures else end
            self._failures.add(end)
        text = f"{name}, {duration_s:5.1f} s, {end}"
        left = None if self._line.changes else self._search_left_s(trial_left_s=0.0)
        if left is not None and left >= 1:  # A race may end earlier, if its answer is certain.
            less = ", or less" if name.startswith("training") else ""
            text += f"; about {left_text(left)}{less}"
        self.say(text)

    def _write_left(self, pause_s: float = 1.0) -> None:
        """Write the seconds that are left, unless they were written less than `pause_s` ago."""
        if self._now() - self._written_s >= pause_s:
            self._written_s = self._now()
            with errors_as_warnings("The progress"):
                self._write(self._search_left_s(trial_left_s=None) or None)  # 0 s: it has ended.

    def _update(self, name: str, share: float | None, figures: str) -> None:
        with errors_as_warnings("The progress"):
            if self._line is not None:
                self._line.update(name, share, figures)

    def _search_left_s(self, trial_left_s: float | None) -> float | None:
        """Return the expected seconds until the search ends, or None if they are unknown."""
        if self.trials_ended == self._total:  # The last trial has ended.
            return 0.0
        if (left_s := self._expect_left_s()) is None:
            return None
        running_s = 0.0 if trial_left_s == 0 else self._now() - self._began_s
        return max(trial_left_s or 0.0, left_s - running_s)


class FitReporter(keras.callbacks.Callback):
    """Shows the progress of a training run of a trial, a few times per second."""

    def __init__(self, progress: SearchProgress, *, execution: int, executions: int):
        super().__init__()
        self._progress, self._execution, self._executions = progress, execution, executions
        self._metrics: dict[str, float] = {}
        self._epoch = 0
        self._shown_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        self._epoch = epoch
        # Not in `on_train_begin`, because a run whose callbacks have this hook cannot be continued.
        optimizer = next(iter(inner_optimizers(self.model)), None)
        self._progress.run_begins(peak_learning_rate(optimizer))

    def on_train_batch_end(self, batch: int, logs: Any = None):
        steps = (self.params or {}).get("steps")
        if steps and time.monotonic() - self._shown_s >= _SHORTEST_PAUSE_S:
            self._show(min((batch + 1) / steps, 1.0))

    def on_epoch_end(self, epoch: int, logs: Any = None):
        self._metrics = numbers_of(logs)
        self._show(1.0, ended=f"epoch {epoch + 1}/{self._epochs}")

    @property
    def _epochs(self) -> int:
        return (self.params or {}).get("epochs") or 1

    def _show(self, share_of_epoch: float, *, ended: str | None = None) -> None:
        self._shown_s = time.monotonic()
        share = (self._epoch + share_of_epoch) / self._epochs
        share = (self._execution + share) / self._executions
        self._progress.show(share, self._metrics, ended=ended)


def ending(record: TrialRecord | None) -> str:
    """Describe how a trial ended: its figures, or the cause of its failure."""
    if record is None:
        return "failed: nothing was recorded"
    if record.status != "completed":
        return f"{record.outcome}: {record.failure}"
    widths = {}
    for name in record.metrics:
        if (interval := record.metric(name)) and (ends := interval.ends):
            widths[name] = f" ± {(ends[1] - ends[0]) / 2:.2g}"
    figures = _figures(record.samples_per_second, record.metrics, widths)
    count = len(record.executions)
    which, last = "best epoch" if count == 1 else f"mean of {count} runs", record.last
    if last.length != "complete":
        which = f"{last.length.replace('_', ' ')}: {len(last.epochs)} of {last.epochs_asked} epochs"
    return f"{', '.join(figures)} ({which})"


def _figures(
    samples_per_second: float | None,
    metrics: Mapping[str, float],
    widths: Mapping[str, str] = types.MappingProxyType({}),
) -> list[str]:
    """Format the speed and the metrics of validation, or of training if there is no validation."""
    validation = {n: v for n, v in metrics.items() if n.startswith("val_")}
    shown = validation or {n: v for n, v in metrics.items() if n not in _NO_QUALITY}
    speed = [] if samples_per_second is None else [f"{samples_per_second:,.0f} samples/s"]
    texts = {n: f"{v:.4f}" if abs(v) >= 1e-3 or not v else f"{v:.3g}" for n, v in shown.items()}
    return [*speed, *(f"{name} {text}{widths.get(name, '')}" for name, text in texts.items())]
