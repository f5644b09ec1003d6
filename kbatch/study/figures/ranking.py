"""The figure of the ranked trials: a table, and beside it the objective with its interval."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from kbatch.document.numbers import counted, listed, readable, setting, shortened
from kbatch.plotting.canvas import TEXT_PT, beside_table, new_axes, tidy, width_share, write_caption
from kbatch.plotting.palette import ALARM, ALARM_TEXT, GRID, INK, MUTED, series_style
from kbatch.plotting.series import annotate, name_panel
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

MOST_ROWS = 30
# In characters: what a cell holds, what stands between columns, what the columns take of a figure
# of the usual width, and that width.
_CELL_CHARACTERS = 15
_GAP = 2
_TABLE_CHARACTERS = 46
_CHARACTERS = 104
_MOST_SHARE = 0.6
_NOTHING = "-"
_FEWEST_ROWS = 4
_ROW_IN = 0.2
_REST_IN = 1.5
# Its title, whether it holds numbers, and its cells.
_Column = tuple[str, bool, list[str]]


class RankedTrial(NamedTuple):
    """One row; the objective is None for a trial without a result."""

    trial_id: str
    cells: tuple[str, ...]
    objective: Estimate | None
    outcome: str


class RankingInfo(NamedTuple):
    """What the figure shows: the trials, the best first and those without a result last."""

    name: str
    headers: tuple[str, ...]
    numeric: tuple[bool, ...]  # Which columns hold numbers, which stand to the right.
    rows: tuple[RankedTrial, ...]
    objective: Objective
    notes: tuple[str, ...]
    conditions: str

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of each column, in characters."""
        columns = zip(self.headers, *(row.cells for row in self.rows), strict=True)
        return tuple(max(map(len, column)) for column in columns)


def ranking_info(study: Study, *, most: int, characters: int = _TABLE_CHARACTERS) -> RankingInfo:
    """Rank the trials of a study by their objective, in columns of so many characters."""
    refuse_empty(study)
    if most < 1:
        raise ValueError(f"`most` must be a positive number of rows. Received: most={most}.")
    names, objective = trial_names(study.trials), study.trials[0].objective
    sign = -1 if objective.direction == "max" else 1

    def rank(trial: TrialRecord) -> tuple[int, float]:
        value = trial.objective_value
        if trial.status != "completed":
            return (2, 0.0)
        return (1, 0.0) if value is None else (0, sign * value)

    ranked = sorted(study.trials, key=rank)
    shown, hidden = ranked[:most], ranked[most:]
    kept: list[_Column] = []
    for column in _columns(shown, names):
        title, _, cells = column
        width = _GAP + max(map(len, (title, *cells)))
        if width <= characters or not kept:
            kept.append(column)
            characters -= width
    headers = tuple(title for title, _, _ in kept)
    tuned = [_short(name) for name in names.hyperparameters]
    return RankingInfo(
        name=study.name,
        headers=headers,
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
        notes=tuple(_notes(study, hidden, [title for title in tuned if title not in headers])),
        conditions=caption(conditions_of(study)),
    )


def _columns(trials: Sequence[TrialRecord], names: TrialNames) -> list[_Column]:
    """Make the columns, the most telling ones first."""

    def column(title: str, values: Iterable[Any], write: Callable[[Any], str]) -> _Column:
        return title, True, [_NOTHING if value is None else write(value) for value in values]

    columns = [column("Batch", (t.batch_size for t in trials), "{:,}".format)]
    for name in names.hyperparameters:
        values = [t.hyperparameters.get(name) for t in trials]
        numeric = all(isinstance(value, (int, float)) for value in values)
        _, _, cells = column(name, values, lambda value: _short(value_text(value)))
        columns.append((_short(name), numeric, cells))
    if names.several_policies:
        columns.append(("Policy", False, [_short(t.dtype_policy) for t in trials]))
    columns.append(column("Samples/s", (t.samples_per_second for t in trials), readable))
    if "learning_rate" not in names.hyperparameters:
        columns.append(column("Learning rate", (t.learning_rate for t in trials), setting))
    micro_batch_sizes = (t.micro_batch_size for t in trials)
    return [*columns, column("Micro-batch", micro_batch_sizes, "{:,}".format)]


