"""A picture in a notebook's cell, or in a file, that is replaced in place."""

import base64
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from rich.console import Console

from kbatch.plotting.saving import figure_bytes
from kbatch.records.whole_files import write_whole_file

# Shown at half its pixels, it is sharp on fine screens.
_WIDTH_PX = 640


class LivePicture:
    """Shows figures one after the other in one place.

    It stays itself in copies, and travels to another process without its place.

    Args:
        path: File to write as well, None for none.
        display: IPython's `display`; None for that of the notebook, if there is one.

    Attributes:
        wiped: Whether the cell's output may be cleared by others: then it must be shown anew.
    """

    def __init__(self, path: Path | None, display: Callable[..., Any] | None):
        self.wiped = True
        self._path = path
        self._is_own = display is None
        self._shown_by = display
        self._handle: Any = None
        self._at_end: Callable[[], None] | None = None

    @property
    def seen(self) -> bool:
        """Whether anybody sees what is shown."""
        return self._path is not None or self._display() is not None

    def show(self, axes: Axes) -> None:
        """Shows a figure in place of the one before."""
        suffix = ".png" if self._path is None else self._path.suffix.lower()
        content = figure_bytes(axes, suffix)
        if self._path is not None:
            write_whole_file(self._path, content)
        display = self._display()
        if display is None:
            return
        picture = content if suffix == ".png" else figure_bytes(axes, ".png")
        data = {
            "image/png": base64.b64encode(picture).decode(),
            "text/plain": str(axes.get_label()),
        }
        metadata = {"image/png": {"width": _WIDTH_PX}}
        if self._handle is None:
            self._handle = display(data, raw=True, metadata=metadata, display_id=True)
        else:
            self._handle.update(data, raw=True, metadata=metadata)

    def renew(self) -> None:
        """Gives up the place where it may have been wiped: the next figure gets a new one."""
        if self._handle is not None and self.wiped:
            self._handle.update({"text/plain": ""}, raw=True)
            self._handle = None

    def at_end_of_cell(self, show: Callable[[], None]) -> None:
        """Lets something be shown when the cell ends, which is after the last clearing.

        Args:
            show: Shows it; it takes the place of what was to be shown before.
        """
        if self.wiped and self._is_own and self._at_end is None and self.seen:
            _events().register("post_run_cell", self._end)
        self._at_end = show

    def _end(self, result: Any = None) -> None:
        _events().unregister("post_run_cell", self._end)
        show, self._at_end = self._at_end, None
        self.renew()
        if show is not None:
            show()

    def _display(self) -> Callable[..., Any] | None:
        # Rich sees a notebook only while a cell runs, which has ended at its end: it is kept.
        if self._shown_by is None and Console().is_jupyter:
            self._shown_by = importlib.import_module("IPython.display").display
        return self._shown_by

    def __deepcopy__(self, memo: dict[int, Any]) -> "LivePicture":
        """Gives itself: keras-tuner copies callbacks for each execution, the place is one."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the place behind: another process has none."""
        return self.__dict__ | {"_handle": None, "_shown_by": None, "_at_end": None}


def _events() -> Any:
    return importlib.import_module("IPython").get_ipython().events
