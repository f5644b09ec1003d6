"""The figure of a sweep of batch sizes: throughput, time, memory, failures and answers."""

import contextlib
import math
import re
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

# The memory limit is drawn if it is less than this multiple of the highest peak.
_FAR = 16
FEW_CALLS = "Hollow: too few calls for the quantile."


def plot_training_profile(
    profile: TrainingProfile, ax: Axes | None = None, *, caption: bool = True
) -> Axes:
    """Plot throughput, time and peak memory of training by micro-batch size.

    One series has one step per execution, the other as many as a search would run. The lines are
    fits t = a + b B, where B is the micro-batch size. If a fit does not hold, lines join the
    points. The size to take and the size that reaches 90 % of the peak throughput are marked. Sizes
    that ran out of memory are marked at the bottom edge.

    Example:

    >>> profile = kbatch.profile_training(build, x, y)
    >>> kbatch.plot_training_profile(profile).figure.savefig("training.png")

    Args:
        profile: A profile from `profile_training`.
        ax: Matplotlib axes whose place the panels take. If None, a new figure.
        caption: Boolean. Whether to write a caption below a new figure. Default: True.

    Returns:
        The uppermost Axes. Their label describes the figure in sentences.

    Raises:
        ValueError: If nothing was timed.
    """
    check_timed(profile.updates)
    updates = profile.updates
    several = [update for update in updates if update.steps_per_execution > 1 and update.measured]
    alone = [update for update in updates if update not in several]
    both = several and any(update.measured for update in alone)
    timed = {"one step per execution": alone, "several steps per execution": several}
    answers = [("take", profile.micro_batch_size, True)]
    line = profile.line_text
    if line is not None and (efficient := profile.efficient.value) is not None:
        sizes = [way.batch_size for way in fastest_ways(updates)]
        answers.insert(0, ("90 % of peak", int(efficient), sizes[0] <= efficient <= sizes[-1]))
    way = " of the faster of both at each size" if both else ""
    xla = "XLA" if profile.jit_compile else "without XLA"
    facts = [*where_measured(profile.environment), profile.model_name, profile.dtype_policy, xla]
    return draw_sweep(
        ax,
        timed if both else {"training": updates},
        profile.memory,
        profile.memory_limit_bytes,
        of="micro-batch",
        label="Micro-batch size (examples at once)",
        answers=answers,
        title="Training throughput by micro-batch size",
        result=profile.answer,
        facts=facts,
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
    result: str,
    facts: Sequence[str],
    of: str = "batch",
    targets_ms: Sequence[tuple[float, str]] = (),
    answers: Sequence[tuple[str, int, bool]] = (),
    quantile: float | None = None,  # Quantile of the times of calls, drawn above their medians.
    fit: str = "",
    caption: bool,
) -> Axes:
    """Draw throughput and time if something was timed, and memory if it was measured.

    An answer is a name, a size, and whether that size was measured. A target is a time and a name.
    """
    rows = [row for series in timed.values() for row in series]
    policies = dict.fromkeys(record.dtype_policy for record in memory)
    peaks = {policy: known for policy in policies if (known := peaks_under(policy, memory))}
    failed = {row.batch_size for row in (*rows, *memory) if row.outcome == "out_of_memory"}
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
                medians_ms = line or [(size, time_ms.value) for size, time_ms in times_ms]
                color, _ = canvas.series_style(index)
                lower.plot(*zip(*medians_ms, strict=True), color=color, linewidth=0.6)
                times_ms, line = _quantiles_ms(series, quantile), []
            few = [(n, e.value) for n, e in times_ms if quantile is not None and e.high is None]
            draw.series(lower, index, times_ms, label=name, line=line, hollow=few)
            notes += [FEW_CALLS] * bool(few)
        upper.yaxis.set_major_formatter("{x:,.0f}")
        upper.set_ylabel("Throughput\n(samples/s)")
        lower.set_yscale("log")
        lower.set_ylabel(f"{time_name(quantile)} of a {of}\n(ms)")
        for target_ms, words in targets_ms:  # Inside the panel, the words would cover points.
            draw.limit(lower, target_ms)
            canvas.write_subtitle(lower, words, color=canvas.ALARM_TEXT)
        draw.plain_log_labels(lower.yaxis)
        draw.name_answers(upper, answers, sizes[0], sizes[-1])
        rounds = count_range((len(row.times_s) for row in rows if row.measured), "round")
        facts = [*facts, f"{rounds} for each point"]
        bars = "Bars: 95 % interval of the median."
        if quantile is not None:
            p = f"p{100 * quantile:g}"
            bars = f"Bars: 95 % intervals; for {p}, a 95 % upper bound. Thin line: median time."
        notes.append(bars)
    if peaks:
        notes.append(_draw_peaks(panels[-1], peaks, limit_bytes))
    reason = Note.of("out_of_memory")
    if not draw.mark_failed(panels[-1:], [(size, reason) for size in sorted(failed)]):
        notes.insert(0, f"\N{MULTIPLICATION X}: {reason}.")
    canvas.write_title(panels[0], title, columns=4)
    caption = caption and ax is None
    canvas.write_caption(panels, *notes, result=result, facts=facts, caption=caption)
    return panels[0]


