"""What a report says of a training profile."""

from kbatch.document.numbers import memory_text, readable
from kbatch.document.section import Fact, Figure, Note, Section, environment_facts
from kbatch.document.tables import Cell, Column, Row, Table
from kbatch.throughput.figure import (
    HEIGHT_IN,
    plot_training_profile,
    training_profile_alt_text,
    training_profile_info,
)
from kbatch.throughput.record import TrainingPoint, TrainingProfile
from kbatch.throughput.text import training_lines, training_rows

_COLUMNS = (
    Column("Micro-batch", True),
    Column("Samples/s (95 %)", True),
    Column("Step (ms)", True),
    Column("Peak memory", True),
    Column("Outcome", False),
)


def training_section(profile: TrainingProfile) -> Section:
    """Compute what a report says of a training profile."""
    lines, environment = training_lines(profile), profile.environment
    headline, *details = lines[: len(lines) - len(profile.notes)]
    limit, took_s = profile.memory_limit_bytes, profile.duration_s
    return Section(
        kind="training profile",
        name=f"{profile.model_name} under {profile.dtype_policy}",
        headline=headline,
        lead=tuple(details[:1]),
        details=tuple(details[1:]),
        conditions=training_profile_info(profile).conditions if profile.measured else "",
        figures=_figures(profile),
        tables=(_table(profile),),
        notes=tuple(Note("", "", note) for note in profile.notes),
        command=environment.command if environment else None,
        settings=(
            Fact("dtype policy", profile.dtype_policy),
            Fact("jit_compile", str(profile.jit_compile)),
            Fact("memory limit", "n/a (not measured)" if limit is None else memory_text(limit)),
            Fact("measured in", "n/a" if took_s is None else f"{readable(took_s)} s"),
        ),
        environment=environment_facts(environment),
    )


def _figures(profile: TrainingProfile) -> tuple[Figure, ...]:
    if not profile.measured:
        return ()
    return (
        Figure(
            name="training-profile",
            title="Throughput, step time and memory by micro-batch size",
            height_in=HEIGHT_IN,
            draw=lambda ax: plot_training_profile(profile, ax),
            alt_text=training_profile_alt_text(training_profile_info(profile)),
        ),
    )


def _table(profile: TrainingProfile) -> Table:
    chosen = profile.choice.micro_batch_size if profile.measured else None
    pairs = zip(profile.points, training_rows(profile), strict=True)
    return Table(
        "Micro-batch sizes",
        _COLUMNS,
        tuple(_row(point, texts, chosen) for point, texts in pairs),
        best_means="the fastest, or a larger one that ties",
    )


def _row(point: TrainingPoint, texts: tuple[str, ...], chosen: int | None) -> Row:
    step_s = point.step_time_s
    keys = (point.micro_batch_size, point.samples_per_second, step_s, point.peak_memory_bytes, None)
    return Row(
        str(point.micro_batch_size),
        "out_of_memory" if point.outcome == "out_of_memory" else "",
        point.micro_batch_size == chosen,
        tuple(Cell(text or "n/a", key) for text, key in zip(texts, keys, strict=True)),
    )
