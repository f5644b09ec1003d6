"""The figure of the call paths: each against the first one."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from kbatch.analysis.intervals import median_interval
from kbatch.document.numbers import readable
from kbatch.inference.figures.common import BATCH_LABEL, inference_info
from kbatch.inference.profile import InferenceProfile
from kbatch.inference.record import TimingRecord
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.canvas import plain_axes, write_caption
from kbatch.plotting.palette import MUTED, series_style
from kbatch.plotting.series import annotate, draw_series, legend_columns, name_panel

HEIGHT_IN = 3.8
# Height of a figure beside a point, as a share of the panel's.
_LABEL_SHARE = 0.055


class PathRatio(NamedTuple):
    """How fast one series is at one batch size, measured in the same rounds as the first."""

    label: str
    batch_size: int
    times_as_fast: float  # Median over the rounds.
    bounds: tuple[float, float] | None  # Its 95 % interval, None from fewer than six rounds.


def path_ratios(profile: InferenceProfile) -> tuple[PathRatio, ...]:
    """Compare every series with the first, round by round."""
    first, *others = inference_info(profile).series
    measured = {
        (t.call_path, t.dtype_policy, t.batch_size): t for t in profile.timings if t.measured
    }
    ratios = []
    for other in others:
        for point in other.points:
            size = point.batch_size
            reference = measured.get((first.call_path, first.dtype_policy, size))
            one = measured[other.call_path, other.dtype_policy, size]
            if reference is not None and (ratio := _ratio(other.label, reference, one)):
                ratios.append(ratio)
    if not ratios:
        raise ValueError(
            "A figure of call paths needs two of them, or two policies, timed at one batch size: "
            'profile with `call_paths=("compiled", "xla")`, say. '
            f"Received: {len(others) + 1} timed."
        )
    return tuple(ratios)


def plot_inference_paths(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot how many times as fast as the first call path each other one is, by batch size.

    Args:
        profile: A profile with several call paths or policies.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: If there is nothing to compare, with what to measure.
    """
    info, ratios = inference_info(profile), path_ratios(profile)
    panel = plain_axes(ax, HEIGHT_IN)
    batch_axis(panel, [ratio.batch_size for ratio in ratios], BATCH_LABEL)
    for index, series in enumerate(info.series[1:], start=1):
        points = [ratio for ratio in ratios if ratio.label == series.label]
        draw_series(
            panel,
            index,
            label=series.label,
            places=[p.batch_size for p in points],
            values=[p.times_as_fast for p in points],
            bounds=[p.bounds for p in points],
        )
    panel.axhline(1, color=MUTED, linewidth=1.0, linestyle="--")
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    low, high = np.log2(panel.get_ylim())
    labels = [one.label for one in info.series]
    for ratio, place in label_places(ratios, _LABEL_SHARE * (high - low)):
        # A ratio between two ticks cannot be read off.
        color = series_style(labels.index(ratio.label)).color
        words = readable(ratio.times_as_fast)
        annotate(panel, words, (ratio.batch_size, place), (7, 0), ha="left", color=color)
    panel.set_ylabel(f"Times as fast as\n{info.series[0].label}")
    name_panel(panel, info.name, columns=legend_columns(one.label for one in info.series))
    write_caption(panel, info.conditions)
    return panel


def label_places(ratios: Sequence[PathRatio], apart: float) -> tuple[tuple[PathRatio, float], ...]:
    """Find where the figures of the last points stand, one above the other."""
    last = {ratio.label: ratio for ratio in ratios}.values()
    places: list[tuple[PathRatio, float]] = []
    for ratio in sorted(last, key=lambda one: (one.batch_size, one.times_as_fast)):
        place = ratio.times_as_fast
        if places and places[-1][0].batch_size == ratio.batch_size:
            place = max(place, places[-1][1] * 2**apart)
        places.append((ratio, place))
    return tuple(places)


def _ratio(label: str, first: TimingRecord, other: TimingRecord) -> PathRatio | None:
    theirs = dict(zip(other.block_rounds, other.batch_times_s, strict=True))
    pairs = zip(first.block_rounds, first.batch_times_s, strict=True)
    ratios = [time_s / theirs[number] for number, time_s in pairs if number in theirs]
    if not ratios:
        return None
    interval = median_interval(ratios)
    bounds = (interval.low, interval.high) if interval else None
    return PathRatio(label, first.batch_size, statistics.median(ratios), bounds)
