"""The figure of the memory by batch size, with the window, the limit and the fitted line."""

from typing import TYPE_CHECKING

import numpy as np

from kbatch.document.number_text import memory_text, percent
from kbatch.memory.memory_info import MemoryInfo, MemoryProbe, alt_text, fit_text, memory_info
from kbatch.plotting.batch_axis import batch_axis
from kbatch.plotting.canvas import SMALL_PT, halo, plain_axes, write_caption
from kbatch.plotting.palette import ALARM, ALARM_TEXT, INK, MUTED, PAPER, series_style
from kbatch.plotting.series import legend_columns, name_panel, ring

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kbatch.memory.max_batch_record import MaxBatchSizeResult

__all__ = ["MemoryInfo", "alt_text", "memory_info", "plot_memory"]

HEIGHT_IN = 4.2
_CURVE_POINTS = 200
_TOP = 1.12
_KINDS = ("below the limit", "above the window", "run once more to confirm")


def plot_memory(result: "MaxBatchSizeResult", ax: "Axes | None" = None) -> "Axes":
    """Plots the peak memory of every batch size that was tried, with window, limit and fit.

    Batch sizes that ran out of memory are marked on the limit.

    Example:

    >>> result = kbatch.find_max_batch_size(build, x, y)
    >>> kbatch.plot_memory(result).figure.savefig("memory.png")

    Args:
        result: What `find_max_batch_size` found.
        ax: Axes to draw on; a new figure if None.

    Returns:
        The Axes; their label, `get_label()`, describes the figure in sentences.
    """
    info = memory_info(result)
    panel = plain_axes(ax, HEIGHT_IN)
    panel.set_label(alt_text(info))
    batch_axis(panel, info.batch_sizes, "Batch size (examples in a step)")
    unit, name = _unit(info.limit_bytes)
    _draw_limit(panel, info, unit)
    _draw_fit(panel, info, unit)
    labels = [_draw_kind(panel, info, unit, *kind) for kind in enumerate(_KINDS)]
    labels.append(_draw_failed(panel, info, unit))
    _mark_answer(panel, info, unit)
    panel.set_ylim(0, _TOP * info.limit_bytes / unit)
    panel.set_ylabel(f"Peak memory ({name})")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    columns = legend_columns(filter(None, labels))
    name_panel(panel, info.title, columns=columns)
    write_caption(panel, *filter(None, (info.reason, fit_text(info), info.conditions)))
    return panel


def _draw_kind(panel: "Axes", info: MemoryInfo, unit: float, index: int, label: str) -> str:
    """Draws the runs of one kind, and gives its name where there are any."""
    style = series_style(index)
    shown = [
        (probe.batch_size, probe.peak_bytes / unit)
        for probe in info.probes
        if probe.peak_bytes is not None and _kind(probe) == label
    ]
    if not shown:
        return ""
    panel.plot(
        *zip(*shown, strict=True),
        color=style.color,
        marker=style.marker,
        markersize=6,
        markeredgecolor=PAPER,
        markeredgewidth=0.8,
        linestyle="none",
        label=label,
        zorder=3,
    )
    return label


def _kind(probe: MemoryProbe) -> str:
    if probe.above_window:
        return _KINDS[1]
    return _KINDS[2] if probe.confirms else _KINDS[0]


def _draw_fit(panel: "Axes", info: MemoryInfo, unit: float) -> None:
    if info.fit is None:
        return
    fixed, each = info.fit
    places = np.geomspace(info.batch_sizes[0], info.batch_sizes[-1], _CURVE_POINTS)
    values = (fixed + places * each) / unit
    panel.plot(places, values, color=series_style(0).color, linewidth=1.1, linestyle=":")


def _draw_limit(panel: "Axes", info: MemoryInfo, unit: float) -> None:
    low, high = (end / unit for end in info.window_bytes)
    panel.axhspan(low, high, color=series_style(2).color, alpha=0.14, linewidth=0, zorder=0.3)
    panel.axhline(info.limit_bytes / unit, color=ALARM, linewidth=1.0, linestyle="--", zorder=0.6)
    texts = (
        (
            info.limit_bytes / unit,
            3,
            "bottom",
            ALARM_TEXT,
            f"limit {memory_text(info.limit_bytes)}",
        ),
        ((low + high) / 2, 0, "center", MUTED, info.window_text),
    )
    for value, shift, align, color, text in texts:
        panel.annotate(
            text,
            (0.01, value),
            xycoords=panel.get_yaxis_transform(),
            xytext=(0, shift),
            textcoords="offset points",
            va=align,
            fontsize=SMALL_PT,
            color=color,
            path_effects=halo(),
        )


def _draw_failed(panel: "Axes", info: MemoryInfo, unit: float) -> str:
    """Marks on the limit what ran out of memory, and names it where there is any."""
    failed = sorted({p.batch_size for p in info.probes if p.peak_bytes is None})
    if not failed:
        return ""
    panel.plot(
        failed,
        [info.limit_bytes / unit] * len(failed),
        "X",
        color=ALARM,
        markersize=8,
        markeredgecolor=PAPER,
        label="out of memory",
        zorder=4,
    )
    return "out of memory"


def _mark_answer(panel: "Axes", info: MemoryInfo, unit: float) -> None:
    panel.axvline(info.answer, color=MUTED, linewidth=0.8, linestyle=":", zorder=0.5)
    share = percent(info.answer_bytes / info.limit_bytes)
    ring(panel, info.answer, info.answer_bytes / unit)
    left = info.answer > info.batch_sizes[0]
    above = info.answer_bytes < 0.15 * info.limit_bytes
    panel.annotate(
        f"{info.answer:,}: {memory_text(info.answer_bytes)}, {share}",
        (info.answer, info.answer_bytes / unit),
        xytext=(-11 if left else 11, 11 if above else -11),
        textcoords="offset points",
        ha="right" if left else "left",
        va="bottom" if above else "top",
        fontsize=SMALL_PT + 0.5,
        fontweight="bold",
        color=INK,
        path_effects=halo(),
    )


def _unit(limit_bytes: int) -> tuple[float, str]:
    """Gives the unit in which the limit is a readable number, and its name."""
    return (2.0**30, "GiB") if limit_bytes >= 2**30 else (2.0**20, "MiB")
