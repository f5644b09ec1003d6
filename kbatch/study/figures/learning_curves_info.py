"""What the figure of the learning curves shows, computed before anything is drawn."""

import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from kbatch.analysis.intervals import FEWEST_VALUES, mean_interval
from kbatch.document.number_text import counted, listed, readable
from kbatch.records.execution import EpochRecord, ExecutionRecord
from kbatch.study.conditions import caption, conditions_of
from kbatch.study.empty_study import refuse_empty
from kbatch.study.figures.best_of_size import best_of_size, best_of_size_note
from kbatch.study.figures.incomplete import incomplete_text, none_completed
from kbatch.study.metric_names import metric_words
from kbatch.study.outcomes import diverged
from kbatch.study.study_record import Study
from kbatch.study.trial import Objective, TrialRecord

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
        """Gives what was spent of one of `BUDGETS`."""
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
    """Computes a learning curve for each batch size, that of its best trial.

    Args:
        study: A study with at least one trial.

    Raises:
        ValueError: If the study is empty, with what to run.
    """
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
    """Describes the figure in sentences, for those who do not see it."""
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
    """Lists the ends of epochs that have the metric, with what was spent up to there."""

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
