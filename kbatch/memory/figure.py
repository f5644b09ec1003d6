"""The figure of the memory by batch size, with the window, the limit and the fitted line."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from kbatch.document.numbers import memory_text, percent, pluralize
from kbatch.document.section import where_measured
from kbatch.memory.record import MaxBatchSizeResult
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.palette import ALARM, MUTED, series_style

HEIGHT_IN = 4.2
_CURVE_POINTS = 200
_TOP = 1.12
_OUT_OF_MEMORY = "out of memory"
_KINDS = ("below the limit", "above the window", "run once more to confirm", _OUT_OF_MEMORY)


class MemoryInfo(NamedTuple):
    """What the figure shows."""

    title: str
    # By what became of the run: batch sizes and peak bytes; what ran out lies on the limit.
    runs: dict[str, tuple[tuple[int, float], ...]]
    answer: int  # The largest batch size, in examples.
    answer_bytes: int  # Most bytes seen there.
    limit_bytes: int
    window_bytes: tuple[float, float]
    window_text: str
    fit: tuple[float, float] | None  # Fixed bytes and bytes per example, None from one size.
    notes: tuple[str, ...]
    alt_text: str

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Every batch size once, ascending."""
        return tuple(sorted({size for runs in self.runs.values() for size, _ in runs}))


def memory_info(result: MaxBatchSizeResult) -> MemoryInfo:
    """Compute what the figure of a search for the largest batch shows."""
    limit_bytes, fit, environment = result.limit_bytes, result.fit, result.environment
    low, high = result.memory_window
    window = f"{percent(low)} to {percent(high)}"
    task = "training" if result.training else "inference"
    runs: dict[str, list[tuple[int, float]]] = {kind: [] for kind in _KINDS}
    below, above, confirming, out = _KINDS
    for probe in result.probes:
        kind, peak_bytes = out, probe.peak_memory_bytes
        if peak_bytes is not None:
            kind = below if probe.purpose == "search" else confirming
            kind = above if probe.outcome == "above_window" else kind
        runs[kind].append((probe.batch_size, limit_bytes if peak_bytes is None else peak_bytes))
    sizes = sorted({probe.batch_size for probe in result.probes})
    failed = ", ".join(f"{size:,}" for size, _ in sorted(set(runs[_OUT_OF_MEMORY])))
    line = ""
    if fit:
        fixed, each = memory_text(max(fit.fixed_bytes, 0)), max(fit.bytes_per_example, 0.0)
        line = f"Dotted: fitted line, {fixed} and {memory_text(each)} per example."
    where = where_measured(environment) if environment else [result.device]
    answer, answer_bytes = result.max_batch_size, result.peak_memory_bytes
    sentences = (
        f"A chart of peak memory over batch size, {sizes[0]:,} to {sizes[-1]:,}, on a logarithmic "
        f"axis, with the limit of {memory_text(limit_bytes)} and a window {window}.",
        f"Batch size {answer:,} is marked, with {memory_text(answer_bytes)}, "
        f"{percent(answer_bytes / limit_bytes)} of the limit.",
        failed and f"Out of memory: {failed}.",
        line,
    )
    return MemoryInfo(
        title=f"Largest batch for {task}: {pluralize(answer, 'example')}",
        runs={kind: tuple(found) for kind, found in runs.items()},
        answer=answer,
        answer_bytes=answer_bytes,
        limit_bytes=limit_bytes,
        window_bytes=(low * limit_bytes, high * limit_bytes),
        window_text=f"window {window}",
        fit=(fit.fixed_bytes, fit.bytes_per_example) if fit else None,
        notes=(
            f"Why this size: {result.reason}.",
            line,
            " · ".join([*where, result.dtype_policy, pluralize(len(result.probes), "run")]),
        ),
        alt_text=" ".join(filter(None, sentences)),
    )


def plot_memory(result: MaxBatchSizeResult, ax: Axes | None = None) -> Axes:
    """Plot the peak memory of every batch size that was tried, with window, limit and fit.

    Batch sizes that ran out of memory are marked on the limit.

    >>> result = kbatch.find_max_batch_size(build, x, y)
    >>> kbatch.plot_memory(result).figure.savefig("memory.png")

    Args:
        result: What `find_max_batch_size` found.
        ax: Axes to draw on; a new figure if None. Their label describes the figure in sentences.
    """
    info = memory_info(result)
    (panel,) = canvas.panels(ax, HEIGHT_IN)
    panel.set_label(info.alt_text)
    sizes = info.batch_sizes
    batch_axis(panel, sizes, "Batch size (examples in a step)")
    unit, unit_name = (2.0**30, "GiB") if info.limit_bytes >= 2**30 else (2.0**20, "MiB")
    limit, low, high = (end / unit for end in (info.limit_bytes, *info.window_bytes))
    panel.axhspan(low, high, color=series_style(2).color, alpha=0.14, linewidth=0, zorder=0.3)
    draw.limit(panel, limit, f"limit {memory_text(info.limit_bytes)}")
    middle, edge = (0.01, (low + high) / 2), panel.get_yaxis_transform()
    draw.text(panel, info.window_text, middle, ha="left", color=MUTED, xycoords=edge)
    if info.fit is not None:
        fixed, each = info.fit
        places = np.geomspace(sizes[0], sizes[-1], _CURVE_POINTS)
        line = {"color": series_style(0).color, "linewidth": 1.1, "linestyle": ":"}
        panel.plot(places, (fixed + places * each) / unit, **line)
    for index, (kind, runs) in enumerate(info.runs.items()):
        if runs:
            failed = kind == _OUT_OF_MEMORY
            color, marker = (ALARM, "X") if failed else series_style(index)
            peaks = [peak_bytes / unit for _, peak_bytes in runs]
            look = {"size": 8 if failed else 6, "label": kind, "zorder": 4 if failed else 3}
            draw.points(panel, [size for size, _ in runs], peaks, color, marker, **look)
    draw.guide(panel, info.answer)
    place = (info.answer, info.answer_bytes / unit)
    draw.ring(panel, *place)
    share = info.answer_bytes / info.limit_bytes
    ha, right_pt = ("right", -11) if info.answer > sizes[0] else ("left", 11)
    va, up_pt = ("bottom", 11) if share < 0.15 else ("top", -11)
    words = f"{info.answer:,}: {memory_text(info.answer_bytes)}, {percent(share)}"
    draw.text(panel, words, place, (right_pt, up_pt), ha=ha, va=va, bold=True)
    panel.set_ylim(0, _TOP * limit)
    panel.set_ylabel(f"Peak memory ({unit_name})")
    panel.yaxis.set_major_formatter("{x:g}")
    canvas.write_title(panel, info.title, columns=4)
    canvas.write_caption(panel, *info.notes)
    return panel
