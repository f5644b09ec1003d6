"""The figure of the memory by batch size, with the window, the limit and the fitted line."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kbatch.document.numbers import counted, memory_text, percent
from kbatch.document.section import where_measured
from kbatch.memory.record import MaxBatchSizeResult
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.canvas import SMALL_PT, halo, plain_axes, write_caption
from kbatch.plotting.palette import ALARM, ALARM_TEXT, INK, MUTED, PAPER, series_style
from kbatch.plotting.series import legend_columns, name_panel, ring

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class MemoryProbe(NamedTuple):
    """One batch size that was run.

    Attributes:
        batch_size: Examples in the batch.
        peak_bytes: Most bytes held at once, None where memory ran out.
        above_window: Whether that is more than the window allows.
        confirms: Whether the run confirmed the answer, in a fresh process say.
    """

    batch_size: int
    peak_bytes: int | None
    above_window: bool
    confirms: bool


class MemoryInfo(NamedTuple):
    """What the figure shows.

    Attributes:
        title: Task and answer.
        probes: All runs, in order.
        answer: The largest batch size, in examples.
        answer_bytes: Most bytes seen there.
        limit_bytes: Memory that there was.
        window_bytes: Lower and upper end of the window.
        window_text: The window in words.
        fit: Fixed bytes and bytes per example, None from fewer than two sizes.
        reason: Why it is this size.
        conditions: Device, policy, versions and number of runs.
    """

    title: str
    probes: tuple[MemoryProbe, ...]
    answer: int
    answer_bytes: int
    limit_bytes: int
    window_bytes: tuple[float, float]
    window_text: str
    fit: tuple[float, float] | None
    reason: str
    conditions: str

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Every batch size once, ascending."""
        return tuple(sorted({probe.batch_size for probe in self.probes}))


def memory_info(result: MaxBatchSizeResult) -> MemoryInfo:
    """Compute what the figure of a search for the largest batch shows."""
    low, high = result.memory_window
    task = "training" if result.training else "inference"
    fit = result.fit
    return MemoryInfo(
        title=f"Largest batch for {task}: {counted(result.max_batch_size, 'example')}",
        probes=tuple(
            MemoryProbe(
                probe.batch_size,
                probe.peak_memory_bytes,
                probe.outcome == "above_window",
                probe.purpose != "search",
            )
            for probe in result.probes
        ),
        answer=result.max_batch_size,
        answer_bytes=result.peak_memory_bytes,
        limit_bytes=result.limit_bytes,
        window_bytes=(low * result.limit_bytes, high * result.limit_bytes),
        window_text=f"window {percent(low)} to {percent(high)}",
        fit=(fit.fixed_bytes, fit.bytes_per_example) if fit else None,
        reason=f"Why this size: {result.reason}.",
        conditions=_conditions(result),
    )


def fit_text(info: MemoryInfo) -> str:
    """Describe what the fitted line is, an empty text where there is none."""
    if info.fit is None:
        return ""
    fixed, each = info.fit
    return (
        f"Dotted: fitted line, {memory_text(max(fixed, 0.0))} and {memory_text(max(each, 0.0))} "
        "per example."
    )


def alt_text(info: MemoryInfo) -> str:
    """Describe the figure in sentences, for those who do not see it."""
    sizes = info.batch_sizes
    failed = sorted({p.batch_size for p in info.probes if p.peak_bytes is None})
    sentences = [
        f"A chart of peak memory over batch size, {sizes[0]:,} to {sizes[-1]:,}, on a logarithmic "
        f"axis, with the limit of {memory_text(info.limit_bytes)} and a {info.window_text}.",
        f"Batch size {info.answer:,} is marked, with {memory_text(info.answer_bytes)}, "
        f"{percent(info.answer_bytes / info.limit_bytes)} of the limit.",
    ]
    if failed:
        sentences.append(f"Out of memory: {', '.join(f'{size:,}' for size in failed)}.")
    return " ".join([*sentences, fit_text(info)]).strip()


def _conditions(result: MaxBatchSizeResult) -> str:
    environment = result.environment
    parts = where_measured(environment) if environment else [result.device]
    parts += [result.dtype_policy, counted(len(result.probes), "run")]
    return " · ".join(parts)


HEIGHT_IN = 4.2
_CURVE_POINTS = 200
_TOP = 1.12
_KINDS = ("below the limit", "above the window", "run once more to confirm")


def plot_memory(result: "MaxBatchSizeResult", ax: "Axes | None" = None) -> "Axes":
    """Plot the peak memory of every batch size that was tried, with window, limit and fit.

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
    """Draw the runs of one kind, and return its name where there are any."""
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
    """Marks on the limit what ran out of memory, and name it where there is any."""
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
    """Return the unit in which the limit is a readable number, and its name."""
    return (2.0**30, "GiB") if limit_bytes >= 2**30 else (2.0**20, "MiB")
