"""What a search shows while it runs: a line a trial, a live line with the time left, a figure."""

import base64
import contextlib
import dataclasses
import importlib
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
from matplotlib.axes import Axes
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.page.numbers import percent, pluralize, setting
from kbatch.plotting.canvas import (
    detached_axes,
    figure_bytes,
    panels,
    shortened,
    write_message,
    write_title,
)
from kbatch.records.json_codec import check_local, write_whole_file
from kbatch.records.training_run import ExecutionRecord
from kbatch.search.trial_files import TrialFiles
from kbatch.study.comparison import rate_factor, value_text
from kbatch.study.figures.trials import HEIGHT_IN, draw_trials
from kbatch.study.study import Study, load_study
from kbatch.study.trial import TrialRecord
from kbatch.training.callbacks import numbers_of

_SHORTEST_PAUSE_S = 0.2
# Metrics of an epoch that say nothing of what was learned.
_NO_QUALITY = ("samples_per_second", "gradient_variance", "gradient_squared_norm", "learning_rate")
# Drawing takes at most about this share of the time.
_SHARE = 0.1
# Shown at half its pixels, it is sharp on fine screens.
_WIDTH_PX = 640
_NAME_CHARACTERS = 16


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


@contextlib.contextmanager
def errors_as_warnings(what: str) -> Iterator[None]:
    """Warn where something cannot be shown: a console, a notebook, a disk or a figure fails."""
    try:
        yield
    except Exception as error:  # Whatever these raise.
        cause = f"{type(error).__name__}: {str(error)[:300]}"
        warnings.warn(f"{what} could not be shown, and the search goes on: {cause}", stacklevel=2)


class SearchProgress:
    """What a search shows: nothing, a line a trial that stays and one that changes, or more."""

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
        self.trainings = 0  # That a race has made; how many it will is not known.
        self._failures: set[str] = set()
        self._begun_s = 0.0
        self._at_once = 1  # Trials that run beside each other.
        self._first: tuple[float, float] | None = None

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
        """Print a line that stays."""
        with errors_as_warnings("The progress"):
            if self._line is not None:
                self._line.print(text)

    def trial_begins(
        self,
        values: Mapping[str, Any],
        *,
        ended: int | None,
        left: int | None,
        took_s: float | None = None,
        at_once: int = 1,
    ) -> None:
        """Show that a trial begins; with `took_s`, prepare the line of one that ran that long."""
        place = f"training {self.trainings + 1}"
        if ended is not None and left is not None:
            place = f"trial {ended + 1}/{ended + left}"
        own = ("batch_size", FACTOR_NAME)  # The rate is known by the record.
        others = (f"{n} {value_text(v)}" for n, v in values.items() if n not in own)
        self._name = ", ".join([place, f"batch {values['batch_size']:>5}", *others])
        self._trials_left, self._begun_s = left, self._now() - (took_s or 0.0)
        self._at_once = at_once
        if took_s is None:
            self._first = None
            self._update(self._name, None, "starting")

    def show_counts(self, submitted: int, *, ended: int) -> None:
        """Show how many trials an executor has, and how many have ended."""
        left = self._search_left_s(trial_left_s=0.0)
        known = [f"{submitted} submitted", f"{ended} done"]
        known += [] if left is None else [f"{duration(left)} left"]
        self._update("search", None, ", ".join(known))

    def show(self, share: float, metrics: Mapping[str, float], *, ended: str | None = None) -> None:
        """Show what share of a trial is done, the metrics of its last epoch, and which that was."""
        if self._line is None:
            return
        figures = _figures(metrics.get("samples_per_second"), metrics)
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
        self._durations_s.append(duration_s - sum(one.plan_s or 0.0 for one in executions))
        self.trainings += 1
        if self._line is None:
            return
        name, end = self._name, ending(record)
        if record and FACTOR_NAME in record.hyperparameters:
            rate, times = record.learning_rate, f"{setting(rate_factor(record))} times the rule"
            name += f", learning rate {setting(rate) if rate else times}"
        if record and record.failure:
            end = f"{record.outcome} as before" if end in self._failures else end
            self._failures.add(end)
        text = f"{name}, {duration_s:5.1f} s, {end}"
        left = None if self._line.changes else self._search_left_s(trial_left_s=0.0)
        self.say(text + (f"; about {duration(left)} left" if left else ""))

    def _update(self, name: str, share: float | None, figures: str) -> None:
        with errors_as_warnings("The progress"):
            if self._line is not None:
                self._line.update(name, share, figures)

    def _search_left_s(self, trial_left_s: float | None) -> float | None:
        """Extrapolate from the trials that this search has finished."""
        if not self._durations_s or self._trials_left is None:
            return None
        mean_s = sum(self._durations_s) / len(self._durations_s)
        if trial_left_s is None:
            trial_left_s = max(0.0, mean_s - (self._now() - self._begun_s))
        return trial_left_s + mean_s * (self._trials_left - 1) / self._at_once


