"""What is said of a training profile, in words and tables."""

import functools

from kbatch.analysis.line_fit import StepTime
from kbatch.document.numbers import format_number, in_brackets, memory_text, percent, pluralize
from kbatch.document.section import Fact, Figure, Note, Section, clocks_text, environment_facts
from kbatch.document.tables import Cell, Column, Row, Table
from kbatch.throughput.record import TrainingPoint, TrainingProfile

_COLUMNS = (
    Column("Micro-batch", True),
    Column("Samples/s (95 %)", True),
    Column("Step (ms)", True),
    Column("Peak memory", True),
    Column("Outcome", False),
)


def training_section(profile: TrainingProfile) -> Section:
    """Compute what a report says of a training profile."""
    # The figure says the clocks too: it imports this module.
    from kbatch.throughput.figure import HEIGHT_IN, plot_training_profile, training_profile_info

    (headline, *details), environment = training_lines(profile), profile.environment
    limit, took_s = profile.memory_limit_bytes, profile.duration_s
    chosen, conditions, figures = None, "", ()
    if profile.measured:
        info = training_profile_info(profile)
        chosen, conditions = profile.choice.micro_batch_size, info.conditions
        title = "Throughput, step time and memory by micro-batch size"
        draw = functools.partial(plot_training_profile, profile)
        figures = (Figure("training-profile", title, HEIGHT_IN, draw),)
    rows = tuple(_row(point, chosen) for point in profile.points)
    best_means = "the fastest, or a larger one that ties"
    return Section(
        kind="training profile",
        name=f"{profile.model_name} under {profile.dtype_policy}",
        headline=headline,
        lead=tuple(details[:1]),
        details=tuple(details[1:]),
        conditions=conditions,
        figures=figures,
        tables=(Table("Micro-batch sizes", _COLUMNS, rows, best_means=best_means),),
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


def _row(point: TrainingPoint, chosen: int | None) -> Row:
    size, step_s, peak_bytes = point.micro_batch_size, point.step_time_s, point.peak_memory_bytes
    cells = (
        Cell(f"{size:,}", size),
        Cell(_rate(point) or "n/a", point.samples_per_second),
        Cell("n/a" if step_s is None else format_number(1000 * step_s), step_s),
        Cell("n/a" if peak_bytes is None else memory_text(peak_bytes), peak_bytes),
        Cell(point.reason or point.outcome),
    )
    status = "out_of_memory" if point.outcome == "out_of_memory" else ""
    return Row(str(size), status, size == chosen, cells)


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
    if apart := training_clocks(profile):
        lines.append(
            f"The GPU clock differed between sizes ({apart}), which also affects their times."
        )
    return lines


def training_clocks(profile: TrainingProfile) -> str:
    """Say between which GPU clocks sizes were timed, where they are far apart."""
    return clocks_text((f"{p.micro_batch_size:,}", p.sm_clock_mhz) for p in profile.measured)


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
    if efficient.batch_size is None:
        return "Where throughput saturates cannot be told: the noise hides how the time grows."
    size = f"{efficient.batch_size:,}"
    if found := efficient.interval:
        size += f" ({found.low:,.0f} to {found.high:,.0f})"
    if efficient.batch_size > largest:
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
    worst = percent(fit.line.departure.worst)
    return f"{line} does not hold: measured times are up to {worst} off that line."


def line_text(fit: StepTime) -> str:
    """Write the fitted line a + b B."""
    fixed, each = (format_number(1e3 * max(s, 0.0)) for s in (fit.overhead_s, fit.per_example_s))
    return f"{fixed} ms + {each} ms x B"


def _rate(point: TrainingPoint) -> str:
    if point.samples_per_second is None:
        return ""
    between = in_brackets(point.samples_per_second_interval)
    return f"{format_number(point.samples_per_second)}{between}"
