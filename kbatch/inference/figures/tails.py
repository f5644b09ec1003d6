"""The figure of the latency's tails: the median and bounds of quantiles by batch size."""

from typing import NamedTuple

from matplotlib.axes import Axes

from kbatch.analysis.intervals import quantile_upper_bound
from kbatch.document.numbers import listed
from kbatch.inference.figures.common import BATCH_LABEL, conditions_line
from kbatch.inference.profile import InferenceProfile
from kbatch.plotting.axes import batch_axis, plain_log_labels
from kbatch.plotting.canvas import plain_axes, say, write_caption
from kbatch.plotting.series import draw_series, name_panel

HEIGHT_IN = 3.8
QUANTILES = (0.5, 0.95, 0.99)


class TailPoint(NamedTuple):
    """A quantile of the latency at one batch size."""

    batch_size: int
    quantile: float
    bound_ms: float | None  # Its upper 95 % bound, None with too few calls.
    missing_calls: int  # How many more it needs.


def tail_points(profile: InferenceProfile) -> tuple[TailPoint, ...]:
    """Compute the bounds for the first call path and policy."""
    timings = [timing for timing in profile.answering if not timing.bulk]
    if not timings:
        raise ValueError(
            "Tails need single calls of batches, and the first call path has none: select another "
            f"one (`profile.select`). Received: series={profile.series}."
        )
    quantiles = sorted({*QUANTILES, profile.quantile})
    points = []
    for timing in timings:
        for quantile in quantiles:
            bound = quantile_upper_bound(timing.latencies_s, quantile=quantile)
            value_ms = None if bound.value is None else 1000 * bound.value
            points.append(TailPoint(timing.batch_size, quantile, value_ms, bound.missing_calls))
    return tuple(points)


def plot_inference_tails(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
    """Plot upper bounds of the latency's quantiles by batch size, for the first call path.

    A quantile is shown only where enough calls were made; elsewhere the figure says how many more
    it needs.

    Args:
        profile: A profile, as `profile_inference` gives it.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: If there are no single calls.
    """
    points = tail_points(profile)
    panel = plain_axes(ax, HEIGHT_IN)
    batch_axis(panel, [point.batch_size for point in points], BATCH_LABEL)
    for index, quantile in enumerate(sorted({point.quantile for point in points})):
        known = [
            (point.batch_size, point.bound_ms)
            for point in points
            if point.quantile == quantile and point.bound_ms is not None
        ]
        if known:
            places, values = zip(*known, strict=True)
            draw_series(panel, index, label=f"p{100 * quantile:g}", places=places, values=values)
    panel.set_yscale("log")
    plain_log_labels(panel.yaxis)
    panel.set_ylabel("Latency, upper 95 % bound\nof the quantile (ms)")
    path, policy = profile.series[0]
    name_panel(panel, f"{profile.model_name}: {path}, {policy}", columns=4 if panel.lines else 0)
    if all(point.bound_ms is None for point in points):
        say(panel, "n/a (too few calls for any quantile)")
    write_caption(panel, conditions_line(profile), *missing_notes(points))
    return panel


def missing_notes(points: tuple[TailPoint, ...]) -> tuple[str, ...]:
    """Describe which quantiles need more calls, and how many at most."""
    notes = []
    for quantile in sorted({point.quantile for point in points}):
        missing = [p for p in points if p.quantile == quantile and p.missing_calls]
        if missing:
            sizes = listed(f"{p.batch_size:,}" for p in missing)
            most = max(p.missing_calls for p in missing)
            notes.append(
                f"p{100 * quantile:g} at batch size {sizes} needs up to {most:,} more calls."
            )
    return tuple(notes)
