"""The timeline of the GPUs: utilization, memory and power while a block of code ran."""

from typing import TYPE_CHECKING

from kbatch.plotting.canvas import new_axes, piled, tidy, write_caption
from kbatch.plotting.palette import series_style
from kbatch.plotting.series import legend_columns, name_panel
from kbatch.study.figures.gpu_timeline_info import (
    GpuPanel,
    GpuTimelineInfo,
    alt_text,
    gpu_timeline_info,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kbatch.records.usage import UsageRecord
    from kbatch.study.figures.gpu_timeline_info import HasUsage
    from kbatch.study.study_record import Study

__all__ = ["GpuTimelineInfo", "alt_text", "gpu_timeline_info", "plot_gpu_timeline"]

_PANEL_IN = 1.35
_REST_IN = 1.5
# With all of its panels.
HEIGHT_IN = _REST_IN + 3 * _PANEL_IN
# Of each curve so many readings are marked, to tell the GPUs apart without colour.
_MARKS = 25


def plot_gpu_timeline(
    watched: "Study | UsageRecord | HasUsage", ax: "Axes | None" = None
) -> "Axes":
    """Plots utilization, memory and power of each GPU over time.

    Example:

    >>> with kbatch.GpuMonitor() as monitor:
    ...     model.fit(x, y)
    >>> kbatch.plot_gpu_timeline(monitor).figure.savefig("gpu.png")

    Args:
        watched: A `GpuMonitor` whose block has ended, its `usage`, or a study, whose best trial
            with readings is shown.
        ax: Axes whose place the panels take; a new figure if None.

    Returns:
        The Axes of the uppermost panel; their label, `get_label()`, describes the figure in
        sentences.

    Raises:
        ValueError: If no GPU was read, with the reason and what to do.
    """
    info = gpu_timeline_info(watched)
    shown = [panel for panel in info.panels if panel.known]
    first = new_axes(_REST_IN + _PANEL_IN * len(shown)) if ax is None else ax
    panels = piled(first, len(shown))
    first.set_label(alt_text(info))
    for panel, quantity in zip(panels, shown, strict=True):
        tidy(panel)
        _draw(panel, info, quantity)
    panels[-1].set_xlim(0, info.duration_s)
    panels[-1].set_xlabel("Time (s)")
    name_panel(first, info.title, columns=legend_columns(info.gpus, most=2))
    write_caption(panels[-1], *info.notes)
    return first


def _draw(panel: "Axes", info: GpuTimelineInfo, quantity: GpuPanel) -> None:
    for number, (gpu, trace) in enumerate(zip(info.gpus, quantity.traces, strict=True)):
        style = series_style(number)
        panel.plot(
            trace.times_s,
            trace.values,
            color=style.color,
            linewidth=1.3,
            marker=style.marker,
            markevery=max(1, len(trace.times_s) // _MARKS),
            markersize=3.5,
            label=gpu,
        )
    highest = max(value for trace in quantity.traces for value in trace.values)
    panel.set_ylim(0, quantity.top or 1.12 * highest or 1.0)
    panel.set_ylabel(quantity.label)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
