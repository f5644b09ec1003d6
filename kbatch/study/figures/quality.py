"""The figures of model quality: by learning rate, against throughput, and over training."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kbatch.analysis.intervals import Estimate
from kbatch.analysis.learning_rate import names_rate
from kbatch.page.numbers import setting
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import ALARM, MUTED, series_style, size_color
from kbatch.plotting.draw import plain_log_labels
from kbatch.study.compared_trials import (
    differing,
    is_complete,
    rates_of_settings,
    setting_texts,
    with_complete_runs,
)
from kbatch.study.comparison import Studies, studies_of
from kbatch.study.decision import speed_of
from kbatch.study.figures import common
from kbatch.study.study import Study, refuse_empty
from kbatch.study.trial import Objective, TrialRecord, mean_of, within_range

RATES_IN, PARETO_IN, CURVES_IN = 3.4, 3.4, 3.0
_STYLES = ("-", "--", "-.", ":")  # If there are more combinations of settings, none is named.

# A colour and a marker.
Look = tuple[draw.Color, str]
# A learning rate, the kind of its runs, and their quality (None if a run diverged). The kind is
# "complete", "short" (all runs that the search ended early) or "diverged".
RatePoint = tuple[float, str, Estimate[float] | None]
# A trial, its throughput in samples/s, its quality, and whether no other trial beats it in both.
Point = tuple[TrialRecord, Estimate[float], Estimate[float], bool]


def rate_lines(study: Study) -> tuple[Objective, dict[tuple[int, str], list[RatePoint]]]:
    """Return the quality metric, and the tried rates by batch size and other settings."""
    refuse_empty(study)
    quality, decision = study.quality_metric, study.decide()
    names = [name for name in differing(study.trials) if not names_rate(name)]
    lengths = {t.batch_size: len(t.last.epochs) for t in study.trials if t.last.length == "short"}
    lines: dict[tuple[int, str], list[RatePoint]] = {}
    for trial in sorted(study.trials, key=lambda t: (t.batch_size, t.learning_rate or 0.0)):
        rate, settings = trial.learning_rate, ", ".join(setting_texts(trial, names))
        if not rate or rate < 0 or quality is None or decision.rate_setters:
            continue
        line = lines.setdefault((trial.batch_size, settings), [])
        if any(run.diverged for run in trial.executions):
            line.append((rate, "diverged", None))
            continue
        early = [e for e in trial.executions if e.status == "completed" and not is_complete(e)]
        first, epochs = trial.executions[0], lengths.get(trial.batch_size)
        # The first epochs of a complete run are comparable with short runs of this size.
        if epochs and not early and is_complete(first):
            prefix = {"epochs": first.epochs[:epochs], "outcomes": None, "reported": {}}
            early = [dataclasses.replace(first, length="short", **prefix)]
        short = dataclasses.replace(trial, executions=tuple(early)) if early else None
        complete = with_complete_runs(trial)
        complete = complete and decision.as_judged(complete)
        for length, runs in (("short", short), ("complete", complete)):
            if runs and (value := common.quality_of(runs, quality)):
                several = len(runs.executions) > 1
                line.append((rate, length, value if several else Estimate(value.value)))
    if quality is None or not any(value for line in lines.values() for *_, value in line):
        raise common.missing_data(study, "trials with a learning rate and a metric such as loss")
    return quality, {key: line for key, line in lines.items() if line}


def plot_learning_rates(studies: Studies, ax: Axes | None = None, *, caption: bool = True) -> Axes:
    """Plot the quality of the model by learning rate, one line for each batch size.

    If trials differ in their dtype policy or in other hyperparameters, each combination has a
    line. Filled marks are complete runs, with a 95 % interval if there are several at a rate.
    Hollow marks are runs that the search ended early, and the first epochs of complete runs at a
    size with short runs. A cross at the edge of the plot is a rate at which training diverged. The
    ring is the answer of `study.decide()`, and the dotted line is the learning rate that the model
    was built with.

    If there are several studies, each has a colour, with a line for each batch size. Use this to
    compare the learning rates that suit two dtype policies or optimizers.

    Example:

    >>> study = kbatch.load_study("results/search")
    >>> kbatch.plot_learning_rates(study).figure.savefig("learning-rates.png")

    Args:
        studies: A `kbatch.Study`, or several with one objective as a list or as a dict of names.
        ax: `matplotlib.axes.Axes` to draw on. If None, make a new figure.
        caption: Boolean. Whether to write a caption below a new figure. Default: True.

    Returns:
        The Axes.

    Raises:
        ValueError: If there is nothing to show, or if the studies do not fit together.
    """
    shown = studies_of(studies)
    several, rated = len(shown) > 1, [rate_lines(study) for study in shown]
    quality, lines_of_studies = rated[0][0], [lines for _, lines in rated]
    keys = dict.fromkeys(key for lines in lines_of_studies for key in lines)
    (panel,) = canvas.panels(ax, RATES_IN)
    canvas.vertical_grid(panel)
    panel.set_xlabel("Learning rate")
    edge = 0.04 if quality.direction == "max" else 0.96  # Next to the worst values.
    sizes, texts = sorted({size for size, _ in keys}), [*dict.fromkeys(text for _, text in keys)]
    for number, lines in enumerate(lines_of_studies):
        for (size, text), line in lines.items():
            look: Look = size_color(size, sizes), series_style(sizes.index(size))[1]
            if several:
                look = series_style(number)
            style = _STYLES[0 if several else texts.index(text) % len(_STYLES)]
            _draw_rates(panel, line, look, style, edge=edge)
    named = zip(texts, _STYLES, strict=False) if 1 < len(texts) <= len(_STYLES) else ()
    for text, style in () if several else named:
        panel.plot([], [], color=MUTED, linestyle=style, label=text)
    all_lines = [line for lines in lines_of_studies for line in lines.values()]
    points = [point for line in all_lines for point in line]
    trials = [trial for study in shown for trial in study.trials]
    scalings = [scaling for trial in trials if (scaling := trial.last.scaling)]
    # Rates that models were built with, before rule and factor.
    built = {float(f"{s.learning_rate / s.learning_rate_ratio:.3g}") for s in scalings} - {0.0}
    values = [value for *_, value in points if value]
    common.end_axis(panel, quality, values)
    means = [value.value for value in values]
    common.quality_axis(panel, quality, means, judged=trials[0].objective)
    rates = [*built, *(rate for rate, *_ in points)]
    low, high = min(rates), max(rates)
    margin = 1.2 * (high / low) ** 0.04
    panel.set_xscale("log")
    panel.set_xlim(low / margin, high * margin)
    plain_log_labels(panel.xaxis)
    for rate in built if len(built) == 1 else ():
        draw.guide(panel, rate)
        side, offset_pt = ("right", -4) if rate**2 > low * high else ("left", 4)
        words, place = f"your rate, {setting(rate)}", (rate, 0.1 + 0.8 * (edge > 0.5))
        across = panel.get_xaxis_transform()
        draw.text(panel, words, place, (offset_pt, 0), ha=side, xycoords=across)
    answers = [_ring_answer(panel, study, quality) for study in shown]
    answer = answers[0]
    if several:
        answer = f"{common.RINGS if any(answers) else ''} Numbers: batch sizes.".strip()
        _name_sizes(panel, lines_of_studies, quality)
    lengths = {length for _, length, _ in points}
    by = "learning rate" if several else "learning rate and batch size"
    title = f"{common.metric_title(quality)} by {by}"
    common.write_title(panel, title, shown, sizes)
    hollow = "Hollow: first epochs only. Filled: complete runs." if "short" in lengths else ""
    crosses = "Crosses: training diverged." if "diverged" in lengths else ""
    alarm = common.incomplete_text(shown, diverged=False)  # Crosses show these.
    several_runs = any(value and value.ends for *_, value in points)
    bars = "Bars: 95 % interval, if a learning rate has several runs." if several_runs else ""
    notes, caption = (answer, hollow, crosses, bars), caption and ax is None
    common.write_conditions([panel], shown, *notes, alarm=alarm, caption=caption)
    return panel


def _draw_rates(
    panel: Axes, line: Sequence[RatePoint], look: Look, style: str, *, edge: float
) -> None:
    """Draw the rates of a line. Rates that diverged are at the edge of the plot."""
    for hollow, kind in ((True, "short"), (False, "complete")):
        points = [(rate, value) for rate, length, value in line if value and length == kind]
        rates, values = [rate for rate, _ in points], [value.value for _, value in points]
        if points:
            draw.bars(panel, rates, [value.ends for _, value in points], look[0])
            zorder = 3 - hollow / 2
            draw.points(panel, rates, values, *look, hollow=hollow, line=style, zorder=zorder)
    if diverged := [rate for rate, length, _ in line if length == "diverged"]:
        cross: dict[str, Any] = {"color": look[0], "mec": canvas.PAPER, "ms": 8, "zorder": 4}
        cross |= {"transform": panel.get_xaxis_transform()}
        panel.plot(diverged, [edge] * len(diverged), "X", **cross)


def _name_sizes(
    panel: Axes, studies: Sequence[Mapping[tuple[int, str], list[RatePoint]]], quality: Objective
) -> None:
    """Write the batch size of each line beside its best point that has room."""
    ranked = []
    for number, ((size, _), line) in enumerate(item for each in studies for item in each.items()):
        points = [(kind == "complete", quality.sign * v.value, rate) for rate, kind, v in line if v]
        for rank, (_, value, rate) in enumerate(sorted(points, reverse=True)):
            ranked.append((rank, number, ((rate, quality.sign * value), f"{size:,}", MUTED)))
    ranked.sort()
    draw.label_points(panel, [p for *_, p in ranked], lines=[number for _, number, _ in ranked])


def _ring_answer(panel: Axes, study: Study, quality: Objective) -> str:
    """Mark the answer and return its name; empty if there is none."""
    decision = study.decide()
    trial, rate = decision.trial, decision.learning_rate
    value = trial and common.quality_of(decision.as_judged(trial), quality)
    if not value or not rate:
        return ""
    draw.ring(panel, rate, value.value)
    return f"Ring: the answer, {common.answer_text(decision)}."


def pareto_points(*studies: Study) -> tuple[Objective, list[Point]]:
    """Return the metric of quality, and a point for each trial in the order of throughput."""
    measured, quality = [], None
    for study in studies:
        refuse_empty(study)
        quality, decision, far = study.quality_metric, study.decide(), common.far_off(study)
        points = [
            (trial, rate, value)
            for trial, *_ in rates_of_settings(study.trials)
            if trial.status == "completed"
            and trial not in far
            and quality is not None
            and (rate := speed_of(decision, trial)[1]) is not None
            and (value := common.quality_of(decision.as_judged(trial), quality)) is not None
        ]
        if not points:
            needed = "trials with a throughput and a metric such as loss"
            raise common.missing_data(study, needed)
        measured += points
    assert quality is not None
    scores = [(rate.value, quality.sign * value.value) for _, rate, value in measured]
    beaten = [any(s != t and s[0] >= t[0] and s[1] >= t[1] for s in scores) for t in scores]
    classified = [(*point, not worse) for point, worse in zip(measured, beaten, strict=True)]
    return quality, sorted(classified, key=lambda p: (p[1].value, -quality.sign * p[2].value))


def plot_pareto(studies: Studies, ax: Axes | None = None, *, caption: bool = True) -> Axes:
    """Plot the quality of each trial against its throughput, with the Pareto front as steps.

    A filled mark is a trial that no other trial beats in both. Other trials have hollow marks. The
    colour and the shape of a mark show the batch size. If there are several studies, colour and
    shape show the study, there is one front for all studies, and rings are the answers.

    Example:

    >>> study = kbatch.load_study("results/search")
    >>> kbatch.plot_pareto(study).figure.savefig("pareto.png")

    Args:
        studies: A `kbatch.Study`, or several with one objective as a list or as a dict of names.
        ax: `matplotlib.axes.Axes` to draw on. If None, make a new figure.
        caption: Boolean. Whether to write a caption below a new figure. Default: True.

    Returns:
        The Axes.

    Raises:
        ValueError: If there is nothing to show, or if the studies do not fit together.
    """
    shown = studies_of(studies)
    several, (quality, points) = len(shown) > 1, pareto_points(*shown)
    rates, values = [rate.value for _, rate, *_ in points], [value.value for *_, value, _ in points]
    front = [point for point in points if point[3]]
    (panel,) = canvas.panels(ax, PARETO_IN)
    canvas.vertical_grid(panel)
    panel.set_xlabel("Throughput (samples/s)")
    slowest, fastest = rates[0], rates[-1]
    ends = [end for _, rate, *_ in points for end in rate.ends or (rate.value,)]
    if fastest > 12 * slowest:  # On a linear axis, small values would cover each other.
        panel.set_xscale("log")
        low = max(min(ends), slowest / 10)
        panel.set_xlim(low / 1.3, max(1.5 * fastest, 1.1 * max(ends)))
        plain_log_labels(panel.xaxis)
    else:  # From zero, twice the distance is twice the speed.
        panel.set_xlim(0, max(1.12 * fastest, 1.02 * max(ends)))
        labels = int(canvas.label_room(panel) / (len(f"{fastest:,.0f}") + 1.5))
        steps = MaxNLocator(nbins=max(1, min(9, labels)), steps=(1, 2, 2.5, 5, 10))
        panel.xaxis.set_major_locator(steps)
        panel.xaxis.set_major_formatter("{x:,.0f}")
    sizes = sorted({trial.batch_size for trial, *_ in points})
    owners = {id(trial): number for number, study in enumerate(shown) for trial in study.trials}
    # Trials of a size or study are drawn together, which keeps files of many trials small.
    for number, group in enumerate(range(len(shown)) if several else sizes):
        look: Look = series_style(number)
        look = look if several else (size_color(group, sizes), look[1])
        members = [p for p in points if group == (owners[id(p[0])] if several else p[0].batch_size)]
        for best in (False, True):
            alike = [point for point in members if point[3] == best]
            across, up = [p[1].value for p in alike], [p[2].value for p in alike]
            draw.bars(panel, across, [p[2].ends for p in alike], look[0])
            draw.bars(panel, up, [p[1].ends for p in alike], look[0], across=True)
            if alike:
                draw.points(panel, across, up, *look, size=6.5, hollow=not best, zorder=2.5 + best)
    for trial, rate, value, _ in points if several else ():
        answer = shown[owners[id(trial)]].decide().trial
        if answer and trial.trial_id == answer.trial_id:
            draw.ring(panel, rate.value, value.value)
    panel.margins(y=0.1)
    panel.autoscale_view(scalex=False)
    common.quality_axis(panel, quality, values, judged=points[0][0].objective)
    # Beyond these steps, no trial is both faster and better.
    left, (bottom, top) = panel.get_xlim()[0], panel.get_ylim()
    edge = bottom if quality.direction == "max" else top
    rates = [left, *(rate.value for _, rate, *_ in front), front[-1][1].value]
    values = [value.value for *_, value, _ in (front[0], *front)] + [edge]
    panel.plot(rates, values, ds="steps-pre", color=canvas.FAINT, lw=0.8, zorder=1)
    panel.set_ylim(bottom, top)
    title = f"{common.metric_title(quality)} against throughput"
    common.write_title(panel, title, shown, sizes)
    judged = [shown[owners[id(trial)]].decide().as_judged(trial) for trial, *_ in points]
    filled = "Filled marks: no other trial is both faster and better."
    rings = common.RINGS if several else ""
    notes = rings, common.far_off_note(shown), common.bars_text(judged, quality)
    common.write_conditions([panel], shown, filled, *notes, caption=caption and ax is None)
    return panel


BUDGETS = ("updates", "examples", "seconds")
_LABELS = {"updates": "Updates", "examples": "Training examples", "seconds": "Training time (s)"}
# For each epoch: updates, examples and seconds until its end, and the metric. Values are means over
# training runs, from three runs on with the 95 % interval of the metric.
Curve = list[tuple[tuple[float, ...], Estimate[float]]]


def learning_curves(*studies: Study) -> tuple[Objective, list[tuple[TrialRecord, Curve]]]:
    """Return the metric, and a trial of each batch size with its learning curve.

    If there are several studies, return the trial of each answer.
    """
    quality, curves = None, []
    for study in studies:
        refuse_empty(study)
        quality, decision = study.quality_metric, study.decide()
        shown, far = common.one_of_each_size(study, study.trials).values(), common.far_off(study)
        if len(studies) > 1:
            shown = [decision.trial] if decision.trial else []
        judged = [decision.as_judged(trial) for trial in shown if trial not in far]
        known = [(t, curve) for t in judged if quality and (curve := _curve(t, quality.name))]
        if not known:
            raise common.missing_data(study, "epochs with a metric such as val_accuracy")
        curves += known
    assert quality is not None
    return quality, curves


def _curve(trial: TrialRecord, metric: str) -> Curve:
    runs = []
    for execution in trial.executions:
        costs = zip(*((e.updates, e.examples, e.train_s) for e in execution.epochs), strict=True)
        values = [epoch.finite(metric) for epoch in execution.epochs]
        if set(values) - {None}:
            runs.append([*zip(*map(itertools.accumulate, costs), values, strict=True)])
    curve: Curve = []
    # An epoch counts if all runs have a value. A run may have ended earlier, such as at a target.
    for ends in zip(*runs, strict=False):
        *spent, values = zip(*ends, strict=True)
        if None not in values and (value := within_range(metric, mean_of(values))) is not None:
            curve.append((tuple(map(fmean, spent)), value))
    return curve


def plot_learning_curves(
    studies: Studies,
    ax: Axes | None = None,
    *,
    against: Literal["updates", "examples", "seconds"] | None = None,
    caption: bool = True,
) -> Axes:
    """Plot the quality of the model over training, with one curve for each batch size.

    Three panels show the same curves against updates, examples and seconds of training. A large
    batch is worth it if its curve is ahead in the third panel, even if it is behind in the second.
    Each batch size is shown by its trial that `study.decide()` compares, or by its best one. If
    there are several studies, each has one curve, for its answer.

    Example:

    >>> study = kbatch.load_study("results/search")
    >>> kbatch.plot_learning_curves(study).figure.savefig("learning-curves.png")

    Args:
        studies: A `kbatch.Study`, or several with one objective as a list or as a dict of names.
        ax: `matplotlib.axes.Axes` whose place the panels take. If None, make a new figure.
        against: `"updates"`, `"examples"` or `"seconds"`, to draw one panel. If None, draw all.
        caption: Boolean. Whether to write a caption below a new figure. Default: True.

    Returns:
        The upper Axes.

    Raises:
        ValueError: If there is nothing to show, or if `against` is another string.
    """
    if against not in (None, *BUDGETS):
        raise ValueError(
            f"`against` must be one of {', '.join(BUDGETS)}, or None to draw one panel for each. "
            f"Received: against={against!r}."
        )
    shown = studies_of(studies)
    several, (quality, curves) = len(shown) > 1, learning_curves(*shown)
    sizes = [trial.batch_size for trial, _ in curves]
    colors = [series_style(n)[0] if several else size_color(s, sizes) for n, s in enumerate(sizes)]
    budgets, height_in = ((against,), CURVES_IN) if against else (BUDGETS, 1.9 * CURVES_IN)
    means = [value.value for _, curve in curves for _, value in curve]
    if min(means) >= 0:  # An interval of a loss may reach below zero.
        curves = [
            (t, [(s, dataclasses.replace(v, low=v.low and max(v.low, 0.0))) for s, v in c])
            for t, c in curves
        ]
    estimates = [value for _, curve in curves for _, value in curve]
    panels = canvas.panels(ax, height_in, (1,) * len(budgets), share_x=False)
    for panel, budget in zip(panels, budgets, strict=True):
        panel.set_xlabel(_LABELS[budget])
        for number, (trial, curve) in enumerate(curves):
            color, marker = colors[number], series_style(number)[1]
            places = [spent[BUDGETS.index(budget)] for spent, _ in curve]
            values = [value.value for _, value in curve]
            draw.band(panel, places, [value.ends for _, value in curve], color)
            panel.plot(places, values, color=color, linewidth=1.4)
            look = (ALARM, "X") if trial.outcome == "diverged" else (color, marker)
            draw.points(panel, places[-1:], values[-1:], *look, size=6.5, zorder=3)
        panel.set_xscale("log")
        plain_log_labels(panel.xaxis)
        common.end_axis(panel, quality, estimates)
        common.quality_axis(panel, quality, means)
        if canvas.is_low(panel) and panel is not panels[0]:
            panel.set_ylabel("")  # There is room for one label only.
    over = _LABELS[against].partition(" (")[0].lower() if against else "training"
    title = f"{common.metric_title(quality)} over {over}{'' if several else ', by batch size'}"
    common.write_title(panels[0], title, shown, sizes)
    banded = any(value.ends for _, curve in curves for _, value in curve)
    bands = "Bands: 95 % interval of the mean over training runs." if banded else ""
    tracing = "Measured time includes tracing, but no validation." if "seconds" in budgets else ""
    notes = ("" if several else common.far_off_note(shown), bands, tracing)
    common.write_conditions(panels, shown, *notes, caption=caption and ax is None)
    return panels[0]
