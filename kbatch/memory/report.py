"""The largest batch that fits, in words, and the figure of the memory by batch size."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from kbatch.document.numbers import format_number, memory_text, percent, pluralize
from kbatch.document.section import Fact, Figure, Note, Section, environment_facts, where_measured
from kbatch.document.tables import Cell, Column, Row, Table
from kbatch.memory.record import MaxBatchSizeResult
from kbatch.memory.search import REACHED_DATA
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import batch_axis
from kbatch.plotting.palette import ALARM, MUTED, series_style

_OUTCOMES = {"fits": "fits", "above_window": "above the window", "out_of_memory": "out of memory"}
# A first step that held more than this many times what later ones did is worth a line.
_MORE_AT_FIRST = 1.05


def max_batch_lines(result: MaxBatchSizeResult) -> list[str]:
    peak, limit, fit = result.peak_memory_bytes, result.limit_bytes, result.fit
    task = "training" if result.training else "inference"
    beyond = " To search beyond it, give `longest_example=(x[0], y[0])` to `find_max_batch_size`."
    lines = [
        f"Largest batch for {task}: {pluralize(result.max_batch_size, 'example')}, "
        f"{memory_text(peak)} of {memory_text(limit)} ({percent(peak / limit)}) on "
        f"{result.device} under {result.dtype_policy}.",
        f"Why this one: {result.reason}.{beyond if result.reason == REACHED_DATA else ''}",
    ]
    if fit is not None:
        fixed, each = (
            memory_text(max(value, 0.0))
            + ("" if error is None else f" (standard error {memory_text(error)})")
            for value, error in (
                (fit.fixed_bytes, fit.fixed_error_bytes),
                (fit.bytes_per_example, fit.bytes_per_example_error),
            )
        )
        lines.append(
            f"Memory: {fixed} fixed, {each} per example; "
            f"the variables are {memory_text(result.weights_bytes)}."
        )
    firsts = [
        probe.first_step_peak_memory_bytes or 0
        for probe in result.probes
        if probe.batch_size == result.max_batch_size
    ]
    if max(firsts) > _MORE_AT_FIRST * peak:
        lines.append(
            f"Its first step held {memory_text(max(firsts))}: it also compiles and tries "
            "algorithms. The search goes by the peak of the later steps."
        )
    if result.spread is not None:
        lines.append(f"Its peak memory differs by {percent(result.spread)} between runs.")
    if result.largest_free_block_bytes is not None and result.free_bytes is not None:
        requested = result.requested_block_bytes or 0
        lines.append(
            f"At the last failure {memory_text(requested)} were requested in one block; "
            f"{memory_text(result.free_bytes)} were free, the largest free block "
            f"{memory_text(result.largest_free_block_bytes)}."
        )
    return [*lines, *filter(None, [slow_steps_text(result)]), *result.notes]


def slow_steps_text(result: MaxBatchSizeResult) -> str | None:
    """Return which sizes were run for fewer steps than others, None where none was."""
    slow = [probe for probe in result.probes if probe.stopped_after is not None]
    if not slow:
        return None
    largest = max(slow, key=lambda probe: probe.batch_size)
    return (
        f"Steps of {pluralize(largest.batch_size, 'example')} take "
        f"{format_number(largest.step_s or 0)} s: memory was read from "
        f"{largest.stopped_after} of them, and later ones may take more."
    )


def max_batch_section(result: MaxBatchSizeResult) -> Section:
    lines, environment = max_batch_lines(result), result.environment
    headline, reason, *details = lines[: len(lines) - len(result.notes)]
    names = ("Batch size", "Peak memory", "Of the limit", "Outcome", "Seconds", "Run")
    columns = tuple(Column(name, name not in ("Outcome", "Run")) for name in names)
    rows = []
    for index, probe in enumerate(result.probes):
        peak, out = probe.peak_memory_bytes, probe.outcome == "out_of_memory"
        share = None if peak is None else peak / result.limit_bytes
        cells = (
            Cell(f"{probe.batch_size:,}", probe.batch_size),
            Cell("n/a (out of memory)" if peak is None else memory_text(peak), peak),
            Cell("n/a (out of memory)" if share is None else percent(share), share),
            Cell(_OUTCOMES[probe.outcome]),
            Cell(format_number(probe.duration_s), probe.duration_s),
            Cell(probe.purpose),
        )
        best = probe.batch_size == result.max_batch_size and not out
        rows.append(Row(str(index), "out_of_memory" if out else "", best, cells))
    return Section(
        kind="largest batch",
        name=f"{'training' if result.training else 'inference'} on {result.device}",
        headline=headline,
        lead=(reason,),
        details=tuple(details),
        conditions="",
        figures=(
            Figure("memory", "Memory by batch size", HEIGHT_IN, lambda ax: plot_memory(result, ax)),
        ),
        tables=(Table("Batch sizes that were run", columns, tuple(rows), best_means="the answer"),),
        notes=tuple(Note("", "", note) for note in result.notes),
        command=environment.command if environment else None,
        settings=(
            Fact("task", "train steps" if result.training else "predictions"),
            Fact("memory limit", memory_text(result.limit_bytes)),
            Fact("target window", " to ".join(percent(s) for s in result.memory_window)),
            Fact("dtype policy", result.dtype_policy),
        ),
        environment=environment_facts(environment),
    )


HEIGHT_IN = 4.2
_CURVE_POINTS = 200
_TOP = 1.12
_OUT_OF_MEMORY = "out of memory"
_KINDS = ("below the limit", "above the window", "run once more to confirm", _OUT_OF_MEMORY)


class MemoryInfo(NamedTuple):
    title: str
    # By what became of the run: batch sizes and peak bytes; what ran out lies on the limit.
    runs: dict[str, tuple[tuple[int, float], ...]]
    window: str
    notes: tuple[str, ...]
    alt_text: str

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({size for runs in self.runs.values() for size, _ in runs}))


def memory_info(result: MaxBatchSizeResult) -> MemoryInfo:
    limit_bytes, fit, environment = result.limit_bytes, result.fit, result.environment
    window = "window " + " to ".join(map(percent, result.memory_window))
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
        f"axis, with the limit of {memory_text(limit_bytes)} and a {window}.",
        f"Batch size {answer:,} is marked, with {memory_text(answer_bytes)}, "
        f"{percent(answer_bytes / limit_bytes)} of the limit.",
        failed and f"Out of memory: {failed}.",
        line,
    )
    return MemoryInfo(
        title=f"Largest batch for {task}: {pluralize(answer, 'example')}",
        runs={kind: tuple(found) for kind, found in runs.items()},
        window=window,
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
    info, answer, limit_bytes = memory_info(result), result.max_batch_size, result.limit_bytes
    (panel,) = canvas.panels(ax, HEIGHT_IN)
    panel.set_label(info.alt_text)
    sizes = info.batch_sizes
    batch_axis(panel, sizes, "Batch size (examples in a step)")
    unit, unit_name = (2.0**30, "GiB") if limit_bytes >= 2**30 else (2.0**20, "MiB")
    limit, low, high = (share * limit_bytes / unit for share in (1, *result.memory_window))
    panel.axhspan(low, high, color=series_style(2).color, alpha=0.14, linewidth=0, zorder=0.3)
    draw.limit(panel, limit, f"limit {memory_text(limit_bytes)}")
    middle, edge = (0.01, (low + high) / 2), panel.get_yaxis_transform()
    draw.text(panel, info.window, middle, ha="left", color=MUTED, xycoords=edge)
    if (fit := result.fit) is not None:
        places = np.geomspace(sizes[0], sizes[-1], _CURVE_POINTS)
        line = {"color": series_style(0).color, "linewidth": 1.1, "linestyle": ":"}
        panel.plot(places, (fit.fixed_bytes + places * fit.bytes_per_example) / unit, **line)
    for index, (kind, runs) in enumerate(info.runs.items()):
        if runs:
            failed = kind == _OUT_OF_MEMORY
            color, marker = (ALARM, "X") if failed else series_style(index)
            peaks = [peak_bytes / unit for _, peak_bytes in runs]
            look = {"size": 8 if failed else 6, "label": kind, "zorder": 4 if failed else 3}
            draw.points(panel, [size for size, _ in runs], peaks, color, marker, **look)
    peak_bytes = result.peak_memory_bytes
    draw.guide(panel, answer)
    place, share = (answer, peak_bytes / unit), peak_bytes / limit_bytes
    draw.ring(panel, *place)
    ha, right_pt = ("right", -11) if answer > sizes[0] else ("left", 11)
    va, up_pt = ("bottom", 11) if share < 0.15 else ("top", -11)
    words = f"{answer:,}: {memory_text(peak_bytes)}, {percent(share)}"
    draw.text(panel, words, place, (right_pt, up_pt), ha=ha, va=va, bold=True)
    panel.set_ylim(0, _TOP * limit)
    panel.set_ylabel(f"Peak memory ({unit_name})")
    panel.yaxis.set_major_formatter("{x:g}")
    canvas.write_title(panel, info.title, columns=4)
    canvas.write_caption(panel, *info.notes)
    return panel
