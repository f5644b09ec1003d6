"""The bridge for results that still make a `Section`: it goes when the last one is a `Result`."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from kbatch.page.content import Figure, Page
from kbatch.page.environment import environment_texts
from kbatch.records.json_codec import read_record, write_record
from kbatch.records.record import EnvironmentRecord

# What makes the section of each class: whoever makes a class a `Result` takes its line away.
_SECTION_OF = {
    "Recommendation": ("kbatch.recommendation.report", "recommendation_section"),
    "TrainingProfile": ("kbatch.throughput.report", "training_section"),
}


class ShownRecord:
    def page(self) -> Page:
        return page_of(section_of(self))

    def _repr_html_(self) -> str | None:
        from kbatch.page.html import notebook_html, prose

        try:
            return notebook_html(self.page())
        except ValueError as error:
            # An object that is looked at must not raise: what is missing is said in its place.
            return f"<p>{prose(str(error))}</p>"


class SavedRecord(ShownRecord):
    """What a frozen record needs to be saved and loaded as versioned JSON."""

    def save(self, path: Path | str) -> None:
        """Write the record as JSON."""
        write_record(self, Path(path))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a record that `save` wrote."""
        return read_record(cls, Path(path))


class Fact(NamedTuple):
    name: str
    value: str


class Note(NamedTuple):
    """What a reader of the numbers must know."""

    mark: str  # The letter beside the numbers it concerns, empty where there are none.
    label: str  # What it is about in a few words, for a caption.
    text: str
    # The columns of the table whose numbers it concerns, by name: none where it concerns what is
    # not there; and the rows by key, none for all of them.
    columns: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


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


class Section(NamedTuple):
    kind: str  # What it is a record of, in a word or two.
    name: str
    headline: str  # The decision in a sentence.
    lead: tuple[str, ...]  # What binds and how sure it is, a sentence or two each.
    details: tuple[str, ...]  # What was compared or done, a sentence or two each.
    conditions: str  # Device, versions and budget in a line, empty where the details say it.
    figures: tuple[Figure, ...]  # That of the decision first.
    tables: tuple[Table, ...]
    notes: tuple[Note, ...]  # Those with a mark first.
    command: str | None  # The command line that measured it, None if it was not recorded.
    settings: tuple[Fact, ...]  # What it was measured with.
    environment: tuple[Fact, ...]  # Machine and software; empty if not recorded.


def environment_facts(environment: EnvironmentRecord | None) -> tuple[Fact, ...]:
    return tuple(Fact(*fact) for fact in environment_texts(environment).items())


def section_of(record: Any) -> Section:
    home, name = _SECTION_OF[type(record).__name__]
    return getattr(importlib.import_module(home), name)(record)


def page_of(section: Section) -> Page:
    return Page(
        title=f"{section.kind} {section.name}",
        answer=section.headline,
        tables=tuple(map(_frame, section.tables)),
        notes=tuple(note.text for note in section.notes),
        figures=section.figures,
        settings=dict(section.settings),
        environment=dict(section.environment),
        command=section.command,
        paragraphs=tuple(filter(None, (*section.lead, *section.details, section.conditions))),
    )


def _frame(table: Table) -> Any:
    import pandas as pd

    frame = pd.DataFrame(
        [row.texts for row in table.rows], columns=pd.Index(table.headers), dtype=object
    )
    frame.attrs["answer"] = [i for i, row in enumerate(table.rows) if row.best]
    return frame
