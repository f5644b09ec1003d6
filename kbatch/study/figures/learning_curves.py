"""The figure of the learning curves: one a batch size, against what training spent."""

import itertools
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from matplotlib.axes import Axes

from kbatch.analysis.intervals import Estimate
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import plain_log_labels
from kbatch.plotting.canvas import ALARM, series_style, size_color
from kbatch.study.comparison import refuse_empty
from kbatch.study.decision_page import judged_part
from kbatch.study.figures import common
from kbatch.study.names import diverged
from kbatch.study.trial import Objective, TrialRecord, mean_of, within_range

if TYPE_CHECKING:
    from kbatch.study.study import Study

HEIGHT_IN = 3.8
BUDGETS = ("updates", "examples", "seconds")
_LABELS = {"updates": "Updates", "examples": "Training examples", "seconds": "Training time (s)"}
_MOST_NAMES = 8  # What fits in a row above the panels.
# At the end of each epoch updates, examples and seconds so far, and the metric: means over
# executions, with the 95 % interval of the metric from three on.
Curve = list[tuple[tuple[float, ...], Estimate[float]]]


def learning_curves(study: "Study") -> tuple[Objective, list[tuple[TrialRecord, Curve]]]:
    """Return the metric, and a trial of each batch size with its learning curve."""
    refuse_empty(study)
    quality, decided = study.quality_metric, study.decide()
    shown = common.one_of_each_size(study, study.trials).values()
    judged = [judged_part(decided, trial) for trial in shown]
    curves = [(t, curve) for t in judged if quality and (curve := _curve(t, quality.name))]
    if quality is None or not curves:
        raise common.missing_data(study, "epochs with a metric of quality")
    return quality, curves


def _curve(trial: TrialRecord, metric: str) -> Curve:
    runs = []
    for execution in trial.executions:
        costs = zip(*((e.updates, e.examples, e.train_s) for e in execution.epochs), strict=True)
        spent = zip(*map(itertools.accumulate, costs), strict=True)
        values = [epoch.finite(metric) for epoch in execution.epochs]
        run = [(*s, value) for s, value in zip(spent, values, strict=True) if value is not None]
        if run:
            runs.append(run)
    curve: Curve = []
    # An execution may end earlier than others, at a target: the mean is of epochs that all have.
    for ends in zip(*runs, strict=False):
        *spent, values = zip(*ends, strict=True)
        if (value := within_range(metric, mean_of(values))) is not None:
            curve.append((tuple(map(fmean, spent)), value))
    return curve


def plot_learning_curves(
    study: "Study",
    ax: Axes | None = None,
    *,
    against: Literal["updates", "examples", "seconds"] | None = None,
) -> Axes:
    """Plot the quality of the model over training, one curve a batch size.

    Three panels, one below the other, show the same curves against updates, examples and seconds of
    training: where large batches lose in the second and win in the third, they pay. Each curve is
    of the trial of its batch size that `study.decide()` compares, else of the best one.

    Args:
        study: A study, from `load_study`.
        ax: Axes whose place the panels take; a new figure if None.
        against: What to show them against, in a single panel; if None, all three.

    Raises:
        ValueError: If there is nothing to show, with the reason, or `against` is something else.
    """
    if against not in (None, *BUDGETS):
        raise ValueError(
            f"`against` must be one of {', '.join(BUDGETS)}, or None for all of them. "
            f"Received: against={against!r}."
        )
    quality, curves = learning_curves(study)
    sizes = [trial.batch_size for trial, _ in curves]
    budgets = BUDGETS if against is None else (against,)
    height_in = HEIGHT_IN if against else 1.9 * HEIGHT_IN
    panels = canvas.panels(ax, height_in, (1,) * len(budgets), share_x=False)
    for panel, budget in zip(panels, budgets, strict=True):
        panel.set_xlabel(_LABELS[budget], fontsize=canvas.TEXT_PT)
        for number, (trial, curve) in enumerate(curves):
            color, marker = size_color(trial.batch_size, sizes), series_style(number).marker
            places = [spent[BUDGETS.index(budget)] for spent, _ in curve]
            values = [value.value for _, value in curve]
            draw.band(panel, places, [value.ends for _, value in curve], color)
            panel.plot(places, values, color=color, linewidth=1.4)
            look = (ALARM, "X") if diverged(trial) else (color, marker)
            draw.points(panel, places[-1:], values[-1:], *look, size=6.5, zorder=3)
        panel.set_xscale("log")
        plain_log_labels(panel.xaxis)
        values = [value.value for _, curve in curves for _, value in curve]
        common.quality_axis(panel, quality, values)
    common.name_sizes(panels[0], sizes, most=_MOST_NAMES)
    incomplete = common.incomplete_text(study)
    canvas.write_title(panels[0], study.name, columns=_MOST_NAMES, fewest=1)
    lines = ""
    if max(len(trial.executions) for trial in study.trials) > 1:
        lines = "Lines: mean over executions; bands: its 95 % interval, from three executions on."
    tracing = ""
    if "seconds" in budgets:
        tracing = "Training time has the tracing of the first step in it, but no validation."
    notes = (common.one_of_each_size_note(study.trials), tracing, lines)
    common.write_conditions(panels, study, *notes, alarm=incomplete)
    return panels[0]
