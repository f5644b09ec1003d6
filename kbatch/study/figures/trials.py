"""The figure of the trials: throughput and model quality by batch size."""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes

from kbatch.analysis.intervals import Estimate
from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.page.numbers import format_number, join_words, pluralize, setting
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.canvas import INK, MUTED, series_style
from kbatch.study.comparison import as_compared, rates_of_settings, refuse_empty
from kbatch.study.decision import FAR_RATE, starting_rate
from kbatch.study.decision_page import judged_part, sizes_text
from kbatch.study.figures import common
from kbatch.study.names import at_most, differing, outcome, setting_texts, value_of
from kbatch.study.trial import Objective, TrialRecord

if TYPE_CHECKING:
    from kbatch.study.study import Study

HEIGHT_IN = 5.4
_MOST_SERIES = 6
# A size lies outside the axis that is so many times as far from the best as the median is.
_FAR, _LEAST_SPREAD = 10, 0.05


def plot_trials(study: "Study", ax: Axes | None = None) -> Axes:
    """Plot samples/s and the quality of the model by batch size.

    The upper panel holds the throughput, the lower one the validation accuracy or whatever
    `study.quality_metric` is. Of a search of learning rates the best one of each size is shown, and
    the others as grey dots. Trials that failed or ran out of memory are marked at the bottom edge,
    and the trial that `study.decide()` names is labelled. Bars are intervals over executions; of a
    single execution those over its timing windows and validation examples. Hollow, without a line,
    is a size that a race tried only at a rate that is far off, and a trial that runs.

    Example:

    >>> study = kbatch.load_study("results/digits")
    >>> kbatch.plot_trials(study).figure.savefig("trials.png")

    Args:
        study: A study, from `load_study`.
        ax: Axes to draw on, whose place several panels take; a new figure if None.

    Raises:
        ValueError: If the study is empty, with what to run.
    """
    return draw_trials(study, ax)


def draw_trials(study: "Study", ax: Axes | None, *, running: str | None = None) -> Axes:
    """Draw the figure; the trial that runs is a hollow mark."""
    refuse_empty(study)
    quality, decided, trials = study.quality_metric, study.decide(), as_compared(study.trials)
    named = decided.trial
    shown = [rates[0] for rates in rates_of_settings(trials)]
    names = differing(study.trials)
    series = _series(shown, names)
    places = _places(series, shown)
    completed = [trial for trial in shown if trial.status == "completed"]

    def quality_of(trial: TrialRecord) -> Estimate[float] | None:
        # The value that the table of the decision shows.
        return judged_part(decided, trial).metric(quality.name) if quality else None

    # Of these nothing is known at a rate that suits them: no line goes through them.
    far = {trial.trial_id for trial, why in decided.left_out if why == FAR_RATE}
    upper, lower = canvas.panels(ax, HEIGHT_IN, (1, 1))
    batch_axis(lower, [trial.batch_size for trial in shown], common.BATCH_LABEL)
    measured, unjoined = {upper: lambda trial: trial.throughput, lower: quality_of}, False
    for panel, measure in measured.items():
        for index, (label, members) in enumerate(series.items()):
            members = [trial for trial in members if trial.status == "completed"]
            joined = label is not None and len({t.batch_size for t in members}) == len(members)
            found = {t.trial_id: e for t in members if (e := measure(t))}
            near = {each: e for each, e in found.items() if each not in far}
            if near:
                at, values = [places[each] for each in near], [e.value for e in near.values()]
                bars = [e.ends for e in near.values()]
                look = {"label": label or "", "joined": joined}
                draw.series(panel, index, at, values, bounds=bars, **look)
                unjoined |= not joined
            for each in sorted(found.keys() & {running, *far}):
                mark = [places[each]], [found[each].value]
                draw.points(panel, *mark, *series_style(index), hollow=True, zorder=3)
        if not panel.lines:
            nothing = "n/a (not measured in any trial)"
            canvas.write_message(panel, nothing if completed else common.none_completed(study))
    alarm = _mark_incomplete(upper, lower, study, shown, places)
    # Throughput may be unknown where quality is not, and the other way round.
    fuller = max(upper, lower, key=lambda panel: len(panel.get_legend_handles_labels()[1]))
    canvas.write_title(upper, study.name, columns=3, series_of=fuller)
    upper.set_ylabel("Throughput\n(samples/s)")
    lower.set_ylabel("Quality metric")
    outside = others = ""
    if completed:
        # Throughput is a ratio scale: from zero, twice as high is twice as fast.
        upper.set_ylim(bottom=0, top=1.08 * upper.get_ylim()[1])
        upper.yaxis.set_major_formatter("{x:,.0f}")
        outside = _end_axis(lower, completed, quality)
        if quality:
            values = [e.value for trial in completed if (e := quality_of(trial))]
            common.quality_axis(lower, quality, values)
        if len(completed) < len(shown):  # Room for the words below those that failed.
            bottom, top = lower.get_ylim()
            lower.set_ylim(bottom - 0.25 * (top - bottom), top)
        others = _draw_other_rates(lower, trials, shown, quality)
    if named is not None:
        place, characters = places[named.trial_id], round(canvas.width_share(lower) * 60)
        label = textwrap.fill(named_label(study), characters, max_lines=5, placeholder=" …")
        title = {"fontsize": canvas.TEXT_PT, "color": INK, "fontweight": "bold", "pad": 4}
        lower.set_title(label, loc="left", parse_math=False, **title)
        for panel, measure in measured.items():
            draw.guide(panel, place)
            if estimate := measure(named):
                draw.ring(panel, place, estimate.value)
    tied = apart = ""
    if unjoined:
        differ = f" in {join_words(names)}" if names else ""
        apart = f"Points are not joined: trials of a batch size differ{differ}."
    if decided.tied:
        sizes = sizes_text(decided.tied, sorted({trial.batch_size for trial in study.trials}))
        tied = f"Not told apart from the best: {sizes}."
    notes = (tied, others, outside, common.bars_text(completed), apart)
    common.write_conditions((upper, lower), study, *notes, alarm=alarm)
    return upper


