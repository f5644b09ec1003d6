"""The figure of the operating points: throughput against latency."""

from matplotlib.axes import Axes

from kbatch.inference.figures.common import conditions_line, inference_info
from kbatch.inference.profile import InferenceProfile
from kbatch.plotting.axes import plain_log_labels
from kbatch.plotting.canvas import plain_axes, write_caption
from kbatch.plotting.palette import ALARM, ALARM_TEXT, GRID, MUTED, series_style
from kbatch.plotting.series import annotate, draw_series, legend_columns, name_panel

HEIGHT_IN = 3.8
# Height of the panel in heights of the highest point, and what the words of a target add.
_ROOM_ABOVE, _ROOM_A_TARGET = 1.12, 0.07
_ROW = 0.055


def plot_inference_operating_curve(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot samples/s against the time of a batch; each point is a batch size.

    Going right along a curve buys throughput with latency; where it turns flat, nothing is
    bought. Targets that were checked are vertical lines.

    Args:
        profile: A profile, as `profile_inference` gives it.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: If nothing was timed.
    """
    info = inference_info(profile)
    panel = plain_axes(ax, HEIGHT_IN)
    panel.set_xscale("log")
    panel.grid(visible=True, axis="x", color=GRID, linewidth=0.6)
    for index, series in enumerate(info.series):
        times = [p.time_ms for p in series.points]
        rates = [p.samples_per_second for p in series.points]
        draw_series(panel, index, label=series.label, places=times, values=rates)
        # The sizes of the others are about the same: only their ends are named, or none could be
        # read.
        for point in series.points[-1:] if index else series.points:
            place = (point.time_ms, point.samples_per_second)
            color = series_style(index).color if index else MUTED
            annotate(panel, f"{point.batch_size:,}", place, (0, 6), va="baseline", color=color)
    # The words of targets stand above all points.
    room = _ROOM_ABOVE + _ROOM_A_TARGET * len(info.targets)
    panel.set_ylim(bottom=0, top=room * panel.get_ylim()[1])
    low, high = panel.get_xlim()
    for row, target in enumerate(info.targets):
        # The words stand on the side that has room, below those before.
        side, offset_pt = ("right", -4) if target.latency_ms**2 > low * high else ("left", 4)
        panel.axvline(target.latency_ms, color=ALARM, linewidth=1.0, linestyle="--", zorder=0.5)
        annotate(
            panel,
            target.words,
            (target.latency_ms, 0.99 - _ROW * row),
            (offset_pt, 0),
            ha=side,
            va="top",
            color=ALARM_TEXT,
            xycoords=panel.get_xaxis_transform(),
        )
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    plain_log_labels(panel.xaxis)
    panel.set_xlabel("Time of a batch (ms)")
    panel.set_ylabel("Throughput (samples/s)")
    name_panel(panel, info.name, columns=legend_columns(one.label for one in info.series))
    write_caption(panel, conditions_line(profile))
    return panel
