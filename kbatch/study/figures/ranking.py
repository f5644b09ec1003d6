"""The figure of the ranked trials: a table, and beside it the objective with its interval."""

from typing import Any, NamedTuple

from matplotlib.axes import Axes

from kbatch.document.numbers import format_number, join_words, pluralize, shortened
from kbatch.plotting import canvas, draw
from kbatch.plotting.palette import ALARM, ALARM_TEXT, GRID, INK, MUTED, series_style
from kbatch.records.training_run import COST_NAMES
from kbatch.study.figures.common import ranked_trials, tick_fraction, write_conditions
from kbatch.study.names import (
    BARS,
    PAIRS,
    PlottedEstimate,
    estimate,
    metric_axis_label,
    metric_words,
    outcome,
    spreads,
    trial_names,
)
from kbatch.study.study import Study, refuse_empty
from kbatch.study.table import trial_table
from kbatch.study.trial import Objective

MOST_ROWS = 30
# In characters: what stands between columns, and what they take of a figure of the usual width.
_GAP, _TABLE_CHARACTERS = 2, 46


class RankedColumn(NamedTuple):
    title: str
    numeric: bool  # Numbers stand to the right.
    cells: list[str]

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.cells)))


class RankedTrial(NamedTuple):
    """One row; the objective is None for a trial without a result."""

    objective: PlottedEstimate | None
    outcome: str


class RankingInfo(NamedTuple):
    """What the figure shows: the trials, the best first and those without a result last."""

    columns: tuple[RankedColumn, ...]
    rows: tuple[RankedTrial, ...]
    objective: Objective
    notes: tuple[str, ...]


def ranking_info(study: Study, *, most: int, characters: int = _TABLE_CHARACTERS) -> RankingInfo:
    """Rank the trials of a study by their objective, in columns of so many characters."""
    refuse_empty(study)
    if most < 1:
        raise ValueError(f"`most` must be a positive number of rows. Received: most={most}.")
    names, objective = trial_names(study.trials), study.trials[0].objective
    ranked = ranked_trials(study)
    shown, hidden = ranked[:most], ranked[most:]
    table = trial_table(study)
    cells_of = {row.key: dict(zip(table.headers, row.cells, strict=True)) for row in table.rows}
    titles = ["Batch size", *names.hyperparameters, *["Policy"] * names.several_policies]
    titles += ["Samples/s", "Learning rate", "Micro-batch"]  # The most telling ones first.
    columns: list[RankedColumn] = []
    for title in titles:
        found = [cells_of[trial.trial_id][title] for trial in shown]
        # Spreads and reasons stand in the report.
        cells = [_short(cell.brief(missing=True).text.partition(" ±")[0]) for cell in found]
        numeric = all(cell.sort_key is not None or cell.text.startswith("n/a") for cell in found)
        column = RankedColumn(_short(title.removesuffix(" size")), numeric, cells)
        if _GAP + column.width <= characters or not columns:
            columns.append(column)
            characters -= _GAP + column.width
    notes, spread = [], spreads(study.trials)
    if spread.intervals:
        notes.append(BARS)
    elif spread.pairs:
        notes.append(PAIRS)
    elif spread.single:
        notes.append("One execution a trial, no bars: whether the order would repeat is not known.")
    if hidden:
        failed = sum(trial.status != "completed" for trial in hidden)
        without = f", {failed:,} of them without a result" if failed else ""
        notes.append(f"Not shown: {pluralize(len(hidden), 'trial')} that follow{without}.")
    shown_titles = [column.title for column in columns]
    untitled = [name for name in map(_short, names.hyperparameters) if name not in shown_titles]
    if untitled:
        plural = "s" * (len(untitled) > 1)
        notes.append(f"No room for the hyperparameter{plural} {join_words(untitled)}.")
    rows = []
    for trial in shown:
        value = trial.objective_value if trial.status == "completed" else None
        found = estimate(objective.name, value, trial.objective_interval)
        rows.append(RankedTrial(found, outcome(trial)))
    return RankingInfo(tuple(columns), tuple(rows), objective, tuple(notes))


def _short(text: str) -> str:
    return shortened(text, 15)


