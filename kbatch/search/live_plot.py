"""Draw a figure of a search while the search runs."""

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

_DRAWING_SHARE = 0.1  # The largest share of the time that drawing takes.
_WIDTH_PX = 640  # Half of the figure's pixels, so that it is sharp on high-resolution screens.
_FIGURES = "kbatch.study.figures.trials"  # Imported when needed, because it imports matplotlib.


class LivePlot(keras.callbacks.Callback):
    """Show throughput and quality of the trials in one figure while a search runs.

    A notebook shows the figure below the cell and updates it. In a script, give a `path`, and open
    the file in an image viewer that reloads it. A hollow mark is the running trial. The figure is
    drawn between epochs, which measured times do not include, for at most a tenth of the time.

    Example:

    >>> tuner.search(x, y, validation_split=0.2, epochs=10, callbacks=[kbatch.LivePlot()])

    Args:
        path: String or path. File to write at each change, with suffix `.png`, `.svg` or `.pdf`. If
            None, no file is written. Default: None.
        interval_s: Float. Smallest number of seconds between two drawings in a trial. Default: 1.0.
        display: Function that shows the figure, like IPython's `display`. If None, the display of
            the notebook. Default: None.
        now: Function that returns the time in seconds. Default: `time.monotonic`.

    Raises:
        ValueError: If `path` has another suffix, or if `interval_s` is negative.
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
        # The path is absolute, because a callback may change the working directory.
        self._path = None if path is None else Path(path).absolute()
        if self._path is not None and self._path.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ValueError(
                f"`path` must end in `.png`, `.svg` or `.pdf`. Received: path={str(path)!r}."
            )
        if not interval_s >= 0:
            raise ValueError(
                f"`interval_s` must not be negative. Received: interval_s={interval_s}."
            )
        self._interval_s, self._now = interval_s, now
        self._uses_notebook_display = display is None
        self._output = None if display is None else NotebookLine(display)
        self._waits_for_cell = False  # Whether the figure is shown again at the end of the cell.
        # The running trial: its files, the number of its run, and a function that returns the
        # record of this run so far.
        self._followed: tuple[TrialFiles, int, Callable[[], ExecutionRecord]] | None = None
        self._next_s = 0.0
        self._epoch = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "LivePlot":
        """Return the same object, although keras-tuner copies callbacks for each execution."""
        return self

    def follow_trial(
        self, files: TrialFiles, *, number: int, so_far: Callable[[], ExecutionRecord]
    ) -> None:
        """Follow a training run, whose record so far is `so_far()`. A search calls this."""
        self._followed = files, number, so_far
        with errors_as_warnings("`LivePlot`"):
            if self._is_visible() and self._output is not None and not files.of_kbatch_tuner:
                # keras-tuner's own tuners clear the output of the cell after each trial and after
                # the last one, so the figure is shown again.
                self._output.close()
                if self._uses_notebook_display and not self._waits_for_cell:
                    self._waits_for_cell = True
                    _events().register("post_run_cell", self._end_cell)

    def show_ended(self, project: Path) -> None:
        """Show the trials in a project directory. A search calls this."""
        with errors_as_warnings("`LivePlot`"):
            if self._is_visible():
                self._draw(load_study(project), None)

    def on_train_begin(self, logs: Any = None):
        self._epoch = 0
        self._draw_running()

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        """Show the previous epoch, unless the figure has just been drawn."""
        self._epoch = epoch
        if self._now() >= self._next_s and epoch:
            self._draw_running()

    def on_train_end(self, logs: Any = None):
        self._epoch += 1
        self._draw_running()

    def _draw_running(self) -> None:
        with errors_as_warnings("`LivePlot`"):
            if self._followed is None or not self._is_visible():
                return
            files, number, so_far = self._followed
            study, execution = load_study(files.project), so_far()
            # The file of the running trial has only the record of the start of its run.
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
        began_s = self._now()
        figures = importlib.import_module(_FIGURES)
        axes = figures.draw_live(study, running=running, status=status)
        suffix = ".png" if self._path is None else self._path.suffix.lower()
        content = figures.figure_bytes(axes, suffix)
        if self._path is not None:
            write_whole_file(self._path, content)
        if self._output is not None:
            png = content if suffix == ".png" else figures.figure_bytes(axes, ".png")
            label, image = str(axes.get_label()), base64.b64encode(png).decode()
            formats = {"image/png": image, "text/plain": label}
            self._output.show(formats, metadata={"image/png": {"width": _WIDTH_PX}})
        ended_s = self._now()
        self._next_s = ended_s + max(self._interval_s, (ended_s - began_s) / _DRAWING_SHARE)

    def _is_visible(self) -> bool:
        # Keep the display: Rich recognises a notebook only while a cell runs, not in `_end_cell`.
        if self._output is None and Console().is_jupyter:
            self._output = NotebookLine(importlib.import_module("IPython.display").display)
        return self._path is not None or self._output is not None

    def _end_cell(self, result: Any = None) -> None:
        _events().unregister("post_run_cell", self._end_cell)
        self._waits_for_cell = False
        if self._output is not None and self._followed is not None:
            self._output.close()
            self.show_ended(self._followed[0].project)


def _events() -> Any:
    return importlib.import_module("IPython").get_ipython().events
