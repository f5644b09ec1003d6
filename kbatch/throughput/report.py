"""A training profile in words and tables, and the figure of throughput, step time and memory."""

import functools
import textwrap
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from kbatch.analysis.line_fit import Line
from kbatch.page.content import Figure
from kbatch.page.environment import where_measured
from kbatch.page.numbers import (
    count_range,
    format_number,
    in_brackets,
    memory_text,
    percent,
    pluralize,
)
from kbatch.page.section import Cell, Column, Fact, Note, Row, Section, Table, environment_facts
from kbatch.plotting import canvas, draw
from kbatch.plotting.axes import batch_axis, rate_and_time_axes
from kbatch.plotting.palette import ALARM, ALARM_TEXT, MUTED
from kbatch.throughput.record import TrainingPoint, TrainingProfile

_COLUMNS = (
    Column("Micro-batch", True),
    Column("Samples/s (95 %)", True),
    Column("Step (ms)", True),
    Column("Peak memory", True),
    Column("Outcome", False),
)


def training_section(profile: TrainingProfile) -> Section:
    (headline, *details), environment = training_lines(profile), profile.environment
    limit, took_s = profile.memory_limit_bytes, profile.duration_s
    chosen, conditions, figures = None, "", ()
    if profile.measured:
        info = training_profile_info(profile)
        chosen, conditions = profile.choice.micro_batch_size, info.conditions
        title = "Throughput, step time and memory by micro-batch size"
        draw = functools.partial(plot_training_profile, profile)
        figures = (Figure("training-profile", title, HEIGHT_IN, draw),)
    rows = []
    for point in profile.points:
        size, step_s, peak = point.micro_batch_size, point.step_time_s, point.peak_memory_bytes
        cells = (
            Cell(f"{size:,}", size),
            Cell(_rate(point) or "n/a", point.samples_per_second),
            Cell("n/a" if step_s is None else format_number(1000 * step_s), step_s),
            Cell("n/a" if peak is None else memory_text(peak), peak),
            Cell(point.reason or point.outcome),
        )
        status = "out_of_memory" if point.outcome == "out_of_memory" else ""
        rows.append(Row(str(size), status, size == chosen, cells))
    best_means = "the fastest, or a larger one that ties"
    return Section(
        kind="training profile",
        name=f"{profile.model_name} under {profile.dtype_policy}",
        headline=headline,
        lead=tuple(details[:1]),
        details=tuple(details[1:]),
        conditions=conditions,
        figures=figures,
        tables=(Table("Micro-batch sizes", _COLUMNS, tuple(rows), best_means=best_means),),
        notes=tuple(Note("", "", note) for note in profile.notes),
        command=environment.command if environment else None,
        settings=(
            Fact("dtype policy", profile.dtype_policy),
            Fact("jit_compile", str(profile.jit_compile)),
            Fact("memory limit", "n/a (not measured)" if limit is None else memory_text(limit)),
            Fact("measured in", "n/a" if took_s is None else f"{format_number(took_s)} s"),
        ),
        environment=environment_facts(environment),
    )


def training_lines(profile: TrainingProfile) -> list[str]:
    """Return where throughput saturates, how a step takes its time, and what memory allows."""
    lines = _speed(profile) if profile.measured else ["No step could be timed."]
    for point in profile.points:
        if point.outcome == "out_of_memory":
            lines.append(f"Micro-batches of {point.micro_batch_size:,} ran out of memory.")
    not_run = [point for point in profile.points if point.outcome == "not_run"]
    if not_run:
        first = not_run[0]
        lines.append(
            f"Not measured: {pluralize(len(not_run), 'size')} from {first.micro_batch_size:,} on "
            f"({first.reason})."
        )
    return lines


def _speed(profile: TrainingProfile) -> list[str]:
    measured, chosen = profile.measured, profile.choice.micro_batch_size
    best = max(measured, key=lambda point: point.samples_per_second or 0.0)
    size = best.micro_batch_size
    tied = f"; {chosen:,} are as fast within the noise" if chosen > size else ""
    lines = [f"Fastest: {_rate(best)} samples/s with micro-batches of {size:,}{tied}."]
    if profile.has_fit:
        lines += [_saturation(profile), _fit(profile)]
    memory, limit = profile.memory_fit, profile.memory_limit_bytes
    if memory is not None:
        of_limit = "" if limit is None else f", of {memory_text(limit)} that may be taken"
        lines.append(
            f"Memory: {memory_text(max(memory.fixed_bytes, 0.0))} and "
            f"{memory_text(max(memory.bytes_per_example, 0.0))} an example{of_limit}."
        )
    compiled_s = [point.compile_s for point in measured if point.compile_s is not None]
    if compiled_s:
        longest_s = format_number(max(compiled_s))
        lines.append(f"Tracing and compiling took up to {longest_s} s a size; not counted above.")
    return lines


