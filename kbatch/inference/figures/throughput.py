"""The figure of throughput and latency by batch size."""

from typing import TYPE_CHECKING

from kbatch.inference.figures.common import BATCH_LABEL, InferenceInfo, TimedSeries, inference_info
from kbatch.plotting.axes import batch_axis, plain_log_labels
from kbatch.plotting.canvas import SMALL_PT, halo, new_axes, stacked, tidy, write_caption
from kbatch.plotting.palette import ALARM, ALARM_TEXT, INK, MUTED, series_style
from kbatch.plotting.series import (
    draw_series,
    legend_columns,
    mark_missing,
    name_missing,
    name_panel,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kbatch.inference.profile import InferenceProfile

HEIGHT_IN = 5.4
# What the name of an answer takes above the highest point, as a share of its height.
_ROOM_A_NAME = 0.11
_ROW = 0.085


def plot_inference_throughput(profile: "InferenceProfile", ax: "Axes | None" = None) -> "Axes":
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
    _mark_targets(lower, info)
    upper.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    lower.set_yscale("log")
    plain_log_labels(lower.yaxis)
    upper.set_ylabel("Throughput\n(samples/s)")
    lower.set_ylabel("Time of a batch\n(ms)")
    name_panel(upper, info.name, columns=legend_columns(one.label for one in info.series))
    marks = _answer_marks(info)
    # Their names stand above all points.
    upper.set_ylim(bottom=0, top=(1.05 + _ROOM_A_NAME * len(marks)) * upper.get_ylim()[1])
    _mark_answers(upper, info, marks)
    write_caption(lower, info.conditions)
    return upper


def _draw_both(upper: "Axes", lower: "Axes", index: int, series: TimedSeries) -> None:
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
        mark_missing(lower, size)
        name_missing(lower, size, "out of memory")


def _mark_targets(lower: "Axes", info: InferenceInfo) -> None:
    for target in info.targets:
        lower.axhline(target.latency_ms, color=ALARM, linewidth=1.0, linestyle="--", zorder=0.5)
        lower.annotate(
            target.words,
            (0.005, target.latency_ms),
            xycoords=lower.get_yaxis_transform(),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=SMALL_PT,
            color=ALARM_TEXT,
            path_effects=halo(),
        )


def _answer_marks(info: InferenceInfo) -> list[tuple[int, list[str]]]:
    """Return the sizes that answer something, ascending, with what they answer."""
    by_size: dict[int, list[str]] = {}
    for name, answer in info.answers:
        by_size.setdefault(answer.batch_size, []).append(name)
    return sorted(by_size.items())


def _mark_answers(panel: "Axes", info: InferenceInfo, marks: list[tuple[int, list[str]]]) -> None:
    smallest, largest = info.batch_sizes[0], info.batch_sizes[-1]
    unmeasured = {answer.batch_size for _, answer in info.answers if answer.extrapolated}
    for row, (size, names) in enumerate(marks):
        if smallest <= size <= largest:
            panel.axvline(size, color=MUTED, linewidth=0.8, linestyle=":", zorder=0.5)
        panel.annotate(
            f"{', '.join(names)} {size:,}{' (not measured)' if size in unmeasured else ''}",
            # A size beyond the axis stands at its end.
            (min(max(size, smallest), largest), 0.99 - _ROW * row),
            xycoords=panel.get_xaxis_transform(),
            xytext=(-4 if size > smallest**0.5 * largest**0.5 else 4, 0),
            textcoords="offset points",
            ha="right" if size > smallest**0.5 * largest**0.5 else "left",
            va="top",
            fontsize=SMALL_PT,
            color=INK,
            path_effects=halo(),
        )
