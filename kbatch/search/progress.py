"""Progress of a search: a line a trial that stays, and a live line with the time left."""

import contextlib
import importlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kbatch.device.memory import memory_use_bytes, reset_memory_use
from kbatch.page.numbers import percent
from kbatch.study.names import outcome, value_text
from kbatch.study.trial import TrialRecord
from kbatch.training.clock import numbers_of

_SHORTEST_PAUSE_S = 0.2
# Metrics of an epoch that say nothing of what was learned.
_NO_QUALITY = ("samples_per_second", "gradient_variance", "gradient_squared_norm", "learning_rate")


class ConsoleLine:
    """Lines that stay, and below them a bar where the console is a terminal and no log file."""

    def __init__(self, console: Console):
        self._console = console
        self.changes = console.is_terminal  # Whether there is a place whose text is replaced.
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
            transient=True,
            auto_refresh=False,
            disable=not self.changes,
        )
        self._task = self._bar.add_task("", total=1.0, figures="")
        self._bar.start()

    def update(self, name: str, share: float | None, figures: str) -> None:
        """Show a name, a share from 0 to 1 and figures in place of those before."""
        self._bar.update(
            self._task, description=name, completed=share or 0.0, figures=figures, refresh=True
        )

    def print(self, text: str) -> None:
        """Print a line that stays and is there at once."""
        self._console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


class NotebookLine:
    """An output of its own in a notebook's cell, which alone it replaces by IPython's `display`."""

    changes = True

    def __init__(self, display: Any):
        self._display = display
        self._handle: Any = None

    def update(self, name: str, share: float | None, figures: str) -> None:
        self.show({"text/plain": f"{name}: {figures}"})

    def print(self, text: str) -> None:
        """Print a line, below which the changing one begins again."""
        self.close()
        print(text)

    def close(self) -> None:
        if self._handle is not None:
            self.show({"text/plain": ""})
            self._handle = None

    def show(self, bundle: Mapping[str, str], **given: Any) -> None:
        """Show contents by their types in place of those before."""
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True, **given)
        else:
            self._handle.update(bundle, raw=True, **given)


def live_line() -> ConsoleLine | NotebookLine:
    console = Console()
    if console.is_jupyter:
        return NotebookLine(importlib.import_module("IPython.display").display)
    return ConsoleLine(console)


class FitReporter(keras.callbacks.Callback):
    """Tells how far training is, as `SearchProgress.show` takes it, a few times a second."""

    def __init__(
        self,
        tell: Callable[[Mapping[str, Any]], None],
        *,
        execution: int,
        executions: int,
        now: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self._tell = tell
        self._execution = execution
        self._executions = executions
        self._now = now
        self._metrics: dict[str, float] = {}
        self._epoch = 0
        self._told_s = 0.0

    def on_train_begin(self, logs: Any = None):
        reset_memory_use()
        self._told_s = self._now()

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None):
        if self._now() - self._told_s >= _SHORTEST_PAUSE_S:
            steps = (self.params or {}).get("steps")
            self._report((batch + 1) / steps if steps else 0.0)

    def on_epoch_end(self, epoch: int, logs: Any = None):
        self._metrics = numbers_of(logs)
        self._report(1.0, epoch_ended=True)

    def _report(self, share_of_epoch: float, *, epoch_ended: bool = False) -> None:
        self._told_s = self._now()
        epochs = (self.params or {}).get("epochs") or 1
        share = (self._epoch + min(share_of_epoch, 1.0)) / epochs
        self._tell(
            {
                "share": (self._execution + share) / self._executions,
                "ended": f"epoch {self._epoch + 1}/{epochs}" if epoch_ended else None,
                "memory_bytes": memory_use_bytes(),
                "metrics": self._metrics,
            }
        )