def alt_text(info: RankingInfo) -> str:
    best = [
        ", ".join(f"{column.title} {column.cells[number]}" for column in info.columns)
        + f": {format_number(row.objective.value, 4)}"
        for number, row in enumerate(info.rows[:3])
        if row.objective
    ]
    words = metric_words(info.objective.name)
    sentences = (
        f"A table of {pluralize(len(info.rows), 'trial')} ranked by {words}, with dots.",
        f"The best are {'; '.join(best)}." if best else "No trial completed.",
        *info.notes,
    )
    return " ".join(sentences)


def height_in(rows: int) -> float:
    return 1.5 + 0.2 * max(4, rows)


def plot_ranking(study: Study, ax: Axes | None = None, *, most: int = MOST_ROWS) -> Axes:
    """Plot the trials ranked by their objective: settings as a table, values as dots.

    Trials without a result stand last, with the reason.

    Args:
        study: A study, from `load_study`.
        ax: Axes whose place the table and the dots take; a new figure if None.
        most: How many rows to show at most.

    Raises:
        ValueError: If the study is empty, with what to run, or `most` is not positive.
    """
    share = 1.0 if ax is None else canvas.width_share(ax)
    info = ranking_info(study, most=most, characters=int(share * _TABLE_CHARACTERS))
    (panel,) = canvas.panels(ax, height_in(len(info.rows)))
    characters = sum(_GAP + column.width for column in info.columns)
    table_share = min(0.6, characters / (share * 104))  # So many fit beside each other.
    (table, _), below = canvas.beside(panel, (table_share, 1 - table_share), at=1, gap=0.02)
    table.set_axis_off()
    panel.set_label(alt_text(info))
    panel.grid(visible=False)
    canvas.vertical_grid(panel)
    panel.set_ylim(len(info.rows) - 0.4, -0.6)
    panel.set_yticks([])
    table.set_xlim(0, characters)
    left, above = 0, table.get_xaxis_transform()
    for column in info.columns:
        place, ha = (left + column.width, "right") if column.numeric else (left, "left")
        left += column.width + _GAP
        look: dict[str, Any] = {"ha": ha, "fontsize": canvas.TEXT_PT, "parse_math": False}
        table.text(place, 1.01, column.title, va="bottom", color=MUTED, transform=above, **look)
        for number, (row, cell) in enumerate(zip(info.rows, column.cells, strict=True)):
            color = INK if row.objective else MUTED
            table.text(place, number, cell, va="center", color=color, **look)
    _draw_dots(panel, info)
    canvas.write_title(table, study.name, rows_below=1, characters=max(20, characters))
    below_pt = 36 if below is panel else 4
    write_conditions(below, study, *info.notes, below_pt=below_pt)
    return panel


def _draw_dots(panel: Axes, info: RankingInfo) -> None:
    (color, marker), edge = series_style(0), panel.get_yaxis_transform()
    values = [row.objective.value for row in info.rows if row.objective]
    for number, row in enumerate(info.rows):
        panel.axhline(number, color=GRID, linewidth=0.5, zorder=0.4)
        if row.objective is None:
            place = (0.02, number)
            panel.plot(place[:1], place[1:], "X", transform=edge, color=ALARM, ms=6, clip_on=False)
            reason = {"ha": "left", "color": ALARM_TEXT, "xycoords": edge}
            draw.text(panel, row.outcome, place, (8, 0), **reason)
        else:
            draw.bars(panel, [number], [row.objective.bar], color, across=True)
            draw.points(panel, [row.objective.value], [number], color, marker, size=7)
    label = metric_axis_label(info.objective).replace("\n", " ")
    label = label.replace(" (", "\n(") if len(label) > 45 else label
    panel.set_xlabel(label, fontsize=canvas.TEXT_PT, parse_math=False)
    best = info.rows[0].objective
    if best is None:
        panel.set_xticks([])
        return
    panel.margins(x=0.12)
    panel.set_xlim(panel.get_xlim())
    name = info.objective.name
    fraction = tick_fraction(panel.xaxis, name, values)
    if not fraction and (name in COST_NAMES or name == "samples_per_second"):
        # Ratio scales: from zero, twice as far is twice as much.
        panel.set_xlim(0, 1.12 * panel.get_xlim()[1])
        panel.xaxis.set_major_formatter("{x:,g}")
    # The value of the best trial stands on the side of its dot that has room.
    left = best.value > sum(panel.get_xlim()) / 2
    end = best.bar[0 if left else 1] if best.bar else best.value
    side, offset_pt = ("right", -7) if left else ("left", 7)
    draw.text(panel, format_number(best.value, 4), (end, 0), (offset_pt, 0), ha=side, bold=True)