def _saturation(profile: TrainingProfile) -> str:
    efficient, largest = profile.efficient, profile.measured[-1].micro_batch_size
    if efficient.value is None:
        return "Where throughput saturates cannot be told: the noise hides how the time grows."
    size = f"{efficient.value:,}"
    if efficient.ends:
        size += " ({:,.0f} to {:,.0f})".format(*efficient.ends)
    if efficient.value > largest:
        return (
            f"Throughput still grows at {largest:,}: 90 % of its peak is expected from about "
            f"{size} examples on."
        )
    return f"90 % of the peak throughput is reached from {size} examples on."


def _fit(profile: TrainingProfile) -> str:
    fit = profile.step_time
    line = f"Time of a micro-batch of B examples: {line_text(fit)}"
    if fit.holds is None:
        return f"{line} (two sizes cannot show whether it is a line)."
    if fit.holds:
        return f"{line}."
    worst = percent(fit.departure.worst)
    return f"{line} does not hold: measured times are up to {worst} off that line."


def line_text(fit: Line) -> str:
    fixed, each = (format_number(1e3 * max(s, 0.0)) for s in (fit.intercept, fit.slope))
    return f"{fixed} ms + {each} ms x B"


def _rate(point: TrainingPoint) -> str:
    if point.samples_per_second is None:
        return ""
    between = in_brackets(point.samples_per_second_interval)
    return f"{format_number(point.samples_per_second)}{between}"


HEIGHT_IN = 7.0
# A line looks curved on a logarithmic axis.
_LINE_POINTS = 60
# Share of the limit above which nothing is timed.
_WINDOW_END = 0.90
_LIMIT_CHARACTERS = 80


class TrainingProfileInfo(NamedTuple):
    profile: TrainingProfile
    sizes: tuple[int, ...]  # Along the axis.
    failed: tuple[int, ...]  # Sizes that ran out of memory.
    line_s: tuple[tuple[float, float], ...]  # Fitted seconds along the axis, if a line holds.
    answers: tuple[tuple[str, int, bool], ...]  # Sizes that are marked, and if they were measured.
    conditions: str
    fit: str  # Empty where there is none.


def training_profile_info(profile: TrainingProfile) -> TrainingProfileInfo:
    points = profile.measured
    if not points:
        raise ValueError(
            "The profile holds no time, so there is nothing to plot: measure smaller micro-batches "
            f"or longer. Received: {len(profile.points)} sizes, none measured."
        )
    line_s, answers, words = (), (), ""
    if profile.has_fit:
        fit, line = profile.step_time, f"t = {line_text(profile.step_time)}"
        if fit.holds is False:
            off = f"{100 * fit.departure.worst:.0f} %"
            words = f"No line holds ({line} is off by up to {off})"
        else:
            words = f"Fit: {line}"
            if fit.intercept >= 0 and not any(point.accumulated for point in points):
                ends = points[0].micro_batch_size, points[-1].micro_batch_size
                places = np.geomspace(*ends, _LINE_POINTS)
                line_s = tuple((float(size), fit(size)) for size in places)
        answers = tuple(
            (
                name,
                int(answer.value),
                points[0].micro_batch_size <= answer.value <= points[-1].micro_batch_size,
            )
            for name, answer in (("90 % of peak", profile.efficient), ("fastest", profile.fastest))
            if answer.value is not None
        )
    parts = where_measured(profile.environment)
    batches = sorted({p.batch_size for p in points if p.accumulated})
    if batches:
        parts.append(f"steps accumulate {', '.join(f'{size:,}' for size in batches)} examples")
    number = count_range((len(point.rounds) for point in points), "round")
    parts.append(f"{number} a point, bars: 95 % interval of the median")
    parts.append("XLA" if profile.jit_compile else "without XLA")
    conditions = " · ".join(parts)
    failed = tuple(p.micro_batch_size for p in profile.points if p.outcome == "out_of_memory")
    sizes = sorted({p.micro_batch_size for p in points}.union(failed, profile.memory_bytes))
    return TrainingProfileInfo(profile, tuple(sizes), failed, line_s, answers, conditions, words)