def _series(
    trials: Sequence[TrialRecord], names: Sequence[str]
) -> dict[str | None, list[TrialRecord]]:
    """Group trials by their settings; None is the name of all, where there are too many."""

    def order(trial: TrialRecord) -> list[tuple[int, float, str]]:
        """Sort by numbers, then by texts."""
        values = [value_of(trial, name) for name in names]
        return [(0, v, "") if isinstance(v, (int, float)) else (1, 0, str(v)) for v in values]

    found: dict[str | None, list[TrialRecord]] = {}
    for trial in sorted(trials, key=order):
        found.setdefault(", ".join(setting_texts(trial, names)), []).append(trial)
    return found if len(found) <= _MOST_SERIES else {None: [*trials]}


def _places(
    series: Mapping[str | None, Sequence[TrialRecord]], trials: Sequence[TrialRecord]
) -> dict[str, float]:
    """Return where each trial is drawn: those of different series stand side by side."""
    # In powers of two, together at most a quarter of the distance between batch sizes.
    sizes = sorted({trial.batch_size for trial in trials})
    gaps = [math.log2(high / low) for low, high in itertools.pairwise(sizes)]
    distance = min(0.12, 0.25 * min(gaps, default=1) / len(series))
    moved = {
        trial.trial_id: 2 ** (distance * (index - (len(series) - 1) / 2))
        for index, members in enumerate(series.values())
        for trial in members
    }
    return {trial.trial_id: trial.batch_size * moved[trial.trial_id] for trial in trials}


def _mark_incomplete(
    upper: Axes,
    lower: Axes,
    study: "Study",
    shown: Sequence[TrialRecord],
    places: Mapping[str, float],
) -> str:
    """Mark what has no result, with the reasons; return these where there is no room for them."""
    failed: dict[int, list[str]] = {}
    incomplete = [trial for trial in shown if trial.status != "completed"]
    for trial in incomplete:
        failed.setdefault(trial.batch_size, []).append(outcome(trial))
    for panel in (upper, lower) if failed else ():
        # All at once: of thousands of trials hundreds may be without a result.
        draw.missing(panel, *(places[trial.trial_id] for trial in incomplete))
    if 8 * len(failed) > canvas.label_room(lower):
        return common.incomplete_text(study)
    for size, outcomes in failed.items():
        draw.reason(lower, size, ",\n".join(dict.fromkeys(outcomes)))
    return ""


def _end_axis(panel: Axes, completed: Sequence[TrialRecord], quality: Objective | None) -> str:
    """End the axis where the sizes do that matter, and say which lie outside."""
    sign = 1 if quality and quality.direction == "max" else -1
    values = [
        (sign * value, trial.batch_size)
        for trial in completed
        if quality and (value := trial.metrics.get(quality.name)) is not None
    ]
    best, _ = max(values, default=(0.0, 0))
    spread = best - median(value for value, _ in values) if values else 0.0
    least = best - _FAR * max(spread, _LEAST_SPREAD * abs(best))
    outside = [(value, size) for value, size in values if value < least]
    if not outside:
        return ""
    inside = min(value for value, _ in values if value >= least)
    low, high = sorted((sign * best, sign * inside))
    margin = 0.05 * ((high - low) or abs(high))
    panel.set_ylim(low - margin, high + margin)
    named = [f"{size:,} ({format_number(sign * value)})" for value, size in outside]
    return f"Outside the axis: batch size {join_words(at_most(named))}."


def _draw_other_rates(
    panel: Axes,
    trials: Sequence[TrialRecord],
    shown: Sequence[TrialRecord],
    quality: Objective | None,
) -> str:
    """Draw the learning rates that are not the best of their size, and say what they are."""
    best = {trial.trial_id for trial in shown}
    points = [
        (trial.batch_size, value)
        for trial in trials
        if trial.trial_id not in best and trial.status == "completed"
        if quality and (value := trial.metrics.get(quality.name)) is not None
    ]
    if not points:
        return ""
    low, high = panel.get_ylim()
    sizes, values = zip(*points, strict=True)
    panel.plot(sizes, values, ".", color=MUTED, alpha=0.6, markersize=5, zorder=1)
    panel.set_ylim(low, high)
    hidden = sum(not low <= value <= high for value in values)
    where = f", {hidden:,} of them outside the axis" if hidden else ""
    return f"Grey: {pluralize(len(points), 'trial')} at other learning rates{where}."


def named_label(study: "Study") -> str:
    """Write what the decision names, with its throughput or quality."""
    decided, quality = study.decide(), study.quality_metric
    trial: Any = decided.trial
    parts = [f"batch size {trial.batch_size:,}", *setting_texts(trial, differing(study.trials))]
    if FACTOR_NAME in trial.hyperparameters and (rate := starting_rate(trial)):
        parts.append(f"learning rate {setting(rate)}")
    text = f"take {', '.join(parts)}"
    if trial.objective.name == "samples_per_second":
        return f"{text}: {format_number(trial.objective_value, 4)} samples/s"
    found = quality and judged_part(decided, trial).metric(quality.name)
    return f"{text}: {format_number(found.value, 4)}" if found else text
