"""Progress of long work: a bar in a terminal or a notebook, lines in a log."""

import contextlib
import importlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kbatch.errors import InputError

_BAR_WIDTH = 20
# Shortest pause between two lines in a log about a quantity that changes often.
_LOG_PAUSE_S = 10.0


def check_verbose(verbose: Any) -> int:
    """Check `verbose` as Keras defines it, and return its number. "auto" is 1."""
    if verbose not in ("auto", 0, 1, 2):
        raise InputError(f'`verbose` must be "auto", 0, 1 or 2. Received: verbose={verbose!r}.')
    return 1 if verbose == "auto" else int(verbose)


class ConsoleLine:
    """Printed lines and, if the console is a terminal, a progress bar below them."""

    def __init__(self, console: Console):
        self._console = console
        self.changes = console.is_terminal  # Whether the last line can be replaced.
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=_BAR_WIDTH),
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
            transient=True,
            auto_refresh=False,
            disable=not self.changes,
        )
        self._task = self._bar.add_task("", total=1.0, figures="")
        self._bar.start()

    def update(self, name: str, share: float | None, figures: str) -> None:
        """Replace the bar by a name, a share from 0 to 1, and figures."""
        self._bar.update(
            self._task, description=name, completed=share or 0.0, figures=figures, refresh=True
        )

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


class NotebookLine:
    """Printed lines and a progress bar in a notebook: one output of the cell, which is replaced."""

    changes = True

    def __init__(self, display: Any):
        self._display = display
        self._handle: Any = None
        self._lines: list[str] = []

    def update(self, name: str, share: float | None, figures: str) -> None:
        bar = "" if share is None else f" {round(_BAR_WIDTH * share) * '━':·<{_BAR_WIDTH}}"
        self.show({"text/plain": "\n".join([*self._lines, f"{name}{bar}: {figures}"])})

    def print(self, text: str) -> None:
        """Add a line above the changing one."""
        self._lines.append(text)
        self.show({"text/plain": "\n".join(self._lines)})

    def close(self) -> None:
        if self._handle is not None:
            self.show({"text/plain": "\n".join(self._lines)})
            self._handle, self._lines = None, []

    def show(self, bundle: Mapping[str, str], **options: Any) -> None:
        """Replace the output by a bundle of contents by MIME type."""
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True, **options)
        else:
            self._handle.update(bundle, raw=True, **options)


def live_line() -> ConsoleLine | NotebookLine:
    console = Console()
    if console.is_jupyter:
        return NotebookLine(importlib.import_module("IPython.display").display)
    return ConsoleLine(console)


@contextlib.contextmanager
def errors_as_warnings(what: str) -> Iterator[None]:
    """Turn an error of a console, a notebook, a disk or a figure into a warning."""
    try:
        yield
    except Exception as error:  # Each of these may raise anything, and the work must continue.
        cause = f"{type(error).__name__}: {str(error)[:300]}"
        warnings.warn(f"{what} could not be shown, and the work continues: {cause}", stacklevel=2)


class MeasuringProgress:
    """Progress of a measurement: a bar of its time, or a line for each step in a log.

    Args:
        name: Name of the measurement.
        verbose: 0, 1, 2 or "auto". 2 prints lines in a terminal too.
        time_budget_s: Time budget, in seconds. If None, there is no bar.
    """

    def __init__(
        self,
        name: str,
        verbose: Any,
        *,
        time_budget_s: float | None = None,
        open_line: Callable[[], ConsoleLine | NotebookLine] = live_line,
        now: Callable[[], float] = time.monotonic,
    ):
        self._name, self._verbose = name, check_verbose(verbose)
        self._budget_s, self._open_line, self._now = time_budget_s, open_line, now
        self._line: ConsoleLine | NotebookLine | None = None
        self._began_s, self._logged_s = now(), -math.inf

    def __enter__(self) -> "MeasuringProgress":
        with errors_as_warnings("The progress"):
            self._line = self._open_line() if self._verbose else None
        return self

    def __exit__(self, *error: object) -> None:
        with errors_as_warnings("The progress"):
            if self._line is not None:
                self._line.print(f"{self._name}: {self._now() - self._began_s:.0f} s")
                self._line.close()
        self._line = None

    def say(self, text: str) -> None:
        """Show the result of a step."""
        with errors_as_warnings("The progress"):
            spent_s, budget_s = self._now() - self._began_s, self._budget_s
            if self._line is None:
                return
            if self._line.changes and self._verbose < 2:
                share = None if budget_s is None else min(1.0, spent_s / budget_s)
                self._line.update(self._name, share, f"{spent_s:.0f} s, {text}")
            else:
                self._line.print(f"{self._name}, {spent_s:.0f} s: {text}")
                self._logged_s = self._now()

    def tick(self, text: str) -> None:
        """Show a text that changes often. A log gets a line every ten seconds."""
        changes = self._line is not None and self._line.changes and self._verbose < 2
        if changes or self._now() - self._logged_s >= _LOG_PAUSE_S:
            self.say(text)


SILENT = MeasuringProgress("", 0)
