"""Progress of a search in the terminal: a line a trial, and a bar with the time left."""

import time
from typing import Any

import keras
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class SearchProgress(keras.callbacks.Callback):
    """Shows how far a search is; a callback for `tuner.search`, used as a context manager.

    Args:
        tuner: The tuner that searches.
        trials: How many training runs are to come.
        epochs: Epochs of each.
        console: Where to write.
    """

    def __init__(self, tuner: Any, *, trials: int, epochs: int, console: Console | None = None):
        super().__init__()
        self._tuner = tuner
        self._trials = trials
        self._epochs = epochs
        self._number = 0
        self._started_s = 0.0
        self._logs: dict[str, Any] = {}
        self._console = console or Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("epochs,"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=trials * epochs)

    def __enter__(self):
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def __deepcopy__(self, memo: object) -> "SearchProgress":
        """Stays itself where keras-tuner copies callbacks: one display serves all trials."""
        return self

    def on_train_begin(self, logs: Any = None):
        """Announces the trial."""
        self._number += 1
        self._started_s = time.perf_counter()
        self._progress.update(self._task, description=self._name())

    def on_epoch_end(self, epoch: int, logs: Any = None):
        """Moves the bar."""
        self._logs = logs or {}
        self._progress.update(self._task, completed=(self._number - 1) * self._epochs + epoch + 1)

    def on_train_end(self, logs: Any = None):
        """Prints the line of the trial."""
        self._progress.update(self._task, completed=self._number * self._epochs)
        seconds = time.perf_counter() - self._started_s
        figures = [self._name(), f"{seconds:5.1f} s", *_figures(self._logs)]
        self._console.print(", ".join(figures) + " (last epoch)", highlight=False, soft_wrap=True)

    def _name(self) -> str:
        running = list(self._tuner.oracle.ongoing_trials.values())
        sizes = [trial.hyperparameters.values.get("batch_size") for trial in running[:1]]
        size = f", batch {sizes[0]:>5}" if sizes else ""
        return f"trial {self._number}/{self._trials}{size}"


def _figures(logs: dict[str, Any]) -> list[str]:
    figures = []
    if "samples_per_second" in logs:
        figures.append(f"{logs['samples_per_second']:8,.0f} samples/s")
    shown = [name for name in logs if name.startswith("val_")]
    return figures + [f"{name} {float(logs[name]):.4f}" for name in shown]
