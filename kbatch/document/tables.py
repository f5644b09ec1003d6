"""Tables of texts, for the terminal, HTML and Markdown."""

from typing import NamedTuple


class Cell(NamedTuple):
    """One cell.

    Attributes:
        text: What is shown.
        sort_key: Number to sort by, None to sort by the text or for a missing value.
        marks: Marks of the notes that concern it.
    """

    text: str
    sort_key: float | None = None
    marks: tuple[str, ...] = ()


class Column(NamedTuple):
    """One column.

    Attributes:
        title: Its header, with the unit.
        numeric: Whether it holds numbers, which stand to the right.
        name: By which notes find it; empty where none concern it.
        marks: Marks of the notes that concern all of it.
    """

    title: str
    numeric: bool
    name: str = ""
    marks: tuple[str, ...] = ()


class Row(NamedTuple):
    """One row.

    Attributes:
        key: By which notes find it, such as keras-tuner's identifier of a trial.
        status: How it ended, as recorded; empty where that is not asked.
        best: Whether it is the one to take.
        cells: One cell a column.
    """

    key: str
    status: str
    best: bool
    cells: tuple[Cell, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """What is shown, a text a column."""
        return tuple(cell.text for cell in self.cells)


class Table(NamedTuple):
    """A table.

    Attributes:
        title: What its rows are.
        columns: The columns.
        rows: The rows.
        footnote: What its numbers are, empty where the titles say it.
        best_means: What it means that a row is the one to take.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    footnote: str = ""
    best_means: str = "best"

    @property
    def headers(self) -> tuple[str, ...]:
        """The titles of the columns."""
        return tuple(column.title for column in self.columns)
