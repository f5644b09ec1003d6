"""One line that changes in place, where there is a place for one."""

import importlib
import sys
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class LiveLine(Protocol):
    """Shows text that replaces what it showed before; lines printed above it stay.

    Attributes:
        changes: Whether there is such a place at all.
    """

    changes: bool

    def update(self, name: str, share: float | None, figures: str) -> None:
        """Shows a name, a share from 0 to 1, and figures."""
        ...

    def print(self, text: str) -> None:
        """Prints a line that stays."""
        ...

    def close(self) -> None:
        """Takes the changing line away."""
        ...


def live_line() -> LiveLine:
    """Gives the line for where stdout goes: a terminal, a notebook or a file."""
    console = Console()
    if console.is_jupyter:
        return NotebookLine(importlib.import_module("IPython.display").display)
    return TerminalLine(console) if console.is_terminal else FileLine()


class TerminalLine:
    """A bar at the bottom of a terminal."""

    changes = True

    def __init__(self, console: Console):
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
            transient=True,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=1.0, figures="")
        self._bar.start()

    def update(self, name: str, share: float | None, figures: str) -> None:
        """Moves the bar; without a share it stands."""
        self._bar.update(
            self._task, description=name, completed=share or 0.0, figures=figures, refresh=True
        )

    def print(self, text: str) -> None:
        """Prints above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Takes the bar away."""
        self._bar.stop()


class NotebookLine:
    """An output of its own in a notebook's cell, which alone it replaces.

    Args:
        display: IPython's `display`.
    """

    changes = True

    def __init__(self, display: Any):
        self._display = display
        self._handle: Any = None

    def update(self, name: str, share: float | None, figures: str) -> None:
        """Replaces the text of its own output."""
        self._show(f"{name}: {figures}")

    def print(self, text: str) -> None:
        """Prints a line, below which the changing one begins anew."""
        self.close()
        print(text)

    def close(self) -> None:
        """Leaves its output empty."""
        if self._handle is not None:
            self._show("")
            self._handle = None

    def _show(self, text: str) -> None:
        bundle = {"text/plain": text}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class FileLine:
    """A log file: nothing changes there, and lines hold no control characters."""

    changes = False

    def update(self, name: str, share: float | None, figures: str) -> None:
        """Shows nothing."""

    def print(self, text: str) -> None:
        """Prints a line that is there at once."""
        print(text, file=sys.stdout, flush=True)

    def close(self) -> None:
        """Does nothing."""
