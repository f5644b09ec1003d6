"""What the figure of the trials shows, computed before anything is drawn."""

from collections import Counter
from typing import NamedTuple

from kbatch.analysis.intervals import Interval
from kbatch.records.study import Study
from kbatch.records.trial import Objective, TrialRecord
from kbatch.reporting.conditions import STATUS_WORDS, Conditions, conditions_of
from kbatch.reporting.empty_study import refuse_empty
from kbatch.reporting.metric_names import metric_words
from kbatch.reporting.number_text import counted, listed, readable


class Estimate(NamedTuple):
    """A value with its spread.

    Attributes:
        value: The value.
        low: Lower end of its interval, None if it has none.
        high: Upper end of its interval, None if it has none.
    """

    value: float
    low: float | None
    high: float | None


class TrialPoint(NamedTuple):
    """One trial.

    Attributes:
        trial_id: keras-tuner's identifier.
        batch_size: Examples of one optimizer update.
        policy: The dtype policy that was active.
        status: Status of the trial.
        samples_per_second: Throughput in examples per second, None if it was not measured.
        quality: The quality metric, None if it was not measured.
    """

    trial_id: str
    batch_size: int
    policy: str
    status: str
    samples_per_second: Estimate | None
    quality: Estimate | None

    @property
    def completed(self) -> bool:
        """Whether the numbers are those of a whole trial."""
        return self.status == "completed"


class TrialsInfo(NamedTuple):
    """What the figure of the trials shows.

    Attributes:
        name: Name of the study.
        points: The trials by batch size.
        quality: The metric of the lower panel, None if no trial has one.
        best: The completed trial with the best objective, None if none completed.
        objective: What the search optimised.
        conditions: Device, versions and budget.
    """

    name: str
    points: tuple[TrialPoint, ...]
    quality: Objective | None
    best: TrialPoint | None
    objective: Objective
    conditions: Conditions

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Every batch size once, ascending, failed ones included."""
        return tuple(sorted({point.batch_size for point in self.points}))

    @property
    def policies(self) -> tuple[str, ...]:
        """The dtype policies, each a series of its own."""
        return self.conditions.policies

    @property
    def completed(self) -> tuple[TrialPoint, ...]:
        """The trials that completed."""
        return tuple(point for point in self.points if point.completed)

    @property
    def incomplete(self) -> tuple[TrialPoint, ...]:
        """The trials that ran out of memory, failed, or did not end."""
        return tuple(point for point in self.points if not point.completed)


def trials_info(study: Study) -> TrialsInfo:
    """Computes what the figure of the trials shows.

    Args:
        study: A study with at least one trial.

    Returns:
        The info.

    Raises:
        ValueError: If the study is empty, with what to run.
    """
    refuse_empty(study)
    quality, objective = study.quality_metric, study.trials[0].objective
    points = {trial.trial_id: _point(trial, quality) for trial in study.trials}
    best = study.best_trial()
    return TrialsInfo(
        name=study.name,
        points=tuple(points.values()),
        quality=quality,
        best=points[best.trial_id] if best else None,
        objective=objective,
        conditions=conditions_of(study),
    )


def _point(trial: TrialRecord, quality: Objective | None) -> TrialPoint:
    return TrialPoint(
        trial_id=trial.trial_id,
        batch_size=trial.batch_size,
        policy=trial.dtype_policy,
        status=trial.status,
        samples_per_second=_estimate(trial.samples_per_second, trial.samples_per_second_interval),
        quality=quality
        and _estimate(trial.metrics.get(quality.name), trial.metric_interval(quality.name)),
    )


def _estimate(value: float | None, interval: Interval | None) -> Estimate | None:
    if value is None:
        return None
    return Estimate(value, interval and interval.low, interval and interval.high)


def best_label(info: TrialsInfo) -> str:
    """Labels the best trial."""
    point = info.best
    if point is None:
        return ""
    throughput = info.objective.name == "samples_per_second"
    estimate = point.samples_per_second if throughput else point.quality
    number = f": {readable(estimate.value, 4)}" if estimate else ""
    return f"best, batch size {point.batch_size}{number}"


def spread_notes(info: TrialsInfo) -> tuple[str, ...]:
    """Says what the bars are, and where there are none."""
    low, high = info.conditions.executions
    if not info.completed:
        return ()
    if high == 1:
        return (
            "Bars above: quartiles of the timing windows. One execution a trial: no bars below.",
        )
    if low > 1:
        return ("Bars: 95 % interval of the mean over executions.",)
    return (
        "Bars: 95 % interval of the mean over executions.",
        "Trials with one execution: quartiles of the timing windows above, no bars below.",
    )


def failure_summary(info: TrialsInfo) -> str:
    """Counts the trials that did not complete, by status."""
    statuses = Counter(STATUS_WORDS[point.status] for point in info.incomplete)
    return ", ".join(f"{count:,} {word}" for word, count in statuses.items())


def alt_text(info: TrialsInfo) -> str:
    """Describes the figure in sentences, for those who do not see it.

    Args:
        info: What the figure shows.
    """
    sizes = info.batch_sizes
    between = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    quality = metric_words(info.quality.name) if info.quality else "quality"
    sentences = [
        f"Two charts of {counted(len(info.points), 'trial')} over batch size, {between}, on a "
        f"logarithmic axis: throughput above, {quality} below.",
        *_range_sentences(info),
    ]
    if info.best:
        sentences.append(f"Marked as {best_label(info)}.")
    if info.incomplete:
        marked = listed(
            f"batch size {p.batch_size:,} ({STATUS_WORDS[p.status]})" for p in info.incomplete
        )
        sentences.append(f"Marked as not completed: {marked}.")
    return " ".join(sentences)


def _range_sentences(info: TrialsInfo) -> list[str]:
    points = info.completed
    words = metric_words(info.quality.name) if info.quality else "quality"
    series = (
        ("Throughput", " samples/s", [(p.batch_size, p.samples_per_second) for p in points]),
        (words[0].upper() + words[1:], "", [(p.batch_size, p.quality) for p in points]),
    )
    sentences = []
    for name, unit, pairs in series:
        measured = [(size, estimate.value) for size, estimate in pairs if estimate]
        if measured:
            low = min(measured, key=lambda pair: pair[1])
            high = max(measured, key=lambda pair: pair[1])
            sentences.append(
                f"{name} lies between {readable(low[1])}{unit} at batch size {low[0]:,} and "
                f"{readable(high[1])}{unit} at {high[0]:,}."
            )
    return sentences
