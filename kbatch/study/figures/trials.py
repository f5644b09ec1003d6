"""The figure of the trials: throughput and model quality by batch size."""

import itertools
import math
import textwrap
from typing import NamedTuple

from matplotlib.axes import Axes

from kbatch.document.numbers import format_number, join_words, pluralize
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import batch_axis
from kbatch.study.decision_page import sizes_text
from kbatch.study.figures import common
from kbatch.study.figures.common import (
    PlottedEstimate,
    bars_text,
    metric_estimate,
    throughput_estimate,
)
from kbatch.study.names import caption, metric_words, missing_text, outcome, trial_names
from kbatch.study.study import Study, as_compared, refuse_empty
from kbatch.study.trial import Objective

HEIGHT_IN = 5.4


class TrialPoint(NamedTuple):
    """One trial; an unknown number is None."""

    trial_id: str
    batch_size: int
    place: float  # Where it is drawn on the batch axis, beside trials of other series.
    settings: tuple[str, ...]  # What it has where trials differ, such as `"units=8"`.
    status: str
    outcome: str
    samples_per_second: PlottedEstimate | None
    quality: PlottedEstimate | None


class TrialsInfo(NamedTuple):
    points: tuple[TrialPoint, ...]
    series: tuple[common.Series, ...]
    quality: Objective | None  # The metric of the lower panel.
    named: TrialPoint | None  # The trial that the study decides for.
    objective: Objective
    notes: tuple[str, ...]

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Every batch size once, ascending, failed ones included."""
        return tuple(sorted({point.batch_size for point in self.points}))

    @property
    def completed(self) -> tuple[TrialPoint, ...]:
        return tuple(point for point in self.points if point.status == "completed")

    @property
    def incomplete(self) -> tuple[TrialPoint, ...]:
        """The trials that ran out of memory, failed, or did not end."""
        return tuple(point for point in self.points if point.status != "completed")

    @property
    def by_throughput(self) -> bool:
        """Whether the fastest trial is the best one."""
        return self.objective.name == "samples_per_second"


def trials_info(study: Study) -> TrialsInfo:
    refuse_empty(study)
    study = as_compared(study)
    quality, names, decided = study.quality_metric, trial_names(study.trials), study.decide()
    series = common.trial_series(study.trials, names)
    # Trials of different series stand side by side on the batch axis: in powers of two, together
    # at most a quarter of the distance between batch sizes.
    sizes = sorted({trial.batch_size for trial in study.trials})
    gaps = [math.log2(high / low) for low, high in itertools.pairwise(sizes)]
    distance = min(0.12, 0.25 * min(gaps, default=1) / len(series))
    dodges = {
        trial_id: 2 ** (distance * (index - (len(series) - 1) / 2))
        for index, one in enumerate(series)
        for trial_id in one.trial_ids
    }
    points = {
        trial.trial_id: TrialPoint(
            trial_id=trial.trial_id,
            batch_size=trial.batch_size,
            place=trial.batch_size * dodges[trial.trial_id],
            settings=names.settings(trial),
            status=trial.status,
            outcome=outcome(trial),
            samples_per_second=throughput_estimate(trial),
            quality=metric_estimate(trial, quality.name) if quality else None,
        )
        for trial in study.trials
    }
    notes = [bars_text(study.trials, of_metric=True)]
    if decided.tied:
        tied = sizes_text(decided.tied, sorted((*decided.tied, *decided.worse)))
        notes.append(f"Not told apart from the best: {tied}.")
    completed = [trial for trial in study.trials if trial.status == "completed"]
    if completed and not all(one.joined for one in series):
        combinations, differ = len({p.settings for p in points.values()}), names.hyperparameters
        why = "several trials have the same batch size and settings"
        if differ and combinations > common.MOST_SERIES:
            why = f"the trials also differ in {join_words(differ)} ({combinations:,} combinations)"
        notes.append(f"Points are not joined: {why}.")
    named = points[decided.trial.trial_id] if decided.trial else None
    objective = study.trials[0].objective
    return TrialsInfo(tuple(points.values()), series, quality, named, objective, tuple(notes))


def named_label(info: TrialsInfo) -> str:
    point = info.named
    if point is None:
        return ""
    estimate = point.samples_per_second if info.by_throughput else point.quality
    unit = " samples/s" if info.by_throughput else ""
    number = f": {format_number(estimate.value, 4)}{unit}" if estimate else ""
    return f"take {', '.join((f'batch size {point.batch_size:,}', *point.settings))}{number}"


def alt_text(info: TrialsInfo) -> str:
    sizes = info.batch_sizes
    between = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    words = metric_words(info.quality.name) if info.quality else "quality"
    sentences = [
        f"Two charts of {pluralize(len(info.points), 'trial')} over batch size, {between}, on a "
        f"logarithmic axis: throughput above, {words} below."
    ]
    if len(info.series) > 1:
        sentences.append(f"A series each for {join_words(one.label for one in info.series)}.")
    for name, unit, field in (
        ("Throughput", " samples/s", "samples_per_second"),
        (words[0].upper() + words[1:], "", "quality"),
    ):
        measured = [(e.value, p.batch_size) for p in info.completed if (e := getattr(p, field))]
        if measured:
            low, low_size = min(measured)
            high, high_size = max(measured, key=lambda pair: pair[0])
            sentences.append(
                f"{name} lies between {format_number(low)}{unit} at batch size {low_size:,} and "
                f"{format_number(high)}{unit} at {high_size:,}."
            )
    if info.named:
        sentences.append(f"Marked: {named_label(info)}.")
    if info.incomplete:
        marked = join_words(
            f"batch size {p.batch_size:,} ({', '.join((*p.settings, p.outcome))})"
            for p in info.incomplete
        )
        sentences.append(f"Marked as not completed: {marked}.")
    return " ".join(sentences)


def plot_trials(study: Study, ax: Axes | None = None) -> Axes:
    """Plot samples/s and the quality of the model by batch size, one point a trial.

    The upper panel holds the throughput, the lower one the validation accuracy or whatever
    `study.quality_metric` is. Trials that failed or ran out of memory are marked at the
    bottom edge, and the trial that `study.decide()` names is labelled. Bars are intervals over
    executions; of a single execution those over its timing windows and validation examples.

    Example:

    >>> study = kbatch.load_study("results/digits")
    >>> kbatch.plot_trials(study).figure.savefig("trials.png")

    Args:
        study: A study, from `load_study`.
        ax: Axes to draw on, whose place several panels take; a new figure if None.

    Raises:
        ValueError: If the study is empty, with what to run.
    """
    info = trials_info(study)
    upper, lower = canvas.panels(ax, HEIGHT_IN, (1, 1))
    upper.set_label(alt_text(info))
    batch_axis(lower, info.batch_sizes, common.BATCH_LABEL)
    _draw_series(upper, info, "samples_per_second", common.none_completed(study))
    _draw_series(lower, info, "quality", common.none_completed(study))
    failed: dict[int, list[str]] = {}
    for point in info.incomplete:
        failed.setdefault(point.batch_size, []).append(point.outcome)
    for panel in (upper, lower) if failed else ():
        # All at once: of thousands of trials hundreds may be without a result.
        draw.missing(panel, *(point.place for point in info.incomplete))
    # Words beside each other that have no room stand below.
    crowded = 8 * len(failed) > canvas.label_room(lower)
    for size, outcomes in failed.items() if not crowded else ():
        draw.reason(lower, size, ",\n".join(dict.fromkeys(outcomes)))
    # Throughput may be unknown where quality is not, and the other way round.
    fuller = max(upper, lower, key=lambda panel: len(panel.get_legend_handles_labels()[1]))
    canvas.write_title(upper, study.name, columns=3, series_of=fuller)
    upper.set_ylabel("Throughput\n(samples/s)")
    lower.set_ylabel("Quality metric")
    if info.completed:
        # Throughput is a ratio scale: from zero, twice as high is twice as fast. The lower panel
        # gets room for the words below those that failed.
        upper.set_ylim(bottom=0, top=1.08 * upper.get_ylim()[1])
        upper.yaxis.set_major_formatter("{x:,.0f}")
        bottom, top = lower.get_ylim()
        below = 0.25 if info.incomplete else 0.12
        lower.set_ylim(bottom - below * (top - bottom), top + 0.08 * (top - bottom))
    if info.quality:
        values = [point.quality.value for point in info.completed if point.quality]
        common.quality_axis(lower, info.quality, values)
    if info.named:
        _label_named(upper, lower, info, info.named)
    alarm = common.incomplete_text(study) if crowded else ""
    alarm = f"{alarm} {missing_text(study.missing)}".strip()
    conditions = caption(as_compared(study).conditions)
    canvas.write_caption(lower, conditions, *info.notes, alarm=alarm)
    return upper


def _draw_series(panel: Axes, info: TrialsInfo, field: str, nothing: str) -> None:
    """Draw what was measured, or say why there is nothing."""
    for index, series in enumerate(info.series):
        members = set(series.trial_ids)
        found = [
            (point.place, estimate)
            for point in info.completed
            if point.trial_id in members and (estimate := getattr(point, field))
        ]
        if found:
            places, estimates = zip(*found, strict=True)
            values, bars = zip(*estimates, strict=True)
            look = {"label": series.label, "joined": series.joined}
            draw.series(panel, index, places, values, bounds=bars, **look)
    if not panel.lines:
        text = "n/a (not measured in any trial)" if info.completed else nothing
        canvas.write_message(panel, text)


def _label_named(upper: Axes, lower: Axes, info: TrialsInfo, named: TrialPoint) -> None:
    """Ring the trial in both panels; label it in the objective's, on its line above all points."""
    for panel, estimate in ((upper, named.samples_per_second), (lower, named.quality)):
        draw.guide(panel, named.place)
        if estimate:
            draw.ring(panel, named.place, estimate.value)
    panel, field = (upper, "samples_per_second") if info.by_throughput else (lower, "quality")
    if getattr(named, field) is None:
        return
    low, high = panel.get_xlim()
    at = math.log(named.place / low) / math.log(high / low)
    side = "left" if at < 0.25 else "right" if at > 0.75 else "center"
    right_pt = {"left": -6, "right": 6, "center": 0}[side]
    text = named_label(info)
    characters = round(canvas.width_share(panel) * 44)  # In a line.
    if len(text) > characters:
        words, _, number = text.rpartition(": ")
        lines = textwrap.wrap(f"{words}:", characters, max_lines=5, placeholder=" …:")
        text = "\n".join((*lines, number))
    height_pt = 72 * canvas.figure_of(panel).get_figheight() * panel.get_position().height
    share = min(0.6, 1.25 * canvas.TEXT_PT * (1.5 + text.count("\n")) / height_pt)
    bottom, top = panel.get_ylim()
    panel.set_ylim(top=bottom + (top - bottom) / (1 - share))
    place, edge = (named.place, 1), panel.get_xaxis_transform()
    draw.text(panel, text, place, (right_pt, -2), ha=side, va="top", bold=True, xycoords=edge)
