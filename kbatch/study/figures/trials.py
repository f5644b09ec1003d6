"""The figure of the trials: throughput and model quality by batch size."""

import dataclasses
import textwrap
from collections.abc import Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from kbatch.analysis.intervals import Estimate
from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.page.numbers import at_most, format_number, join_words, pluralize, setting
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import INK, MUTED, figure_bytes, series_style
from kbatch.plotting.draw import batch_axis
from kbatch.study.compared_trials import (
    as_compared,
    differing,
    is_complete,
    setting_texts,
    sizes_text,
)
from kbatch.study.comparison import Studies, studies_of
from kbatch.study.decision import Decision
from kbatch.study.figures import common
from kbatch.study.page import LEFT_OUT
from kbatch.study.study import Study
from kbatch.study.trial import Objective, TrialRecord
from kbatch.training.metrics import metric_words

__all__ = ["draw_live", "draw_trials", "figure_bytes", "plot_trials"]

HEIGHT_IN = 4.7
# A size lies outside the axis that is so many times as far from the best as the median is.
_FAR, _LEAST_SPREAD = 10, 0.05
# Between the marks that several studies have at a batch size, in octaves.
_ASIDE = 0.07


def plot_trials(studies: Studies, ax: Axes | None = None, *, caption: bool = True) -> Axes:
    """Plot samples/s and the quality of the model by batch size.

    The upper panel holds the throughput, the lower one the validation accuracy or whatever
    `study.quality_metric` is. The line joins the trials that `study.decide()` compares, or the best
    of a size. Grey dots are other trials. Failed trials are marked at the bottom edge, and the
    trial that the decision names is labelled. Bars are intervals over training runs, or over the
    timing windows and validation examples of a single run. A mark is hollow if the trial still
    runs, is a short run, or trained only at a learning rate far from the best one.

    Several studies share both scales. Each has a line and a ring at its answer, and the legend
    names both. Their marks stand side by side at each batch size. Other trials are left out.

    Example:

    >>> study = kbatch.load_study("results/search")
    >>> kbatch.plot_trials(study).figure.savefig("trials.png")
    >>> kbatch.plot_trials({"Adam": adam, "SGD": sgd}).figure.savefig("optimizers.png")

    Args:
        studies: A study, from `load_study`. Or several with one objective: a list, or a dict that
            names them.
        ax: Axes to draw on, whose place several panels take. If None, a new figure.
        caption: Whether to write at most two lines below a new figure.

    Raises:
        ValueError: If a study is empty, with what to run, or if the studies do not fit together.
    """
    return draw_trials(studies_of(studies), ax, caption=caption and ax is None)


