"""Tables of texts, for the terminal, HTML and Markdown."""

from collections.abc import Sequence
from typing import NamedTuple


class Cell(NamedTuple):
    text: str
    sort_key: float | None = None  # None to sort by the text, or for a missing value.
    marks: tuple[str, ...] = ()  # Of the notes that concern it.

    def brief(self, missing: bool) -> "Cell":
        """Return the number without its spread and, if `missing`, "n/a" without its reason."""
        cut = self.sort_key is not None or (missing and self.text.startswith("n/a ("))
        return self._replace(text=self.text.partition(" (")[0]) if cut else self


class Column(NamedTuple):
    title: str  # With the unit.
    numeric: bool  # Whether it holds numbers, which stand to the right.
    name: str = ""  # By which notes find it; empty where none concern it.
    marks: tuple[str, ...] = ()  # Of the notes that concern all of it.


class Row(NamedTuple):
    key: str  # By which notes find it, such as keras-tuner's identifier of a trial.
    status: str  # How it ended, as recorded; empty where that is not asked.
    best: bool  # Whether it is the one to take.
    cells: tuple[Cell, ...]  # One a column.

    @property
    def texts(self) -> tuple[str, ...]:
        """What is shown, a text a column."""
        return tuple(cell.text for cell in self.cells)


class Table(NamedTuple):
    title: str  # What its rows are.
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    footnote: str = ""  # What its numbers are, empty where the titles say it.
    best_means: str = "best"  # What it means that a row is the one to take.

    @property
    def headers(self) -> tuple[str, ...]:
        return tuple(column.title for column in self.columns)

    def select(self, places: Sequence[int]) -> "Table":
        """Return the table with some of its columns."""
        rows = (row._replace(cells=tuple(row.cells[i] for i in places)) for row in self.rows)
        return self._replace(columns=tuple(self.columns[i] for i in places), rows=tuple(rows))
