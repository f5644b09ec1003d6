"""The largest batch that fits, in words."""

from kbatch.document.numbers import format_number, memory_text, percent, pluralize
from kbatch.document.section import Fact, Figure, Note, Section, environment_facts
from kbatch.document.tables import Cell, Column, Row, Table
from kbatch.memory.figure import HEIGHT_IN, plot_memory
from kbatch.memory.record import MaxBatchSizeResult
from kbatch.memory.search import REACHED_DATA

_OUTCOMES = {"fits": "fits", "above_window": "above the window", "out_of_memory": "out of memory"}
# A first step that held more than this many times what later ones did is worth a line.
_MORE_AT_FIRST = 1.05


def max_batch_lines(result: MaxBatchSizeResult) -> list[str]:
    """Describe which batch fits, why it is this one, and how sure that is."""
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


_COLUMNS = (
    Column("Batch size", True),
    Column("Peak memory", True),
    Column("Of the limit", True),
    Column("Outcome", False),
    Column("Seconds", True),
    Column("Run", False),
)


def max_batch_section(result: MaxBatchSizeResult) -> Section:
    """Compute what a report says of a search for the largest batch that fits."""
    lines, environment = max_batch_lines(result), result.environment
    headline, reason, *details = lines[: len(lines) - len(result.notes)]
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
        tables=(
            Table("Batch sizes that were run", _COLUMNS, _rows(result), best_means="the answer"),
        ),
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


def _rows(result: MaxBatchSizeResult) -> tuple[Row, ...]:
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
    return tuple(rows)
