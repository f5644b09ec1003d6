"""The figure of the cost of a target: seconds and updates by batch size."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from kbatch.analysis.goodput import StepsToTarget, fit_steps_to_target
from kbatch.analysis.intervals import Estimate, mean_interval
from kbatch.page.numbers import format_number, in_brackets, join_words, pluralize, setting
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import batch_axis, plain_log_labels
from kbatch.plotting.palette import GRID, MUTED, series_style
from kbatch.records.training_run import Cost, Target, cost_to_target
from kbatch.study.comparison import refuse_empty
from kbatch.study.figures import common
from kbatch.study.figures.common import BARS
from kbatch.study.names import metric_words, outcome
from kbatch.study.trial import TrialRecord

if TYPE_CHECKING:
    from kbatch.study.study import Study

HEIGHT_IN = 5.6


class TargetPoint(NamedTuple):
    """The cost of the target at one batch size; all that was spent where it was not met."""

    batch_size: int
    trial_id: str
    met: bool
    seconds: Estimate[float]
    updates: Estimate[float]
    runs: tuple[int, ...]  # Updates of each execution that met it.


class TimeToTargetInfo(NamedTuple):
    """What the figure shows; a text that does not apply is empty."""

    target: Target
    points: tuple[TargetPoint, ...]
    incomplete_sizes: tuple[tuple[int, str], ...]  # With the reason.
    fit: StepsToTarget | None  # None from fewer than three sizes that met the target.
    fit_text: str
    notes: tuple[str, ...]
    incomplete: str

    @property
    def met(self) -> tuple[TargetPoint, ...]:
        return tuple(point for point in self.points if point.met)

    @property
    def target_text(self) -> str:
        """The target in words, such as `"validation accuracy ≥ 0.95"`."""
        sign = "≥" if self.target.direction == "max" else "≤"
        return f"{metric_words(self.target.metric)} {sign} {setting(self.target.value)}"


def time_to_target_info(study: "Study", *, target: float | None = None) -> TimeToTargetInfo:
    """Compute what each batch size needed to reach a target."""
    refuse_empty(study)
    aim = _target(study, target)
    points, incomplete = [], []
    for size in sorted({trial.batch_size for trial in study.trials}):
        trials = [trial for trial in study.trials if trial.batch_size == size]
        found = [point for trial in trials if (point := _point(trial, aim)) is not None]
        if found:
            points.append(min(found, key=lambda point: (not point.met, point.updates.value)))
        else:
            ends = dict.fromkeys(outcome(t) for t in trials if t.status != "completed")
            incomplete.append((size, ", ".join(ends) or "no epochs"))
    if not points:
        raise common.missing_data(study, "trials that completed with epochs")
    runs = [(p.batch_size, updates) for p in points if p.met for updates in p.runs]
    enough = len({size for size, _ in runs}) >= 3
    fit = fit_steps_to_target(*zip(*runs, strict=True)) if enough else None
    if fit is None:
        met = pluralize(sum(point.met for point in points), "size")
        fit_text = (
            f"No curve is fitted: it needs three batch sizes that met the target, and {met} did."
        )
    else:
        critical, fit_text = fit.critical_batch_size, "Fitted updates: S_min (1 + B_crit / B)"
        if critical.value is None:
            bound = f", above {format_number(critical.low)}" if critical.low else ""
            fit_text += f"; B_crit is larger than these batch sizes can tell{bound}."
        else:
            fit_text += (
                f", S_min {format_number(fit.fewest_steps)}, B_crit "
                f"{format_number(critical.value)}{in_brackets(critical)}."
            )
            if fit.holds is False:
                fit_text += " The trials deviate from this curve by more than their noise."
    notes = [
        "The target is looked at when an epoch ends: costs are those of whole epochs. Training "
        "time has the tracing of the first step in it, but no validation."
    ]
    if len(study.trials) > len({trial.batch_size for trial in study.trials}):
        notes.append("Shown: the trial of each batch size that needed the fewest updates.")
    if any(point.updates.ends for point in points):
        notes.append(f"{BARS}.")
    runs = [run for trial in study.trials for run in trial.executions]
    if {run.scaling.rule if run.scaling else run.learning_rate_scaling for run in runs} == {None}:
        notes.append(
            "One learning rate for all batch sizes: large ones may need more updates for it alone."
        )
    return TimeToTargetInfo(
        target=aim,
        points=tuple(points),
        incomplete_sizes=tuple(incomplete),
        fit=fit,
        fit_text=fit_text,
        notes=tuple(notes),
        incomplete=common.incomplete_text(study),
    )


def _target(study: "Study", value: float | None) -> Target:
    if value is not None:
        metric = study.quality_metric
        if metric is None:
            raise ValueError(
                "`target` is a value of the study's metric of quality, and no trial has one. "
                f"Received: target={value}."
            )
        return Target(metric.name, value, metric.direction)
    targets = dict.fromkeys(trial.target for trial in study.trials if trial.target is not None)
    if len(targets) == 1:
        return next(iter(targets))
    held = "several targets" if targets else "no target"
    raise ValueError(
        "A figure of the cost of a target needs one: give `target=0.95`, say (in a terminal "
        "`--target 0.95`), or search with `callbacks=[kbatch.StopAtTarget(monitor, value)]`. "
        f"Received: target=None, and a study with {held}."
    )


def _point(trial: TrialRecord, target: Target) -> TargetPoint | None:
    """Compute what a trial took, None where it has no result."""
    if trial.status != "completed" or not all(run.epochs for run in trial.executions):
        return None
    costs = [cost_to_target(target, run.epochs) for run in trial.executions]
    reached = [cost for cost in costs if cost is not None]
    shown, met = reached, len(reached) == len(costs)
    if not met:
        # What was not met in what was spent takes more than that.
        most = max(trial.executions, key=lambda run: sum(epoch.updates for epoch in run.epochs))
        totals = ((e.train_s, e.updates, e.examples) for e in most.epochs)
        shown = [Cost(*map(sum, zip(*totals, strict=True)))]
    seconds = _mean([cost.train_s for cost in shown])
    updates = _mean([float(cost.updates) for cost in shown])
    runs = tuple(cost.updates for cost in reached)
    return TargetPoint(trial.batch_size, trial.trial_id, met, seconds, updates, runs)


def _mean(values: Sequence[float]) -> Estimate[float]:
    interval, mean = mean_interval(values), sum(values) / len(values)
    if interval is None or interval.low is None:
        return Estimate(mean)
    # A logarithmic axis has no place for what is not positive.
    low = interval.low if interval.low > 0 else min(values)
    return Estimate(mean, low, interval.high)


def alt_text(info: TimeToTargetInfo) -> str:
    sentences = [
        f"Two charts over batch size on logarithmic axes: seconds of training, and updates, to "
        f"{info.target_text}."
    ]
    if info.met:
        cost = join_words(
            f"{p.updates.value:,.0f} updates and {format_number(p.seconds.value)} s at batch size "
            f"{p.batch_size:,}"
            for p in info.met
        )
        sentences.append(f"It took {cost}.")
    missed = [f"{point.batch_size:,}" for point in info.points if not point.met]
    if missed:
        sentences.append(f"Batch size {join_words(missed)} did not meet it.")
    return " ".join(filter(None, (*sentences, info.fit_text, info.incomplete)))


def plot_time_to_target(
    study: "Study", ax: Axes | None = None, *, target: float | None = None
) -> Axes:
    """Plot the training time and the updates to a target by batch size, on logarithmic axes.

    Dashed is perfect scaling from the smallest batch size that met the target, where twice the
    batch needs half the updates (Shallue et al. 2019, arXiv:1811.03600). The curve through the
    updates is S_min (1 + B_crit / B) (McCandlish et al. 2018, arXiv:1812.06162).

    Args:
        study: A study, from `load_study`.
        ax: Axes whose place the panels take; a new figure if None.
        target: Value of `study.quality_metric` to reach; the one of `StopAtTarget` if None.

    Raises:
        ValueError: If there is no target or nothing to show, with what to do.
    """
    info = time_to_target_info(study, target=target)
    upper, lower = canvas.panels(ax, HEIGHT_IN, (1, 1))
    upper.set_label(alt_text(info))
    sizes = [p.batch_size for p in info.points] + [size for size, _ in info.incomplete_sizes]
    batch_axis(lower, sizes, common.BATCH_LABEL)
    _draw_costs(upper, info, [point.seconds for point in info.points], None)
    _draw_costs(lower, info, [point.updates for point in info.points], info.fit)
    for size, words in info.incomplete_sizes:
        draw.missing(upper, size)
        draw.missing(lower, size, words=words)
    upper.set_ylabel("Training time to target\n(s)")
    lower.set_ylabel("Updates to target")
    canvas.write_title(upper, f"{study.name}: to {info.target_text}", columns=2, fewest=1)
    common.write_conditions(lower, study, info.fit_text, *info.notes)
    return upper


def _draw_costs(
    panel: Axes, info: TimeToTargetInfo, costs: Sequence[Estimate[float]], fit: StepsToTarget | None
) -> None:
    panel.set_yscale("log")
    sizes, (color, marker) = [p.batch_size for p in info.points], series_style(0)
    met = [(p.batch_size, c) for p, c in zip(info.points, costs, strict=True) if p.met]
    missed = [(p.batch_size, c.value) for p, c in zip(info.points, costs, strict=True) if not p.met]
    if met:
        places, values = [size for size, _ in met], [cost.value for _, cost in met]
        bars = [cost.ends for _, cost in met]
        draw.series(panel, 0, places, values, label="target met", bounds=bars, joined=fit is None)
        if places[0] < sizes[-1]:
            ends = np.array([places[0], sizes[-1]], float)
            line = {"linewidth": 1.0, "linestyle": "--", "label": "perfect scaling"}
            panel.plot(ends, values[0] * places[0] / ends, color=MUTED, zorder=1, **line)
    # What was spent without meeting the target: it takes more.
    for place in missed:
        draw.points(panel, place[:1], place[1:], color, marker, hollow=True)
        draw.arrow(panel, place, 20, color)
        draw.text(panel, "not met", place, (0, 21), va="bottom")
    if fit is not None:
        places = np.geomspace(sizes[0], sizes[-1], 100)
        steps = np.array([fit.steps(place) for place in places])
        shown, color = steps > 0, series_style(0).color
        panel.plot(places[shown], steps[shown], color=color, linewidth=1.4, zorder=1.5)
        critical, ends = fit.critical_batch_size.value, fit.critical_batch_size.ends
        if critical is not None and sizes[0] <= critical <= sizes[-1]:
            if ends is not None:
                low, high = np.clip(ends, sizes[0], sizes[-1])
                panel.axvspan(low, high, color=GRID, alpha=0.5, linewidth=0, zorder=0.2)
            draw.guide(panel, critical)
            words, top = f"B_crit {critical:,.0f}", panel.get_xaxis_transform()
            draw.text(panel, words, (critical, 1), (4, -3), ha="left", va="top", xycoords=top)
    # The line of perfect scaling leaves the panel: what was measured is what matters.
    low = min(cost.low or cost.value for cost in costs)
    high = max(cost.high or cost.value for cost in costs)
    stretch = max(1.15, (high / low) ** 0.1)
    below = stretch**3 if info.incomplete_sizes else stretch**1.5
    panel.set_ylim(low / below, high * (stretch**3 if missed else stretch))
    plain_log_labels(panel.yaxis)
