"""The table of the trials in words, and the marks that tie its numbers to notes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kbatch.analysis.intervals import Interval
from kbatch.analysis.noise_scale import NoiseScale
from kbatch.document.numbers import percent, readable, setting
from kbatch.document.section import Note
from kbatch.document.tables import Cell, Column, Row, Table
from kbatch.records.training_run import ExecutionRecord
from kbatch.study.conditions import spreads
from kbatch.study.decision import refuse_empty
from kbatch.study.names import metric_words, outcome, trial_names, value_text
from kbatch.study.notes import NOISE_FOOTNOTE, Caveat, followed_text, noise_scale_text
from kbatch.study.study import Study
from kbatch.study.trial import Objective, TrialRecord

_COST_TEXTS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("seconds_to_target", readable),
    ("updates_to_target", lambda number: f"{number:,.0f}"),
    ("examples_to_target", lambda number: f"{number:,.0f}"),
)


class _GpuFigure(NamedTuple):
    title: str
    of: Callable[[ExecutionRecord], float | None]
    write: Callable[[float], str]


_GPU_FIGURES = (
    _GpuFigure("GPU utilization", lambda e: e.usage and e.usage.gpu_utilization, percent),
    _GpuFigure("Joules per sample", lambda e: e.joules_per_sample, readable),
)


def trial_table(study: Study) -> Table:
    """Write the trials of a study as a table of texts.

    A hyperparameter of the user's gets a column where it differs between trials, and so do the
    noise scale and what was measured of the GPUs where they are known of any trial.
    """
    refuse_empty(study)
    best = study.best_trial()
    tuned = trial_names(study.trials).hyperparameters
    quality = study.quality_metric
    noise = bool(_noise_scales(study.trials))
    used = _gpu_figures(study.trials)
    targets = _target_titles(study.trials)
    return Table(
        title="Trials",
        best_means="best objective",
        columns=(
            Column("Batch size", True, "batch_size"),
            # Not last, where a narrow page or terminal cuts it.
            Column("Status", False, "status"),
            Column("Micro-batch", True, "micro_batch_size"),
            Column("Policy", False),
            Column("Learning rate", True, "learning_rate"),
            *(Column(name, True) for name in tuned),
            Column("Samples/s", True, "samples_per_second"),
            Column(_quality_title(quality), True, "quality"),
            *(Column(title, True) for title in targets),
            *((Column("Noise scale", True, "noise_scale"),) if noise else ()),
            Column("Updates", True, "updates"),
            Column("First step (s)", True),
            Column("Waiting for data", True),
            *(Column(figure.title, True, "gpu") for figure in used),
        ),
        rows=tuple(
            Row(
                trial.trial_id,
                trial.status,
                trial is best,
                _cells(
                    trial,
                    quality,
                    tuned,
                    target=bool(targets),
                    noise=noise,
                    used=used,
                ),
            )
            for trial in study.trials
        ),
        footnote=_footnote(study.trials),
    )


def _cells(
    trial: TrialRecord,
    quality: Objective | None,
    tuned: Sequence[str],
    *,
    target: bool,
    noise: bool,
    used: Sequence["_GpuFigure"],
) -> tuple[Cell, ...]:
    return (
        Cell(f"{trial.batch_size:,}", trial.batch_size),
        Cell(outcome(trial)),
        _cell(trial, trial.micro_batch_size, lambda n: f"{n:,.0f}"),
        Cell(trial.dtype_policy),
        _cell(trial, trial.learning_rate, setting),
        *(_hyperparameter(trial.hyperparameters.get(name)) for name in tuned),
        _throughput(trial),
        _quality(trial, quality),
        *(_to_target(trial) if target else ()),
        *((_noise_scale(trial),) if noise else ()),
        _cell(trial, trial.mean(lambda e: e.updates), lambda n: f"{n:,.0f}"),
        _cell(trial, trial.mean(lambda e: e.first_step_s)),
        _cell(trial, trial.mean(lambda e: e.data_wait_share), percent),
        *(_cell(trial, trial.mean(figure.of), figure.write) for figure in used),
    )


def _gpu_figures(trials: Sequence[TrialRecord]) -> list[_GpuFigure]:
    return [f for f in _GPU_FIGURES if any(trial.mean(f.of) is not None for trial in trials)]


def _cell(trial: TrialRecord, value: float | None, write=readable) -> Cell:
    if value is None:
        return Cell(f"n/a ({_reason(trial)})")
    return Cell(write(value), value)


def _reason(trial: TrialRecord) -> str:
    return "not measured" if trial.status == "completed" else outcome(trial)


def _throughput(trial: TrialRecord) -> Cell:
    value, interval = trial.samples_per_second, trial.samples_per_second_interval
    if value is None or interval is None:
        return _cell(trial, value)
    if len(trial.executions) > 1:
        return Cell(_plus_minus(value, interval, 3), value)
    return Cell(f"{readable(value)} ({readable(interval.low)} to {readable(interval.high)})", value)


def _quality(trial: TrialRecord, quality: Objective | None) -> Cell:
    value = trial.metrics.get(quality.name) if quality else None
    interval = trial.metric_interval(quality.name) if quality else None
    if value is None or interval is None:
        return _cell(trial, value, lambda v: readable(v, 4))
    return Cell(_plus_minus(value, interval, 4), value)


def _target_titles(trials: Iterable[TrialRecord]) -> tuple[str, ...]:
    """Title the columns of a target, none where no trial has one."""
    targets = dict.fromkeys(trial.target for trial in trials if trial.target is not None)
    if not targets:
        return ()
    words = " or ".join(f"{target.metric} {setting(target.value)}" for target in targets)
    return (f"Seconds to {words}", f"Updates to {words}", f"Examples to {words}")


def _to_target(trial: TrialRecord) -> tuple[Cell, ...]:
    if trial.target is not None and trial.status == "completed":
        missed = Cell("never met")
        costs = [(trial.cost(name), write) for name, write in _COST_TEXTS]
        return tuple(missed if c is None else Cell(write(c), c) for c, write in costs)
    return tuple(_cell(trial, None) for _ in _COST_TEXTS)


def _noise_scales(trials: Iterable[TrialRecord]) -> list[NoiseScale]:
    return [scale for trial in trials if (scale := trial.noise_scale) is not None]


def _noise_scale(trial: TrialRecord) -> Cell:
    scale = trial.noise_scale
    return _cell(trial, None) if scale is None else Cell(noise_scale_text(scale), scale.value)


def _plus_minus(value: float, interval: Interval, digits: int) -> str:
    return f"{readable(value, digits)} ± {readable((interval.high - interval.low) / 2, 2)}"


def _hyperparameter(value: bool | int | float | str | None) -> Cell:
    if value is None:
        return Cell("n/a (not set)")
    if isinstance(value, (bool, str)):
        return Cell(str(value))
    return Cell(value_text(value) if isinstance(value, float) else f"{value:,}", value)


def _quality_title(quality: Objective | None) -> str:
    if quality is None:
        return "Quality metric"
    words = metric_words(quality.name)
    return words[0].upper() + words[1:]


def _footnote(trials: Sequence[TrialRecord]) -> str:
    found = spreads(trials)
    sentences = []
    if found.intervals:
        sentences.append("± is half the 95 % interval of the mean over executions.")
    if found.pairs:
        sentences.append("Two executions have a mean and no interval.")
    if found.quartiles:
        sentences.append(
            "Samples/s are examples over training time after the first steps. A single execution "
            "shows the first and third quartile of its timing windows beside them, and no interval "
            "of its quality."
        )
    elif found.single:
        sentences.append("A single execution has no interval.")
    sentences.append("Quality is that of each execution's best epoch.")
    if followed := followed_text(e.scaling for trial in trials for e in trial.executions):
        sentences.append(followed)
    if _noise_scales(trials):
        sentences.append(NOISE_FOOTNOTE)
    if _gpu_figures(trials):
        sentences.append(
            "What NVML shows of the GPUs is that of the whole run, validation included, and of "
            "every process on them."
        )
        if any(
            gpu.mig for t in trials for e in t.executions if e.usage for gpu in e.usage.gpus or ()
        ):
            sentences.append("On an instance of a GPU (MIG) the energy is the whole board's.")
    return " ".join(sentences)


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def marked_notes(caveats: Sequence[Caveat], table: Table) -> tuple[Note, ...]:
    """Return each caveat whose column the table has a letter; the others follow without one."""
    return tuple(note for _, note in _paired(caveats, table))


def notes_about(
    caveats: Sequence[Caveat], table: Table, columns: Iterable[str]
) -> tuple[Note, ...]:
    """Return the marked notes about any of these columns, for what else shows their numbers."""
    wanted = set(columns)
    pairs = _paired(caveats, table)
    return tuple(note for caveat, note in pairs if note.mark and wanted & set(caveat.columns))


def marked_table(table: Table, caveats: Sequence[Caveat]) -> Table:
    """Set the marks of the notes: in the header for a whole column, else in the cells."""
    pairs = [(caveat, note.mark) for caveat, note in _paired(caveats, table) if note.mark]
    everywhere = {
        (mark, column.name)
        for caveat, mark in pairs
        for place, column in enumerate(table.columns)
        if column.name in caveat.columns and _concerns_all(caveat, table, place)
    }
    columns = tuple(
        column._replace(marks=tuple(m for _, m in pairs if (m, column.name) in everywhere))
        for column in table.columns
    )
    concerned = {mark: frozenset(caveat.trial_ids) for caveat, mark in pairs}
    rows = tuple(_marked_row(row, table, pairs, concerned, everywhere) for row in table.rows)
    return table._replace(columns=columns, rows=rows)


def _concerns_all(caveat: Caveat, table: Table, place: int) -> bool:
    """Whether a caveat concerns all numbers of a column; all texts where it has no numbers."""
    with_numbers = {row.key for row in table.rows if row.cells[place].sort_key is not None}
    keys = with_numbers or {row.key for row in table.rows}
    return not caveat.trial_ids or keys <= set(caveat.trial_ids)


def _marked_row(
    row: Row,
    table: Table,
    pairs: Sequence[tuple[Caveat, str]],
    concerned: Mapping[str, frozenset[str]],
    everywhere: set[tuple[str, str]],
) -> Row:
    cells = tuple(
        cell._replace(
            marks=tuple(
                m
                for c, m in pairs
                if row.key in concerned[m]
                and column.name in c.columns
                and (m, column.name) not in everywhere
            )
        )
        for column, cell in zip(table.columns, row.cells, strict=True)
    )
    return row._replace(cells=cells)


def _paired(caveats: Sequence[Caveat], table: Table) -> list[tuple[Caveat, Note]]:
    """Pair the caveats with their notes, those with a mark first."""
    names = {column.name for column in table.columns}
    ordered = sorted(caveats, key=lambda caveat: not names & set(caveat.columns))
    return [
        (c, Note(_letter(i) if names & set(c.columns) else "", c.label, c.text))
        for i, c in enumerate(ordered)
    ]


def _letter(index: int) -> str:
    """Return a, b, ... z, aa, ab, ..."""
    before = _letter(index // len(_LETTERS) - 1) if index >= len(_LETTERS) else ""
    return before + _LETTERS[index % len(_LETTERS)]