def draw_trials(
    studies: Sequence[Study],
    ax: Axes | None,
    *,
    running: str | None = None,
    title: str = "",
    caption: bool = False,
) -> Axes:
    """Draw the figure; the trial that runs is a hollow mark."""
    several = len(studies) > 1
    quality = next(filter(None, (study.quality_metric for study in studies)), None)
    upper, lower = canvas.panels(ax, HEIGHT_IN, (1, 1))
    every = [trial for study in studies for trial in as_compared(study.trials)]
    batch_axis(lower, [trial.batch_size for trial in every], common.BATCH_LABEL)
    values: list[tuple[str, Estimate[float]]] = []
    others: dict[Axes, list[tuple[float, float, bool]]] = {}
    rings, barred, marks, empty = [], [], [], [upper, lower]
    for number, study in enumerate(studies):
        decided, trials = study.decide(), as_compared(study.trials)
        completed = [trial for trial in trials if trial.status == "completed"]

        def quality_of(trial: TrialRecord, decided: Decision = decided) -> Estimate[float] | None:
            # The value that the table of the decision shows.
            return common.quality_of(decided.as_judged(trial), quality) if quality else None

        # These did not train at a suitable rate, so no line goes through them.
        far = [trial.trial_id for trial in common.far_off(study)]
        short = {trial.trial_id for trial in completed if not is_complete(trial.last)}
        whole = [trial for trial in completed if trial.trial_id not in short]
        # Until a run is complete, the short runs are all that there is to show.
        shown = [*common.one_of_each_size(study, whole).values()] or completed
        chosen = {trial.trial_id for trial in shown}
        hollow_ids = {running, *far, *chosen & short}
        taken = decided.trial and decided.trial.trial_id
        aside = 2 ** (_ASIDE * (number - (len(studies) - 1) / 2))  # Bars would cover each other.
        for panel, measure in ((upper, lambda trial: trial.throughput), (lower, quality_of)):
            known = [(trial, found) for trial in completed if (found := measure(trial))]
            empty = [each for each in empty if each is not panel or not known]
            drawn = chosen.difference(far, short)
            joined = [(t.batch_size * aside, found) for t, found in known if t.trial_id in drawn]
            if joined:
                draw.series(panel, number, joined, label="")
            look = series_style(number)
            for trial, found in known:
                place = trial.batch_size * aside, found.value
                if trial.trial_id in hollow_ids:
                    draw.points(panel, place[:1], place[1:], *look, hollow=True, zorder=3)
                if trial.trial_id == taken:
                    rings.append((panel, *place))
                if trial.trial_id not in chosen and not several:
                    others.setdefault(panel, []).append((*place, trial.trial_id in short))
        who = f"{study.name} " if several else ""
        values += [(f"{who}{t.batch_size:,}", found) for t in shown if (found := quality_of(t))]
        barred += [decided.as_judged(t) for t in shown if t.trial_id not in short]
        if hollow_ids - {running} and running is None:
            marks.append(f"Hollow: {'short runs' if chosen & short else LEFT_OUT['far_rate']}.")
        if missing := {t.batch_size for t in completed} - {t.batch_size for t in shown}:
            marks.append(f"No complete run: batch size {who}{sizes_text(sorted(missing), trials)}.")
    failed = [(t.batch_size, t.outcome) for t in every if t.status != "completed"]
    said = draw.missing((upper, lower), failed) and not several
    words = f"Throughput and {metric_words(quality.name)}" if quality else "Throughput"
    common.write_title(upper, title or f"{words} by batch size", studies)
    upper.set_ylabel("Throughput\n(samples/s)")
    lower.set_ylabel("Quality metric")
    outside = grey = ""
    all_failed = len(failed) == len(every)
    if not all_failed:
        # Throughput is a ratio scale: from zero, twice as high is twice as fast.
        upper.set_ylim(bottom=0, top=1.08 * upper.get_ylim()[1])
        upper.yaxis.set_major_formatter("{x:,.0f}")
        if quality:
            outside = _end_axis(lower, values, quality)
            shown_values = [found.value for _, found in values]
            common.quality_axis(lower, quality, shown_values, judged=every[0].objective)
        if failed:  # Room for the words below those that failed.
            bottom, top = lower.get_ylim()
            lower.set_ylim(bottom - 0.25 * (top - bottom), top)
        for panel, points in others.items():
            grey = _draw_others(panel, points) or grey
    for panel in empty:
        nothing = "n/a (not measured in any trial)"
        canvas.write_message(panel, common.incomplete_text(studies) if all_failed else nothing)
    for panel, size, value in rings:
        draw.ring(panel, size, value)
        if not several:
            draw.guide(panel, size)
    if not several and studies[0].decide().trial is not None:
        characters = round(canvas.width_share(lower) * 60)
        label = textwrap.fill(named_label(studies[0]), characters, max_lines=5, placeholder=" …")
        look = {"fontsize": canvas.TEXT_PT, "color": INK, "fontweight": "bold", "pad": 4}
        lower.set_title(label, loc="left", y=1, parse_math=False, **look)
    if several:
        marks.insert(0, "Rings: the answers.")
    notes = (" ".join(dict.fromkeys(marks)), grey, outside, common.bars_text(barred, quality))
    alarm = "" if said else None
    common.write_conditions((upper, lower), studies, *notes, alarm=alarm, caption=caption)
    return upper


