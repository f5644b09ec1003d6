"""The figures of a study by name, each loaded when it is drawn."""

import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Names are those of the modules, and of the functions behind `plot_`.
STUDY_FIGURES = (
    "trials",
    "pareto",
    "learning-curves",
    "time-to-target",
    "noise-scale",
    "gpu-timeline",
)
# That of the file that `find_max_batch_size` or `kbatch max-batch --output` left is the last.
FIGURES = (*STUDY_FIGURES, "memory")


def draw_figure(
    name: str, path: str | Path, *, target: float | None = None, width_in: float | None = None
) -> "Axes":
    """Draw a figure of what lies in a file or a folder."""
    if name not in FIGURES:
        raise ValueError(
            f"There is no such figure: the name must be one of {', '.join(FIGURES)}. "
            f"Received: {name!r}."
        )
    if target is not None and name != "time-to-target":
        raise ValueError(
            "A target belongs to the figure `time-to-target`. "
            f"Received: target={target} for {name!r}."
        )
    # A command lists the names without loading what reads and draws.
    from kbatch.plotting.canvas import draw_so_wide

    if name == "memory":
        from kbatch.memory.figure import plot_memory
        from kbatch.memory.result import MaxBatchSizeResult

        draw = functools.partial(plot_memory, MaxBatchSizeResult.load(path))
    else:
        from kbatch.study.study import load_study

        module = name.replace("-", "_")
        plot = getattr(importlib.import_module(f"kbatch.study.figures.{module}"), f"plot_{module}")
        options = {} if target is None else {"target": target}
        draw = functools.partial(plot, load_study(path), **options)
    return draw() if width_in is None else draw_so_wide(draw, width_in)
