"""The figure of throughput and latency by batch size."""

from matplotlib.axes import Axes

from kbatch.inference.figures.common import BATCH_LABEL, InferenceInfo, TimedSeries, inference_info
from kbatch.inference.profile import InferenceProfile
from kbatch.plotting.axes import batch_axis, plain_log_labels
from kbatch.plotting.canvas import new_axes, stacked, tidy, write_caption
from kbatch.plotting.palette import ALARM, ALARM_TEXT, MUTED, series_style
from kbatch.plotting.series import (
    annotate,
    draw_series,
    legend_columns,
    mark_missing,
    name_panel,
)

HEIGHT_IN = 5.4
# What the name of an answer takes above the highest point, as a share of its height.
_ROOM_A_NAME = 0.11
_ROW = 0.085


def plot_inference_throughput(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot samples/s above and the time of a batch below, by batch size.

    Lines are the fit t(b) = (b + n_half) / r_inf where it holds; elsewhere they join the points.
    Latency targets that were checked are drawn in the lower panel. Batch sizes that the first call
    path answers (knee, efficient, fastest) are marked, sizes that ran out of memory stand at the
    bottom edge.

    Example:

    >>> kbatch.plot_inference_throughput(profile).figure.savefig("throughput.png")

    Args:
        profile: A profile, as `profile_inference` gives it.
        ax: Axes whose place the two panels take; a new figure if None.

    Returns:
        The Axes of the upper panel.

    Raises:
        ValueError: If nothing was timed.
    """
    info = inference_info(profile)
    upper, lower = stacked(new_axes(HEIGHT_IN) if ax is None else ax)
    for panel in (upper, lower):
        tidy(panel)
    batch_axis(lower, info.batch_sizes, BATCH_LABEL)
    for index, series in enumerate(info.series):
        _draw_both(upper, lower, index, series)
    edge = lower.get_yaxis_transform()
    for target in info.targets:
        lower.axhline(target.latency_ms, color=ALARM, linewidth=1.0, linestyle="--", zorder=0.5)
        annotate(
            lower,
            target.words,
            (0.005, target.latency_ms),
            (0, 3),
            ha="left",
            va="baseline",
            color=ALARM_TEXT,
            xycoords=edge,
        )
    upper.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    lower.set_yscale("log")
    plain_log_labels(lower.yaxis)
    upper.set_ylabel("Throughput\n(samples/s)")
    lower.set_ylabel("Time of a batch\n(ms)")
    name_panel(upper, info.name, columns=legend_columns(one.label for one in info.series))
    _mark_answers(upper, info)
    write_caption(lower, info.conditions)
    return upper


def _draw_both(upper: Axes, lower: Axes, index: int, series: TimedSeries) -> None:
    sizes = [p.batch_size for p in series.points]
    rates = [p.samples_per_second for p in series.points]
    times = [p.time_ms for p in series.points]
    marks = {"label": series.label, "places": sizes, "joined": not series.line}
    draw_series(upper, index, values=rates, bounds=[p.rate_bounds for p in series.points], **marks)
    draw_series(lower, index, values=times, bounds=[p.time_bounds for p in series.points], **marks)
    if series.line:
        places, line_ms = zip(*series.line, strict=True)
        line_rates = [1000 * size / ms for size, ms in series.line]
        for panel, values in ((upper, line_rates), (lower, line_ms)):
            panel.plot(places, values, color=series_style(index).color, linewidth=1.2)
    for size in series.failed:
        mark_missing(lower, size, "out of memory")


def _mark_answers(panel: Axes, info: InferenceInfo) -> None:
    """Name the sizes that answer something, above all points."""
    names: dict[int, list[str]] = {}
    for name, answer in info.answers:
        names.setdefault(answer.batch_size, []).append(name)
    panel.set_ylim(bottom=0, top=(1.05 + _ROOM_A_NAME * len(names)) * panel.get_ylim()[1])
    smallest, largest = info.batch_sizes[0], info.batch_sizes[-1]
    unmeasured = {answer.batch_size for _, answer in info.answers if answer.extrapolated}
    for row, size in enumerate(sorted(names)):
        if smallest <= size <= largest:
            panel.axvline(size, color=MUTED, linewidth=0.8, linestyle=":", zorder=0.5)
        side, offset_pt = ("right", -4) if size > (smallest * largest) ** 0.5 else ("left", 4)
        annotate(
            panel,
            f"{', '.join(names[size])} {size:,}{' (not measured)' if size in unmeasured else ''}",
            # A size beyond the axis stands at its end.
            (min(max(size, smallest), largest), 0.99 - _ROW * row),
            (offset_pt, 0),
            ha=side,
            va="top",
            xycoords=panel.get_xaxis_transform(),
        )
