"""The figure of the ranked trials: a table, and beside it the objective with its interval."""

from typing import TYPE_CHECKING

from kbatch.document.number_text import readable
from kbatch.document.short_text import shortened
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
from kbatch.records.target import COST_NAMES
from kbatch.study.figures.ranking_info import TABLE_CHARACTERS, RankingInfo, alt_text, ranking_info
from kbatch.study.metric_names import is_fraction, metric_axis_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kbatch.study.study_record import Study

__all__ = ["RankingInfo", "alt_text", "plot_ranking", "ranking_info"]

MOST_ROWS = 30
_FEWEST_ROWS = 4
_ROW_IN = 0.2
_REST_IN = 1.5
_CHARACTERS = 104
_MOST_SHARE = 0.6
_GAP = 2


def height_in(rows: int) -> float:
    """Tells the height that so many rows need, in inches."""
    return _REST_IN + _ROW_IN * max(_FEWEST_ROWS, rows)


def plot_ranking(study: "Study", ax: "Axes | None" = None, *, most: int = MOST_ROWS) -> "Axes":
    """Plots the trials ranked by their objective: settings as a table, values as dots.

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
    """Writes the value of the best trial beside its dot, on the side that has room."""
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
