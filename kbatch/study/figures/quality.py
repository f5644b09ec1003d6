"""The figures of quality: by learning rate, against throughput, and over training."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
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
from kbatch.study.figures import common
from kbatch.study.study import Study, refuse_empty
from kbatch.study.trial import Objective, TrialRecord, mean_of, within_range

RATES_IN, PARETO_IN, CURVES_IN = 3.4, 3.4, 3.0
_STYLES = ("-", "--", "-.", ":")  # More combinations of settings have no names.

# A colour and a marker.
Look = tuple[draw.Color, str]
# A learning rate; "complete", "short" (all runs that the search ended early) or "diverged"; and the
# quality, None if a run diverged.
RatePoint = tuple[float, str, Estimate[float] | None]
# A trial, its throughput in examples per second, its quality, and whether no other beats it.
Point = tuple[TrialRecord, Estimate[float], Estimate[float], bool]


def rate_lines(study: Study) -> tuple[Objective, dict[tuple[int, str], list[RatePoint]]]:
    """Return the metric, and the rates tried at each batch size and its other settings."""
    refuse_empty(study)
    quality, decided = study.quality_metric, study.decide()
    names = [name for name in differing(study.trials) if not names_rate(name)]
    lines: dict[tuple[int, str], list[RatePoint]] = {}
    for trial in sorted(study.trials, key=lambda t: (t.batch_size, t.learning_rate or 0.0)):
        rate, settings = trial.learning_rate, ", ".join(setting_texts(trial, names))
        if not rate or rate < 0 or quality is None or decided.rate_setters:
            continue
        line = lines.setdefault((trial.batch_size, settings), [])
        if any(run.diverged for run in trial.executions):
            line.append((rate, "diverged", None))
            continue
        early = [e for e in trial.executions if e.status == "completed" and not is_complete(e)]
        short = dataclasses.replace(trial, executions=tuple(early)) if early else None
        whole = with_complete_runs(trial)
        for length, runs in (("short", short), ("complete", whole and decided.as_judged(whole))):
            if runs and (value := common.quality_of(runs, quality)):
                several = len(runs.executions) > 1
                line.append((rate, length, value if several else Estimate(value.value)))
    if quality is None or not any(value for line in lines.values() for *_, value in line):
        raise common.missing_data(study, "learning rates that were tried, with a metric of quality")
    return quality, {key: line for key, line in lines.items() if line}


def plot_learning_rates(studies: Studies, ax: Axes | None = None, *, caption: bool = True) -> Axes:
    """Plot the quality of the model by learning rate, one line for each batch size.

    If trials differ in their dtype policy or in other hyperparameters, each combination has a
    line. Filled marks are complete runs, with a 95 % interval if there are several at a rate.
    Hollow marks are runs that the search ended early: short runs, and runs that it stopped. A
    cross at the edge of the plot is a rate at which training diverged. The ring is the answer of
    `study.decide()`, and the dotted line is the learning rate that the model was built with.

    Several studies have a colour each, with a line for each batch size. So two searches with
    different dtype policies or optimizers show which learning rates suit each.

    Example:

    >>> study = kbatch.load_study("results/search")
    >>> kbatch.plot_learning_rates(study).figure.savefig("learning-rates.png")

    Args:
        studies: A study, from `load_study`. Or several with one objective: a list, or a dict that
            names them.
        ax: Axes to draw on. If None, a new figure.
        caption: Whether to write at most two lines below a new figure.

    Returns:
        The Axes.

    Raises:
        ValueError: If there is nothing to show, with the reason, or if the studies do not fit
            together.
    """
    shown = studies_of(studies)
    several, found = len(shown) > 1, [rate_lines(study) for study in shown]
    quality, keys = found[0][0], dict.fromkeys(key for _, lines in found for key in lines)
    (panel,) = canvas.panels(ax, RATES_IN)
    canvas.vertical_grid(panel)
    panel.set_xlabel("Learning rate")
    worst = 0.04 if quality.direction == "max" else 0.96  # At the edge of the worst values.
    sizes, texts = sorted({size for size, _ in keys}), [*dict.fromkeys(text for _, text in keys)]
    for number, (_, own) in enumerate(found):
        for (size, text), line in own.items():
            look: Look = size_color(size, sizes), series_style(sizes.index(size))[1]
            if several:
                look = series_style(number)
            style = _STYLES[0 if several else texts.index(text) % len(_STYLES)]
            _draw_rates(panel, line, look, style, edge=worst)
    named = zip(texts, _STYLES, strict=False) if 1 < len(texts) <= len(_STYLES) else ()
    for text, style in () if several else named:
        panel.plot([], [], color=MUTED, linestyle=style, label=text)
    points = [point for _, own in found for line in own.values() for point in line]
    trials = [trial for study in shown for trial in study.trials]
    # What models were built with, before any rule or factor.
    scalings = [scaling for trial in trials if (scaling := trial.last.scaling)]
    given = {float(f"{s.learning_rate / s.learning_rate_ratio:.3g}") for s in scalings} - {0.0}
    values = [value.value for *_, value in points if value]
    common.end_axis(panel, quality, values)
    common.quality_axis(panel, quality, values, judged=trials[0].objective)
    every = [*given, *(rate for rate, *_ in points)]
    low, high = min(every), max(every)
    margin = 1.2 * (high / low) ** 0.04
    panel.set_xscale("log")
    panel.set_xlim(low / margin, high * margin)
    plain_log_labels(panel.xaxis)
    for rate in given if len(given) == 1 else ():
        draw.guide(panel, rate)
        side, offset_pt = ("right", -4) if rate**2 > low * high else ("left", 4)
        words, place = f"your rate, {setting(rate)}", (rate, 0.1 + 0.8 * (worst > 0.5))
        across = panel.get_xaxis_transform()
        draw.text(panel, words, place, (offset_pt, 0), ha=side, xycoords=across)
    answers = [_ring_answer(panel, study, quality) for study in shown]
    joined = any(len({rate for rate, *_ in line}) > 1 for _, own in found for line in own.values())
    each = "line" if joined else "mark"
    answer = f"Rings: the answers. Each {each}: one batch size." if several else answers[0]
    lengths = {length for _, length, _ in points}
    by = "learning rate" if several else "learning rate and batch size"
    title = f"{common.metric_title(quality)} by {by}"
    common.write_title(panel, title, shown, sizes)
    hollow = "Hollow: runs that the search ended early." if "short" in lengths else ""
    crosses = "Crosses: training diverged." if "diverged" in lengths else ""
    kept = [[t for t in one.trials if not any(r.diverged for r in t.executions)] for one in shown]
    alarm = common.incomplete_text(
        [dataclasses.replace(one, trials=(*own,)) for one, own in zip(shown, kept, strict=True)]
    )
    several_runs = any(value and value.ends for *_, value in points)
    bars = "Bars: 95 % interval of rates with several runs." if several_runs else ""
    notes, caption = (answer, hollow, crosses, bars), caption and ax is None
    common.write_conditions([panel], shown, *notes, alarm=alarm, caption=caption)
    return panel


def _draw_rates(
    panel: Axes, line: Sequence[RatePoint], look: Look, style: str, *, edge: float
) -> None:
    """Draw the rates of a line, and those that diverged at the edge of the plot."""
    for hollow, length in ((True, "short"), (False, "complete")):
        found = [(rate, value) for rate, its, value in line if value and its == length]
        rates, values = [rate for rate, _ in found], [value.value for _, value in found]
        if found:
            draw.bars(panel, rates, [value.ends for _, value in found], look[0])
            zorder = 3 - hollow / 2
            draw.points(panel, rates, values, *look, hollow=hollow, line=style, zorder=zorder)
    if lost := [rate for rate, length, _ in line if length == "diverged"]:
        cross: dict[str, Any] = {"color": look[0], "mec": canvas.PAPER, "ms": 8, "zorder": 4}
        panel.plot(lost, [edge] * len(lost), "X", transform=panel.get_xaxis_transform(), **cross)


def _ring_answer(panel: Axes, study: Study, quality: Objective) -> str:
    """Mark the answer, and say what it is; an empty text if there is none."""
    decided = study.decide()
    trial, rate = decided.trial, decided.learning_rate
    value = trial and common.quality_of(decided.as_judged(trial), quality)
    if not value or not rate:
        return ""
    draw.ring(panel, rate, value.value)
    return f"Ring: the answer, {common.answer_text(decided)}."


def pareto_points(*studies: Study) -> tuple[Objective, list[Point]]:
    """Return the metric and the trials by throughput, with those that no other one beats."""
    measured, quality = [], None
    for study in studies:
        refuse_empty(study)
        quality, decided, far = study.quality_metric, study.decide(), common.far_off(study)
        own = [
            (trial, rate, value)
            for trial, *_ in rates_of_settings(study.trials)
            if trial.status == "completed"
            and trial not in far
            and quality is not None
            and (rate := trial.throughput) is not None
            and (value := common.quality_of(decided.as_judged(trial), quality)) is not None
        ]
        if not own:
            needed = "trials with both a throughput and a metric of quality"
            raise common.missing_data(study, needed)
        measured += own
    assert quality is not None
    sign = quality.sign
    choices = [(rate.value, sign * value.value) for _, rate, value in measured]
    points = [
        # No other one has more of one of both, and no less of the other.
        (*found, not any(one != own and one[0] >= own[0] and one[1] >= own[1] for one in choices))
        for found, own in zip(measured, choices, strict=True)
    ]
    return quality, sorted(points, key=lambda p: (p[1].value, sign * -p[2].value))


def plot_pareto(studies: Studies, ax: Axes | None = None, *, caption: bool = True) -> Axes:
    """Plot the quality of each trial against its throughput, with the Pareto front as steps.

    A filled mark stands for a trial that no other one beats in both, a hollow one for the others.
    The colour and the mark are those of the batch size. Of several studies they are those of the
    study, the front is that of all together, and rings are the answers.

    Args:
        studies: A study, from `load_study`. Or several with one objective: a list, or a dict that
            names them.
        ax: Axes to draw on. If None, a new figure.
        caption: Whether to write at most two lines below a new figure.

    Raises:
        ValueError: If there is nothing to show, with the reason, or if the studies do not fit
            together.
    """
    shown = studies_of(studies)
    several, (quality, points) = len(shown) > 1, pareto_points(*shown)
    rates, values = [rate.value for _, rate, *_ in points], [value.value for *_, value, _ in points]
    front = [point for point in points if point[3]]
    (panel,) = canvas.panels(ax, PARETO_IN)
    canvas.vertical_grid(panel)
    panel.set_xlabel("Throughput (samples/s)")
    slowest, fastest = rates[0], rates[-1]
    if fastest > 12 * slowest:  # Small values would lie in one heap on a linear axis.
        panel.set_xscale("log")
        panel.set_xlim(slowest / 1.3, fastest * 1.5)
        plain_log_labels(panel.xaxis)
    else:  # A ratio scale: from zero, twice as far is twice as fast.
        ends = (rate.high or rate.value for _, rate, *_ in points)
        panel.set_xlim(0, max(1.12 * fastest, 1.02 * max(ends)))
        labels = int(canvas.label_room(panel) / (len(f"{fastest:,.0f}") + 1.5))
        steps = MaxNLocator(nbins=max(1, min(9, labels)), steps=(1, 2, 2.5, 5, 10))
        panel.xaxis.set_major_locator(steps)
        panel.xaxis.set_major_formatter("{x:,.0f}")
    sizes = sorted({trial.batch_size for trial, *_ in points})
    owners = {id(trial): number for number, one in enumerate(shown) for trial in one.trials}
    # Those of a size, or a study, together: hundreds of trials make few marks for a file to hold.
    for number, group in enumerate(range(len(shown)) if several else sizes):
        look: Look = series_style(number)
        look = look if several else (size_color(group, sizes), look[1])
        own = [p for p in points if group == (owners[id(p[0])] if several else p[0].batch_size)]
        for best in (False, True):
            alike = [point for point in own if point[3] == best]
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
    # The border of what some trial beats, from edge to edge.
    left, (bottom, top) = panel.get_xlim()[0], panel.get_ylim()
    edge = bottom if quality.direction == "max" else top
    rates = [left, *(rate.value for _, rate, *_ in front), front[-1][1].value]
    values = [value.value for *_, value, _ in (front[0], *front)] + [edge]
    panel.plot(rates, values, ds="steps-pre", color=canvas.FAINT, lw=0.8, zorder=1)
    panel.set_ylim(bottom, top)
    title = f"{common.metric_title(quality)} against throughput"
    common.write_title(panel, title, shown, sizes)
    judged = [shown[owners[id(trial)]].decide().as_judged(trial) for trial, *_ in points]
    filled = "Filled: no other trial is both faster and better."
    filled += " Rings: the answers." if several else ""
    notes = common.far_off_note(shown), common.bars_text(judged, quality)
    common.write_conditions([panel], shown, filled, *notes, caption=caption and ax is None)
    return panel


BUDGETS = ("updates", "examples", "seconds")
_LABELS = {"updates": "Updates", "examples": "Training examples", "seconds": "Training time (s)"}
# At the end of each epoch updates, examples and seconds so far, and the metric: means over
# executions, with the 95 % interval of the metric from three on.
Curve = list[tuple[tuple[float, ...], Estimate[float]]]


def learning_curves(*studies: Study) -> tuple[Objective, list[tuple[TrialRecord, Curve]]]:
    """Return the metric, and a trial of each batch size with its learning curve.

    Of several studies it is the trial of each answer.
    """
    quality, curves = None, []
    for study in studies:
        refuse_empty(study)
        quality, decided = study.quality_metric, study.decide()
        shown, far = common.one_of_each_size(study, study.trials).values(), common.far_off(study)
        if len(studies) > 1:
            shown = [decided.trial] if decided.trial else []
        judged = [decided.as_judged(trial) for trial in shown if trial not in far]
        own = [(t, curve) for t in judged if quality and (curve := _curve(t, quality.name))]
        if not own:
            raise common.missing_data(study, "epochs with a metric of quality")
        curves += own
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
    # The mean is of epochs that all have: one may end earlier, at a target, or have no value there.
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
    """Plot the quality of the model over training, one curve a batch size.

    Three panels, one below the other, show the same curves against updates, examples and seconds of
    training: where large batches lose in the second and win in the third, they pay. Each curve is
    of the trial of its batch size that `study.decide()` compares, else of the best one. Several
    studies have one curve each, that of the answer.

    Args:
        studies: A study, from `load_study`. Or several with one objective: a list, or a dict that
            names them.
        ax: Axes whose place the panels take. If None, a new figure.
        against: What to show them against, in a single panel. If None, all three.
        caption: Whether to write at most two lines below a new figure.

    Raises:
        ValueError: If there is nothing to show, with the reason, or `against` is something else.
    """
    if against not in (None, *BUDGETS):
        raise ValueError(
            f"`against` must be one of {', '.join(BUDGETS)}, or None for all of them. "
            f"Received: against={against!r}."
        )
    shown = studies_of(studies)
    several, (quality, curves) = len(shown) > 1, learning_curves(*shown)
    sizes = [trial.batch_size for trial, _ in curves]
    colors = [series_style(n)[0] if several else size_color(s, sizes) for n, s in enumerate(sizes)]
    budgets = BUDGETS if against is None else (against,)
    height_in = CURVES_IN if against else 1.9 * CURVES_IN
    every = [value.value for _, curve in curves for _, value in curve]
    floor = 0.0 if min(every) >= 0 else -math.inf  # An interval of a loss may reach below zero.
    panels = canvas.panels(ax, height_in, (1,) * len(budgets), share_x=False)
    for panel, budget in zip(panels, budgets, strict=True):
        panel.set_xlabel(_LABELS[budget])
        for number, (trial, curve) in enumerate(curves):
            color, marker = colors[number], series_style(number)[1]
            places = [spent[BUDGETS.index(budget)] for spent, _ in curve]
            values = [value.value for _, value in curve]
            bounds = [
                value.ends and (max(value.ends[0], floor), value.ends[1]) for _, value in curve
            ]
            draw.band(panel, places, bounds, color)
            panel.plot(places, values, color=color, linewidth=1.4)
            look = (ALARM, "X") if trial.outcome == "diverged" else (color, marker)
            draw.points(panel, places[-1:], values[-1:], *look, size=6.5, zorder=3)
        panel.set_xscale("log")
        plain_log_labels(panel.xaxis)
        common.end_axis(panel, quality, every)
        common.quality_axis(panel, quality, every)
    title = f"{common.metric_title(quality)} over training{'' if several else ', by batch size'}"
    common.write_title(panels[0], title, shown, sizes)
    banded = any(value.ends for _, curve in curves for _, value in curve)
    bands = "Bands: 95 % interval of the mean over training runs." if banded else ""
    tracing = "Training time includes tracing, but no validation." if "seconds" in budgets else ""
    notes = ("" if several else common.far_off_note(shown), bands, tracing)
    common.write_conditions(panels, shown, *notes, caption=caption and ax is None)
    return panels[0]
