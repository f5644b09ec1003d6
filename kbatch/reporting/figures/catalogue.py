"""The figures of a study by name, each loaded when it is drawn."""

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


def draw_figure(name: str, path: str | Path, *, target: float | None = None) -> "Axes":
    """Draws a figure of what lies in a file or a folder.

    Args:
        name: One of `FIGURES`.
        path: A project directory or a file of `Study.save`; for `"memory"` a file of
            `MaxBatchSizeResult.save`.
        target: For `"time-to-target"`, the value to come to; that of `StopAtTarget` if None.

    Returns:
        The Axes.

    Raises:
        ValueError: If there is no such figure, or it lacks its data, with what to do.
        FileNotFoundError: If there is nothing to draw from.
    """
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
    plot = getattr(importlib.import_module(f"kbatch.reporting.figures.{module}"), f"plot_{module}")
    # A command lists the names without loading what reads and draws.
    if name in RESULT_FIGURES:
        from kbatch.records.max_batch import MaxBatchSizeResult

        return plot(MaxBatchSizeResult.load(path))
    from kbatch.records.loading import load_study

    study = load_study(path)
    return plot(study) if target is None else plot(study, target=target)
