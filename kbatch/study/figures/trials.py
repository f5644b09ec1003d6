"""The figure of the trials: throughput and model quality by batch size."""

import dataclasses
from collections.abc import Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from kbatch.analysis.intervals import Estimate
from kbatch.analysis.learning_rate import FACTOR_NAME
from kbatch.page.numbers import at_most, format_number, join_words, pluralize, setting
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import MUTED, figure_bytes, series_style
from kbatch.plotting.draw import batch_axis
from kbatch.study.compared_trials import as_compared, differing, is_complete, setting_texts
from kbatch.study.comparison import Studies, studies_of
from kbatch.study.decision import speed_of
from kbatch.study.figures import common
from kbatch.study.page import LEFT_OUT
from kbatch.study.study import Study
from kbatch.study.trial import Objective
from kbatch.training.metrics import metric_words

__all__ = ["draw_live", "draw_trials", "figure_bytes", "plot_trials"]

HEIGHT_IN = 4.7
# The axis leaves out a size that is more than `_FAR` times as far from the best as the median size.
# The distance of the median counts as at least `_LEAST_SPREAD` of the best value.
_FAR, _LEAST_SPREAD = 10, 0.05
# Distance between the marks of several studies at a batch size, in octaves.
_ASIDE = 0.07


def plot_trials(studies: Studies, ax: Axes | None = None, *, caption: bool = True) -> Axes:
    """Plot samples/s and the quality of the model by batch size.

    The upper panel shows the samples/s of `study.table()`. The lower one shows
    `study.quality_metric`, such as the validation accuracy. The line joins the trial of each batch
    size that `study.decide()` compares, or the best one. Grey dots are other trials. Failed trials
    have a mark at the bottom edge, and the answer has a label. Bars are intervals over training
    runs, or over the timing windows and validation examples of a single run. A mark is hollow if
    the trial still runs, is a short run, or trained only at a learning rate far from the best one.

    If there are several studies, each has a line and a ring at its answer, and the legend names
    both. Other trials are left out.

    Example:

    >>> study = kbatch.load_study("results/search")
    >>> kbatch.plot_trials(study).figure.savefig("trials.png")
    >>> kbatch.plot_trials({"Adam": adam, "SGD": sgd}).figure.savefig("optimizers.png")

    Args:
        studies: A `kbatch.Study`, or several with one objective as a list or as a dict of names.
        ax: `matplotlib.axes.Axes` whose place the panels take. If None, make a new figure.
        caption: Boolean. Whether to write a caption below a new figure. Default: True.

    Returns:
        The upper Axes.

    Raises:
        ValueError: If a study is empty, or if the studies do not fit together.
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
    """Draw the figure. The trial with the id `running` has a hollow mark."""
    several = len(studies) > 1
    quality = next(filter(None, (study.quality_metric for study in studies)), None)
    upper, lower = canvas.panels(ax, HEIGHT_IN, (1, 1))
    all_trials = [trial for study in studies for trial in as_compared(study.trials)]
    batch_axis(lower, [trial.batch_size for trial in all_trials], common.BATCH_LABEL)
    values: list[tuple[str, Estimate[float]]] = []
    others: dict[Axes, list[tuple[float, float, bool]]] = {}
    rings, with_bars, marks, empty = [], [], [], [upper, lower]
    for number, study in enumerate(studies):
        decision, trials = study.decide(), as_compared(study.trials)
        completed = [trial for trial in trials if trial.status == "completed"]
        rates = {t.trial_id: speed_of(decision, t)[1] for t in completed}
        qualities = {
            t.trial_id: common.quality_of(decision.as_judged(t), quality) if quality else None
            for t in completed
        }
        # The line leaves out sizes that did not train at a suitable learning rate.
        far = [trial.trial_id for trial in common.far_off(study)]
        short = {trial.trial_id for trial in completed if not is_complete(trial.last)}
        complete = [trial for trial in completed if trial.trial_id not in short]
        # Short runs are shown until a run is complete.
        shown = [*common.one_of_each_size(study, complete).values()] or completed
        chosen = {trial.trial_id for trial in shown}
        hollow_ids = {running, *far, *chosen & short}
        answer_id = decision.trial and decision.trial.trial_id
        # Marks of several studies are side by side, so that bars do not cover each other.
        aside = 2 ** (_ASIDE * (number - (len(studies) - 1) / 2))
        for panel, estimates in ((upper, rates), (lower, qualities)):
            known = [(t, value) for t in completed if (value := estimates[t.trial_id])]
            empty = [other for other in empty if other is not panel or not known]
            on_line = chosen.difference(far, short)
            line = [(t.batch_size * aside, value) for t, value in known if t.trial_id in on_line]
            if line:
                draw.series(panel, number, line, label="")
            look = series_style(number)
            for trial, value in known:
                place = trial.batch_size * aside, value.value
                if trial.trial_id in hollow_ids:
                    draw.points(panel, place[:1], place[1:], *look, hollow=True, zorder=3)
                if trial.trial_id == answer_id:
                    rings.append((panel, *place))
                if trial.trial_id not in chosen and not several:
                    others.setdefault(panel, []).append((*place, trial.trial_id in short))
        suffix = f" of {study.name}" if several else ""
        values += [(f"{t.batch_size:,}{suffix}", v) for t in shown if (v := qualities[t.trial_id])]
        with_bars += [decision.as_judged(t) for t in shown if t.trial_id not in short]
        if hollow_ids - {running} and running is None:
            marks.append(f"Hollow: {'short runs' if chosen & short else LEFT_OUT['far_rate']}.")
        if missing := {t.batch_size for t in completed} - {t.batch_size for t in shown}:
            sizes = join_words(at_most([f"{size:,}" for size in sorted(missing)]))
            marks.append(f"No complete run: batch size {sizes}{suffix}.")
    failed = [(t.batch_size, t.outcome) for t in all_trials if t.status != "completed"]
    labelled = draw.mark_failed((upper, lower), failed) and not several
    of = f"throughput{f' and {metric_words(quality.name)}' if quality else ''} by batch size"
    upper.set_ylabel("Throughput\n(samples/s)")
    common.write_title(upper, title or of.capitalize(), studies)
    lower.set_ylabel("Quality metric")
    outside = grey = ""
    all_failed = len(failed) == len(all_trials)
    if not all_failed:
        # From zero, twice the height is twice the speed.
        greys = [value for _, value, _ in others.get(upper, ())]
        upper.set_ylim(bottom=0, top=1.08 * max([upper.get_ylim()[1], *greys]))
        upper.yaxis.set_major_formatter("{x:,.0f}")
        if quality:
            outside = _end_axis(lower, values, quality)
            shown_values = [value.value for _, value in values]
            common.quality_axis(lower, quality, shown_values, judged=all_trials[0].objective)
        if failed:  # Room for the reasons below the marks.
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
        canvas.write_subtitle(lower, named_label(studies[0]))
    marks = [common.RINGS, *marks] if several else marks
    of += f": {title}" if title else ""  # The title of a live figure says how far the search is.
    notes = (" ".join(dict.fromkeys(marks)), grey, outside, common.bars_text(with_bars, quality))
    alarm = "" if labelled else None
    common.write_conditions((upper, lower), studies, *notes, alarm=alarm, caption=caption, of=of)
    return upper


def _end_axis(
    panel: Axes, values: Sequence[tuple[str, Estimate[float]]], quality: Objective
) -> str:
    """End the axis at the values near the best one, and name the sizes outside."""
    sign = quality.sign
    signed = [sign * value.value for _, value in values]
    best = max(signed, default=0.0)
    spread = best - median(signed) if signed else 0.0
    least = best - _FAR * max(spread, _LEAST_SPREAD * abs(best))
    outside = [(size, value) for size, value in values if sign * value.value < least]
    if not outside:
        return ""
    inside = [value for _, value in values if sign * value.value >= least]
    ends = [end for value in inside for end in value.ends or (value.value, value.value)]
    margin = 0.05 * ((max(ends) - min(ends)) or abs(best))
    panel.set_ylim(min(ends) - margin, max(ends) + margin)
    names = [f"{size} ({format_number(value.value)})" for size, value in outside]
    return f"Outside the axis: batch size {join_words(at_most(names))}."


def _draw_others(panel: Axes, points: Sequence[tuple[float, float, bool]]) -> str:
    """Draw the trials that are not chosen for their size, and count them."""
    if not points:
        return ""
    low, high = panel.get_ylim()
    for marker, is_short in ((".", False), ("o", True)):
        drawn = [(s, v) for s, v, short in points if short == is_short and low <= v <= high]
        look = {"color": MUTED, "alpha": 0.6, "fillstyle": "none" if is_short else "full"}
        look["clip_on"] = False  # A mark at the edge is whole.
        if drawn:
            panel.plot(*zip(*drawn, strict=True), marker, markersize=5, zorder=1, **look)
    panel.set_ylim(low, high)
    hidden = sum(not low <= value <= high for _, value, _ in points)
    short = sum(is_short for *_, is_short in points)
    counts = (short, "short (hollow)"), (hidden, "outside the plot")
    kinds = "".join(f", {count:,} {kind}" for count, kind in counts if count)
    others = pluralize(len(points), "other trial")
    line = "The line joins the trials that are compared, one for each batch size."
    return f"{line} Grey: {others}{kinds}."


def named_label(study: Study) -> str:
    """Name the answer, with its throughput or quality, and whether it is certified."""
    decision, quality = study.decide(), study.quality_metric
    trial: Any = decision.trial
    parts = [f"batch size {trial.batch_size:,}", *setting_texts(trial, differing(study.trials))]
    if FACTOR_NAME in trial.hyperparameters and (rate := decision.learning_rate):
        parts.append(f"learning rate {setting(rate)}")
    verb = "keep" if decision.page.sentences[0].startswith("Keep") else "take"
    text, value = f"{verb} {', '.join(parts)}", quality and common.quality_of(trial, quality)
    if trial.objective.name == "samples_per_second":
        text += f": {format_number(trial.judged_value, 4)} samples/s"
    elif value:
        text += f": {format_number(value.value, 4)}"
    return f"{text}{common.doubt(decision)}"


def draw_live(study: Study, *, running: str | None, status: str) -> Axes:
    """Draw the trials of a search so far. The running trial has a hollow mark after one epoch."""
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
        panel.set_label("An empty chart, because no epoch of the search has ended yet.\n")
        return panel
    shown = Study(study.name, tuple(trials), study.search)
    return draw_trials([shown], canvas.detached_axes(HEIGHT_IN), running=running, title=status)
