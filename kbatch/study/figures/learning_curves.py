"""The figure of the learning curves: one a batch size, against what training spent."""

from typing import TYPE_CHECKING, Literal

from kbatch.document.short_text import shortened
from kbatch.plotting.canvas import TEXT_PT, beside, label_room, new_axes, say, tidy, write_caption
from kbatch.plotting.log_axis import plain_log_labels
from kbatch.plotting.palette import ALARM, PAPER, series_style, size_color
from kbatch.plotting.series import name_panel
from kbatch.study.figures.learning_curves_info import (
    BUDGETS,
    LearningCurvesInfo,
    alt_text,
    learning_curves_info,
)
from kbatch.study.figures.metric_axis import quality_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kbatch.study.study_record import Study

__all__ = ["LearningCurvesInfo", "alt_text", "learning_curves_info", "plot_learning_curves"]

HEIGHT_IN = 3.8
_LABELS = {
    "updates": "Updates",
    "examples": "Training examples",
    "seconds": "Training time (s)",
}
# The same beside each other in a narrow figure.
_SHORT_LABELS = {"updates": "Updates", "examples": "Examples", "seconds": "Seconds"}
# What fits in a row above the panels.
_MOST_NAMES = 8
_TITLE_CHARACTERS = 40


def plot_learning_curves(
    study: "Study",
    ax: "Axes | None" = None,
    *,
    against: Literal["updates", "examples", "seconds"] | None = None,
) -> "Axes":
    """Plots the quality of the model over training, one curve a batch size.

    Three panels show the same curves against updates, examples and seconds of training: where
    large batches lose in the second and win in the third, they pay. The curve is that of the
    best trial of its batch size.

    Example:

    >>> study = kbatch.load_study("results/digits")
    >>> kbatch.plot_learning_curves(study, against="seconds").figure.savefig("curves.png")

    Args:
        study: A study, as `load_study` gives it.
        ax: Axes whose place the panels take; a new figure if None.
        against: One of `"updates"`, `"examples"` and `"seconds"` for a single panel; all three
            if None.

    Returns:
        The first Axes; their label, `get_label()`, describes the figure in sentences.

    Raises:
        ValueError: If the study is empty, with what to run, or `against` is something else.
    """
    if against not in (None, *BUDGETS):
        raise ValueError(
            f"`against` must be one of {', '.join(BUDGETS)}, or None for all of them. "
            f"Received: against={against!r}."
        )
    info = learning_curves_info(study)
    first = new_axes(HEIGHT_IN) if ax is None else ax
    budgets = BUDGETS if against is None and info.curves else (against or BUDGETS[0],)
    panels, below = beside(first, len(budgets)) if len(budgets) > 1 else ([first], first)
    first.set_label(alt_text(info))
    for panel, budget in zip(panels, budgets, strict=True):
        tidy(panel)
        fits = label_room(panel) > len(_LABELS["examples"])
        panel.set_xlabel((_LABELS if fits else _SHORT_LABELS)[budget], fontsize=TEXT_PT)
        for number in range(len(info.curves)):
            _draw_curve(panel, info, number, budget)
        if info.curves:
            panel.set_xscale("log")
            plain_log_labels(panel.xaxis, short=len(budgets) > 1)
    _finish(first, info)
    write_caption(
        below,
        *info.notes,
        info.conditions,
        alarm=info.incomplete,
        below_pt=36 if below is first else 4,
    )
    return first


def _draw_curve(panel: "Axes", info: LearningCurvesInfo, number: int, budget: str) -> None:
    curve = info.curves[number]
    color = size_color(curve.batch_size, info.curves)
    places = [point.spent(budget) for point in curve.points]
    values = [point.value for point in curve.points]
    bands = [(x, *p.bar) for x, p in zip(places, curve.points, strict=True) if p.bar]
    if bands:
        across, lows, highs = zip(*bands, strict=True)
        panel.fill_between(across, lows, highs, color=color, alpha=0.18, linewidth=0)
    panel.plot(places, values, color=color, linewidth=1.4)
    panel.plot(
        places[-1:],
        values[-1:],
        marker="X" if curve.diverged else series_style(number).marker,
        color=ALARM if curve.diverged else color,
        markersize=6.5,
        markeredgecolor=PAPER,
        markeredgewidth=0.8,
        linestyle="none",
        zorder=3,
    )


def _finish(panel: "Axes", info: LearningCurvesInfo) -> None:
    if not info.curves or info.quality is None:
        name_panel(panel, info.name)
        panel.set_xticks([])
        say(panel, info.nothing)
        return
    for number in range(0, len(info.curves), -(-len(info.curves) // _MOST_NAMES)):
        curve = info.curves[number]
        panel.plot(
            [],
            [],
            color=size_color(curve.batch_size, info.curves),
            marker=series_style(number).marker,
            markersize=6,
            markeredgecolor=PAPER,
            label=f"{curve.batch_size:,}",
        )
    values = [point.value for curve in info.curves for point in curve.points]
    quality_axis(panel, info.quality, values)
    # The layout looks at the middle of a title, which must lie above the first panel.
    title = f"{info.name}: learning by batch size"
    fitting = title if len(title) <= _TITLE_CHARACTERS else info.name
    name_panel(panel, shortened(fitting, _TITLE_CHARACTERS), columns=_MOST_NAMES)
