"""How fast training runs by micro-batch size, in words."""

from kbatch.analysis.intervals import Interval
from kbatch.analysis.scaling_curve import BatchAnswer
from kbatch.document.numbers import counted, memory_text, percent, readable
from kbatch.document.section import clocks_text
from kbatch.throughput.record import TrainingPoint, TrainingProfile


def training_lines(profile: TrainingProfile) -> list[str]:
    """Return where throughput saturates, how a step takes its time, and what memory allows."""
    measured = profile.measured
    if not measured:
        return ["No step could be timed.", *_left_out(profile), *_notes(profile)]
    return [
        *_fastest(profile),
        *_saturation(profile),
        *_fit(profile),
        *_memory(profile),
        *_compiling(measured),
        *_left_out(profile),
        *_clocks(profile),
        *_notes(profile),
    ]


def training_clocks(profile: TrainingProfile) -> str:
    """Say between which GPU clocks sizes were timed, where they are far apart."""
    return clocks_text((f"{p.micro_batch_size:,}", p.sm_clock_mhz) for p in profile.measured)


def training_rows(profile: TrainingProfile) -> list[tuple[str, ...]]:
    """Write each size: samples/s, milliseconds a step, peak memory, outcome."""
    return [
        (
            f"{point.micro_batch_size:,}",
            _rate(point),
            "" if point.step_time_s is None else readable(1000 * point.step_time_s),
            "" if point.peak_memory_bytes is None else memory_text(point.peak_memory_bytes),
            point.reason or point.outcome,
        )
        for point in profile.points
    ]


def _fastest(profile: TrainingProfile) -> list[str]:
    best = max(profile.measured, key=lambda point: point.samples_per_second or 0.0)
    line = f"Fastest: {_rate(best)} samples/s with micro-batches of {best.micro_batch_size:,}"
    chosen = profile.choice.micro_batch_size
    tied = f"; {chosen:,} are as fast within the noise" if chosen > best.micro_batch_size else ""
    return [f"{line}{tied}."]


def _saturation(profile: TrainingProfile) -> list[str]:
    if not profile.has_fit:
        return []
    efficient, largest = profile.efficient, profile.measured[-1].micro_batch_size
    if efficient.batch_size is None:
        return ["Where throughput saturates cannot be told: the noise hides how the time grows."]
    if efficient.batch_size > largest:
        return [
            f"Throughput still grows at {largest:,}: 90 % of its peak are expected from about "
            f"{_size(efficient)} examples on."
        ]
    return [f"90 % of the peak throughput are reached from {_size(efficient)} examples on."]


def _fit(profile: TrainingProfile) -> list[str]:
    if not profile.has_fit:
        return []
    fit = profile.step_time
    line = (
        f"Time of a micro-batch of B examples: {readable(1e3 * max(fit.overhead_s, 0.0))} ms + "
        f"{readable(1e3 * max(fit.per_example_s, 0.0))} ms x B"
    )
    if fit.holds is None:
        return [f"{line} (two sizes: whether it is a line cannot be told)."]
    if not fit.holds:
        worst = percent(fit.line.departure.worst)
        return [f"{line} does not hold: measured times are up to {worst} off that line."]
    return [f"{line}."]


def _memory(profile: TrainingProfile) -> list[str]:
    fit, limit = profile.memory_fit, profile.memory_limit_bytes
    if fit is None:
        return []
    of_limit = "" if limit is None else f", of {memory_text(limit)} that may be taken"
    return [
        f"Memory: {memory_text(max(fit.fixed_bytes, 0.0))} and "
        f"{memory_text(max(fit.bytes_per_example, 0.0))} an example{of_limit}."
    ]


def _compiling(measured: tuple[TrainingPoint, ...]) -> list[str]:
    known = [point.compile_s for point in measured if point.compile_s is not None]
    if not known:
        return []
    return [f"Tracing and compiling took up to {readable(max(known))} s a size; not counted above."]


def _left_out(profile: TrainingProfile) -> list[str]:
    out = [p for p in profile.points if p.outcome == "out_of_memory"]
    not_run = [p for p in profile.points if p.outcome == "not_run"]
    lines = [f"Micro-batches of {p.micro_batch_size:,} ran out of memory." for p in out]
    if not_run:
        first = not_run[0]
        lines.append(
            f"Not measured: {counted(len(not_run), 'size')} from {first.micro_batch_size:,} on "
            f"({first.reason})."
        )
    return lines


def _clocks(profile: TrainingProfile) -> list[str]:
    apart = training_clocks(profile)
    return [f"Sizes ran at different clocks ({apart}): times differ by that too."] if apart else []


def _notes(profile: TrainingProfile) -> list[str]:
    return [f"Note: {note}" for note in profile.notes]


def _rate(point: TrainingPoint) -> str:
    if point.samples_per_second is None:
        return ""
    return f"{readable(point.samples_per_second)}{_between(point.samples_per_second_interval)}"


def _size(answer: BatchAnswer) -> str:
    interval = answer.interval
    between = f" ({interval.low:,.0f} to {interval.high:,.0f})" if interval else ""
    return f"{answer.batch_size:,}{between}"


def _between(interval: Interval | None) -> str:
    return f" ({readable(interval.low)} to {readable(interval.high)})" if interval else ""
