"""The trials of a study in a terminal."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from kbatch.study.study_record import Study

# Columns of a table in a log file, where no terminal tells its width.
LOG_WIDTH = 120
_FEWEST_COLUMNS = 4


def print_trials(study: "Study", console: "Console") -> None:
    """Prints the trials; what is the same in all of them stands in a line below."""
    from rich import box
    from rich.table import Table

    from kbatch.study.trial_table import trial_table

    content = trial_table(study)
    rows = [row.texts for row in content.rows]
    titles = [column.title for column in content.columns]
    for shorter in (_without_spread, _without_reason):
        # What is left out here stands in the report.
        if _width(titles, rows, _varying(rows)) > console.width:
            rows = [tuple(shorter(text) for text in row) for row in rows]
    varying = _varying(rows)
    shown = varying
    while len(shown) > _FEWEST_COLUMNS and _width(titles, rows, shown) > console.width:
        shown = shown[:-1]
    shared = [i for i in range(len(content.columns)) if i not in varying]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i in shown:
        column = content.columns[i]
        justify = "right" if column.numeric else "left"
        table.add_column(column.title, justify=justify, width=_column_width(titles, rows, i))
    for row, trial in zip(rows, content.rows, strict=True):
        table.add_row(*(row[i] for i in shown), style="bold" if trial.best else None)
    console.print(table)
    if left_out := [titles[i].lower() for i in varying if i not in shown]:
        console.print(f"in the report too: {', '.join(left_out)}", highlight=False, soft_wrap=True)
    if shared and rows:
        first = rows[0]
        same = ", ".join(f"{content.columns[i].title.lower()} {first[i]}" for i in shared)
        console.print(f"in every trial: {same}", highlight=False, soft_wrap=True)


def _varying(rows: "Sequence[tuple[str, ...]]") -> list[int]:
    return [i for i, texts in enumerate(zip(*rows, strict=True)) if len(set(texts)) > 1]


def _width(
    titles: "Sequence[str]", rows: "Sequence[tuple[str, ...]]", columns: "Sequence[int]"
) -> int:
    """Gives the characters of a line: two between columns, one at each end."""
    return 2 + sum(_column_width(titles, rows, i) + 2 for i in columns)


def _column_width(titles: "Sequence[str]", rows: "Sequence[tuple[str, ...]]", column: int) -> int:
    """Gives the width of a column's longest text; its title may take a line a word."""
    return max(map(len, [*titles[column].split(), *(row[column] for row in rows)]))


def _without_reason(text: str) -> str:
    return text.partition(" (")[0]


def _without_spread(text: str) -> str:
    return text if text.startswith("n/a") else text.partition(" (")[0]


def print_decision(study: "Study", console: "Console") -> None:
    """Prints which batch size to use, and how sure that is."""
    from kbatch.study.decision import decision

    words = decision(study)
    sentences = [words.headline, words.speed, words.limit, words.compared, words.certainty]
    console.print(" ".join(filter(None, sentences)), highlight=False)
