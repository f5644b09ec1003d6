"""The figure of the trials: throughput and model quality by batch size."""

import math
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from kbatch.document.numbers import counted, listed, readable, shortened
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.canvas import (
    SMALL_PT,
    TEXT_PT,
    halo,
    label_room,
    new_axes,
    stacked,
    tidy,
    width_share,
    write_caption,
)
from kbatch.plotting.palette import INK, MUTED
from kbatch.plotting.series import (
    draw_series,
    legend_columns,
    mark_missing,
    name_missing,
    name_panel,
    ring,
)
from kbatch.study.conditions import (
    Conditions,
    Estimate,
    Spreads,
    caption,
    conditions_of,
    metric_estimate,
    spreads,
    throughput_estimate,
)
from kbatch.study.decision import refuse_empty
from kbatch.study.figures.common import MOST_SERIES, Series, incomplete_text, places, trial_series
from kbatch.study.names import (
    TrialNames,
    is_fraction,
    metric_axis_label,
    metric_words,
    outcome,
    trial_names,
)
from kbatch.study.study import Study
from kbatch.study.trial import Objective, TrialRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    """Compute what the figure of the trials shows."""
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
    """Label the best trial."""
    point = info.best
    if point is None:
        return ""
    throughput = info.objective.name == "samples_per_second"
    estimate = point.samples_per_second if throughput else point.quality
    unit = " samples/s" if throughput else ""
    number = f": {readable(estimate.value, 4)}{unit}" if estimate else ""
    return f"{', '.join(('best', f'batch size {point.batch_size:,}', *point.settings))}{number}"


def spread_notes(info: TrialsInfo) -> tuple[str, ...]:
    """Describe what the bars are, and where there are none."""
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
    """Describe why points are not joined by lines."""
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
    """Count the trials that did not complete, by status."""
    statuses = Counter(point.outcome for point in info.incomplete)
    return ", ".join(f"{count:,} {word}" for word, count in statuses.items())


def alt_text(info: TrialsInfo) -> str:
    """Describe the figure in sentences, for those who do not see it."""
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


HEIGHT_IN = 5.4
_LABEL_CHARACTERS = 44
_LABEL_LINES = 5
_MISSING_CHARACTERS = 8


def plot_trials(study: "Study", ax: "Axes | None" = None) -> "Axes":
    """Plot samples/s and the quality of the model by batch size, one point a trial.

    The upper panel holds the throughput, the lower one the validation accuracy or whatever
    `study.quality_metric` is. Trials that failed or ran out of memory are marked at the
    bottom edge, and the trial with the best objective is labelled.

    Example:

    >>> study = kbatch.load_study("results/digits")
    >>> kbatch.plot_trials(study).figure.savefig("trials.png")

    Args:
        study: A study, as `load_study` gives it.
        ax: Axes whose place the two panels take; a new figure if None.

    Returns:
        The Axes of the upper panel; their label, `get_label()`, describes the figure in sentences.

    Raises:
        ValueError: If the study is empty, with what to run.
    """
    info = trials_info(study)
    upper, lower = stacked(new_axes(HEIGHT_IN) if ax is None else ax)
    upper.set_label(alt_text(info))
    for panel in (upper, lower):
        tidy(panel)
    batch_axis(lower, info.batch_sizes, "Batch size (examples per update)")
    _draw_panel(upper, info, [p.samples_per_second for p in info.points])
    _draw_panel(lower, info, [p.quality for p in info.points])
    # Words beside each other that have no room stand below.
    failed = {point.batch_size for point in info.incomplete}
    crowded = _MISSING_CHARACTERS * len(failed) > label_room(lower)
    _mark_incomplete(upper, info, labelled=False)
    _mark_incomplete(lower, info, labelled=not crowded)
    _label_panels(upper, lower, info)
    _label_best(upper, lower, info)
    alarm = incomplete_text(study) if crowded else ""
    lines = (caption(info.conditions), *spread_notes(info), *series_notes(info))
    write_caption(lower, *lines, alarm=alarm)
    return upper


def _draw_panel(panel: "Axes", info: TrialsInfo, estimates: list[Estimate | None]) -> None:
    for index, series in enumerate(info.series):
        drawn = set(series.trial_ids)
        pairs = [
            (point.place, estimate)
            for point, estimate in zip(info.points, estimates, strict=True)
            if point.trial_id in drawn and point.completed and estimate
        ]
        if pairs:
            draw_series(
                panel,
                index,
                label=series.label,
                places=[place for place, _ in pairs],
                values=[estimate.value for _, estimate in pairs],
                bounds=[_bar(estimate) for _, estimate in pairs],
                joined=series.joined,
            )
    if not info.completed:
        panel.set_yticks([])
        _say(panel, f"No trial completed: {failure_summary(info)}")
    elif not any(e for p, e in zip(info.points, estimates, strict=True) if p.completed):
        panel.set_yticks([])
        _say(panel, "n/a (not measured in any trial)")


