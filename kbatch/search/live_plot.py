"""The figure of a search that is drawn while it runs."""

import base64
import dataclasses
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from rich.console import Console

from kbatch.page.numbers import pluralize
from kbatch.progress import NotebookLine, errors_as_warnings
from kbatch.records.json_codec import check_local, write_whole_file
from kbatch.records.training_run import ExecutionRecord
from kbatch.search.files import TrialFiles
from kbatch.study.study import Study, load_study

# Drawing takes at most about this share of the time.
_SHARE = 0.1
# Shown at half its pixels, it is sharp on fine screens.
_WIDTH_PX = 640
# Imported when something is drawn, with matplotlib.
_FIGURES = "kbatch.study.figures.trials"


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
        figures = importlib.import_module(_FIGURES)
        axes = figures.draw_live(study, running=running, status=status)
        suffix = ".png" if self._path is None else self._path.suffix.lower()
        content = figures.figure_bytes(axes, suffix)
        if self._path is not None:
            write_whole_file(self._path, content)
        if self._place is not None:
            picture = content if suffix == ".png" else figures.figure_bytes(axes, ".png")
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
