"""The figure of quality against throughput, with the trials that no other one beats."""

from typing import TYPE_CHECKING

from kbatch.document.short_text import shortened
from kbatch.plotting.canvas import plain_axes, say, width_share, write_caption
from kbatch.plotting.labels import Label, place_labels
from kbatch.plotting.palette import GRID, INK, MUTED, PAPER, series_style
from kbatch.plotting.series import legend_columns, name_panel
from kbatch.study.figures.metric_axis import quality_axis, throughput_x_axis
from kbatch.study.figures.pareto_info import ParetoInfo, ParetoPoint, alt_text, pareto_info

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from kbatch.study.study_record import Study

__all__ = ["ParetoInfo", "alt_text", "pareto_info", "plot_pareto"]

HEIGHT_IN = 4.0
_MOST_NAMED = 14
_NAME_CHARACTERS = 30


def plot_pareto(study: "Study", ax: "Axes | None" = None) -> "Axes":
    """Plots the quality of each trial against its throughput, with the Pareto front as steps.

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
    _draw_front(panel, info)
    shown = sorted({p.series for p in info.points})
    for number in shown if len(shown) > 1 else ():
        style = series_style(number)
        panel.plot([], [], style.marker, color=style.color, label=info.series[number])
    name_panel(panel, info.name, columns=legend_columns((info.series[n] for n in shown), most=3))
    _label(panel, info)
    write_caption(panel, _legend_text(info), info.conditions, alarm=info.incomplete)
    return panel


def _draw_points(panel: "Axes", points: "Sequence[ParetoPoint]") -> None:
    """Draws points that are alike: hundreds of trials make few marks for a file to hold."""
    style, on_front = series_style(points[0].series), points[0].on_front
    bars = {"color": style.color, "linewidth": 1.2, "alpha": 0.45, "zorder": 1.5}
    across = [(p.throughput.value, *p.quality.bar) for p in points if p.quality.bar]
    along = [(p.quality.value, *p.throughput.bar) for p in points if p.throughput.bar]
    if across:
        panel.vlines(*zip(*across, strict=True), **bars)
    if along:
        panel.hlines(*zip(*along, strict=True), **bars)
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


def _draw_front(panel: "Axes", info: ParetoInfo) -> None:
    """Draws the border of what some trial beats, from edge to edge."""
    front = info.front
    left, (bottom, top) = panel.get_xlim()[0], panel.get_ylim()
    edge = bottom if info.quality and info.quality.direction == "max" else top
    places = [left, *(p.throughput.value for p in front), front[-1].throughput.value]
    values = [front[0].quality.value, *(p.quality.value for p in front), edge]
    panel.plot(places, values, drawstyle="steps-pre", color=MUTED, linewidth=1.1, zorder=1)
    panel.set_ylim(bottom, top)


def _label(panel: "Axes", info: ParetoInfo) -> None:
    up = 1 if info.quality is None or info.quality.direction == "max" else -1
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


def _legend_text(info: ParetoInfo) -> str:
    if len(info.points) == 1:
        return f"Label: batch size. {info.bars}"
    return f"Filled: no other trial is both faster and better. Labels: batch size. {info.bars}"
