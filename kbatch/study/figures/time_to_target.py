"""The figure of the cost of a target: seconds and updates by batch size."""

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from kbatch.plotting.batch_axis import batch_axis
from kbatch.plotting.canvas import SMALL_PT, halo, new_axes, say, stacked, tidy, write_caption
from kbatch.plotting.labels import Label, place_labels
from kbatch.plotting.log_axis import plain_log_labels
from kbatch.plotting.palette import GRID, INK, MUTED, PAPER, series_style
from kbatch.plotting.series import draw_series, mark_missing, name_missing, name_panel
from kbatch.study.estimates import Estimate
from kbatch.study.figures.time_to_target_info import (
    TargetPoint,
    TimeToTargetInfo,
    alt_text,
    time_to_target_info,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kbatch.study.study_record import Study

__all__ = ["TimeToTargetInfo", "alt_text", "plot_time_to_target", "time_to_target_info"]

HEIGHT_IN = 5.6
_CURVE_POINTS = 100
# Points on each piece of a curve that a name must not cover.
_BETWEEN = 12
# Where on its line the name of perfect scaling is tried, from the start to where the line leaves.
_NAME_SHARES = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9)


def plot_time_to_target(
    study: "Study", ax: "Axes | None" = None, *, target: float | None = None
) -> "Axes":
    """Plots the training time and the updates to a target by batch size, on logarithmic axes.

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
    """Names the line where its name stays in the panel and covers neither mark, bar nor curve."""
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
    """Gives points along the lines that join points on logarithmic axes."""
    yield points[-1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        yield from zip(
            np.geomspace(x0, x1, _BETWEEN, endpoint=False),
            np.geomspace(y0, y1, _BETWEEN, endpoint=False),
            strict=True,
        )


def _draw_missed(panel: "Axes", place: float, value: float) -> None:
    """Draws what was spent without meeting the target: it takes more."""
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
