"""The figure of the learning curves: one a batch size, against what training spent."""

import itertools
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

from matplotlib.axes import Axes

from kbatch.analysis.intervals import mean_interval
from kbatch.page.numbers import format_number, join_words, pluralize
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import plain_log_labels
from kbatch.plotting.palette import ALARM, series_style, size_color
from kbatch.study.comparison import refuse_empty
from kbatch.study.figures import common
from kbatch.study.names import diverged, metric_words
from kbatch.study.trial import Objective, TrialRecord

if TYPE_CHECKING:
    from kbatch.study.study import Study

HEIGHT_IN = 3.8
BUDGETS = ("updates", "examples", "seconds")
_LABELS = {"updates": "Updates", "examples": "Training examples", "seconds": "Training time (s)"}
# The same beside each other in a narrow figure.
_SHORT_LABELS = {"updates": "Updates", "examples": "Examples", "seconds": "Seconds"}
_MOST_NAMES = 8  # What fits in a row above the panels.


class CurvePoint(NamedTuple):
    """The end of an epoch: what training has spent, and the metric, as means over executions."""

    updates: float
    examples: float
    seconds: float
    value: float
    bar: tuple[float, float] | None  # 95 % interval, None from fewer than three executions.


class LearningCurve(NamedTuple):
    """The curve of the best trial of one batch size."""

    batch_size: int
    trial_id: str
    points: tuple[CurvePoint, ...]
    diverged: bool


def learning_curves(study: "Study") -> tuple[Objective, tuple[LearningCurve, ...]]:
    """Return the metric and the learning curve of the best trial of each batch size."""
    refuse_empty(study)
    quality = study.quality_metric
    curves = tuple(
        LearningCurve(size, trial.trial_id, points, diverged(trial))
        for size, trial in common.best_of_size(study.trials).items()
        if quality is not None and (points := _points(trial, quality.name))
    )
    if quality is None or not curves:
        raise common.missing_data(study, "epochs with a metric of quality")
    return quality, curves


def _points(trial: TrialRecord, metric: str) -> tuple[CurvePoint, ...]:
    """Average the ends of epochs that have the metric, with what was spent up to there."""
    runs = []
    for execution in trial.executions:
        costs = zip(*((e.updates, e.examples, e.train_s) for e in execution.epochs), strict=True)
        spent = zip(*map(itertools.accumulate, costs), strict=True)
        values = [epoch.finite(metric) for epoch in execution.epochs]
        run = [(*s, value) for s, value in zip(spent, values, strict=True) if value is not None]
        if run:
            runs.append(run)
    points = []
    # An execution may end earlier than others, at a target: the mean is of epochs that all have.
    for ends in zip(*runs, strict=False):
        updates, examples, seconds, values = zip(*ends, strict=True)
        interval = mean_interval(values)
        bar = interval and interval.ends
        spent = fmean(updates), fmean(examples), fmean(seconds)
        points.append(CurvePoint(*spent, fmean(values), bar))
    return tuple(points)


def plot_learning_curves(
    study: "Study",
    ax: Axes | None = None,
    *,
    against: Literal["updates", "examples", "seconds"] | None = None,
) -> Axes:
    """Plot the quality of the model over training, one curve a batch size.

    Three panels show the same curves against updates, examples and seconds of training: where
    large batches lose in the second and win in the third, they pay. Each curve is of the
    best trial of its batch size.

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
    sizes = [curve.batch_size for curve in curves]
    (first,) = canvas.panels(ax, HEIGHT_IN)
    budgets = BUDGETS if against is None else (against,)
    panels, below, below_pt = [first], first, 36
    if len(budgets) > 1:
        panels, below = canvas.beside(first, len(budgets))
        below_pt = 36 if below is first else 4
    incomplete = common.incomplete_text(study)
    ends = join_words(
        f"{format_number(c.points[-1].value)} at batch size {c.batch_size:,} after "
        f"{c.points[-1].updates:,.0f} updates and {format_number(c.points[-1].seconds)} s"
        for c in curves
    )
    alt_text = (
        f"Curves of {metric_words(quality.name)} over training for "
        f"{pluralize(len(curves), 'batch size')}, on logarithmic axes. They end with {ends}. "
        f"{incomplete}"
    )
    first.set_label(alt_text.strip())
    for panel, budget in zip(panels, budgets, strict=True):
        canvas.tidy(panel)
        fits = canvas.label_room(panel) > len(_LABELS["examples"])
        panel.set_xlabel((_LABELS if fits else _SHORT_LABELS)[budget], fontsize=canvas.TEXT_PT)
        for number, curve in enumerate(curves):
            color, marker = size_color(curve.batch_size, sizes), series_style(number).marker
            places = [getattr(point, budget) for point in curve.points]
            values = [point.value for point in curve.points]
            draw.band(panel, places, [point.bar for point in curve.points], color)
            panel.plot(places, values, color=color, linewidth=1.4)
            look = (ALARM, "X") if curve.diverged else (color, marker)
            draw.points(panel, places[-1:], values[-1:], *look, size=6.5, zorder=3)
        panel.set_xscale("log")
        plain_log_labels(panel.xaxis, short=len(budgets) > 1)
    common.name_sizes(first, sizes, most=_MOST_NAMES)
    values = [point.value for curve in curves for point in curve.points]
    common.quality_axis(first, quality, values)
    title = f"{study.name}: learning by batch size"
    title = title if len(title) <= 40 else study.name
    canvas.write_title(first, title, columns=_MOST_NAMES, fewest=1, characters=40)
    most = max(len(trial.executions) for trial in study.trials)
    lines = ""
    if most > 1:
        lines = "Lines: mean over executions; bands: its 95 % interval, from three executions on."
    tracing = "Training time has the tracing of the first step in it, but no validation."
    notes = (common.best_of_size_note(study.trials), tracing, lines)
    common.write_conditions(below, study, *notes, alarm=incomplete, below_pt=below_pt)
    return first
