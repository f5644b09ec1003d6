"""The figure of a search that still runs: what is known so far, the running trial hollow."""

import dataclasses
from typing import TYPE_CHECKING

from kbatch.document.short_text import shortened
from kbatch.plotting.canvas import detached_axes, plain_axes, say
from kbatch.plotting.palette import PAPER, series_style
from kbatch.plotting.series import name_panel
from kbatch.study.figures.trials import HEIGHT_IN, plot_trials
from kbatch.study.figures.trials_info import trials_info
from kbatch.study.study_record import Study
from kbatch.study.trial import TrialRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARK_SIZE = 6
_NAME_CHARACTERS = 16


def draw_live(study: Study, *, running: str | None, status: str) -> "Axes":
    """Draws the trials of a search so far.

    A trial that runs is drawn with what its epochs have shown, as a hollow mark; one without an
    epoch is not drawn yet.

    Args:
        study: The study so far.
        running: Identifier of the trial that runs, None for none.
        status: What runs, in words.

    Returns:
        The upper Axes of a figure that belongs to the caller alone.
    """
    shown = Study(
        f"{shortened(study.name, _NAME_CHARACTERS)}: {status}",
        tuple(_so_far(t) if t.trial_id == running else t for t in study.trials if _is_shown(t)),
        study.search,
    )
    if not shown.trials:
        panel = plain_axes(detached_axes(HEIGHT_IN), HEIGHT_IN)
        name_panel(panel, shown.name)
        panel.set_xticks([])
        say(panel, "No epoch has ended yet.")
        panel.set_label("An empty chart: no epoch of the search has ended yet.")
        return panel
    upper = plot_trials(shown, detached_axes(HEIGHT_IN))
    _hollow(upper, shown, running)
    return upper


def _is_shown(trial: TrialRecord) -> bool:
    return trial.status not in ("running", "interrupted") or any(e.epochs for e in trial.executions)


def _so_far(trial: TrialRecord) -> TrialRecord:
    """Takes what the epochs have shown for the result."""
    measured = (e for e in trial.executions if e.epochs)
    completed = (dataclasses.replace(e, status="completed") for e in measured)
    return dataclasses.replace(trial, executions=tuple(completed))


def _hollow(upper: "Axes", shown: Study, running: str | None) -> None:
    info = trials_info(shown)
    figure = upper.get_figure(root=True)
    panels = figure.axes if figure else [upper]
    for point in info.points:
        if point.trial_id != running or not point.completed:
            continue
        number = next(i for i, one in enumerate(info.series) if running in one.trial_ids)
        style = series_style(number)
        values = (point.samples_per_second, point.quality)
        for panel, estimate in zip(panels, values, strict=True):
            if estimate is not None:
                panel.plot(
                    [point.place],
                    [estimate.value],
                    marker=style.marker,
                    markersize=_MARK_SIZE,
                    markerfacecolor=PAPER,
                    markeredgecolor=style.color,
                    linestyle="none",
                    zorder=3,
                )
