"""What a report says of a search for the largest batch that fits."""

import functools

from kbatch.document.content import Fact, Figure, Note, Section
from kbatch.document.environment import environment_facts
from kbatch.document.number_text import memory_text, percent
from kbatch.document.tables import Cell, Column, Row, Table
from kbatch.memory.max_batch_record import MaxBatchSizeResult, ProbeRecord
from kbatch.memory.max_batch_text import max_batch_lines, probe_rows
from kbatch.memory.memory import HEIGHT_IN, plot_memory

_COLUMNS = (
    Column("Batch size", True),
    Column("Peak memory", True),
    Column("Of the limit", True),
    Column("Outcome", False),
    Column("Seconds", True),
    Column("Run", False),
)


def max_batch_section(result: MaxBatchSizeResult) -> Section:
    """Computes what a report says of a search for the largest batch that fits."""
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
            Figure(
                "memory",
                "Memory by batch size",
                HEIGHT_IN,
                functools.partial(plot_memory, result),
            ),
        ),
        tables=(_table(result),),
        notes=tuple(Note("", "", note) for note in result.notes),
        command=environment.command if environment else None,
        settings=(
            Fact("task", "train steps" if result.training else "predictions"),
            Fact("memory limit", memory_text(result.limit_bytes)),
            Fact("window aimed at", " to ".join(percent(s) for s in result.memory_window)),
            Fact("dtype policy", result.dtype_policy),
        ),
        environment=environment_facts(environment),
    )


def _table(result: MaxBatchSizeResult) -> Table:
    pairs = zip(result.probes, probe_rows(result), strict=True)
    rows = tuple(_row(i, probe, texts, result) for i, (probe, texts) in enumerate(pairs))
    return Table("Batch sizes that were run", _COLUMNS, rows, best_means="the answer")


def _row(index: int, probe: ProbeRecord, texts: tuple[str, ...], result: MaxBatchSizeResult) -> Row:
    peak = probe.peak_memory_bytes
    share = None if peak is None else peak / result.limit_bytes
    keys = (probe.batch_size, peak, share, None, probe.duration_s, None)
    out_of_memory = probe.outcome == "out_of_memory"
    cells = [
        Cell(text or "n/a (out of memory)", key) for text, key in zip(texts, keys, strict=True)
    ]
    return Row(
        str(index),
        "out_of_memory" if out_of_memory else "",
        probe.batch_size == result.max_batch_size and not out_of_memory,
        tuple(cells),
    )
