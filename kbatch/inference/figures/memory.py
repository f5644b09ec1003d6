"""The figure of the memory by batch size, with the limit and the size expected to reach it."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from kbatch.document.numbers import memory_text
from kbatch.inference.figures.common import BATCH_LABEL, conditions_line
from kbatch.inference.profile import InferenceProfile
from kbatch.memory.search import MemoryFit, fit_memory
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.canvas import plain_axes, write_caption
from kbatch.plotting.palette import ALARM, ALARM_TEXT, MUTED, series_style
from kbatch.plotting.series import (
    annotate,
    draw_series,
    legend_columns,
    mark_missing,
    name_panel,
)

HEIGHT_IN = 3.8
# The share of the limit beyond which no batch is run.
GUARD_SHARE = 0.80
_CURVE_POINTS = 200


class MemorySeries(NamedTuple):
    """The memory under one policy."""

    label: str
    sizes: tuple[int, ...]  # Batch sizes that were measured.
    peak_bytes: tuple[int, ...]
    failed: tuple[int, ...]  # Sizes that ran out of memory.
    guarded: tuple[int, ...]  # Sizes that were not run, since they were expected to.
    fit: MemoryFit | None
    # To stay below 80 % of the limit; None where memory does not grow or is not known.
    largest_expected: int | None


def memory_series(profile: InferenceProfile) -> tuple[MemorySeries, ...]:
    """Compute the memory under each policy."""
    series = []
    for policy in dict.fromkeys(m.dtype_policy for m in profile.memory):
        records = [m for m in profile.memory if m.dtype_policy == policy]
        known = {m.batch_size: m.peak_bytes for m in records if m.peak_bytes is not None}
        fit = fit_memory({size: float(peak) for size, peak in known.items()})
        largest, limit_bytes = 0, profile.memory_limit_bytes
        # Less than a byte an example is rounding, not growth.
        if fit is not None and limit_bytes is not None and fit.bytes_per_example >= 1:
            largest = int((GUARD_SHARE * limit_bytes - fit.fixed_bytes) / fit.bytes_per_example)
        series.append(
            MemorySeries(
                policy,
                tuple(known),
                tuple(known.values()),
                tuple(m.batch_size for m in records if m.outcome == "out_of_memory"),
                tuple(m.batch_size for m in records if m.guarded),
                fit,
                largest if largest >= 1 else None,
            )
        )
    if not any(one.sizes for one in series):
        raise ValueError(
            "The profile holds no memory: profile with `measure_memory=True`. "
            f"Received: {len(profile.memory)} probes of memory."
        )
    return tuple(series)


def plot_inference_memory(profile: InferenceProfile, ax: Axes | None = None) -> Axes:
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
        if one.fit is not None:
            places = np.geomspace(sizes[0], sizes[-1], _CURVE_POINTS)
            values = one.fit.fixed_bytes + places * one.fit.bytes_per_example
            shown, color = values > 0, series_style(index).color
            panel.plot(places[shown], values[shown], color=color, linewidth=1.0, linestyle=":")
        draw_series(
            panel, index, label=one.label, places=one.sizes, values=one.peak_bytes, joined=False
        )
        for size in one.failed:
            mark_missing(panel, size, "out of memory")
    if (limit_bytes := profile.memory_limit_bytes) is not None:
        guard_bytes, edge = GUARD_SHARE * limit_bytes, panel.get_yaxis_transform()
        panel.axhline(limit_bytes, color=ALARM, linewidth=1.0, linestyle="--")
        panel.axhline(guard_bytes, color=MUTED, linewidth=1.0, linestyle="--")
        for text, value, offset_pt, va, color in (
            (f"limit {memory_text(limit_bytes)}", limit_bytes, 3, "bottom", ALARM_TEXT),
            ("80 %: nothing above is run", guard_bytes, -3, "top", MUTED),
        ):
            place, offset = (0.01, value), (0, offset_pt)
            annotate(panel, text, place, offset, ha="left", va=va, color=color, xycoords=edge)
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
