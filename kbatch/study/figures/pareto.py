"""The figure of quality against throughput, with the trials that no other one beats."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from kbatch.document.numbers import counted, listed, readable, shortened
from kbatch.plotting.canvas import plain_axes, say, width_share, write_caption
from kbatch.plotting.labels import Label, place_labels
from kbatch.plotting.palette import GRID, INK, MUTED, PAPER, series_style
from kbatch.plotting.series import legend_columns, name_panel
from kbatch.study.conditions import (
    Estimate,
    bars_text,
    caption,
    conditions_of,
    metric_estimate,
    throughput_estimate,
)
from kbatch.study.decision import refuse_empty
from kbatch.study.figures.common import (
    incomplete_text,
    none_completed,
    quality_axis,
    throughput_x_axis,
    trial_series,
)
from kbatch.study.names import metric_words, trial_names
from kbatch.study.study import Study
from kbatch.study.trial import Objective

HEIGHT_IN = 4.0
_MOST_NAMED = 14
_NAME_CHARACTERS = 30


class ParetoPoint(NamedTuple):
    """One trial."""

    trial_id: str
    name: str  # Its batch size, with what else tells it from the others.
    batch_size: int
    series: int  # Number of its series.
    throughput: Estimate  # In examples per second.
    quality: Estimate
    on_front: bool  # Whether no other trial is both faster and better.


class ParetoInfo(NamedTuple):
    """What the figure shows; a text that does not apply is empty."""

    name: str
    points: tuple[ParetoPoint, ...]  # By throughput.
    series: tuple[str, ...]  # What the trials of each have in common.
    quality: Objective | None  # None if no trial has a metric of quality.
    bars: str
    nothing: str
    incomplete: str
    conditions: str

    @property
    def front(self) -> tuple[ParetoPoint, ...]:
        """The trials that no other one beats, the slowest first."""
        return tuple(point for point in self.points if point.on_front)


def pareto_info(study: Study) -> ParetoInfo:
    """Compute which trials are faster or better than every other one."""
    refuse_empty(study)
    names, quality = trial_names(study.trials), study.quality_metric
    completed = [trial for trial in study.trials if trial.status == "completed"]
    series = trial_series(completed, names) if completed else ()
    number = {trial_id: i for i, one in enumerate(series) for trial_id in one.trial_ids}
    measured = [
        (trial, rate, value)
        for trial in completed
        if quality is not None
        and (rate := throughput_estimate(trial)) is not None
        and (value := metric_estimate(trial, quality.name)) is not None
    ]
    sign = 1 if quality is None or quality.direction == "max" else -1
    front = pareto_front([r.value for _, r, _ in measured], [sign * v.value for *_, v in measured])
    points = [
        ParetoPoint(
            trial.trial_id,
            # The legend tells the rest where there are several series.
            names.name(trial) if len(series) == 1 else f"{trial.batch_size:,}",
            trial.batch_size,
            number[trial.trial_id],
            rate,
            value,
            place in front,
        )
        for place, (trial, rate, value) in enumerate(measured)
    ]
    nothing = "n/a (no trial has both a throughput and a metric of quality)"
    return ParetoInfo(
        name=study.name,
        points=tuple(sorted(points, key=lambda p: (p.throughput.value, sign * -p.quality.value))),
        series=tuple(one.label for one in series),
        quality=quality,
        bars=bars_text(study),
        nothing="" if points else nothing if completed else none_completed(study),
        incomplete=incomplete_text(study) if completed else "",
        conditions=caption(conditions_of(study)),
    )


def pareto_front(first: Sequence[float], second: Sequence[float]) -> tuple[int, ...]:
    """Find the choices that no other one beats.

    One choice beats another if it is better in one quality and not worse in the other. Equal
    choices do not beat each other.

    >>> pareto_front([1.0, 2.0, 3.0], [0.9, 0.8, 0.85])
    (0, 2)
    """
    if len(first) != len(second):
        raise ValueError(
            "`first` and `second` must have one value a choice each. Received: "
            f"{len(first)} and {len(second)} values."
        )
    front: list[int] = []
    for place in sorted(range(len(first)), key=lambda i: (first[i], second[i]), reverse=True):
        best = front[-1] if front else None
        equal = best is not None and (first[place], second[place]) == (first[best], second[best])
        if best is None or equal or second[place] > second[best]:
            front.append(place)
    return tuple(reversed(front))


def alt_text(info: ParetoInfo) -> str:
    """Describe the figure in sentences, for those who do not see it."""
    if not info.points or info.quality is None:
        return f"An empty chart of quality against throughput. {info.nothing}."
    front = listed(
        f"batch size {p.name} with {readable(p.throughput.value)} samples/s and "
        f"{readable(p.quality.value, 4)}"
        for p in info.front
    )
    return (
        f"A chart of {metric_words(info.quality.name)} against throughput, one mark for each of "
        f"{counted(len(info.points), 'trial')}. No other trial is both faster and better than "
        f"{front}. {info.incomplete}"
    ).strip()


def plot_pareto(study: Study, ax: Axes | None = None) -> Axes:
    """Plot the quality of each trial against its throughput, with the Pareto front as steps.

    A filled mark stands for a trial that no other one beats in both, a hollow one for the others.
    Marks are labelled with the batch size.

    Example:

    >>> study = kbatch.load_study("results/digits")
    >>> kbatch.plot_pareto(study).figure.savefig("pareto.png")

    Args:
        study: A study, as `load_study` gives it.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes; their label, `get_label()`, describes the figure in sentences.

    Raises:
        ValueError: If the study is empty, with what to run.
    """
    info = pareto_info(study)
    panel = plain_axes(ax, HEIGHT_IN)
    panel.set_label(alt_text(info))
    if not info.points or info.quality is None:
        name_panel(panel, info.name)
        say(panel, info.nothing)
        panel.set_xticks([])
        write_caption(panel, info.conditions, alarm=info.incomplete, below_pt=10)
        return panel
    panel.grid(visible=True, axis="x", color=GRID, linewidth=0.6)
    throughput_x_axis(panel, [p.throughput.value for p in info.points])
    for kind in sorted({(p.series, p.on_front) for p in info.points}):
        _draw_points(panel, [p for p in info.points if (p.series, p.on_front) == kind])
    panel.margins(y=0.14)
    panel.autoscale_view(scalex=False)
    quality_axis(panel, info.quality, [p.quality.value for p in info.points])
    higher = info.quality.direction == "max"
    _draw_front(panel, info.front, higher=higher)
    shown = sorted({p.series for p in info.points})
    for number in shown if len(shown) > 1 else ():
        style = series_style(number)
        panel.plot([], [], style.marker, color=style.color, label=info.series[number])
    name_panel(panel, info.name, columns=legend_columns((info.series[n] for n in shown), most=3))
    _label_points(panel, info, up=1 if higher else -1)
    filled = "Filled: no other trial is both faster and better. Labels: batch size."
    legend = filled if len(info.points) > 1 else "Label: batch size."
    write_caption(panel, f"{legend} {info.bars}", info.conditions, alarm=info.incomplete)
    return panel


def _draw_points(panel: Axes, points: Sequence[ParetoPoint]) -> None:
    """Draw points that are alike: hundreds of trials make few marks for a file to hold."""
    style, on_front = series_style(points[0].series), points[0].on_front
    bars = {"color": style.color, "linewidth": 1.2, "alpha": 0.45, "zorder": 1.5}
    across = [(p.throughput.value, *p.quality.bar) for p in points if p.quality.bar]
    along = [(p.quality.value, *p.throughput.bar) for p in points if p.throughput.bar]
    for draw, spans in ((panel.vlines, across), (panel.hlines, along)):
        if spans:
            draw(*zip(*spans, strict=True), **bars)
    panel.plot(
        [p.throughput.value for p in points],
        [p.quality.value for p in points],
        marker=style.marker,
        markersize=7 if on_front else 5.5,
        markerfacecolor=style.color if on_front else PAPER,
        markeredgecolor=PAPER if on_front else style.color,
        markeredgewidth=0.8 if on_front else 1.1,
        linestyle="none",
        zorder=3 if on_front else 2.5,
    )


def _draw_front(panel: Axes, front: Sequence[ParetoPoint], *, higher: bool) -> None:
    """Draw the border of what some trial beats, from edge to edge."""
    left, (bottom, top) = panel.get_xlim()[0], panel.get_ylim()
    places = [left, *(p.throughput.value for p in front), front[-1].throughput.value]
    edge = bottom if higher else top
    values = [front[0].quality.value, *(p.quality.value for p in front), edge]
    panel.plot(places, values, drawstyle="steps-pre", color=MUTED, linewidth=1.1, zorder=1)
    panel.set_ylim(bottom, top)


def _label_points(panel: Axes, info: ParetoInfo, *, up: int) -> None:
    """Name the trials, those on the front first; of many trials those alone."""
    outside = ((1, up), (0, up), (-1, up), (1, 0))
    inside = ((-1, -up), (0, -up), (1, -up), (-1, 0), (1, 0), (1, up), (-1, up), (0, up))
    few = len(info.points) <= _MOST_NAMED
    # A narrow figure has no room for settings.
    named = few and width_share(panel) == 1
    labels = [
        Label(
            (p.throughput.value, p.quality.value),
            shortened(p.name, _NAME_CHARACTERS) if named else f"{p.batch_size:,}",
            outside if p.on_front else inside,
            INK if p.on_front else MUTED,
            bold=p.on_front,
            short=f"{p.batch_size:,}",
        )
        for p in sorted(info.points if few else info.front, key=lambda p: not p.on_front)
    ]
    marks = [(p.throughput.value, p.quality.value) for p in info.points]
    place_labels(panel, labels, marks, inside=True)