def _end_axis(
    panel: Axes, values: Sequence[tuple[str, Estimate[float]]], quality: Objective
) -> str:
    """End the axis where the sizes do that matter, and say which lie outside."""
    sign = quality.sign
    signed = [sign * found.value for _, found in values]
    best = max(signed, default=0.0)
    spread = best - median(signed) if signed else 0.0
    least = best - _FAR * max(spread, _LEAST_SPREAD * abs(best))
    outside = [(size, found) for size, found in values if sign * found.value < least]
    if not outside:
        return ""
    inside = [found for _, found in values if sign * found.value >= least]
    ends = [end for found in inside for end in found.ends or (found.value, found.value)]
    margin = 0.05 * ((max(ends) - min(ends)) or abs(best))
    panel.set_ylim(min(ends) - margin, max(ends) + margin)
    named = [f"{size} ({format_number(found.value)})" for size, found in outside]
    return f"Outside the axis: batch size {join_words(at_most(named))}."


def _draw_others(panel: Axes, points: Sequence[tuple[float, float, bool]]) -> str:
    """Draw the trials that are not those of their size, and say what they are."""
    if not points:
        return ""
    low, high = panel.get_ylim()
    for marker, is_short in ((".", False), ("o", True)):
        drawn = [(size, value) for size, value, short in points if short == is_short]
        look = {"color": MUTED, "alpha": 0.6, "fillstyle": "none" if is_short else "full"}
        if drawn:
            panel.plot(*zip(*drawn, strict=True), marker, markersize=5, zorder=1, **look)
    panel.set_ylim(low, high)
    hidden = sum(not low <= value <= high for _, value, _ in points)
    short = sum(is_short for *_, is_short in points)
    counts = (short, "short (hollow)"), (hidden, "outside the plot")
    kinds = "".join(f", {count:,} {kind}" for count, kind in counts if count)
    others = pluralize(len(points), "other trial")
    return f"Line: the compared trial of each batch size, or its best one. Grey: {others}{kinds}."


def named_label(study: Study) -> str:
    """Write what the decision names, its throughput or quality, and whether it is certified."""
    decided, quality = study.decide(), study.quality_metric
    trial: Any = decided.trial
    parts = [f"batch size {trial.batch_size:,}", *setting_texts(trial, differing(study.trials))]
    if FACTOR_NAME in trial.hyperparameters and (rate := decided.learning_rate):
        parts.append(f"learning rate {setting(rate)}")
    verb = "keep" if decided.page.sentences[0].startswith("Keep") else "take"
    text, found = f"{verb} {', '.join(parts)}", quality and common.quality_of(trial, quality)
    if trial.objective.name == "samples_per_second":
        text += f": {format_number(trial.judged_value, 4)} samples/s"
    elif found:
        text += f": {format_number(found.value, 4)}"
    return text if decided.certified else f"{text} (not certified)"


def draw_live(study: Study, *, running: str | None, status: str) -> Axes:
    """Draw the trials of a search so far, the one that runs as a hollow mark from an epoch on."""
    trials = []
    for trial in study.trials:
        measured = [e for e in trial.executions if e.epochs]
        if trial.trial_id == running and measured:
            completed = (dataclasses.replace(e, status="completed") for e in measured)
            trials.append(dataclasses.replace(trial, executions=tuple(completed)))
        elif trial.status not in ("running", "interrupted") or measured:
            trials.append(trial)
    if not trials:
        (panel,) = canvas.panels(canvas.detached_axes(HEIGHT_IN), HEIGHT_IN)
        canvas.write_title(panel, status)
        panel.set_xticks([])
        canvas.write_message(panel, "No epoch has ended yet.")
        panel.set_label("An empty chart: no epoch of the search has ended yet.\n")
        return panel
    shown = Study(study.name, tuple(trials), study.search)
    return draw_trials([shown], canvas.detached_axes(HEIGHT_IN), running=running, title=status)