class FitReporter(keras.callbacks.Callback):
    """Shows how far an execution of a trial is, a few times a second."""

    def __init__(self, progress: SearchProgress, *, execution: int, executions: int):
        super().__init__()
        self._progress, self._execution, self._executions = progress, execution, executions
        self._metrics: dict[str, float] = {}
        self._epoch = 0
        self._shown_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        self._epoch = epoch

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
    """Say how a trial ended: its figures, or the cause of its failure."""
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
    which = "best epoch" if count == 1 else f"mean of {count}"
    return f"{', '.join(figures)} ({which})"


def duration(seconds: float) -> str:
    """Format a duration as minutes and seconds, or hours with them."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _figures(
    samples_per_second: float | None,
    metrics: Mapping[str, float],
    widths: Mapping[str, str] = types.MappingProxyType({}),
) -> list[str]:
    """Write the speed and the metrics of the validation, or without one those of training."""
    validation = {n: v for n, v in metrics.items() if n.startswith("val_")}
    shown = validation or {n: v for n, v in metrics.items() if n not in _NO_QUALITY}
    speed = [] if samples_per_second is None else [f"{samples_per_second:,.0f} samples/s"]
    texts = {
        name: f"{v:.4f}" if abs(v) >= 1e-3 or not v else f"{v:.3g}" for name, v in shown.items()
    }
    return [*speed, *(f"{name} {text}{widths.get(name, '')}" for name, text in texts.items())]


class LivePlot(keras.callbacks.Callback):
    """Shows throughput and quality of the trials in one figure while a search runs.

    In a notebook the figure is replaced in place, also where keras-tuner clears the output of the
    cell after a trial. Elsewhere give a file: an image viewer shows it as it changes. The trial
    that runs is a hollow mark. It is drawn between epochs, outside of what is timed, and seldom
    enough to cost a tenth of the time at most.

    Example:

    >>> tuner.search(x, y, validation_split=0.2, epochs=10, callbacks=[kbatch.LivePlot()])

    Args:
        path: File to write at each change, with suffix `.png`, `.svg` or `.pdf`; None for none.
        interval_s: Least seconds between two drawings in a trial.
        display: What shows the figure, as IPython's `display`; that of the notebook if None.
        now: Returns the time, in seconds.

    Raises:
        ValueError: If the suffix is another one, or `interval_s` is negative.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        interval_s: float = 1.0,
        display: Callable[..., Any] | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        if path is not None:
            check_local(path)
        # A callback may change the working directory.
        place = None if path is None else Path(path).absolute()
        if place is not None and place.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ValueError(
                f"`path` must end in `.png`, `.svg` or `.pdf`. Received: path={str(path)!r}."
            )
        if not interval_s >= 0:
            raise ValueError(
                f"`interval_s` must not be negative. Received: interval_s={interval_s}."
            )
        self._path = place
        self._interval_s = interval_s
        self._now = now
        self._is_own_display = display is None
        self._place = None if display is None else NotebookLine(display)
        self._waits_for_end = False  # Of the cell.
        # Of the trial that runs, the number of its execution, and the record of that so far.
        self._followed: tuple[TrialFiles, int, Callable[[], ExecutionRecord]] | None = None
        self._next_s = 0.0
        self._epoch = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "LivePlot":
        """Return itself: keras-tuner copies callbacks for each execution."""
        return self

    def follow_trial(
        self, files: TrialFiles, *, number: int, so_far: Callable[[], ExecutionRecord]
    ) -> None:
        """Begin an execution, whose record so far is `so_far()`; a search calls it."""
        self._followed = files, number, so_far
        with errors_as_warnings("`LivePlot`"):
            if self._is_seen() and self._place is not None and not files.of_kbatch_tuner:
                # keras-tuner clears the output of the cell after each trial, also after the last
                # one: the figure must be shown again.
                self._place.close()
                if self._is_own_display and not self._waits_for_end:
                    self._waits_for_end = True
                    _events().register("post_run_cell", self._end_cell)

    def show_ended(self, project: Path) -> None:
        """Show the trials that a project directory holds; a search calls it."""
        with errors_as_warnings("`LivePlot`"):
            if self._is_seen():
                self._draw(load_study(project), None)

    def on_train_begin(self, logs: Any = None):
        self._epoch = 0
        self._draw_running()

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        """Show what the epoch before this one added, unless it has just been drawn."""
        self._epoch = epoch
        if self._now() >= self._next_s and epoch:
            self._draw_running()

    def on_train_end(self, logs: Any = None):
        self._epoch += 1
        self._draw_running()

    def _draw_running(self) -> None:
        with errors_as_warnings("`LivePlot`"):
            if self._followed is None or not self._is_seen():
                return
            files, number, so_far = self._followed
            study, execution = load_study(files.project), so_far()
            # Its file has the record of when it began.
            trials = tuple(
                dataclasses.replace(trial, executions=(*trial.executions[:number], execution))
                if trial.trial_id == files.trial_id
                else trial
                for trial in study.trials
            )
            self._draw(dataclasses.replace(study, trials=trials), files.trial_id)

    def _draw(self, study: Study, running: str | None) -> None:
        ended = sum(trial.status not in ("running", "interrupted") for trial in study.trials)
        status = f"{pluralize(ended, 'trial')} ended"
        if running is not None:
            trial = next(trial for trial in study.trials if trial.trial_id == running)
            epochs = (self.params or {}).get("epochs")
            of = f" of {epochs}" if epochs else ""
            status = f"{ended} ended, batch size {trial.batch_size:,} after epoch {self._epoch}{of}"
        begun_s = self._now()
        axes = draw_live(study, running=running, status=status)
        suffix = ".png" if self._path is None else self._path.suffix.lower()
        content = figure_bytes(axes, suffix)
        if self._path is not None:
            write_whole_file(self._path, content)
        if self._place is not None:
            picture = content if suffix == ".png" else figure_bytes(axes, ".png")
            encoded = base64.b64encode(picture).decode()
            shown = {"image/png": encoded, "text/plain": str(axes.get_label())}
            self._place.show(shown, metadata={"image/png": {"width": _WIDTH_PX}})
        ended_s = self._now()
        self._next_s = ended_s + max(self._interval_s, (ended_s - begun_s) / _SHARE)

    def _is_seen(self) -> bool:
        # Rich sees a notebook only while a cell runs, which has ended at its end: it is kept.
        if self._place is None and Console().is_jupyter:
            self._place = NotebookLine(importlib.import_module("IPython.display").display)
        return self._path is not None or self._place is not None

    def _end_cell(self, result: Any = None) -> None:
        _events().unregister("post_run_cell", self._end_cell)
        self._waits_for_end = False
        if self._place is not None and self._followed is not None:
            self._place.close()
            self.show_ended(self._followed[0].project)


def _events() -> Any:
    return importlib.import_module("IPython").get_ipython().events


def draw_live(study: Study, *, running: str | None, status: str) -> Axes:
    """Draw the trials of a search so far, the one that runs as a hollow mark from an epoch on."""
    trials = []
    for trial in study.trials:
        measured = [e for e in trial.executions if e.epochs]
        if trial.trial_id == running and measured:
            completed = (dataclasses.replace(e, status="completed") for e in measured)
            trials.append(dataclasses.replace(trial, executions=tuple(completed)))
        elif trial.status not in ("running", "interrupted") or measured:
            trials.append(trial)
    name = f"{shortened(study.name, _NAME_CHARACTERS)}: {status}"
    shown = Study(name, tuple(trials), study.search)
    if not shown.trials:
        (panel,) = panels(detached_axes(HEIGHT_IN), HEIGHT_IN)
        write_title(panel, shown.name)
        panel.set_xticks([])
        write_message(panel, "No epoch has ended yet.")
        panel.set_label("An empty chart: no epoch of the search has ended yet.")
        return panel
    return draw_trials(shown, detached_axes(HEIGHT_IN), running=running)
