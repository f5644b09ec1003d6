"""The figure of the cost of a target: seconds and updates by batch size."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kbatch.analysis.goodput import StepsToTarget, fit_steps_to_target
from kbatch.analysis.intervals import mean_interval
from kbatch.document.numbers import counted, listed, readable, setting
from kbatch.plotting.axes import batch_axis, plain_log_labels
from kbatch.plotting.canvas import SMALL_PT, halo, new_axes, say, stacked, tidy, write_caption
from kbatch.plotting.labels import Label, place_labels
from kbatch.plotting.palette import GRID, INK, MUTED, PAPER, series_style
from kbatch.plotting.series import draw_series, mark_missing, name_missing, name_panel
from kbatch.records.training_run import Cost, Target, cost_to_target
from kbatch.study.conditions import Estimate, caption, conditions_of, estimate
from kbatch.study.decision import refuse_empty
from kbatch.study.figures.common import incomplete_text, none_completed
from kbatch.study.names import metric_words, outcome
from kbatch.study.study import Study
from kbatch.study.trial import TrialRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class TargetPoint(NamedTuple):
    """The cost of the target at one batch size, that of the trial that needed least updates.

    Attributes:
        batch_size: Examples of one optimizer update.
        trial_id: The trial that is shown.
        met: Whether every execution met the target.
        seconds: Seconds of training; all that were spent where it was not met.
        updates: Updates, likewise.
        runs: Updates of each execution that met it.
    """

    batch_size: int
    trial_id: str
    met: bool
    seconds: Estimate
    updates: Estimate
    runs: tuple[int, ...]


class TimeToTargetInfo(NamedTuple):
    """What the figure shows.

    Attributes:
        name: Name of the study.
        target: The target.
        points: One a batch size, ascending.
        incomplete_sizes: Batch sizes without any result, with the reason.
        fit: The fitted S_min (1 + B_crit / B), None where there are too few sizes that met it.
        fit_text: What the fit says, or why there is none.
        nothing: Why there is no point, an empty text where there is one.
        notes: Which trials are shown and what the bars are.
        incomplete: Which trials have no result, an empty text where all have one.
        conditions: Device, versions and budget.
    """

    name: str
    target: Target
    points: tuple[TargetPoint, ...]
    incomplete_sizes: tuple[tuple[int, str], ...]
    fit: StepsToTarget | None
    fit_text: str
    nothing: str
    notes: tuple[str, ...]
    incomplete: str
    conditions: str

    @property
    def met(self) -> tuple[TargetPoint, ...]:
        """The points that met the target."""
        return tuple(point for point in self.points if point.met)

    @property
    def target_text(self) -> str:
        """The target in words, such as `"validation accuracy ≥ 0.95"`."""
        sign = "≥" if self.target.direction == "max" else "≤"
        return f"{metric_words(self.target.metric)} {sign} {setting(self.target.value)}"


def time_to_target_info(study: Study, *, target: float | None = None) -> TimeToTargetInfo:
    """Compute what each batch size took to come to a target."""
    refuse_empty(study)
    aim = _target(study, target)
    sizes = sorted({trial.batch_size for trial in study.trials})
    found = {size: _points(study, size, aim) for size in sizes}
    points = tuple(_least(candidates) for candidates in found.values() if candidates)
    fit = _fit(points)
    return TimeToTargetInfo(
        name=study.name,
        target=aim,
        points=points,
        incomplete_sizes=tuple(
            (size, _why(study, size)) for size, candidates in found.items() if not candidates
        ),
        fit=fit,
        fit_text=_fit_text(points, fit),
        nothing="" if points else none_completed(study),
        notes=tuple(_notes(study, points)),
        incomplete=incomplete_text(study) if points else "",
        conditions=caption(conditions_of(study)),
    )


def alt_text(info: TimeToTargetInfo) -> str:
    """Describe the figure in sentences, for those who do not see it."""
    if not info.points:
        return f"An empty chart of the cost of {info.target_text}. {info.nothing}."
    sentences = [
        f"Two charts over batch size on logarithmic axes: seconds of training, and updates, to "
        f"{info.target_text}.",
    ]
    if info.met:
        cost = listed(
            f"{p.updates.value:,.0f} updates and {readable(p.seconds.value)} s at batch size "
            f"{p.batch_size:,}"
            for p in info.met
        )
        sentences.append(f"It took {cost}.")
    missed = [f"{point.batch_size:,}" for point in info.points if not point.met]
    if missed:
        sentences.append(f"Batch size {listed(missed)} did not meet it.")
    return " ".join([*sentences, info.fit_text, *([info.incomplete] if info.incomplete else [])])


def _target(study: Study, value: float | None) -> Target:
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


def _points(study: Study, size: int, target: Target) -> list[TargetPoint]:
    trials = [t for t in study.trials if t.batch_size == size and t.status == "completed"]
    return [_point(trial, target) for trial in trials if all(e.epochs for e in trial.executions)]


def _point(trial: TrialRecord, target: Target) -> TargetPoint:
    costs = [cost_to_target(target, execution.epochs) for execution in trial.executions]
    met = [cost for cost in costs if cost is not None]
    # What was not met in what was spent takes more than that.
    counted_costs = met if len(met) == len(costs) else [_spent(trial)]
    seconds = _of([cost.train_s for cost in counted_costs])
    updates = _of([float(cost.updates) for cost in counted_costs])
    return TargetPoint(
        trial.batch_size,
        trial.trial_id,
        len(met) == len(costs),
        seconds,
        updates,
        tuple(cost.updates for cost in met),
    )


def _spent(trial: TrialRecord) -> Cost:
    """Return the most that an execution spent."""
    totals = [
        Cost(
            sum(epoch.train_s for epoch in execution.epochs),
            sum(epoch.updates for epoch in execution.epochs),
            sum(epoch.examples for epoch in execution.epochs),
        )
        for execution in trial.executions
    ]
    return max(totals, key=lambda cost: cost.updates)


def _of(values: Sequence[float]) -> Estimate:
    found = estimate(sum(values) / len(values), mean_interval(values))
    assert found is not None
    # A logarithmic axis has no place for what is not positive.
    if found.low is not None and found.low <= 0:
        return found._replace(low=min(values))
    return found


def _least(candidates: Sequence[TargetPoint]) -> TargetPoint:
    return min(candidates, key=lambda point: (not point.met, point.updates.value))


def _fit(points: Sequence[TargetPoint]) -> StepsToTarget | None:
    runs = [(p.batch_size, updates) for p in points if p.met for updates in p.runs]
    if len(runs) < 3 or len({size for size, _ in runs}) < 3:
        return None
    return fit_steps_to_target(*zip(*runs, strict=True))


def _fit_text(points: Sequence[TargetPoint], fit: StepsToTarget | None) -> str:
    if fit is None:
        met = sum(point.met for point in points)
        return (
            "No curve is fitted: it needs three batch sizes that met the target, and "
            f"{counted(met, 'size')} did."
        )
    critical = fit.critical_batch_size
    begun = "Fitted updates: S_min (1 + B_crit / B)"
    if critical.value is None or critical.interval is None:
        bound = f", above {readable(critical.at_least)}" if critical.at_least else ""
        return f"{begun}; B_crit is larger than these batch sizes can tell{bound}."
    doubt = " The trials leave this curve by more than their noise." if fit.holds is False else ""
    return (
        f"{begun}, S_min {readable(fit.fewest_steps)}, B_crit {readable(critical.value)} "
        f"({readable(critical.interval.low)} to {readable(critical.interval.high)}).{doubt}"
    )


def _notes(study: Study, points: Sequence[TargetPoint]) -> list[str]:
    notes = [
        "The target is looked at when an epoch ends: costs are those of whole epochs. Training "
        "time has the tracing of the first step in it, but no validation."
    ]
    if len(study.trials) > len({trial.batch_size for trial in study.trials}):
        notes.append("Shown: the trial of each batch size that needed the fewest updates.")
    if any(point.updates.bar for point in points):
        notes.append("Bars: 95 % interval of the mean over executions.")
    rules = {e.learning_rate_scaling for t in study.trials for e in t.executions}
    if rules == {None}:
        notes.append(
            "One learning rate for all batch sizes: large ones may need more updates for it alone."
        )
    return notes


def _why(study: Study, size: int) -> str:
    words = (outcome(t) for t in study.trials if t.batch_size == size and t.status != "completed")
    return ", ".join(dict.fromkeys(words)) or "no epochs"


HEIGHT_IN = 5.6
_CURVE_POINTS = 100
# Points on each piece of a curve that a name must not cover.
_BETWEEN = 12
# Where on its line the name of perfect scaling is tried, from the start to where the line leaves.
_NAME_SHARES = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9)


def plot_time_to_target(
    study: "Study", ax: "Axes | None" = None, *, target: float | None = None
) -> "Axes":
    """Plot the training time and the updates to a target by batch size, on logarithmic axes.

    Dashed is perfect scaling from the smallest batch size that met the target, where twice the
    batch needs half the updates (Shallue et al. 2019, arXiv:1811.03600). The curve through the
    updates is S_min (1 + B_crit / B) (McCandlish et al. 2018, arXiv:1812.06162).

    Example:

    >>> study = kbatch.load_study("results/digits")
    >>> kbatch.plot_time_to_target(study, target=0.95).figure.savefig("target.png")

    Args:
        study: A study, as `load_study` gives it.
        ax: Axes whose place the two panels take; a new figure if None.
        target: Value of `study.quality_metric` to come to; that of `StopAtTarget` if None.

    Returns:
        The Axes of the upper panel; their label, `get_label()`, describes the figure in sentences.

    Raises:
        ValueError: If the study is empty or has no target, with what to do.
    """
    info = time_to_target_info(study, target=target)
    upper, lower = stacked(new_axes(HEIGHT_IN) if ax is None else ax)
    upper.set_label(alt_text(info))
    sizes = [p.batch_size for p in info.points] + [size for size, _ in info.incomplete_sizes]
    batch_axis(lower, sizes, "Batch size (examples per update)")
    for panel in (upper, lower):
        tidy(panel)
    _draw_panel(upper, info, lambda point: point.seconds)
    _draw_panel(lower, info, lambda point: point.updates)
    if info.fit is not None:
        _draw_fit(lower, info)
    _finish(upper, info, lambda point: point.seconds)
    _finish(lower, info, lambda point: point.updates)
    for size, words in info.incomplete_sizes:
        name_missing(lower, size, words)
    upper.set_ylabel("Training time to target\n(s)")
    lower.set_ylabel("Updates to target")
    name_panel(upper, f"{info.name}: to {info.target_text}")
    write_caption(lower, info.fit_text, *info.notes, info.conditions)
    return upper


def _draw_panel(
    panel: "Axes", info: TimeToTargetInfo, cost: Callable[[TargetPoint], Estimate]
) -> None:
    if not info.points:
        say(panel, info.nothing)
        return
    panel.set_yscale("log")
    if info.met:
        _draw_perfect_scaling(panel, info, cost(info.met[0]).value)
    draw_series(
        panel,
        0,
        label="target met",
        places=[point.batch_size for point in info.met],
        values=[cost(point).value for point in info.met],
        bounds=[cost(point).bar for point in info.met],
        joined=panel.get_xlabel() == "" or info.fit is None,
    )
    for point in info.points:
        if not point.met:
            _draw_missed(panel, point.batch_size, cost(point).value)


def _draw_perfect_scaling(panel: "Axes", info: TimeToTargetInfo, first: float) -> None:
    sizes = np.array([point.batch_size for point in info.points], float)
    begin = info.met[0].batch_size
    places = np.array([begin, max(sizes[-1], begin)])
    panel.plot(places, first * begin / places, color=MUTED, linewidth=1.0, linestyle="--", zorder=1)


def _name_perfect_scaling(panel: "Axes", info: TimeToTargetInfo, estimates: list[Estimate]) -> None:
    """Name the line where its name stays in the panel and covers neither mark, bar nor curve."""
    costs = [estimate.value for estimate in estimates]
    bars = [(p.batch_size, e.bar) for p, e in zip(info.points, estimates, strict=True) if e.bar]
    begin, first = info.met[0].batch_size, costs[info.points.index(info.met[0])]
    # There the line leaves the panel, or ends.
    end = min(info.points[-1].batch_size, begin * first / panel.get_ylim()[0])
    marks = list(
        _along([(float(p.batch_size), c) for p, c in zip(info.points, costs, strict=True)])
    )
    marks += [(float(size), value) for size, ends in bars for value in np.geomspace(*ends, 6)]
    for share in _NAME_SHARES:
        size = begin * (end / begin) ** share
        place = (size, first * begin / size)
        label = Label(place, "perfect scaling", ((-1, -1), (1, 1)), MUTED)
        if not place_labels(panel, [label], marks, inside=True):
            return


def _along(points: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Return points along the lines that join points on logarithmic axes."""
    yield points[-1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        yield from zip(
            np.geomspace(x0, x1, _BETWEEN, endpoint=False),
            np.geomspace(y0, y1, _BETWEEN, endpoint=False),
            strict=True,
        )


def _draw_missed(panel: "Axes", place: float, value: float) -> None:
    """Draw what was spent without meeting the target: it takes more."""
    style = series_style(0)
    panel.plot(
        [place],
        [value],
        marker=style.marker,
        markersize=6,
        markerfacecolor=PAPER,
        markeredgecolor=style.color,
        linestyle="none",
    )
    panel.annotate(
        "",
        (place, value),
        xytext=(0, 20),
        textcoords="offset points",
        arrowprops={"arrowstyle": "<-", "color": style.color, "linewidth": 1.0, "shrinkB": 3},
    )
    panel.annotate(
        "not met",
        (place, value),
        xytext=(0, 21),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=SMALL_PT,
        color=INK,
        path_effects=halo(),
    )


def _draw_fit(panel: "Axes", info: TimeToTargetInfo) -> None:
    fit = info.fit
    if fit is None:
        return
    sizes = [point.batch_size for point in info.points]
    places = np.geomspace(sizes[0], sizes[-1], _CURVE_POINTS)
    steps = np.array([fit.steps(place) for place in places])
    shown = steps > 0
    style = series_style(0)
    panel.plot(places[shown], steps[shown], color=style.color, linewidth=1.4, zorder=1.5)
    critical = fit.critical_batch_size
    if critical.value is None or not sizes[0] <= critical.value <= sizes[-1]:
        return
    if critical.interval is not None:
        low, high = (
            min(max(x, sizes[0]), sizes[-1])
            for x in (critical.interval.low, critical.interval.high)
        )
        panel.axvspan(low, high, color=GRID, alpha=0.5, linewidth=0, zorder=0.2)
    panel.axvline(critical.value, color=MUTED, linewidth=0.8, linestyle=":", zorder=0.5)
    panel.annotate(
        f"B_crit {critical.value:,.0f}",
        (critical.value, 1),
        xycoords=panel.get_xaxis_transform(),
        xytext=(4, -3),
        textcoords="offset points",
        va="top",
        fontsize=SMALL_PT,
        color=INK,
        path_effects=halo(),
    )


def _finish(panel: "Axes", info: TimeToTargetInfo, cost: Callable[[TargetPoint], Estimate]) -> None:
    for size, _ in info.incomplete_sizes:
        mark_missing(panel, size)
    if not info.points:
        return
    # The line of perfect scaling leaves the panel: what was measured is what matters.
    estimates = [cost(point) for point in info.points]
    low = min(e.bar[0] if e.bar else e.value for e in estimates)
    high = max(e.bar[1] if e.bar else e.value for e in estimates)
    stretch = max(1.15, (high / low) ** 0.1)
    missed = any(not point.met for point in info.points)
    below = stretch**3 if info.incomplete_sizes else stretch**1.5
    panel.set_ylim(low / below, high * (stretch**3 if missed else stretch))
    plain_log_labels(panel.yaxis)
    if info.met and len(info.points) > 1:
        _name_perfect_scaling(panel, info, estimates)
