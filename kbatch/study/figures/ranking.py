"""The figure of the ranked trials: a table, and beside it the objective with its interval."""

from typing import TYPE_CHECKING, NamedTuple

from kbatch.document.numbers import counted, listed, readable, setting, shortened
from kbatch.plotting.canvas import (
    SMALL_PT,
    TEXT_PT,
    beside_table,
    new_axes,
    tidy,
    width_share,
    write_caption,
)
from kbatch.plotting.palette import ALARM, ALARM_TEXT, GRID, INK, MUTED, series_style
from kbatch.plotting.series import name_panel
from kbatch.records.training_run import COST_NAMES
from kbatch.study.conditions import Estimate, caption, conditions_of, objective_estimate, spreads
from kbatch.study.decision import refuse_empty
from kbatch.study.names import (
    TrialNames,
    is_fraction,
    metric_axis_label,
    metric_words,
    outcome,
    trial_names,
    value_text,
)
from kbatch.study.study import Study
from kbatch.study.trial import Objective, TrialRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    """Rank the trials of a study by their objective."""
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
    """Describe the figure in sentences, for those who do not see it."""
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
    """Return title, whether it holds numbers, and the cells, the most telling columns first."""
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
    """Take the columns that there is room for."""
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


MOST_ROWS = 30
_FEWEST_ROWS = 4
_ROW_IN = 0.2
_REST_IN = 1.5
_CHARACTERS = 104
_MOST_SHARE = 0.6
_GAP = 2


def height_in(rows: int) -> float:
    """Return the height that so many rows need, in inches."""
    return _REST_IN + _ROW_IN * max(_FEWEST_ROWS, rows)


def plot_ranking(study: "Study", ax: "Axes | None" = None, *, most: int = MOST_ROWS) -> "Axes":
    """Plot the trials ranked by their objective: settings as a table, values as dots.

    Trials without a result stand last, with the reason.

    Example:

    >>> study = kbatch.load_study("results/digits")
    >>> kbatch.plot_ranking(study, most=10).figure.savefig("ranking.png")

    Args:
        study: A study, as `load_study` gives it.
        ax: Axes whose place table and dots take; a new figure if None.
        most: Most rows to show.

    Returns:
        The Axes of the dots; their label, `get_label()`, describes the figure in sentences.

    Raises:
        ValueError: If the study is empty, with what to run, or `most` is not positive.
    """
    share = 1.0 if ax is None else width_share(ax)
    info = ranking_info(study, most=most, characters=int(share * TABLE_CHARACTERS))
    panel = new_axes(height_in(len(info.rows))) if ax is None else ax
    characters = sum(info.widths) + _GAP * len(info.widths)
    table, below = beside_table(panel, min(_MOST_SHARE, characters / (share * _CHARACTERS)))
    tidy(panel)
    panel.set_label(alt_text(info))
    panel.grid(visible=False)
    panel.grid(visible=True, axis="x", color=GRID, linewidth=0.6)
    panel.set_ylim(len(info.rows) - 0.4, -0.6)
    panel.set_yticks([])
    _write_table(table, info, characters)
    _draw_dots(panel, info)
    # The layout looks at the middle of a title, which must lie above the table.
    name_panel(table, shortened(info.name, max(20, characters)), lines_below=1)
    lines = (*info.notes, info.conditions)
    write_caption(below, *lines, below_pt=36 if below is panel else 4)
    return panel


def _write_table(table: "Axes", info: RankingInfo, characters: int) -> None:
    table.set_xlim(0, characters)
    right = 0
    for column, width in enumerate(info.widths):
        left, right = right, right + width + _GAP
        numeric = info.numeric[column]
        look = {
            "ha": "right" if numeric else "left",
            "fontsize": SMALL_PT + 0.5,
            "parse_math": False,
        }
        place = right - _GAP if numeric else left
        table.annotate(
            info.headers[column],
            (place, 1),
            xycoords=table.get_xaxis_transform(),
            xytext=(0, 2),
            textcoords="offset points",
            va="bottom",
            color=MUTED,
            **look,
        )
        for number, row in enumerate(info.rows):
            color = INK if row.objective else MUTED
            table.text(place, number, row.cells[column], va="center", color=color, **look)


def _draw_dots(panel: "Axes", info: RankingInfo) -> None:
    style = series_style(0)
    for number, row in enumerate(info.rows):
        panel.axhline(number, color=GRID, linewidth=0.5, zorder=0.4)
        if row.objective is None:
            _mark_missing(panel, number, row.outcome)
            continue
        if row.objective.bar:
            panel.hlines(number, *row.objective.bar, color=style.color, linewidth=1.6, alpha=0.55)
        panel.plot(
            [row.objective.value],
            [number],
            marker=style.marker,
            markersize=6,
            color=style.color,
            linestyle="none",
        )
    label = metric_axis_label(info.objective).replace("\n", " ")
    label = label.replace(" (", "\n(") if len(label) > 45 else label
    panel.set_xlabel(label, fontsize=TEXT_PT, parse_math=False)
    values = [row.objective.value for row in info.rows if row.objective]
    if not values:
        panel.set_xticks([])
        return
    panel.margins(x=0.12)
    _number_axis(panel, info, values)
    _label_ends(panel, info)


def _mark_missing(panel: "Axes", number: int, words: str) -> None:
    across = panel.get_yaxis_transform()
    panel.plot([0.02], [number], "X", transform=across, color=ALARM, markersize=6, clip_on=False)
    panel.annotate(
        words,
        (0.02, number),
        xycoords=across,
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=SMALL_PT,
        color=ALARM_TEXT,
        parse_math=False,
    )


def _number_axis(panel: "Axes", info: RankingInfo, values: list[float]) -> None:
    name = info.objective.name
    if is_fraction(name) and max(values) <= 1:
        low, high = panel.get_xlim()
        panel.set_xticks(
            [tick for tick in panel.get_xticks() if low <= tick <= min(high, 1 + 1e-9)]
        )
        panel.set_xlim(low, high)
    elif name in COST_NAMES or name == "samples_per_second":
        # Ratio scales: from zero, twice as far is twice as much.
        panel.set_xlim(0, 1.12 * panel.get_xlim()[1])
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")


def _label_ends(panel: "Axes", info: RankingInfo) -> None:
    """Write the value of the best trial beside its dot, on the side that has room."""
    first = info.rows[0].objective
    if first is None:
        return
    low, high = panel.get_xlim()
    left = first.value > (low + high) / 2
    end = first.value if first.bar is None else first.bar[0 if left else 1]
    panel.annotate(
        readable(first.value, 4),
        (end, 0),
        xytext=(-7 if left else 7, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        va="center",
        fontsize=SMALL_PT + 0.5,
        fontweight="bold",
        color=INK,
    )
