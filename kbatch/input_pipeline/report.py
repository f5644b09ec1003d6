"""What a report says of an input pipeline."""

from collections.abc import Sequence

from kbatch.analysis.intervals import RoundEstimate
from kbatch.document.numbers import readable
from kbatch.document.section import Fact, Figure, Note, Section, environment_facts
from kbatch.document.tables import Cell, Column, Row, Table
from kbatch.input_pipeline.figure import (
    HEIGHT_IN,
    alt_text,
    input_pipeline_info,
    plot_input_pipeline,
)
from kbatch.input_pipeline.record import InputPipelineProfile
from kbatch.input_pipeline.text import evidence_lines, headline, is_clear_gain


def input_section(profile: InputPipelineProfile) -> Section:
    """Compute what a report says of an input pipeline."""
    words, info = headline(profile), input_pipeline_info(profile)
    rates, *rest = evidence_lines(profile)
    return Section(
        kind="input pipeline",
        name=profile.source,
        headline=f"{profile.verdict[0].upper()}{profile.verdict[1:]}: {words}",
        lead=(_certainty(profile),),
        details=(rates, *rest),
        conditions=info.conditions,
        figures=(
            Figure(
                name="input-pipeline",
                title="A second of training, and the rates behind the verdict",
                height_in=HEIGHT_IN,
                draw=lambda ax: plot_input_pipeline(profile, ax),
                alt_text=alt_text(info),
            ),
        ),
        tables=tuple(table for table in (_changes(profile), _untried(profile)) if table.rows),
        notes=tuple(Note("", "", note) for note in profile.notes),
        command=profile.environment.command,
        settings=(
            Fact("batch size", f"{profile.batch_size:,}"),
            Fact("dtype policy", profile.dtype_policy),
            Fact("time to measure", f"{readable(profile.budget_s)} s"),
        ),
        environment=environment_facts(profile.environment),
    )


def _certainty(profile: InputPipelineProfile) -> str:
    if profile.disturbed:
        return "The ratio of the rates is not known: what was timed alone was disturbed."
    ratio, long_run = profile.ratio, profile.long_run_ratio
    if long_run and not profile.is_even:
        return (
            f"Over one long reading the pipeline alone is {readable(long_run.low)} to "
            f"{readable(long_run.high)} times as fast as the train step alone; the shorter rounds "
            "saw another rate."
        )
    if ratio is None or ratio.interval is None:
        return "The ratio of the rates has no interval, so the verdict is not sure."
    return (
        f"The pipeline alone is {readable(ratio.value)} times as fast as the train step alone "
        f"(95 % interval {_span(ratio)})."
    )


def _changes(profile: InputPipelineProfile) -> Table:
    best = profile.best_first[:1]
    return Table(
        "Changes that were tried, one at a time",
        (
            Column("Change", False),
            Column("Times as fast", True),
            Column("95 % interval", True),
            Column("Code", False),
            Column("Mind", False),
        ),
        tuple(
            Row(
                remedy.name,
                "",
                remedy in best and is_clear_gain(remedy),
                (
                    Cell(remedy.name),
                    *_gain_cells(remedy.gain),
                    Cell(remedy.code),
                    Cell(remedy.condition or ""),
                ),
            )
            for remedy in profile.best_first
        ),
        footnote="Training speed over that of the pipeline as it is, in the same rounds.",
        best_means="largest clear gain",
    )


def _gain_cells(gain: RoundEstimate | None) -> Sequence[Cell]:
    if gain is None:
        return Cell("n/a (not measured)"), Cell("n/a (not measured)")
    interval = gain.interval
    span = Cell(_span(gain), interval.low) if interval else Cell("n/a (too few rounds)")
    return Cell(readable(gain.value), gain.value), span


def _span(estimate: RoundEstimate) -> str:
    interval = estimate.interval
    return f"{readable(interval.low)} to {readable(interval.high)}" if interval else "n/a"


def _untried(profile: InputPipelineProfile) -> Table:
    return Table(
        "Changes that were not tried",
        (Column("Change", False), Column("Code", False), Column("Why not", False)),
        tuple(
            Row(u.name, "", False, (Cell(u.name), Cell(u.code), Cell(u.reason)))
            for u in profile.untried
        ),
    )
