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
    "ranking",
    "pareto",
    "learning-curves",
    "time-to-target",
    "noise-scale",
    "goodput",
    "gpu-timeline",
)
# Of the file that `find_max_batch_size` or `kbatch max-batch --output` left.
RESULT_FIGURES = ("memory",)
FIGURES = (*STUDY_FIGURES, *RESULT_FIGURES)
_HOMES = {"memory": "kbatch.memory.figure"}


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
    module = name.replace("-", "_")
    plot = getattr(
        importlib.import_module(_HOMES.get(name, f"kbatch.study.figures.{module}")),
        f"plot_{module}",
    )
    # A command lists the names without loading what reads and draws.
    if name in RESULT_FIGURES:
        from kbatch.memory.record import MaxBatchSizeResult

        draw = functools.partial(plot, MaxBatchSizeResult.load(path))
    else:
        from kbatch.study.loading import load_study

        draw = functools.partial(plot, load_study(path))
    if target is not None:
        draw = functools.partial(draw, target=target)
    if width_in is None:
        return draw()
    from kbatch.plotting.canvas import draw_so_wide

    return draw_so_wide(draw, width_in)
