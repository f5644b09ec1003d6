"""The figure of throughput and latency by batch size."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kbatch.reporting.figures.batch_axis import batch_axis
from kbatch.reporting.figures.canvas import (
    SMALL_PT,
    TEXT_PT,
    halo,
    new_axes,
    stacked,
    tidy,
    write_caption,
)
from kbatch.reporting.figures.inference_info import BATCH_LABEL, InferenceInfo, inference_info
from kbatch.reporting.figures.log_axis import plain_log_labels
from kbatch.reporting.figures.palette import ALARM, INK, MUTED, PAPER, series_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kbatch.records.inference import InferenceProfile

HEIGHT_IN = 5.4


def plot_inference_throughput(profile: "InferenceProfile", ax: "Axes | None" = None) -> "Axes":
    """Plots samples/s above and the time of a batch below, by batch size.

    Batch sizes that the first call path answers (knee, efficient, fastest) are marked, sizes that
    ran out of memory stand at the bottom edge.

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
        sizes = [p.batch_size for p in series.points]
        rates = [p.samples_per_second for p in series.points]
        rate_bounds = [p.rate_bounds for p in series.points]
        draw_series(upper, index, series.label, sizes, rates, rate_bounds)
        times = [p.time_ms for p in series.points]
        bounds = [
            (p.low_ms, p.high_ms) if p.low_ms is not None and p.high_ms is not None else None
            for p in series.points
        ]
        draw_series(lower, index, series.label, sizes, times, bounds)
        mark_failed(lower, series.failed)
    upper.set_ylim(bottom=0, top=1.12 * upper.get_ylim()[1])
    upper.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    lower.set_yscale("log")
    plain_log_labels(lower.yaxis)
    upper.set_ylabel("Throughput\n(samples/s)")
    lower.set_ylabel("Time of a batch\n(ms)")
    name_panel(upper, info.name, len(info.series) > 1)
    _mark_answers(upper, info)
    write_caption(lower, info.conditions)
    return upper


def draw_series(
    panel: "Axes",
    index: int,
    label: str,
    places: Sequence[float],
    values: Sequence[float],
    bounds: Sequence[tuple[float, float] | None],
) -> None:
    """Draws one series with its bars.

    Args:
        panel: The Axes.
        index: Number of the series, for its style.
        label: Its name in the legend.
        places: Where its points lie on the x axis.
        values: Their values.
        bounds: Lower and upper end of each bar, None where there is none.
    """
    style = series_style(index)
    spans = [(x, *b) for x, b in zip(places, bounds, strict=True) if b is not None]
    if spans:
        panel.vlines(*zip(*spans, strict=True), color=style.color, linewidth=1.6, alpha=0.55)
    panel.plot(
        places,
        values,
        color=style.color,
        linewidth=1.4,
        marker=style.marker,
        markersize=6,
        markeredgecolor=PAPER,
        markeredgewidth=0.8,
        label=label,
    )


def mark_failed(panel: "Axes", sizes: tuple[int, ...]) -> None:
    """Marks batch sizes that ran out of memory at the bottom edge."""
    for size in sizes:
        panel.plot(
            [size],
            [0],
            transform=panel.get_xaxis_transform(),
            color=ALARM,
            marker="X",
            markersize=8,
            markeredgecolor=PAPER,
            linestyle="none",
            clip_on=False,
            zorder=4,
        )
        panel.annotate(
            "out of\nmemory",
            (size, 0),
            xycoords=panel.get_xaxis_transform(),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=SMALL_PT,
            color=ALARM,
            path_effects=halo(),
        )


def name_panel(panel: "Axes", title: str, legend: bool) -> None:
    """Titles the upper panel, with the names of its series below the title."""
    panel.set_title(
        title,
        loc="left",
        pad=6 + (1.6 * TEXT_PT if legend else 0),
        fontsize=TEXT_PT + 1.5,
        color=INK,
        fontweight="bold",
    )
    if legend:
        panel.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=4,
            borderaxespad=0,
            frameon=False,
            fontsize=TEXT_PT,
            labelcolor=INK,
            columnspacing=1.2,
            handletextpad=0.5,
        )


def _mark_answers(panel: "Axes", info: InferenceInfo) -> None:
    by_size: dict[int, list[str]] = {}
    smallest, largest = info.batch_sizes[0], info.batch_sizes[-1]
    for name, answer in info.answers:
        if smallest <= answer.batch_size <= largest:
            by_size.setdefault(answer.batch_size, []).append(name)
    for row, (size, names) in enumerate(sorted(by_size.items())):
        panel.axvline(size, color=MUTED, linewidth=0.8, linestyle=":", zorder=0.5)
        panel.annotate(
            f"{', '.join(names)} {size:,}",
            (size, 0.02 + 0.09 * row),
            xycoords=panel.get_xaxis_transform(),
            xytext=(-4 if size > smallest**0.5 * largest**0.5 else 4, 0),
            textcoords="offset points",
            ha="right" if size > smallest**0.5 * largest**0.5 else "left",
            fontsize=SMALL_PT,
            color=INK,
            path_effects=halo(),
        )
