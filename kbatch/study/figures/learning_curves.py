"""The figure of the learning curves: one a batch size, against what training spent."""

import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

from kbatch.analysis.intervals import FEWEST_VALUES, mean_interval
from kbatch.document.numbers import counted, listed, readable, shortened
from kbatch.plotting.axes import plain_log_labels
from kbatch.plotting.canvas import TEXT_PT, beside, label_room, new_axes, say, tidy, write_caption
from kbatch.plotting.palette import ALARM, PAPER, series_style, size_color
from kbatch.plotting.series import name_panel
from kbatch.records.training_run import EpochRecord, ExecutionRecord
from kbatch.study.conditions import caption, conditions_of
from kbatch.study.decision import refuse_empty
from kbatch.study.figures.common import (
    best_of_size,
    best_of_size_note,
    incomplete_text,
    none_completed,
    quality_axis,
)
from kbatch.study.names import diverged, metric_words
from kbatch.study.study import Study
from kbatch.study.trial import Objective, TrialRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes


BUDGETS = ("updates", "examples", "seconds")


class CurvePoint(NamedTuple):
    """The end of an epoch, the mean over executions.

    Attributes:
        updates: Optimizer updates so far.
        examples: Training examples so far.
        seconds: Seconds of training so far.
        value: The metric.
        low: Lower end of its 95 % interval, None from fewer than three executions.
        high: Upper end, likewise.
    """

    updates: float
    examples: float
    seconds: float
    value: float
    low: float | None
    high: float | None

    @property
    def bar(self) -> tuple[float, float] | None:
        """Both ends of the interval, None if it has none."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def spent(self, budget: str) -> float:
        """Return what was spent of one of `BUDGETS`."""
        return {"updates": self.updates, "examples": self.examples, "seconds": self.seconds}[budget]


class LearningCurve(NamedTuple):
    """The curve of one batch size.

    Attributes:
        batch_size: Examples of one optimizer update.
        trial_id: The trial that is shown.
        points: Its epochs.
        diverged: Whether its loss did not stay finite.
    """

    batch_size: int
    trial_id: str
    points: tuple[CurvePoint, ...]
    diverged: bool


class LearningCurvesInfo(NamedTuple):
    """What the figure shows.

    Attributes:
        name: Name of the study.
        curves: One curve a batch size, ascending.
        quality: The metric, None if no trial has one.
        nothing: Why there is no curve, an empty text where there is one.
        notes: Which trials are shown, and what the bands are.
        incomplete: Which trials have no result, an empty text where all have one.
        conditions: Device, versions and budget.
    """

    name: str
    curves: tuple[LearningCurve, ...]
    quality: Objective | None
    nothing: str
    notes: tuple[str, ...]
    incomplete: str
    conditions: str


def learning_curves_info(study: Study) -> LearningCurvesInfo:
    """Compute a learning curve for each batch size, that of its best trial."""
    refuse_empty(study)
    quality = study.quality_metric
    curves = [_curve(t, quality) for t in best_of_size(study).values()] if quality else []
    drawn = tuple(curve for curve in curves if curve.points)
    return LearningCurvesInfo(
        name=study.name,
        curves=drawn,
        quality=quality,
        nothing="" if drawn else _nothing(study),
        notes=tuple(_notes(study, drawn)),
        incomplete=incomplete_text(study) if drawn else "",
        conditions=caption(conditions_of(study)),
    )


def alt_text(info: LearningCurvesInfo) -> str:
    """Describe the figure in sentences, for those who do not see it."""
    if not info.curves or info.quality is None:
        return f"An empty chart of learning curves. {info.nothing}."
    words = metric_words(info.quality.name)
    ends = listed(
        f"{readable(c.points[-1].value)} at batch size {c.batch_size:,} after "
        f"{c.points[-1].updates:,.0f} updates and {readable(c.points[-1].seconds)} s"
        for c in info.curves
    )
    sentences = [
        f"Curves of {words} over training for {counted(len(info.curves), 'batch size')}, against "
        "updates, examples and seconds on logarithmic axes.",
        f"They end with {ends}.",
        *([info.incomplete] if info.incomplete else []),
    ]
    return " ".join(sentences)


def _curve(trial: TrialRecord, quality: Objective) -> LearningCurve:
    runs = [_run(execution, quality.name) for execution in trial.executions]
    # An execution may end earlier than others, at a target: the mean is of epochs that all have.
    epochs = zip(*(run for run in runs if run), strict=False)
    points = tuple(_mean_point(points) for points in epochs)
    return LearningCurve(trial.batch_size, trial.trial_id, points, diverged(trial))


def _run(execution: ExecutionRecord, metric: str) -> list[CurvePoint]:
    """List the ends of epochs that have the metric, with what was spent up to there."""

    def spent(of) -> list[float]:
        return list(itertools.accumulate(map(of, execution.epochs)))

    def seconds(epoch: EpochRecord) -> float:
        return epoch.train_s

    totals = zip(
        spent(lambda epoch: epoch.updates),
        spent(lambda epoch: epoch.examples),
        spent(seconds),
        strict=True,
    )
    values = [epoch.finite(metric) for epoch in execution.epochs]
    return [
        CurvePoint(*total, value, None, None)
        for total, value in zip(totals, values, strict=True)
        if value is not None
    ]


def _mean_point(points: Sequence[CurvePoint]) -> CurvePoint:
    values = [point.value for point in points]
    interval = mean_interval(values)
    return CurvePoint(
        fmean(point.updates for point in points),
        fmean(point.examples for point in points),
        fmean(point.seconds for point in points),
        fmean(values),
        interval and interval.low,
        interval and interval.high,
    )


def _notes(study: Study, curves: Sequence[LearningCurve]) -> list[str]:
    notes = list(best_of_size_note(study))
    if curves:
        notes.append("Training time has the tracing of the first step in it, but no validation.")
    most = max((len(trial.executions) for trial in study.trials), default=1)
    if curves and most >= FEWEST_VALUES:
        notes.append("Lines: mean over executions; bands: its 95 % interval.")
    elif curves and most > 1:
        notes.append("Lines: mean over two executions, too few for an interval.")
    return notes


def _nothing(study: Study) -> str:
    if not any(trial.status == "completed" for trial in study.trials):
        return none_completed(study)
    return "n/a (no epoch of any trial has a metric of quality)"


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
    """Plot the quality of the model over training, one curve a batch size.

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
