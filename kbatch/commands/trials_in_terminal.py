"""The trials of a study in a terminal."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from kbatch.records.study import Study

# Columns of a table in a log file, where no terminal tells its width.
LOG_WIDTH = 120


def print_trials(study: "Study", console: "Console") -> None:
    """Prints the trials; what is the same in all of them stands in a line below."""
    from rich import box
    from rich.table import Table

    from kbatch.reporting.trial_table import trial_table

    content = trial_table(study)
    rows = [row.texts for row in content.rows]
    if console.width < LOG_WIDTH:  # Spreads stand in the report.
        rows = [tuple(_without_spread(text) for text in row) for row in rows]
    varying = [i for i in range(len(content.columns)) if len({row[i] for row in rows}) > 1]
    shared = [i for i in range(len(content.columns)) if i not in varying]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i in varying:
        column = content.columns[i]
        texts = [*column.title.split(), *(row[i] for row in rows)]
        justify = "right" if column.numeric else "left"
        table.add_column(column.title, justify=justify, width=max(map(len, texts)))
    for row, trial in zip(rows, content.rows, strict=True):
        table.add_row(*(row[i] for i in varying), style="bold" if trial.best else None)
    console.print(table)
    if shared and rows:
        first = rows[0]
        same = ", ".join(f"{content.columns[i].title.lower()} {first[i]}" for i in shared)
        console.print(f"in every trial: {same}", highlight=False, soft_wrap=True)


def _without_spread(text: str) -> str:
    return text if text.startswith("n/a") else text.partition(" (")[0]


def print_decision(study: "Study", console: "Console") -> None:
    """Prints which batch size to use, and how sure that is."""
    from kbatch.reporting.decision import decision

    words = decision(study)
    sentences = [words.headline, words.speed, words.limit, words.compared, words.certainty]
    console.print(" ".join(filter(None, sentences)), highlight=False)
