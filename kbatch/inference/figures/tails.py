"""The figure of the latency's tails: the median and bounds of quantiles by batch size."""

from typing import TYPE_CHECKING, NamedTuple

from kbatch.analysis.intervals import quantile_upper_bound
from kbatch.document.numbers import listed
from kbatch.inference.figures.common import BATCH_LABEL, conditions_line
from kbatch.plotting.axes import batch_axis, plain_log_labels
from kbatch.plotting.canvas import SMALL_PT, halo, plain_axes, write_caption
from kbatch.plotting.palette import MUTED
from kbatch.plotting.series import draw_series, name_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kbatch.inference.profile import InferenceProfile

HEIGHT_IN = 3.8
QUANTILES = (0.5, 0.95, 0.99)


class TailPoint(NamedTuple):
    """A quantile of the latency at one batch size.

    Attributes:
        batch_size: Examples in a batch.
        quantile: Which quantile.
        bound_ms: Its upper 95 % bound, in milliseconds; None with too few calls.
        missing_calls: How many more it needs.
    """

    batch_size: int
    quantile: float
    bound_ms: float | None
    missing_calls: int


def tail_points(profile: "InferenceProfile") -> tuple[TailPoint, ...]:
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


def plot_inference_tails(profile: "InferenceProfile", ax: "Axes | None" = None) -> "Axes":
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
        known = [p for p in points if p.quantile == quantile and p.bound_ms is not None]
        values = [p.bound_ms for p in known if p.bound_ms is not None]
        if not values:
            continue
        draw_series(
            panel,
            index,
            label=f"p{100 * quantile:g}",
            places=[p.batch_size for p in known],
            values=values,
        )
    panel.set_yscale("log")
    plain_log_labels(panel.yaxis)
    panel.set_ylabel("Latency, upper 95 % bound\nof the quantile (ms)")
    path, policy = profile.series[0]
    name_panel(panel, f"{profile.model_name}: {path}, {policy}", columns=4 if panel.lines else 0)
    _say_missing(panel, points)
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


def _say_missing(panel: "Axes", points: tuple[TailPoint, ...]) -> None:
    if any(point.bound_ms is not None for point in points):
        return
    panel.set_yticks([])
    panel.text(
        0.5,
        0.5,
        "n/a (too few calls for any quantile)",
        transform=panel.transAxes,
        ha="center",
        fontsize=SMALL_PT,
        color=MUTED,
        path_effects=halo(),
    )
