"""The figure of the memory by batch size, with the limit and the size expected to reach it."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kbatch.document.numbers import memory_text
from kbatch.inference.figures.common import BATCH_LABEL, conditions_line
from kbatch.memory.search import fit_memory
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.canvas import SMALL_PT, halo, plain_axes, write_caption
from kbatch.plotting.palette import ALARM, ALARM_TEXT, MUTED, series_style
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

HEIGHT_IN = 3.8
# The share of the limit beyond which no batch is run.
GUARD_SHARE = 0.80
_CURVE_POINTS = 200


class MemorySeries(NamedTuple):
    """The memory under one policy.

    Attributes:
        label: The policy.
        sizes: Batch sizes that were measured.
        peak_bytes: Most bytes held at each.
        failed: Sizes that ran out of memory.
        guarded: Sizes that were not run, since they were expected to.
        largest_expected: Largest size that is expected to stay below 80 % of the limit; None
            where memory does not grow or is not known.
    """

    label: str
    sizes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    failed: tuple[int, ...]
    guarded: tuple[int, ...]
    largest_expected: int | None


def memory_series(profile: "InferenceProfile") -> tuple[MemorySeries, ...]:
    """Compute the memory under each policy."""
    policies = dict.fromkeys(m.dtype_policy for m in profile.memory)
    series = tuple(_series(profile, policy) for policy in policies)
    if not any(one.sizes for one in series):
        raise ValueError(
            "The profile holds no memory: profile with `measure_memory=True`. "
            f"Received: {len(profile.memory)} probes of memory."
        )
    return series


def plot_inference_memory(profile: "InferenceProfile", ax: "Axes | None" = None) -> "Axes":
    """Plot the peak memory by batch size, the fitted line and the limit.

    Args:
        profile: A profile whose memory was measured.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes.

    Raises:
        ValueError: If no memory was measured.
    """
    found = memory_series(profile)
    panel = plain_axes(ax, HEIGHT_IN)
    sizes = sorted({size for one in found for size in (*one.sizes, *one.failed, *one.guarded)})
    batch_axis(panel, sizes, BATCH_LABEL)
    for index, one in enumerate(found):
        _draw_line(panel, index, one, sizes)
        draw_series(
            panel, index, label=one.label, places=one.sizes, values=one.peak_bytes, joined=False
        )
        for size in one.failed:
            mark_missing(panel, size)
            name_missing(panel, size, "out of memory")
    _draw_limit(panel, profile.memory_limit_bytes)
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(lambda value, _: memory_text(value))
    panel.set_ylabel("Peak memory, weights included")
    name_panel(panel, profile.model_name, columns=legend_columns(one.label for one in found))
    expected = [
        f"{one.label}: batches up to {one.largest_expected:,} are expected to stay below 80 %"
        for one in found
        if one.largest_expected is not None
    ]
    write_caption(panel, conditions_line(profile), *expected)
    return panel


def _series(profile: "InferenceProfile", policy: str) -> MemorySeries:
    records = [m for m in profile.memory if m.dtype_policy == policy]
    known = {m.batch_size: m.peak_bytes for m in records if m.peak_bytes is not None}
    failed = tuple(m.batch_size for m in records if m.outcome == "out_of_memory")
    guarded = tuple(m.batch_size for m in records if m.guarded)
    return MemorySeries(
        policy,
        tuple(known),
        tuple(known.values()),
        failed,
        guarded,
        _largest_expected(known, profile.memory_limit_bytes),
    )


def _largest_expected(peaks: dict[int, int], limit_bytes: int | None) -> int | None:
    fit = fit_memory({size: float(peak) for size, peak in peaks.items()})
    # Less than a byte an example is rounding, not growth.
    if fit is None or limit_bytes is None or fit.bytes_per_example < 1:
        return None
    largest = int((GUARD_SHARE * limit_bytes - fit.fixed_bytes) / fit.bytes_per_example)
    return largest if largest >= 1 else None


def _draw_line(panel: "Axes", index: int, one: MemorySeries, sizes: list[int]) -> None:
    peaks = dict(zip(one.sizes, (float(peak) for peak in one.peak_bytes), strict=True))
    fit = fit_memory(peaks)
    if fit is None:
        return
    places = np.geomspace(sizes[0], sizes[-1], _CURVE_POINTS)
    values = fit.fixed_bytes + places * fit.bytes_per_example
    shown = values > 0
    style = series_style(index)
    panel.plot(places[shown], values[shown], color=style.color, linewidth=1.0, linestyle=":")


def _draw_limit(panel: "Axes", limit_bytes: int | None) -> None:
    if limit_bytes is None:
        return
    lines = (
        (limit_bytes, ALARM, ALARM_TEXT, f"limit {memory_text(limit_bytes)}"),
        (GUARD_SHARE * limit_bytes, MUTED, MUTED, "80 %: nothing above is run"),
    )
    for number, (value, color, text_color, text) in enumerate(lines):
        panel.axhline(value, color=color, linewidth=1.0, linestyle="--")
        panel.annotate(
            text,
            (0.01, value),
            xycoords=panel.get_yaxis_transform(),
            xytext=(0, -3 if number else 3),
            textcoords="offset points",
            va="top" if number else "bottom",
            fontsize=SMALL_PT,
            color=text_color,
            path_effects=halo(),
        )
