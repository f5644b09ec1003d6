"""The figure of the trials: throughput and model quality by batch size."""

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from kbatch.document.numbers import counted, listed, readable, shortened
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.canvas import (
    label_room,
    new_axes,
    say,
    stacked,
    tidy,
    width_share,
    write_caption,
)
from kbatch.plotting.palette import MUTED
from kbatch.plotting.series import (
    annotate,
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
from kbatch.study.figures.common import (
    MOST_SERIES,
    Series,
    incomplete_text,
    none_completed,
    places,
    trial_series,
)
from kbatch.study.names import is_fraction, metric_axis_label, metric_words, outcome, trial_names
from kbatch.study.study import Study
from kbatch.study.trial import Objective

HEIGHT_IN = 5.4
_LABEL_CHARACTERS = 44
_LABEL_LINES = 5
_MISSING_CHARACTERS = 8


class TrialPoint(NamedTuple):
    """One trial; an unknown number is None."""

    trial_id: str
    batch_size: int
    place: float  # Where it is drawn on the batch axis, beside trials of other series.
    settings: tuple[str, ...]  # What it has where trials differ, such as `"units=8"`.
    status: str
    outcome: str
    samples_per_second: Estimate | None
    quality: Estimate | None


class TrialsInfo(NamedTuple):
    """What the figure of the trials shows."""

    name: str
    points: tuple[TrialPoint, ...]
    series: tuple[Series, ...]
    differ: tuple[str, ...]  # The hyperparameters that trials differ in.
    quality: Objective | None  # The metric of the lower panel.
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
        return tuple(point for point in self.points if point.status == "completed")

    @property
    def incomplete(self) -> tuple[TrialPoint, ...]:
        """The trials that ran out of memory, failed, or did not end."""
        return tuple(point for point in self.points if point.status != "completed")

    @property
    def quality_words(self) -> str:
        """The metric of the lower panel in words."""
        return metric_words(self.quality.name) if self.quality else "quality"


def trials_info(study: Study) -> TrialsInfo:
    """Compute what the figure of the trials shows."""
    refuse_empty(study)
    quality, names, best = study.quality_metric, trial_names(study.trials), study.best_trial()
    series = trial_series(study.trials, names)
    placed = places(study.trials, series)
    points = {
        trial.trial_id: TrialPoint(
            trial_id=trial.trial_id,
            batch_size=trial.batch_size,
            place=placed[trial.trial_id],
            settings=names.settings(trial),
            status=trial.status,
            outcome=outcome(trial),
            samples_per_second=throughput_estimate(trial),
            quality=metric_estimate(trial, quality.name) if quality else None,
        )
        for trial in study.trials
    }
    return TrialsInfo(
        name=study.name,
        points=tuple(points.values()),
        series=series,
        differ=names.hyperparameters,
        quality=quality,
        best=points[best.trial_id] if best else None,
        objective=study.trials[0].objective,
        conditions=conditions_of(study),
        spreads=spreads(study.trials),
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


def alt_text(info: TrialsInfo) -> str:
    """Describe the figure in sentences, for those who do not see it."""
    sizes = info.batch_sizes
    between = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    words = info.quality_words
    sentences = [
        f"Two charts of {counted(len(info.points), 'trial')} over batch size, {between}, on a "
        f"logarithmic axis: throughput above, {words} below."
    ]
    if len(info.series) > 1:
        sentences.append(f"A series each for {listed(one.label for one in info.series)}.")
    for name, unit, estimates in (
        ("Throughput", " samples/s", [p.samples_per_second for p in info.completed]),
        (words[0].upper() + words[1:], "", [p.quality for p in info.completed]),
    ):
        pairs = zip(info.completed, estimates, strict=True)
        measured = [(point.batch_size, e.value) for point, e in pairs if e]
        if measured:
            low = min(measured, key=lambda pair: pair[1])
            high = max(measured, key=lambda pair: pair[1])
            sentences.append(
                f"{name} lies between {readable(low[1])}{unit} at batch size {low[0]:,} and "
                f"{readable(high[1])}{unit} at {high[0]:,}."
            )
    if info.best:
        sentences.append(f"Marked as {best_label(info)}.")
    if info.incomplete:
        marked = listed(
            f"batch size {p.batch_size:,} ({', '.join((*p.settings, p.outcome))})"
            for p in info.incomplete
        )
        sentences.append(f"Marked as not completed: {marked}.")
    return " ".join(sentences)


def plot_trials(study: Study, ax: Axes | None = None) -> Axes:
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
    tidy(upper)
    tidy(lower)
    batch_axis(lower, info.batch_sizes, "Batch size (examples per update)")
    for panel, estimates in (
        (upper, [p.samples_per_second for p in info.points]),
        (lower, [p.quality for p in info.points]),
    ):
        drawn = _draw_series(panel, info, estimates)
        if not info.completed:
            say(panel, none_completed(study))
        elif not drawn:
            say(panel, "n/a (not measured in any trial)")
    # Words beside each other that have no room stand below.
    failed = {point.batch_size: [] for point in info.incomplete}
    crowded = _MISSING_CHARACTERS * len(failed) > label_room(lower)
    for point in info.incomplete:
        mark_missing(upper, point.place)
        mark_missing(lower, point.place)
        failed[point.batch_size].append(point.outcome)
    for size, outcomes in failed.items() if not crowded else ():
        name_missing(lower, size, ",\n".join(dict.fromkeys(outcomes)))
    columns = legend_columns((one.label for one in info.series), most=3) if info.completed else 0
    # Throughput may be unknown where quality is not, and the other way round.
    fuller = max(upper, lower, key=lambda panel: len(panel.get_legend_handles_labels()[1]))
    name_panel(upper, info.name, columns=columns, series_of=fuller)
    upper.set_ylabel("Throughput\n(samples/s)")
    quality = metric_axis_label(info.quality) if info.quality else "Quality metric"
    lower.set_ylabel(quality, parse_math=False)
    if info.completed:
        _make_room(upper, lower, info)
    if info.best:
        _label_best(upper, lower, info, info.best)
    alarm = incomplete_text(study) if crowded else ""
    write_caption(lower, caption(info.conditions), *_notes(info), alarm=alarm)
    return upper


def _draw_series(panel: Axes, info: TrialsInfo, estimates: Sequence[Estimate | None]) -> bool:
    """Draw what was measured, and return whether anything was."""
    any_drawn = False
    for index, series in enumerate(info.series):
        members = set(series.trial_ids)
        drawn = [
            (point.place, estimate)
            for point, estimate in zip(info.points, estimates, strict=True)
            if point.trial_id in members and point.status == "completed" and estimate
        ]
        if drawn:
            any_drawn = True
            draw_series(
                panel,
                index,
                label=series.label,
                places=[place for place, _ in drawn],
                values=[estimate.value for _, estimate in drawn],
                bounds=[estimate.bar for _, estimate in drawn],
                joined=series.joined,
            )
    return any_drawn


def _make_room(upper: Axes, lower: Axes, info: TrialsInfo) -> None:
    """Widen the panels for the labels of the best trial and of those that failed."""
    # Throughput is a ratio scale: from zero, twice as high is twice as fast.
    by_throughput = info.objective.name == "samples_per_second"
    upper.set_ylim(bottom=0, top=upper.get_ylim()[1] * (1.25 if by_throughput else 1.08))
    upper.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    bottom, top = lower.get_ylim()
    span = top - bottom
    lower.set_ylim(bottom - (0.25 if info.incomplete else 0.12) * span, top + 0.14 * span)
    values = [point.quality.value for point in info.completed if point.quality]
    if info.quality and is_fraction(info.quality.name) and values and max(values) <= 1:
        bottom = max(lower.get_ylim()[0], -1e-9)
        lower.set_yticks([tick for tick in lower.get_yticks() if bottom <= tick < 1 + 1e-9])


def _label_best(upper: Axes, lower: Axes, info: TrialsInfo, best: TrialPoint) -> None:
    """Ring the best trial in both panels; label it in the objective's, where there is room."""
    for panel, estimate in ((upper, best.samples_per_second), (lower, best.quality)):
        panel.axvline(best.place, color=MUTED, linewidth=0.8, linestyle=":", zorder=0.5)
        if estimate:
            ring(panel, best.place, estimate.value)
    by_throughput = info.objective.name == "samples_per_second"
    panel, estimate = (upper, best.samples_per_second) if by_throughput else (lower, best.quality)
    if estimate is None:
        return
    above = by_throughput or info.objective.direction == "max"
    low, high = panel.get_xlim()
    share = math.log(best.place / low) / math.log(high / low)
    side = "left" if share < 0.25 else "right" if share > 0.75 else "center"
    text, characters = best_label(info), round(width_share(panel) * _LABEL_CHARACTERS)
    if len(text) > characters:
        # The number in a line of its own.
        words, _, number = text.rpartition(": ")
        lines = textwrap.wrap(f"{words}:", characters, break_long_words=False)
        if len(lines) > _LABEL_LINES:
            lines = [*lines[: _LABEL_LINES - 1], "…:"]
        text = "\n".join((*(shortened(line, characters) for line in lines), number))
    annotate(
        panel,
        text,
        (best.place, estimate.value),
        ({"left": -6, "right": 6, "center": 0}[side], 11 if above else -11),
        ha=side,
        va="bottom" if above else "top",
        bold=True,
    )


def _notes(info: TrialsInfo) -> list[str]:
    """Say what the bars are, and why points are not joined."""
    found = info.spreads
    notes = []
    if found.intervals:
        notes.append("Bars: 95 % interval of the mean over executions.")
    if found.pairs:
        notes.append("Two executions a trial: the mean without bars, too few for an interval.")
    if found.single:
        who = "Trials with one execution" if notes else "One execution a trial"
        bars = (
            "bars above are quartiles of the timing windows, no bars below."
            if found.quartiles
            else "no bars, because training was too short to time it more than once."
        )
        notes.append(f"{who}: {bars}")
    if info.completed and not all(one.joined for one in info.series):
        combinations = len({point.settings for point in info.points})
        if info.differ and combinations > MOST_SERIES:
            why = f"the trials also differ in {listed(info.differ)} ({combinations:,} combinations)"
        else:
            why = "several trials have the same batch size and settings"
        notes.append(f"Points are not joined: {why}.")
    return notes