def time_name(quantile: float | None) -> str:
    """Return the name of the time axis: the median if there is no quantile."""
    return "Time" if quantile is None else f"p{100 * quantile:g} time"


def _quantiles_ms(rows: Sequence[Any], quantile: float) -> list[tuple[float, Estimate[float]]]:
    """Return the quantile of the calls of each size, with its upper confidence bound."""
    estimates = []
    for row in rows:
        if row.measured and row.latencies_s:
            value = float(np.quantile(row.latencies_s, quantile))
            high = quantile_upper_bound(row.latencies_s, quantile=quantile)
            estimates.append((row.batch_size, Estimate(value, high and value, high).times(1e3)))
    return estimates


def _fitted_line(rows: Sequence[Timed]) -> list[tuple[float, float]]:
    """Return sizes and seconds along the fitted line, or nothing if the fit does not hold."""
    with contextlib.suppress(ValueError):  # Too few sizes or rounds for a fit.
        if (latency := fit_rounds([row for row in rows if row.measured])).follows_line:
            return draw.sampled(latency.line, *latency.batch_sizes[[0, -1]])
    return []


def _draw_peaks(panel: Axes, peaks: Mapping[str, dict[int, int]], limit_bytes: int | None) -> str:
    """Draw the memory of each policy, and the limit if it is near. Return a note on the lines."""
    line_note = ""
    for index, (policy, known) in enumerate(peaks.items()):
        rows, line = [(size, Estimate(float(peak))) for size, peak in known.items()], []
        # Allocators take memory in steps, so that a line may not fit.
        curve = memory_curve(known)
        if curve is not None and draw.follows(curve, known):
            line_note = "Dotted: fitted line of the memory."
            line = draw.sampled(curve, min(known), max(known))
        draw.series(panel, index, rows, label=policy, line=line, style=":")
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(lambda v, _: re.sub(r"\.0+ ", " ", memory_text(v)))
    panel.set_ylabel("Peak memory\n(weights included)")
    shown = [peak for known in peaks.values() for peak in known.values()]
    if limit_bytes is not None and limit_bytes < _FAR * max(shown):
        shown.append(limit_bytes)
        draw.limit(panel, limit_bytes, f"limit {memory_text(limit_bytes)}", below=True)
    # From one power of two to another, so that there are at least two labels.
    low, high = math.floor(math.log2(min(shown) / 1.1)), math.ceil(math.log2(1.1 * max(shown)))
    panel.set_ylim(2.0**low, 2.0**high)
    return line_note


def height_in(panels: int) -> float:
    """Return the height of a figure with this many panels, in inches."""
    return 1.5 + 1.6 * panels


def check_timed(rows: Sequence[Timed]) -> None:
    """Raise a `ValueError` if nothing was timed."""
    if not any(row.measured for row in rows):
        raise ValueError(
            "The profile has no times, so there is nothing to plot. Profile smaller batch sizes, "
            f"or give a longer `time_budget_s`. Received: {len(rows)} settings, none measured."
        )
