"""What the figure of the ranked trials shows, computed before anything is drawn."""

from typing import NamedTuple

from kbatch.document.number_text import counted, listed, readable, setting
from kbatch.document.short_text import shortened
from kbatch.study.conditions import caption, conditions_of
from kbatch.study.empty_study import refuse_empty
from kbatch.study.estimates import Estimate, objective_estimate
from kbatch.study.metric_names import metric_words
from kbatch.study.outcomes import outcome
from kbatch.study.spreads import spreads
from kbatch.study.study_record import Study
from kbatch.study.trial import Objective, TrialRecord
from kbatch.study.trial_names import TrialNames, trial_names, value_text

# What the columns take of a figure of the usual width.
TABLE_CHARACTERS = 46
_CELL_CHARACTERS = 15
_NOTHING = "-"


class RankedTrial(NamedTuple):
    """One row.

    Attributes:
        trial_id: keras-tuner's identifier.
        cells: Its texts, one a column.
        objective: The objective, None for a trial without a result.
        outcome: How it ended, in words.
    """

    trial_id: str
    cells: tuple[str, ...]
    objective: Estimate | None
    outcome: str


class RankingInfo(NamedTuple):
    """What the figure shows.

    Attributes:
        name: Name of the study.
        headers: Titles of the columns.
        numeric: Which columns hold numbers, which stand to the right.
        rows: The trials, the best first and those without a result last.
        objective: What they are ranked by.
        notes: What the bars are, and what is left out.
        conditions: Device, versions and budget.
    """

    name: str
    headers: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[RankedTrial, ...]
    objective: Objective
    notes: tuple[str, ...]
    conditions: str

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of each column, in characters."""
        columns = zip(self.headers, *(row.cells for row in self.rows), strict=True)
        return tuple(max(map(len, column)) for column in columns)


def ranking_info(study: Study, *, most: int, characters: int = TABLE_CHARACTERS) -> RankingInfo:
    """Ranks the trials of a study by their objective.

    Args:
        study: A study with at least one trial.
        most: Most rows to show.
        characters: Room for the columns.

    Raises:
        ValueError: If the study is empty, with what to run, or `most` is not positive.
    """
    refuse_empty(study)
    if most < 1:
        raise ValueError(f"`most` must be a positive number of rows. Received: most={most}.")
    names, objective = trial_names(study.trials), study.trials[0].objective
    ranked = _ranked(study.trials, objective)
    shown, hidden = _shown(ranked, most)
    columns = _columns(shown, names)
    kept = _kept(columns, characters)
    return RankingInfo(
        name=study.name,
        headers=tuple(title for title, _, _ in kept),
        numeric=tuple(numeric for _, numeric, _ in kept),
        rows=tuple(
            RankedTrial(
                trial.trial_id,
                tuple(cells[row] for _, _, cells in kept),
                objective_estimate(trial) if trial.status == "completed" else None,
                outcome(trial),
            )
            for row, trial in enumerate(shown)
        ),
        objective=objective,
        notes=(
            *_spread_notes(study),
            *_left_out(hidden, [_short(n) for n in names.hyperparameters], kept),
        ),
        conditions=caption(conditions_of(study)),
    )


def alt_text(info: RankingInfo) -> str:
    """Describes the figure in sentences, for those who do not see it."""
    scored = [row for row in info.rows if row.objective is not None]
    words = metric_words(info.objective.name)
    first = [
        f"{', '.join(_named(info, row))}: {readable(row.objective.value, 4)}"
        for row in scored[:3]
        if row.objective
    ]
    sentences = [f"A table of {counted(len(info.rows), 'trial')} ranked by {words}, with dots."]
    if first:
        sentences.append(f"The best are {'; '.join(first)}.")
    else:
        sentences.append("No trial completed.")
    return " ".join([*sentences, *info.notes])


def _named(info: RankingInfo, row: RankedTrial) -> list[str]:
    return [f"{title} {text}" for title, text in zip(info.headers, row.cells, strict=True)]


def _ranked(trials: tuple[TrialRecord, ...], objective: Objective) -> list[TrialRecord]:
    sign = -1 if objective.direction == "max" else 1

    def key(trial: TrialRecord) -> tuple[int, float]:
        value = trial.objective_value
        if trial.status != "completed":
            return (2, 0.0)
        return (1, 0.0) if value is None else (0, sign * value)

    return sorted(trials, key=key)


def _shown(ranked: list[TrialRecord], most: int) -> tuple[list[TrialRecord], list[TrialRecord]]:
    return ranked[:most], ranked[most:]


_Column = tuple[str, bool, list[str]]


def _columns(trials: list[TrialRecord], names: TrialNames) -> list[_Column]:
    """Gives title, whether it holds numbers, and the cells, the most telling columns first."""
    columns: list[_Column] = [("Batch", True, [f"{trial.batch_size:,}" for trial in trials])]
    for name in names.hyperparameters:
        values = [trial.hyperparameters.get(name) for trial in trials]
        numeric = all(isinstance(value, (int, float)) for value in values)
        columns.append((_short(name), numeric, [_short(_value(value)) for value in values]))
    if names.several_policies:
        columns.append(("Policy", False, [_short(trial.dtype_policy) for trial in trials]))
    rates = [t.samples_per_second for t in trials]
    columns.append(("Samples/s", True, [_number(rate, readable) for rate in rates]))
    if "learning_rate" not in names.hyperparameters:
        learning_rates = [_number(trial.learning_rate, setting) for trial in trials]
        columns.append(("Learning rate", True, learning_rates))
    columns.append(
        ("Micro-batch", True, [_number(t.micro_batch_size, lambda n: f"{n:,}") for t in trials])
    )
    return columns


def _kept(columns: list[_Column], room: int) -> list[_Column]:
    """Takes the columns that there is room for."""
    kept: list[_Column] = []
    for column in columns:
        width = 2 + max(len(text) for text in (column[0], *column[2]))
        if width <= room or not kept:
            kept.append(column)
            room -= width
    return kept


def _left_out(hidden: list[TrialRecord], tuned: list[str], kept: list[_Column]) -> tuple[str, ...]:
    notes = []
    if hidden:
        failed = sum(trial.status != "completed" for trial in hidden)
        without = f", {failed:,} of them without a result" if failed else ""
        notes.append(f"Not shown: {counted(len(hidden), 'trial')} that follow{without}.")
    titles = [title for title in tuned if title not in {t for t, _, _ in kept}]
    if titles:
        notes.append(f"No room for the hyperparameter{'s' * (len(titles) > 1)} {listed(titles)}.")
    return tuple(notes)


def _spread_notes(study: Study) -> tuple[str, ...]:
    found = spreads(study.trials)
    if found.intervals:
        return ("Bars: 95 % interval of the mean over executions.",)
    if found.pairs:
        return ("Two executions a trial: the mean without bars, too few for an interval.",)
    single = "One execution a trial, no bars: whether the order would repeat is not known."
    return (single,) if found.single else ()


def _value(value: bool | int | float | str | None) -> str:
    return _NOTHING if value is None else value_text(value)


def _number(value, write) -> str:
    return _NOTHING if value is None else write(value)


def _short(text: str) -> str:
    return shortened(text, _CELL_CHARACTERS)
