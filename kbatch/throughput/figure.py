"""The figure of a sweep of batch sizes: throughput, time and memory, what failed, and answers."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from kbatch.analysis.intervals import Estimate, quantile_upper_bound
from kbatch.analysis.scaling_curve import Timed, fit_rounds
from kbatch.memory.result import MemoryRecord, peaks_under
from kbatch.memory.search import memory_curve
from kbatch.page.document import Figure
from kbatch.page.numbers import count_range, memory_text, where_measured
from kbatch.plotting import canvas, draw
from kbatch.records.notes import Note
from kbatch.throughput.result import TrainingProfile, fastest_ways

# A limit that lies so many times above everything would press the curve to the floor.
_FAR = 16


def plot_training_profile(
    profile: TrainingProfile, ax: Axes | None = None, *, caption: bool = True
) -> Axes:
    """Plot samples/s, the time of a micro-batch and the peak memory of training by its size.

    One series for one step an execution, another for as many as a search would run. The lines are
    fits t = a + b B where these hold; elsewhere lines join the points. The size from which 90 % of
    the peak throughput is reached and the one to take are marked, sizes that ran out of memory
    stand at the bottom edge. The uppermost Axes are returned, whose label describes it.

    >>> profile = kbatch.profile_training(build, x, y)
    >>> kbatch.plot_training_profile(profile).figure.savefig("training.png")

    Args:
        profile: A profile, from `profile_training`.
        ax: Axes whose place the panels take. If None, a new figure.
        caption: Whether to write at most two lines below a new figure.

    Raises:
        ValueError: If nothing was timed.
    """
    check_timed(profile.updates)
    updates = profile.updates
    several = [one for one in updates if one.steps_per_execution > 1 and one.measured]
    alone = [one for one in updates if one not in several]  # And what was not measured.
    both = several and any(one.measured for one in alone)
    timed = {"one step an execution": alone, "as many as a search runs": several}
    answers = [("take", profile.micro_batch_size, True)]
    line = profile.line_text
    if line is not None and (efficient := profile.efficient.value) is not None:
        sizes = [way.batch_size for way in fastest_ways(updates)]
        answers.insert(0, ("90 % of peak", int(efficient), sizes[0] <= efficient <= sizes[-1]))
    facts, way = where_measured(profile.environment), " of the faster way of each size" * bool(both)
    return draw_sweep(
        ax,
        timed if both else {"training": updates},
        profile.memory,
        profile.memory_limit_bytes,
        of="micro-batch",
        label="Micro-batch size (examples at once)",
        answers=answers,
        title="Training throughput by micro-batch size",
        facts=[
            *facts,
            profile.model_name,
            profile.dtype_policy,
            "XLA" if profile.jit_compile else "without XLA",
        ],
        fit="" if line is None else f"Fit{way}: t = {line}.",
        caption=caption,
    )


def figures_of(profile: TrainingProfile) -> tuple[Figure, ...]:
    """Return the figure of throughput, time and memory by micro-batch size."""
    if not fastest_ways(profile.updates):
        return ()
    title = "Throughput, time and memory by micro-batch size"
    height = height_in(3 if any(record.peak_bytes for record in profile.memory) else 2)
    return (Figure.of(plot_training_profile, profile, title, height),)


def draw_sweep(
    ax: Axes | None,
    timed: Mapping[str, Sequence[Timed]],
    memory: Sequence[MemoryRecord] = (),
    limit_bytes: int | None = None,
    *,
    label: str,
    title: str,
    facts: Sequence[str],
    of: str = "batch",
    targets_ms: Sequence[tuple[float, str]] = (),
    answers: Sequence[tuple[str, int, bool]] = (),
    quantile: float | None = None,  # Of the times of single calls, drawn above their medians.
    fit: str = "",
    caption: bool,
) -> Axes:
    """Draw throughput and time where something was timed, and memory where that is known.

    Each answer is its name, its size, and whether that was measured; each target has words too.
    """
    rows = [row for series in timed.values() for row in series]
    found = {one.dtype_policy: peaks_under(one.dtype_policy, memory) for one in memory}
    peaks = {policy: known for policy, known in found.items() if known}
    failed = {row.batch_size for row in rows if row.outcome == "out_of_memory"}
    failed |= {one.batch_size for one in memory if one.outcome == "out_of_memory"}
    measured = {row.batch_size for row in rows if row.measured}.union(*peaks.values())
    sizes, notes = sorted(failed | measured), [fit]
    count = 2 * bool(timed) + bool(peaks)
    panels = canvas.panels(ax, height_in(count), (1,) * count)
    draw.batch_axis(panels[-1], sizes, label)
    if timed:
        upper, lower = panels[:2]
        for index, (name, series) in enumerate(timed.items()):
            line_s = _fitted_line(series)
            rates = [(row.batch_size, row.rate) for row in series if row.rate]
            line = [(size, size / time_s) for size, time_s in line_s]
            draw.series(upper, index, rates, label=name, line=line)
            times_ms = [(row.batch_size, row.time_s.times(1e3)) for row in series if row.time_s]
            line = [(size, 1e3 * time_s) for size, time_s in line_s]
            if quantile is not None:
                medians_ms = line or [(size, found.value) for size, found in times_ms]
                color, _ = canvas.series_style(index)
                lower.plot(*zip(*medians_ms, strict=True), color=color, linewidth=0.6)
                times_ms, line = _quantiles_ms(series, quantile), []
            draw.series(lower, index, times_ms, label=name, line=line)
        for target_ms, words in targets_ms:
            draw.limit(lower, target_ms, words)
        upper.yaxis.set_major_formatter("{x:,.0f}")
        upper.set_ylabel("Throughput\n(samples/s)")
        lower.set_yscale("log")
        draw.plain_log_labels(lower.yaxis)
        lower.set_ylabel(f"{time_name(quantile)} of a {of}\n(ms)")
        draw.answers(upper, answers, sizes[0], sizes[-1])
        rounds = count_range((len(row.times_s) for row in rows if row.measured), "round")
        facts = [*facts, f"{rounds} for each point"]
        bars = "Bars: 95 % interval of the median."
        if quantile is not None:
            p = f"p{100 * quantile:g}"
            bars = f"Bars: 95 % interval of the median; upper bound of {p}. Thin line: median time."
        notes.append(bars)
    if peaks:
        notes.append(_draw_peaks(panels[-1], peaks, limit_bytes))
    words = Note.of("out_of_memory")
    if not draw.missing(panels[-1:], [(size, words) for size in sorted(failed)]):
        notes.insert(0, f"\N{MULTIPLICATION X}: {words}.")
    canvas.write_title(panels[0], title, columns=4)
    canvas.write_caption(panels, *notes, facts=facts, caption=caption and ax is None)
    return panels[0]


def time_name(quantile: float | None) -> str:
    """Name the time of a batch on an axis: the median without a quantile."""
    return "Time" if quantile is None else f"p{100 * quantile:g} time"


def _quantiles_ms(rows: Sequence[Any], quantile: float) -> list[tuple[float, Estimate[float]]]:
    """Return the quantile of the calls of each size; its range ends at the upper bound."""
    found = []
    for row in rows:
        if row.measured and row.latencies_s:
            value = float(np.quantile(row.latencies_s, quantile))
            high = quantile_upper_bound(row.latencies_s, quantile=quantile)
            found.append((row.batch_size, Estimate(value, high and value, high).times(1e3)))
    return found


def _fitted_line(rows: Sequence[Timed]) -> list[tuple[float, float]]:
    """Return sizes and seconds along the line through rows, none where no line holds."""
    with contextlib.suppress(ValueError):  # Too little was timed.
        if (latency := fit_rounds([row for row in rows if row.measured])).follows_line:
            return draw.along(latency.line, *latency.batch_sizes[[0, -1]])
    return []


def _draw_peaks(panel: Axes, peaks: Mapping[str, dict[int, int]], limit_bytes: int | None) -> str:
    """Draw the memory of each policy and a limit that is near; say what the lines are."""
    words = ""
    for index, (policy, known) in enumerate(peaks.items()):
        rows, line = [(size, Estimate(float(peak))) for size, peak in known.items()], []
        # Allocators take memory in steps: a line that misses them says nothing.
        curve = memory_curve(known)
        if curve is not None and draw.follows(curve, known):
            words = "Dotted: fitted line of the memory."
            line = draw.along(curve, min(known), max(known))
        draw.series(panel, index, rows, label=policy, line=line, style=":")
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(lambda value, _: memory_text(value))
    panel.set_ylabel("Peak memory\n(weights included)")
    shown = [peak for known in peaks.values() for peak in known.values()]
    if limit_bytes is not None and limit_bytes < _FAR * max(shown):
        shown.append(limit_bytes)
        draw.limit(panel, limit_bytes, f"limit {memory_text(limit_bytes)}", below=True)
    # From one power of two to another, so that there are two labels at least.
    low, high = math.floor(math.log2(min(shown) / 1.1)), math.ceil(math.log2(1.1 * max(shown)))
    panel.set_ylim(2.0**low, 2.0**high)
    return words


def height_in(panels: int) -> float:
    """Return the height of so many panels with title and caption."""
    return 1.5 + 1.6 * panels


def check_timed(rows: Sequence[Timed]) -> None:
    """Raise a `ValueError` if nothing was timed, with what to do."""
    if not any(row.measured for row in rows):
        raise ValueError(
            "The profile holds no time, so there is nothing to plot: measure smaller batch sizes "
            f"or longer. Received: {len(rows)} settings, none measured."
        )
