"""The callback that shows a search while it runs."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from kbatch.document.number_text import counted
from kbatch.records.execution import ExecutionRecord
from kbatch.search.live import draw_live
from kbatch.search.live_picture import LivePicture
from kbatch.search.trial_files import TrialFiles
from kbatch.study.loading import load_study
from kbatch.study.study_record import Study

# Drawing takes at most about this share of the time.
_SHARE = 0.1


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
        now: Gives the time, in seconds.

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
        place = None if path is None else Path(path)
        if place is not None and place.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ValueError(
                f"`path` must end in `.png`, `.svg` or `.pdf`. Received: path={str(path)!r}."
            )
        if not interval_s >= 0:
            raise ValueError(
                f"`interval_s` must not be negative. Received: interval_s={interval_s}."
            )
        self._picture = LivePicture(place, display)
        self._interval_s = interval_s
        self._now = now
        self._project: Path | None = None
        self._trial_id: str | None = None
        self._number = 0
        self._so_far: Callable[[], ExecutionRecord] | None = None
        self._next_s = 0.0
        self._epoch = 0

    def follow(
        self, files: TrialFiles, *, number: int, so_far: Callable[[], ExecutionRecord]
    ) -> None:
        """Begins an execution; `BatchSizeHyperModel.fit` calls it.

        Args:
            files: Files of the trial.
            number: Number of the execution, from 0.
            so_far: Gives the record of the execution so far.
        """
        project = files.project
        self._project, self._trial_id, self._number = project, files.trial_id, number
        self._so_far = so_far
        self._picture.at_end_of_cell(lambda: self.show_ended(project))

    def stay(self) -> None:
        """Tells that nobody clears the output of the cell; `BatchSizeTuner` calls it."""
        self._picture.wiped = False

    def show_ended(self, project: Path) -> None:
        """Shows the trials that a project directory holds; `BatchSizeTuner` calls it."""
        if self._picture.seen:
            self._show(load_study(project), None)

    def on_train_begin(self, logs: Any = None):
        """Shows the trials before this one."""
        self._epoch = 0
        self._picture.renew()
        self._draw()

    def on_epoch_begin(self, epoch: int, logs: Any = None):
        """Shows what the epoch before this one added, unless it has just been drawn."""
        self._epoch = epoch
        if self._now() >= self._next_s and epoch:
            self._draw()

    def on_train_end(self, logs: Any = None):
        """Shows what the execution came to."""
        self._epoch += 1
        self._draw()

    def _draw(self) -> None:
        if self._project is None or self._so_far is None or not self._picture.seen:
            return
        study = _with_execution(
            load_study(self._project), self._trial_id, self._number, self._so_far()
        )
        self._show(study, self._trial_id)

    def _show(self, study: Study, running: str | None) -> None:
        begun_s = self._now()
        self._picture.show(draw_live(study, running=running, status=self._status(study, running)))
        ended_s = self._now()
        self._next_s = ended_s + max(self._interval_s, (ended_s - begun_s) / _SHARE)

    def _status(self, study: Study, running: str | None) -> str:
        ended = sum(trial.status not in ("running", "interrupted") for trial in study.trials)
        if running is None:
            return f"{counted(ended, 'trial')} ended"
        trial = next(trial for trial in study.trials if trial.trial_id == running)
        epochs = (self.params or {}).get("epochs")
        of = f" of {epochs}" if epochs else ""
        return f"{ended} ended, batch size {trial.batch_size:,} after epoch {self._epoch}{of}"


def live_plots(callbacks: Any) -> list[LivePlot]:
    """Lists the `LivePlot`s among callbacks."""
    return [c for c in keras.tree.flatten(callbacks or []) if isinstance(c, LivePlot)]


def _with_execution(
    study: Study, trial_id: str | None, number: int, execution: ExecutionRecord
) -> Study:
    """Puts the record of an execution that runs in the place of what its file holds."""
    trials = tuple(
        dataclasses.replace(trial, executions=(*trial.executions[:number], execution))
        if trial.trial_id == trial_id
        else trial
        for trial in study.trials
    )
    return dataclasses.replace(study, trials=trials)