class SearchProgress:
    def __init__(
        self,
        verbose: int,  # 0 for nothing, 1 for trials, 2 for epochs too.
        *,
        open_line: Callable[[], ConsoleLine | NotebookLine] = live_line,
        now: Callable[[], float] = time.monotonic,
    ):
        self._verbose = verbose
        self._open_line = open_line
        self._now = now
        self._line: ConsoleLine | NotebookLine | None = None
        self._name = ""
        self._trials_left: int | None = None
        self._durations_s: list[float] = []
        self._begun_s = 0.0
        self._at_once = 1  # Trials that run beside each other.
        self._first: tuple[float, float] | None = None
        self._memory_bytes: int | None = None

    def __enter__(self) -> "SearchProgress":
        if self._verbose:
            with self._ending_nothing():
                self._line = self._open_line()
        return self

    def __exit__(self, *error: object) -> None:
        with self._ending_nothing():
            if self._line is not None:
                self._line.close()
        self._line = None

    @contextlib.contextmanager
    def _ending_nothing(self) -> Iterator[None]:
        """Show nothing more where a console or a notebook fails: the search goes on."""
        try:
            yield
        except Exception as error:  # A full disk, a closed pipe, or what a notebook raises.
            self._line = None
            warnings.warn(
                "The progress of the search cannot be shown any more, and the search goes on: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._line is not None:
            with self._ending_nothing():
                self._line.print(text)

    def _update(self, name: str, share: float | None, figures: str) -> None:
        if self._line is not None:
            with self._ending_nothing():
                self._line.update(name, share, figures)

    def trial_begins(
        self,
        values: Mapping[str, Any],
        *,
        ended: int | None,
        left: int | None,
        took_s: float | None = None,
        at_once: int = 1,
        where: str = "",
    ) -> None:
        """Show that a trial begins; with `took_s`, prepare the line of one that ran that long."""
        number = total = None
        if ended is not None and left is not None:
            number, total = ended + 1, ended + left
        self._name = trial_name(values, number, total) + where
        self._trials_left, self._begun_s = left, self._now() - (took_s or 0.0)
        self._at_once = at_once
        if took_s is None:
            self._first, self._memory_bytes = None, None
            self._update(self._name, None, "starting")

    def show_counts(self, submitted: int, *, ended: int) -> None:
        """Show how many trials an executor has, and how many have ended."""
        left = self._search_left_s(trial_left_s=0.0)
        known = [f"{submitted} submitted", f"{ended} done"]
        known += [] if left is None else [f"{duration(left)} left"]
        self._update("search", None, ", ".join(known))

    def show(
        self,
        *,
        share: float,  # From 0 to 1, by whole epochs where their steps are not known.
        ended: str | None,  # The epoch that has just ended.
        memory_bytes: int,  # Of the GPU or of the process.
        metrics: Mapping[str, float],  # Of the last epoch that ended.
    ) -> None:
        """Show how far the training of a trial is."""
        self._memory_bytes = max(self._memory_bytes or 0, memory_bytes)
        if self._line is None:
            return
        figures = [
            *_speed(metrics.get("samples_per_second"), memory_bytes),
            *(f"{name} {value:.4f}" for name, value in _shown(metrics).items()),
        ]
        if ended is not None and self._verbose > 1:
            self.say(", ".join([self._name, ended, *figures]))
        if self._first is None:
            self._first = self._now(), share
        # By the share since the first report: building and tracing came before it.
        first_s, first_share = self._first
        gained, trial_left_s = share - first_share, None
        left = [percent(share)]
        if gained > 0:
            trial_left_s = (self._now() - first_s) * (1 - share) / gained
            left.append(f"{duration(trial_left_s)} left")
        search_left_s = self._search_left_s(trial_left_s)
        if search_left_s is not None:
            left.append(f"search {duration(search_left_s)} left")
        self._update(self._name, share, ", ".join([*left, *figures]))

    def trial_ends(self, record: TrialRecord | None) -> None:
        duration_s = self._now() - self._begun_s
        # Later trials have the plan already.
        executions = record.executions if record else ()
        plan_s = sum(execution.plan_s or 0.0 for execution in executions)
        self._durations_s.append(duration_s - plan_s)
        if self._line is None:
            return
        memory_bytes = self._memory_bytes
        text = trial_line(self._name, record, duration_s=duration_s, memory_bytes=memory_bytes)
        left = None if self._line.changes else self._search_left_s(trial_left_s=0.0)
        self.say(text + (f"; about {duration(left)} left" if left else ""))

    def _search_left_s(self, trial_left_s: float | None) -> float | None:
        """Extrapolate from the trials that this search has finished."""
        if not self._durations_s or self._trials_left is None:
            return None
        mean_s = sum(self._durations_s) / len(self._durations_s)
        if trial_left_s is None:
            trial_left_s = max(0.0, mean_s - (self._now() - self._begun_s))
        return trial_left_s + mean_s * (self._trials_left - 1) / self._at_once


def trial_name(values: Mapping[str, Any], number: int | None, total: int | None) -> str:
    place = "trial" if number is None else f"trial {number}/{total}"
    others = [
        f"{name} {value_text(value)}" for name, value in values.items() if name != "batch_size"
    ]
    return ", ".join([place, f"batch {values['batch_size']:>5}", *others])


def trial_line(
    name: str, record: TrialRecord | None, *, duration_s: float, memory_bytes: int | None
) -> str:
    """Say how a trial ended: its figures, or the cause of its failure."""
    parts = [name, f"{duration_s:5.1f} s"]
    if record is None:
        return ", ".join([*parts, "failed: nothing was recorded"])
    if record.status != "completed":
        return ", ".join([*parts, f"{outcome(record)}: {record.failure}"])
    parts += _speed(record.samples_per_second, memory_bytes)
    for metric, value in _shown(record.metrics).items():
        interval = record.metric(metric)
        ends = interval and interval.ends
        half_width = f" ± {(ends[1] - ends[0]) / 2:.2g}" if ends else ""
        parts.append(f"{metric} {value:.4f}{half_width}")
    count = len(record.executions)
    which = "best epoch" if count == 1 else f"best epochs, mean of {count} executions"
    return f"{', '.join(parts)} ({which})"


def duration(seconds: float) -> str:
    """Format a duration as minutes and seconds, or hours with them."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _speed(samples_per_second: float | None, memory_bytes: int | None) -> list[str]:
    memory = [] if memory_bytes is None else [f"{memory_bytes / 1e6:,.0f} MB"]
    if samples_per_second is None:
        return memory
    return [*memory, f"{samples_per_second:,.0f} samples/s"]


def _shown(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of the validation, or without one those of training."""
    validation = {n: v for n, v in metrics.items() if n.startswith("val_")}
    return validation or {n: v for n, v in metrics.items() if n not in _NO_QUALITY}