def training_profile_alt_text(info: TrainingProfileInfo) -> str:
    profile, sizes, memory_bytes = info.profile, info.sizes, info.profile.memory_bytes
    best = max(profile.measured, key=lambda point: point.samples_per_second or 0.0)
    sentences = [
        f"Charts over the micro-batch size, {sizes[0]:,} to {sizes[-1]:,}, on a logarithmic axis, "
        f"for {profile.model_name}, {profile.dtype_policy}: throughput, time of a step and peak "
        "memory.",
        f"At most {format_number(best.samples_per_second or 0.0)} samples/s, at "
        f"{best.micro_batch_size:,}.",
    ]
    if memory_bytes:
        largest = max(memory_bytes)
        sentences.append(f"{largest:,} need {memory_text(memory_bytes[largest])}.")
    sentences += [f"{size:,} ran out of memory." for size in info.failed]
    for name, size, measured in info.answers:
        sentences.append(f"Marked as {name}{'' if measured else ', not measured'}: {size:,}.")
    return " ".join(sentences)


def plot_training_profile(profile: TrainingProfile, ax: Axes | None = None) -> Axes:
    """Plot samples/s, the time of a step and the peak memory of training by micro-batch size.

    The line is the fit t = a + b B where it holds; elsewhere lines join the points. The size from
    which 90 % of the peak throughput is reached and the fastest one are marked, sizes that ran out
    of memory stand at the bottom edge. The uppermost Axes are returned, whose label describes it.

    >>> profile = kbatch.profile_training(build, x, y)
    >>> kbatch.plot_training_profile(profile).figure.savefig("training.png")

    Args:
        profile: A profile, from `profile_training`.
        ax: Axes whose place the panels take; a new figure if None.

    Raises:
        ValueError: If nothing was timed.
    """
    info = training_profile_info(profile)
    panels = canvas.panels(ax, HEIGHT_IN, (1, 1, 1) if profile.memory_bytes else (1, 1))
    upper, middle, lowest = panels[0], panels[1], panels[-1]
    upper.set_label(training_profile_alt_text(info))
    batch_axis(lowest, info.sizes, "Micro-batch size (examples at once)")
    timings = [
        draw.Timing(p.micro_batch_size, p.batch_size, p.step_time_s or 0.0, p.step_time_interval_s)
        for p in profile.measured
    ]
    draw.rates_and_times(upper, middle, 0, timings, label="training", line_s=info.line_s)
    rate_and_time_axes(upper, middle, "step")
    if profile.memory_bytes:
        _draw_memory(lowest, profile)
    for size in info.failed:
        draw.missing(lowest, size, words="out of memory")
    draw.answers(upper, info.answers, info.sizes[0], info.sizes[-1])
    canvas.write_title(upper, f"{profile.model_name}, {profile.dtype_policy}")
    canvas.write_caption(lowest, info.conditions, info.fit)
    return upper


def _draw_memory(panel: Axes, profile: TrainingProfile) -> None:
    sizes, peaks = zip(*profile.memory_bytes.items(), strict=True)
    draw.series(panel, 0, sizes, peaks, label="memory")
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter(lambda value, _: memory_text(value))
    panel.set_ylabel("Peak memory\n(weights included)")
    limit_bytes = profile.memory_limit_bytes
    if limit_bytes is None:
        return
    words = f"limit {memory_text(limit_bytes)}, nothing above 90 % of it is timed"
    words = textwrap.fill(words, int(_LIMIT_CHARACTERS * canvas.width_share(panel)))
    end, failed = _WINDOW_END * limit_bytes, [p.outcome == "out_of_memory" for p in profile.points]
    place, offset_pt, where = (0.01, end), (0, -3), panel.get_yaxis_transform()
    # A limit far above everything would press the curve to the floor: its name stands alone.
    if limit_bytes < 16 * max(peaks) or any(failed):
        panel.axhline(limit_bytes, color=ALARM, linewidth=1.0, linestyle="--")
        panel.axhline(end, color=MUTED, linewidth=1.0, linestyle="--")
    else:
        place, offset_pt, where = (0.01, 0.97), (0, 0), panel.transAxes
    draw.text(panel, words, place, offset_pt, ha="left", va="top", color=ALARM_TEXT, xycoords=where)