def _bar(estimate: Estimate) -> tuple[float, float] | None:
    if estimate.low is None or estimate.high is None:
        return None
    return estimate.low, estimate.high


def _mark_incomplete(panel: "Axes", info: TrialsInfo, *, labelled: bool) -> None:
    """Mark trials without a result at the bottom edge, one label a batch size."""
    marked: dict[int, list[str]] = {}
    for point in info.incomplete:
        words = marked.setdefault(point.batch_size, [])
        if point.outcome not in words:
            words.append(point.outcome)
        mark_missing(panel, point.place)
    for batch_size, words in marked.items() if labelled else ():
        name_missing(panel, batch_size, ",\n".join(words))


def _label_panels(upper: "Axes", lower: "Axes", info: TrialsInfo) -> None:
    columns = legend_columns((one.label for one in info.series), most=3) if info.completed else 0
    # Throughput may be unknown where quality is not, and the other way round.
    fuller = max(upper, lower, key=lambda panel: len(panel.get_legend_handles_labels()[1]))
    name_panel(upper, info.name, columns=columns, series_of=fuller)
    upper.set_ylabel("Throughput\n(samples/s)")
    quality = metric_axis_label(info.quality) if info.quality else "Quality metric"
    lower.set_ylabel(quality, parse_math=False)
    if info.completed:
        # Throughput is a ratio scale: from zero, twice as high is twice as fast.
        by_throughput = info.objective.name == "samples_per_second"
        upper.set_ylim(bottom=0, top=upper.get_ylim()[1] * (1.25 if by_throughput else 1.08))
        upper.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        _make_room(lower, info)


def _make_room(lower: "Axes", info: TrialsInfo) -> None:
    """Widen the lower panel for the labels of the best trial and of those that failed."""
    bottom, top = lower.get_ylim()
    span = top - bottom
    lower.set_ylim(bottom - (0.25 if info.incomplete else 0.12) * span, top + 0.14 * span)
    values = [point.quality.value for point in info.completed if point.quality]
    if info.quality and is_fraction(info.quality.name) and values and max(values) <= 1:
        bottom = max(lower.get_ylim()[0], -1e-9)
        lower.set_yticks([tick for tick in lower.get_yticks() if bottom <= tick < 1 + 1e-9])


def _label_best(upper: "Axes", lower: "Axes", info: TrialsInfo) -> None:
    if info.best is None:
        return
    place = info.best.place
    for panel, estimate in ((upper, info.best.samples_per_second), (lower, info.best.quality)):
        panel.axvline(place, color=MUTED, linewidth=0.8, linestyle=":", zorder=0.5)
        if estimate:
            ring(panel, place, estimate.value)
    by_throughput = info.objective.name == "samples_per_second"
    panel, estimate = (
        (upper, info.best.samples_per_second) if by_throughput else (lower, info.best.quality)
    )
    if estimate:
        above = by_throughput or info.objective.direction == "max"
        _label_point(panel, best_label(info), place, estimate.value, above=above)


def _label_point(panel: "Axes", text: str, place: float, value: float, *, above: bool) -> None:
    """Label a point on the side where the panel has room."""
    x_low, x_high = panel.get_xlim()
    share = math.log(place / x_low) / math.log(x_high / x_low)
    side = "left" if share < 0.25 else "right" if share > 0.75 else "center"
    panel.annotate(
        _label_lines(text, round(width_share(panel) * _LABEL_CHARACTERS)),
        (place, value),
        xytext=({"left": -6, "right": 6, "center": 0}[side], 11 if above else -11),
        textcoords="offset points",
        ha=side,
        va="bottom" if above else "top",
        fontsize=SMALL_PT + 0.5,
        fontweight="bold",
        color=INK,
        path_effects=halo(),
        parse_math=False,
    )


def _label_lines(text: str, characters: int) -> str:
    """Break a long label before its number, and shortens what would be wider than the rest."""
    if len(text) <= characters:
        return text
    words, _, number = text.rpartition(": ")
    lines = textwrap.wrap(f"{words}:", characters, break_long_words=False)
    if len(lines) > _LABEL_LINES:
        lines = [*lines[: _LABEL_LINES - 1], "…:"]
    return "\n".join((*(shortened(line, characters) for line in lines), number))


def _say(panel: "Axes", text: str) -> None:
    panel.text(
        0.5, 0.5, text, transform=panel.transAxes, ha="center", fontsize=TEXT_PT, color=MUTED
    )
