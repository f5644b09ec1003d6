"""What the figure of the trials shows, computed before anything is drawn."""

from collections import Counter
from typing import NamedTuple

from kbatch.document.number_text import counted, listed, readable
from kbatch.study.conditions import Conditions, conditions_of
from kbatch.study.empty_study import refuse_empty
from kbatch.study.estimates import Estimate, metric_estimate, throughput_estimate
from kbatch.study.figures.series import MOST_SERIES, Series, places, trial_series
from kbatch.study.metric_names import metric_words
from kbatch.study.outcomes import outcome
from kbatch.study.spreads import Spreads, spreads
from kbatch.study.study_record import Study
from kbatch.study.trial import Objective, TrialRecord
from kbatch.study.trial_names import TrialNames, trial_names


class TrialPoint(NamedTuple):
    """One trial.

    Attributes:
        trial_id: keras-tuner's identifier.
        batch_size: Examples of one optimizer update.
        place: Where it is drawn on the batch axis, beside trials of other series.
        settings: What it has beside the batch size where trials differ, such as `"units=8"`.
        status: Status of the trial.
        outcome: How it ended, in words.
        samples_per_second: Throughput in examples per second, None if it was not measured.
        quality: The quality metric, None if it was not measured.
    """

    trial_id: str
    batch_size: int
    place: float
    settings: tuple[str, ...]
    status: str
    outcome: str
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
        series: Trials that are drawn alike, each with a colour and a marker.
        differ: What the trials differ in beside the batch size and the policy.
        quality: The metric of the lower panel, None if no trial has one.
        best: The completed trial with the best objective, None if none completed.
        objective: What the search optimised.
        conditions: Device, versions and budget.
        spreads: Which spreads the numbers have.
    """

    name: str
    points: tuple[TrialPoint, ...]
    series: tuple[Series, ...]
    differ: tuple[str, ...]
    quality: Objective | None
    best: TrialPoint | None
    objective: Objective
    conditions: Conditions
    spreads: Spreads

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Every batch size once, ascending, failed ones included."""
        return tuple(sorted({point.batch_size for point in self.points}))

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
    names = trial_names(study.trials)
    series = trial_series(study.trials, names)
    placed = places(study.trials, series)
    points = {
        trial.trial_id: _point(trial, quality, names, placed[trial.trial_id])
        for trial in study.trials
    }
    best = study.best_trial()
    return TrialsInfo(
        name=study.name,
        points=tuple(points.values()),
        series=series,
        differ=names.hyperparameters,
        quality=quality,
        best=points[best.trial_id] if best else None,
        objective=objective,
        conditions=conditions_of(study),
        spreads=spreads(study.trials),
    )


def _point(
    trial: TrialRecord, quality: Objective | None, names: TrialNames, place: float
) -> TrialPoint:
    return TrialPoint(
        trial_id=trial.trial_id,
        batch_size=trial.batch_size,
        place=place,
        settings=names.settings(trial),
        status=trial.status,
        outcome=outcome(trial),
        samples_per_second=throughput_estimate(trial),
        quality=metric_estimate(trial, quality.name) if quality else None,
    )


def best_label(info: TrialsInfo) -> str:
    """Labels the best trial."""
    point = info.best
    if point is None:
        return ""
    throughput = info.objective.name == "samples_per_second"
    estimate = point.samples_per_second if throughput else point.quality
    unit = " samples/s" if throughput else ""
    number = f": {readable(estimate.value, 4)}{unit}" if estimate else ""
    return f"{', '.join(('best', f'batch size {point.batch_size:,}', *point.settings))}{number}"


def spread_notes(info: TrialsInfo) -> tuple[str, ...]:
    """Says what the bars are, and where there are none."""
    found = info.spreads
    mixed = found.intervals or found.pairs
    notes = []
    if found.intervals:
        notes.append("Bars: 95 % interval of the mean over executions.")
    if found.pairs:
        notes.append("Two executions a trial: the mean without bars, too few for an interval.")
    if found.single:
        who = "Trials with one execution" if mixed else "One execution a trial"
        bars = (
            "bars above are quartiles of the timing windows, no bars below."
            if found.quartiles
            else "no bars, because training was too short to time it more than once."
        )
        notes.append(f"{who}: {bars}")
    return tuple(notes)


def series_notes(info: TrialsInfo) -> tuple[str, ...]:
    """Says why points are not joined by lines."""
    if not info.completed or all(one.joined for one in info.series):
        return ()
    if info.differ:
        combinations = len({point.settings for point in info.points})
        if combinations > MOST_SERIES:
            return (
                f"Points are not joined: the trials also differ in {listed(info.differ)} "
                f"({combinations:,} combinations).",
            )
    return ("Points are not joined: several trials have the same batch size and settings.",)


def failure_summary(info: TrialsInfo) -> str:
    """Counts the trials that did not complete, by status."""
    statuses = Counter(point.outcome for point in info.incomplete)
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
        *_series_sentences(info),
        *_range_sentences(info),
    ]
    if info.best:
        sentences.append(f"Marked as {best_label(info)}.")
    if info.incomplete:
        marked = listed(
            f"batch size {p.batch_size:,} ({', '.join((*p.settings, p.outcome))})"
            for p in info.incomplete
        )
        sentences.append(f"Marked as not completed: {marked}.")
    return " ".join(sentences)


def _series_sentences(info: TrialsInfo) -> list[str]:
    if len(info.series) == 1:
        return []
    return [f"A series each for {listed(one.label for one in info.series)}."]


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
