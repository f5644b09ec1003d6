"""The figure of the noise: how far the rounds of each batch size scatter."""

import statistics
from typing import TYPE_CHECKING, NamedTuple

from kbatch.reporting.figures.batch_axis import batch_axis
from kbatch.reporting.figures.canvas import SMALL_PT, halo, plain_axes, write_caption
from kbatch.reporting.figures.inference_info import BATCH_LABEL, conditions_line
from kbatch.reporting.figures.palette import INK, MUTED, series_style
from kbatch.reporting.figures.series_marks import name_panel
from kbatch.reporting.number_text import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kbatch.records.inference import InferenceProfile

HEIGHT_IN = 2.8
# Rounds of one size are spread over this much of an octave.
_STRIP = 0.28
# Room above the farthest round, for the label of the band.
_ROOM = 1.25


class NoisePoint(NamedTuple):
    """One round of one batch size.

    Attributes:
        batch_size: Examples in a batch.
        place: Where it is drawn on the batch axis.
        deviation: Distance from the median of its size, as a share of it.
    """

    batch_size: int
    place: float
    deviation: float


def noise_points(profile: "InferenceProfile") -> tuple[NoisePoint, ...]:
    """Computes the deviations of the rounds, for the first call path and policy.

    Raises:
        ValueError: If nothing was timed there.
    """
    points = []
    for timing in profile.answering:
        median = statistics.median(timing.block_medians_s)
        last = max(1, len(timing.block_medians_s) - 1)
        points += [
            NoisePoint(
                timing.batch_size,
                timing.batch_size * 2 ** (_STRIP * (2 * i / last - 1)),
                value / median - 1,
            )
            for i, value in enumerate(timing.block_medians_s)
        ]
    if not points:
        raise ValueError(
            "The first call path has no time, so no noise either: select another one "
            f"(`profile.select`). Received: series={profile.series}."
        )
    return tuple(points)


def plot_inference_noise(profile: "InferenceProfile", ax: "Axes | None" = None) -> "Axes":
    """Plots each round's distance from the median of its batch size, in order of time.

    The band is the noise floor of the A/A test: smaller differences of two settings mean nothing.

    Args:
        profile: A profile, as `profile_inference` gives it.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: If nothing was timed on the first call path.
    """
    points = noise_points(profile)
    panel = plain_axes(ax, HEIGHT_IN)
    batch_axis(panel, [point.batch_size for point in points], BATCH_LABEL)
    style = series_style(0)
    panel.plot(
        [point.place for point in points],
        [point.deviation for point in points],
        linestyle="none",
        marker=style.marker,
        markersize=3.5,
        markeredgewidth=0,
        color=style.color,
        alpha=0.6,
    )
    panel.axhline(0, color=MUTED, linewidth=0.8)
    floor = profile.noise_floor
    if floor is not None:
        panel.axhspan(-floor, floor, color=MUTED, alpha=0.15, linewidth=0)
        farthest = max(floor, *(abs(point.deviation) for point in points))
        panel.set_ylim(-_ROOM * farthest, _ROOM * farthest)
        panel.annotate(
            f"noise floor {percent(floor)}",
            (0.99, floor),
            xycoords=panel.get_yaxis_transform(),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=SMALL_PT,
            color=INK,
            path_effects=halo(),
        )
    panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:+.0f} %" if value else "0 %")
    panel.set_ylabel("Distance of a round\nfrom the median")
    path, policy = profile.series[0]
    name_panel(panel, f"{profile.model_name}: {path}, {policy}")
    write_caption(panel, conditions_line(profile))
    return panel
