"""The tables of the trials and of their learning rates, and the marks that tie them to notes."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from kbatch.analysis.intervals import Estimate
from kbatch.analysis.learning_rate import LearningRateScaling
from kbatch.analysis.rate_search import FACTOR_NAME, RateModel
from kbatch.page.numbers import (
    format_number,
    in_brackets,
    join_words,
    percent,
    setting,
)
from kbatch.page.section import Cell, Column, Note, Row, Table
from kbatch.records.training_run import ExecutionRecord
from kbatch.study.comparison import other_hyperparameters, runs_of
from kbatch.study.decision import SizeChange
from kbatch.study.decision_page import difference_text
from kbatch.study.names import (
    decay_text,
    metric_words,
    noise_scale_text,
    outcome,
    spreads,
    trial_names,
    value_text,
)
from kbatch.study.study import Study, as_compared, refuse_empty
from kbatch.study.trial import TrialRecord

# A column, and what makes its cells.
_Made = tuple[Column, Callable[[TrialRecord], Cell]]


def trial_table(study: Study) -> Table:
    """Write the trials of a study as a table of texts, without columns that say nothing."""
    refuse_empty(study)
    # An execution that a race was interrupted in shows in the status alone.
    trials, named = as_compared(study).trials, study.decide().trial
    columns, made = zip(*_columns(study), strict=True)
    rows = []
    for whole, trial in zip(study.trials, trials, strict=True):
        best = named is not None and trial.trial_id == named.trial_id
        cells = tuple(cell_of(trial) for cell_of in made)
        rows.append(Row(trial.trial_id, whole.status, best, cells))
    return Table("Trials", columns, tuple(rows), _footnote(trials), best_means="the answer")


def _columns(study: Study) -> list[_Made]:
    trials, quality = study.trials, study.quality_metric
    words = metric_words(quality.name) if quality else "quality metric"
    outcomes = {trial.trial_id: outcome(trial) for trial in trials}

    def mean(of: Callable[[ExecutionRecord], float | None]) -> Callable[[TrialRecord], Any]:
        return lambda trial: trial.mean(of)

    gpu_shares = mean(lambda e: e.usage and e.usage.gpu_utilization)
    gpus = (
        _number("GPU utilization", gpu_shares, percent, "gpu"),
        _number("Joules per sample", mean(lambda e: e.joules_per_sample), name="gpu"),
    )

    def noise_scale(trial: TrialRecord) -> Cell:
        scale = trial.noise_scale
        return Cell(noise_scale_text(scale), scale.value) if scale else _cell(trial, None)

    def quality_cell(trial: TrialRecord) -> Cell:
        name = quality.name if quality else ""
        interval = trial.metric_interval(name) or trial.examples_interval(name)
        return _measured(trial, trial.metrics.get(name), interval, 4)

    skipped = mean(lambda e: e.overflowed_updates)
    overflowed = [_number("Overflowed updates", skipped, _whole, "updates")]
    noise = [(Column("Noise scale", True, "noise_scale"), noise_scale)]
    steps = _number("Steps an execution", lambda t: t.steps_per_execution, _whole)
    return [
        _number("Batch size", lambda t: t.batch_size, _whole, "batch_size"),
        # Not last, where a narrow page or terminal cuts it.
        (Column("Status", False, "status"), lambda t: Cell(outcomes[t.trial_id])),
        _number("Micro-batch", lambda t: t.micro_batch_size, _whole, "micro_batch_size"),
        *([steps] if any((t.steps_per_execution or 1) > 1 for t in trials) else []),
        (Column("Policy", False), lambda t: Cell(t.dtype_policy)),
        _number("Learning rate", lambda t: t.learning_rate, setting, "learning_rate"),
        *(
            (Column(name, True), lambda t, name=name: _hyperparameter(t.hyperparameters.get(name)))
            for name in trial_names(trials).hyperparameters
        ),
        (Column("Samples/s", True, "samples_per_second"), _speed_cell),
        (Column(words[0].upper() + words[1:], True, "quality"), quality_cell),
        *_change_columns(study, words),
        *_target_columns(trials),
        *(noise if any(trial.noise_scale for trial in trials) else []),
        _number("Updates", mean(lambda e: e.updates), _whole, "updates"),
        *(overflowed if any(map(skipped, trials)) else []),
        _number("First step (s)", mean(lambda e: e.first_step_s)),
        _number("Waiting for data", lambda t: t.data_wait_share, percent),
        *(one for one in gpus if any(one[1](trial).sort_key is not None for trial in trials)),
    ]


def _speed_cell(trial: TrialRecord) -> Cell:
    if any(note.code == "too_short_to_time" for note in trial.notes):
        return Cell("n/a (too short to time)")
    return _measured(trial, trial.samples_per_second, trial.samples_per_second_interval)


def _number(
    title: str,
    of: Callable[[TrialRecord], float | None],
    write: Callable[[float], str] = format_number,
    name: str = "",
) -> _Made:
    return Column(title, True, name), lambda trial: _cell(trial, of(trial), write)


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _cell(
    trial: TrialRecord, value: float | None, write: Callable[[float], str] = format_number
) -> Cell:
    if value is None:
        return Cell(f"n/a ({'not measured' if trial.status == 'completed' else outcome(trial)})")
    return Cell(write(value), value)


def _measured(
    trial: TrialRecord, value: float | None, interval: Estimate[float] | None, digits: int = 3
) -> Cell:
    """Write a value with its spread over executions, or in brackets with that within one."""
    if value is None:
        return _cell(trial, None)
    spread = in_brackets(interval)
    if interval is not None and interval.ends is not None and len(trial.executions) > 1:
        spread = f" ± {format_number((interval.ends[1] - interval.ends[0]) / 2, 2)}"
    return Cell(f"{format_number(value, digits)}{spread}", value)


def _change_columns(study: Study, words: str) -> list[_Made]:
    """Return what each size changes against the base size, nothing where there is none."""
    found = study.decide()
    left_out = {trial.trial_id for trial, _ in found.left_out}

    def cell(trial: TrialRecord, name: str, write: Callable[[SizeChange], str]) -> Cell:
        if trial.status != "completed":
            return _cell(trial, None)
        if trial.trial_id in left_out:
            return Cell("n/a (not compared)")
        change = found.changes.get(trial.batch_size)
        return Cell("base size") if change is None else Cell(write(change), getattr(change, name))

    columns = (
        (f"Speedup over {found.base_batch_size}", "speedup", _sooner),
        (f"{words} against {found.base_batch_size}", "difference", partial(difference_text, found)),
    )
    return [
        (Column(title[0].upper() + title[1:], True), partial(cell, name=name, write=write))
        for title, name, write in columns
        if any(getattr(change, name) is not None for change in found.changes.values())
    ]


def _sooner(change: SizeChange) -> str:
    """Write how many times sooner training ends, empty where that is not known."""
    if change.speedup is None:
        return ""
    return f"{format_number(change.speedup, 2)}{in_brackets(change.speedup_interval, 2)}"


def _target_columns(trials: Iterable[TrialRecord]) -> list[_Made]:
    """Return the columns of what a target took, none where no trial has one."""
    targets = dict.fromkeys(trial.target for trial in trials if trial.target is not None)
    words = " or ".join(f"{target.metric} {setting(target.value)}" for target in targets)

    def cell(trial: TrialRecord, name: str, write: Callable[[float], str]) -> Cell:
        if trial.target is None or trial.status != "completed":
            return _cell(trial, None)
        cost = trial.cost(name)
        return Cell("never met") if cost is None else Cell(write(cost), cost)

    costs = (("seconds", format_number), ("updates", _whole), ("examples", _whole))
    return [
        (
            Column(f"{what.capitalize()} to {words}", True),
            lambda t, what=what, write=write: cell(t, f"{what}_to_target", write),
        )
        for what, write in costs
        if targets
    ]


def _hyperparameter(value: bool | int | float | str | None) -> Cell:
    if value is None:
        return Cell("n/a (not set)")
    if isinstance(value, (bool, str)):
        return Cell(str(value))
    return Cell(value_text(value) if isinstance(value, float) else f"{value:,}", value)


def _footnote(trials: Sequence[TrialRecord]) -> str:
    found = spreads(trials)
    executions = [e for trial in trials for e in trial.executions]
    gpus = [gpu for e in executions if e.usage for gpu in e.usage.gpus or ()]
    sentences = (
        (found.intervals, "± is half the 95 % interval of the mean over executions."),
        (found.pairs, "Two executions have a mean and no interval."),
        (
            found.quartiles,
            "Samples/s are examples over training time after the first steps. A single execution "
            "shows the first and third quartile of its timing windows beside them"
            + ("." if found.examples else ", and no interval of its quality."),
        ),
        (
            found.examples,
            "The interval of a single execution is 95 % over its validation examples; it does not "
            "include what another seed would change.",
        ),
        (
            found.single and not (found.quartiles or found.examples),
            "A single execution has no interval.",
        ),
        (True, "Quality is that of each execution's best epoch."),
        (
            any(e.outcomes and e.outcomes.values for e in executions),
            "For the objective the epoch is chosen on one half of the validation examples and "
            "its value is from the other, both ways.",
        ),
        (True, followed_text(e.scaling for e in executions)),
        (
            any(trial.noise_scale for trial in trials),
            "Noise scale: in examples, of the late half of training, with its 95 % interval; "
            "batches far above it save hardly any updates.",
        ),
        (
            gpus,
            "The GPU numbers, from NVML, are those of the whole run, validation included, and of "
            "every process on the GPUs.",
        ),
        (
            any(gpu.mig for gpu in gpus),
            "On an instance of a GPU (MIG) the energy is the whole board's.",
        ),
    )
    return " ".join(text for holds, text in sentences if holds and text)


_SETTING_NAMES = {
    "beta_2": "`beta_2`",
    "weight_decay": "weight decay",
    "batch_norm_momentum": "BatchNormalization's momentum",
    "ema_momentum": "`ema_momentum`",
}


def followed_text(scalings: Iterable[LearningRateScaling | None]) -> str:
    """Say what followed the batch size besides the learning rate, nothing where nothing did."""
    known = [scaling for scaling in scalings if scaling and scaling.follow_batch_size]
    if not known:
        return ""
    first = min(known, key=lambda scaling: scaling.batch_size)
    last = max(known, key=lambda scaling: scaling.batch_size)
    parts = []
    for name, words in _SETTING_NAMES.items():
        low, high = _followed_value(first, name), _followed_value(last, name)
        if low and high and low != high:
            parts.append(f"{words} ({low} to {high})")
    if not parts:
        return ""
    return (
        f"Settings that follow the batch size, from {first.batch_size:,} to {last.batch_size:,}: "
        f"{join_words(parts)}."
    )


def _followed_value(scaling: LearningRateScaling, name: str) -> str:
    """Write one of the settings that follow, an empty text where it is not known."""
    if name == "batch_norm_momentum":
        momenta = scaling.batch_norm_momenta
        return join_words(map(decay_text, momenta)) if momenta else ""
    value = getattr(scaling, name)
    write = setting if name == "weight_decay" else decay_text
    return "" if value is None else write(value)


def lettered(notes: Iterable[Note], table: Table) -> tuple[Note, ...]:
    """Letter the notes about columns of the table a to z, aa, ab; the others follow without."""
    names = {column.name for column in table.columns}
    ordered = sorted(notes, key=lambda note: not names & set(note.columns))

    def letter(index: int) -> str:
        before = letter(index // 26 - 1) if index >= 26 else ""
        return before + chr(ord("a") + index % 26)

    return tuple(
        note._replace(mark=letter(i)) if names & set(note.columns) else note
        for i, note in enumerate(ordered)
    )


def marked_table(table: Table, notes: Sequence[Note]) -> Table:
    """Set the marks of lettered notes: in the header for a whole column, else in the cells."""
    columns, cells = [], []
    for place, column in enumerate(table.columns):
        keyed = [(row.key, row.cells[place]) for row in table.rows]
        about = {n.mark: set(n.keys) for n in notes if n.mark and column.name in n.columns}
        # All of a column are its numbers; its texts where it has no numbers.
        numbers = {key for key, cell in keyed if cell.sort_key is not None}
        every = numbers or {key for key, _ in keyed}
        whole = [mark for mark, keys in about.items() if not keys or every <= keys]
        columns.append(column._replace(marks=tuple(whole)))
        some = {mark: keys for mark, keys in about.items() if mark not in whole}
        own = [tuple(mark for mark, keys in some.items() if key in keys) for key, _ in keyed]
        cells.append([cell._replace(marks=m) for (_, cell), m in zip(keyed, own, strict=True)])
    rows = zip(table.rows, zip(*cells, strict=True), strict=True)
    marked = tuple(row._replace(cells=own) for row, own in rows)
    return table._replace(columns=tuple(columns), rows=marked)


# The slope of log rate against log batch size by each rule.
_SLOPES = {"linear": 1.0, "sqrt": 0.5}


def learning_rate_table(study: Study) -> Table | None:
    """Tabulate the best learning rate of each size and those of the rules; None if not searched."""
    decision = study.decide()
    best, scaling = decision.trial, decision.trial and decision.trial.executions[0].scaling
    if best is None or scaling is None or FACTOR_NAME not in best.hyperparameters:
        return None
    others = other_hyperparameters(best.hyperparameters)
    trials = [t for t in study.trials if other_hyperparameters(t.hyperparameters) == others]
    by_size: dict[int, list[TrialRecord]] = {}
    for trial in trials:
        if trial.objective_value is not None and trial.executions[0].scaling is not None:
            by_size.setdefault(trial.batch_size, []).append(trial)
    rows, words = [], metric_words(best.objective.name)
    for size, tried in sorted(by_size.items()):
        found = min(tried, key=lambda t: (-len(t.executions), t.rank))
        own = found.executions[0].scaling or scaling
        base, value = own.learning_rate / own.learning_rate_ratio, found.objective_value
        rates = (own.learning_rate, base * own.kappa, base * own.kappa**0.5)
        cells = (
            Cell(f"{size:,}", size),
            *(Cell(setting(rate), rate) for rate in rates),
            *(Cell(f"{number:,}", number) for number in (len(tried), len(found.executions))),
            Cell(format_number(value or 0.0, 4), value),
        )
        rows.append(Row(found.trial_id, found.status, found is best, cells))
    titles = ("Batch size", "Best learning rate", "Linear rule", "Sqrt rule", "Rates tried")
    titles = (*titles, "Executions of the best", words[0].upper() + words[1:])
    columns = tuple(Column(title, True) for title in titles)
    footnote = _slope_text(trials, scaling, decision.tolerance or 0.01)
    title = "Learning rate of each batch size"
    return Table(title, columns, tuple(rows), footnote, best_means="the pair to take")


def _slope_text(
    trials: Sequence[TrialRecord], scaling: LearningRateScaling, tolerance: float
) -> str:
    (runs, _), larger = runs_of(trials), trials[0].objective.direction == "max"
    pairs = list(dict.fromkeys(run.pair for run in runs))
    model = RateModel.of(runs, pairs, larger_is_better=larger, tolerance=tolerance)
    if model is None or len({size for size, _ in pairs}) < 2 or scaling.rule not in _SLOPES:
        return ""
    slope = model.slope(_SLOPES[scaling.rule])
    return (
        "The best learning rate grows as the batch size to the power of "
        f"{format_number(slope.value, 2)}{in_brackets(slope, 2)}; the linear rule takes 1, the "
        f"sqrt rule 0.5, both from the model's rate at batch size {scaling.base_batch_size:,}."
    )