def _notes(study: Study, hidden: Sequence[TrialRecord], untitled: Sequence[str]) -> list[str]:
    """Say what the bars are, and what is left out."""
    notes, found = [], spreads(study.trials)
    if found.intervals:
        notes.append("Bars: 95 % interval of the mean over executions.")
    elif found.pairs:
        notes.append("Two executions a trial: the mean without bars, too few for an interval.")
    elif found.single:
        notes.append("One execution a trial, no bars: whether the order would repeat is not known.")
    if hidden:
        failed = sum(trial.status != "completed" for trial in hidden)
        without = f", {failed:,} of them without a result" if failed else ""
        notes.append(f"Not shown: {counted(len(hidden), 'trial')} that follow{without}.")
    if untitled:
        plural = "s" * (len(untitled) > 1)
        notes.append(f"No room for the hyperparameter{plural} {listed(untitled)}.")
    return notes


def _short(text: str) -> str:
    return shortened(text, _CELL_CHARACTERS)


def alt_text(info: RankingInfo) -> str:
    """Describe the figure in sentences, for those who do not see it."""
    best = []
    for row in [row for row in info.rows if row.objective][:3]:
        cells = zip(info.headers, row.cells, strict=True)
        settings = ", ".join(f"{title} {text}" for title, text in cells)
        best.append(f"{settings}: {readable(row.objective.value, 4)}" if row.objective else "")
    words = metric_words(info.objective.name)
    sentences = (
        f"A table of {counted(len(info.rows), 'trial')} ranked by {words}, with dots.",
        f"The best are {'; '.join(best)}." if best else "No trial completed.",
        *info.notes,
    )
    return " ".join(sentences)


def height_in(rows: int) -> float:
    """Return the height that so many rows need, in inches."""
    return _REST_IN + _ROW_IN * max(_FEWEST_ROWS, rows)


def plot_ranking(study: Study, ax: Axes | None = None, *, most: int = MOST_ROWS) -> Axes:
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
    info = ranking_info(study, most=most, characters=int(share * _TABLE_CHARACTERS))
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
    below_pt = 36 if below is panel else 4
    write_caption(below, *info.notes, info.conditions, below_pt=below_pt)
    return panel


def _write_table(table: Axes, info: RankingInfo, characters: int) -> None:
    table.set_xlim(0, characters)
    right = 0
    for column, width in enumerate(info.widths):
        left, right = right, right + width + _GAP
        numeric = info.numeric[column]
        place = right - _GAP if numeric else left
        look = {"ha": "right" if numeric else "left", "fontsize": TEXT_PT, "parse_math": False}
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


def _draw_dots(panel: Axes, info: RankingInfo) -> None:
    style, edge = series_style(0), panel.get_yaxis_transform()
    values = []
    for number, row in enumerate(info.rows):
        panel.axhline(number, color=GRID, linewidth=0.5, zorder=0.4)
        if row.objective is None:
            panel.plot([0.02], [number], "X", transform=edge, color=ALARM, ms=6, clip_on=False)
            place = (0.02, number)
            annotate(panel, row.outcome, place, (8, 0), ha="left", color=ALARM_TEXT, xycoords=edge)
            continue
        value, bar = row.objective.value, row.objective.bar
        values.append(value)
        if bar:
            panel.hlines(number, *bar, color=style.color, linewidth=1.6, alpha=0.55)
        panel.plot([value], [number], style.marker, ms=6, color=style.color)
    label = metric_axis_label(info.objective).replace("\n", " ")
    label = label.replace(" (", "\n(") if len(label) > 45 else label
    panel.set_xlabel(label, fontsize=TEXT_PT, parse_math=False)
    if not values:
        panel.set_xticks([])
        return
    panel.margins(x=0.12)
    low, high = panel.get_xlim()
    name = info.objective.name
    if is_fraction(name) and max(values) <= 1:
        ticks = panel.get_xticks()
        panel.set_xticks([tick for tick in ticks if low <= tick <= min(high, 1 + 1e-9)])
        panel.set_xlim(low, high)
    elif name in COST_NAMES or name == "samples_per_second":
        # Ratio scales: from zero, twice as far is twice as much.
        panel.set_xlim(0, 1.12 * high)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    best = info.rows[0].objective
    if best is not None:
        # The value of the best trial stands on the side of its dot that has room.
        left = best.value > sum(panel.get_xlim()) / 2
        end = best.bar[0 if left else 1] if best.bar else best.value
        side, offset_pt = ("right", -7) if left else ("left", 7)
        annotate(panel, readable(best.value, 4), (end, 0), (offset_pt, 0), ha=side, bold=True)
