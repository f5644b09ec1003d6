"""The figure of memory by batch size."""

from matplotlib.axes import Axes

from kbatch.memory.result import MaxBatchSizeResult, ProbeRecord
from kbatch.memory.search import memory_curve
from kbatch.page.document import Figure
from kbatch.page.numbers import memory_text, percent, pluralize, where_measured
from kbatch.plotting import canvas, draw
from kbatch.plotting.canvas import ALARM, MUTED, series_style
from kbatch.plotting.draw import batch_axis

_HEIGHT_IN = 3.6
_TOP = 1.12
# The kinds of run in the order of the legend, with their labels.
_KINDS = {"search": "fits", "above_window": "above the window"}
_KINDS |= {"confirm": "run once more to confirm", "out_of_memory": "out of memory"}


def plot_memory(
    result: MaxBatchSizeResult, ax: Axes | None = None, *, caption: bool = True
) -> Axes:
    """Plot peak memory by batch size, with the memory window, the limit and the fitted line.

    Batch sizes that ran out of memory are marked on the limit.

    Example:

    >>> result = kbatch.find_max_batch_size(build, x, y)
    >>> kbatch.plot_memory(result).figure.savefig("memory.png")

    Args:
        result: A `MaxBatchSizeResult`.
        ax: Matplotlib axes to draw on. If None, a new figure.
        caption: Boolean. Whether to write a caption below a new figure. Default: True.

    Returns:
        The Axes. Their label describes the figure in sentences.

    Raises:
        ValueError: If `ax` has no figure.
    """
    answer, limit_bytes, fit = result.max_batch_size, result.limit_bytes, result.fit
    peaks_bytes = result.memory_bytes
    window = " to ".join(map(percent, result.memory_window))
    (panel,) = canvas.panels(ax, _HEIGHT_IN)
    sizes = sorted({probe.batch_size for probe in result.probes})
    batch_axis(panel, sizes, "Batch size (examples in a step)")
    unit, unit_name = (2.0**30, "GiB") if limit_bytes >= 2**30 else (2.0**20, "MiB")
    limit, low, high = (share * limit_bytes / unit for share in (1, *result.memory_window))
    panel.axhspan(low, high, color=series_style(2)[0], alpha=0.14, linewidth=0, zorder=0.3)
    draw.limit(panel, limit, f"limit {memory_text(limit_bytes)}")
    middle, edge = (0.01, (low + high) / 2), panel.get_yaxis_transform()
    draw.text(panel, f"window {window}", middle, ha="left", color=MUTED, xycoords=edge)
    fit_text = ""
    curve = memory_curve(peaks_bytes)
    if fit is not None and curve is not None and draw.follows(curve, peaks_bytes):
        points = draw.sampled(lambda size: curve(size) / unit, sizes[0], sizes[-1])
        look = {"color": series_style(0)[0], "linewidth": 1.2, "linestyle": ":"}
        panel.plot(*zip(*points, strict=True), **look)
        fixed, per_example = (memory_text(max(size_bytes, 0.0)) for size_bytes in fit)
        fit_text = f"Dotted: fitted line, {fixed} plus {per_example} per example."
    for index, (kind, label) in enumerate(_KINDS.items()):
        if runs := [probe for probe in result.probes if _kind(probe) == kind]:
            failed = kind == "out_of_memory"
            color, marker = (ALARM, "X") if failed else series_style(index)
            # A run that failed has no peak and is drawn on the limit.
            peaks = [(probe.peak_memory_bytes or limit_bytes) / unit for probe in runs]
            look = {"size": 8 if failed else 6, "label": label, "zorder": 4 if failed else 3}
            draw.points(panel, [run.batch_size for run in runs], peaks, color, marker, **look)
    peak_bytes = result.peak_memory_bytes
    draw.guide(panel, answer)
    place, share = (answer, peak_bytes / unit), peak_bytes / limit_bytes
    draw.ring(panel, *place)
    ha, right_pt = ("right", -11) if answer > sizes[0] else ("left", 11)
    va, up_pt = ("bottom", 11) if share < 0.15 else ("top", -11)
    words = f"{answer:,}: {memory_text(peak_bytes)}, {percent(share)}"
    look = {"ha": ha, "va": va, "fontweight": "bold", "fontsize": canvas.TEXT_PT}
    draw.text(panel, words, place, (right_pt, up_pt), **look)
    panel.set_ylim(0, _TOP * limit)
    panel.set_ylabel(f"Peak memory ({unit_name})")
    panel.yaxis.set_major_formatter("{x:,g}")
    machine = where_measured(result.environment) if result.environment else [result.device]
    facts = [*machine, result.dtype_policy, pluralize(len(result.probes), "run")]
    canvas.write_title(panel, f"{result.title}: {pluralize(answer, 'example')}", columns=4)
    notes, caption = (f"Why this size: {result.reason}.", fit_text), caption and ax is None
    of = "peak memory by batch size"
    canvas.write_caption([panel], *notes, of=of, facts=facts, caption=caption)
    return panel


def figures_of(result: MaxBatchSizeResult) -> tuple[Figure, ...]:
    """Return the figure of memory by batch size."""
    return (Figure.of(plot_memory, result, "Memory by batch size", _HEIGHT_IN),)


def _kind(probe: ProbeRecord) -> str:
    if probe.outcome != "fits":
        return probe.outcome
    return "search" if probe.purpose == "search" else "confirm"
