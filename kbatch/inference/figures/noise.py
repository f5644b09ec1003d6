"""The figure of the noise: how far the rounds of each batch size scatter."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from kbatch.document.numbers import counted, percent
from kbatch.inference.figures.common import BATCH_LABEL, conditions_line
from kbatch.inference.profile import InferenceProfile
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.canvas import plain_axes, write_caption
from kbatch.plotting.palette import ALARM, MUTED, series_style
from kbatch.plotting.series import annotate, name_panel

HEIGHT_IN = 2.8
# Rounds of one size are spread over this much of an octave.
_STRIP = 0.28
# Room above the farthest round, for the label of the band.
_ROOM = 1.25
# Rounds beyond so many times what this share of them keeps to are marked at the edge: one round
# beside a neighbour would flatten all others.
_FAR, _MOST_ROUNDS = 2.0, 0.9
_EDGE = 0.96
# Of rounds that are all alike.
_LEAST_REACH = 0.01


class NoisePoint(NamedTuple):
    """One round of one batch size."""

    batch_size: int
    place: float  # Where it is drawn on the batch axis.
    deviation: float  # Distance from the median of its size, as a share of it.


def noise_points(profile: InferenceProfile) -> tuple[NoisePoint, ...]:
    """Compute the deviations of the rounds, for the first call path and policy."""
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


def noise_reach(points: Sequence[NoisePoint], floor: float | None) -> float:
    """Return how far the axis reaches to each side."""
    distances = [abs(point.deviation) for point in points]
    farthest = max(distances)
    usual = _FAR * float(np.quantile(distances, _MOST_ROUNDS))
    return max(floor or 0.0, usual if 0 < usual < farthest else farthest) or _LEAST_REACH


def plot_inference_noise(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot each round's distance from the median of its batch size, in order of time.

    The band is the noise floor of the A/A test: smaller differences of two settings mean nothing.
    A few rounds that lie far beyond the others are triangles at the edge, and the caption tells
    the farthest.

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
    floor = profile.noise_floor
    reach = noise_reach(points, floor)
    beyond = [point for point in points if abs(point.deviation) > reach]
    panel.set_ylim(-_ROOM * reach, _ROOM * reach)
    panel.axhline(0, color=MUTED, linewidth=0.8)
    if floor is not None:
        panel.axhspan(-floor, floor, color=MUTED, alpha=0.15, linewidth=0)
        place, edge = (0.99, floor), panel.get_yaxis_transform()
        words = f"noise floor {percent(floor)}"
        annotate(panel, words, place, (0, 2), ha="right", va="bottom", xycoords=edge)
    within = [point for point in points if abs(point.deviation) <= reach]
    style = series_style(0)
    panel.plot(
        [point.place for point in within],
        [point.deviation for point in within],
        linestyle="none",
        marker=style.marker,
        markersize=3.5,
        markeredgewidth=0,
        color=style.color,
        alpha=0.6,
    )
    for point in beyond:
        panel.plot(
            [point.place],
            [math.copysign(_EDGE * _ROOM * reach, point.deviation)],
            linestyle="none",
            marker="^" if point.deviation > 0 else "v",
            markersize=6,
            markeredgewidth=0,
            color=ALARM,
        )
    panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:+.0f} %" if value else "0 %")
    panel.set_ylabel("Distance of a round\nfrom the median")
    path, policy = profile.series[0]
    name_panel(panel, f"{profile.model_name}: {path}, {policy}")
    notes = [conditions_line(profile)]
    if beyond:
        farthest = max(beyond, key=lambda point: abs(point.deviation))
        notes.append(
            f"{counted(len(beyond), 'round')} {'lies' if len(beyond) == 1 else 'lie'} beyond the "
            f"axis (triangles), the farthest at {100 * farthest.deviation:+.0f} %, batch size "
            f"{farthest.batch_size:,}"
        )
    write_caption(panel, *notes)
    return panel
