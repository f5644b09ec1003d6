"""Marks that tie the numbers of a table or a figure to the notes that concern them."""

from collections.abc import Iterable, Mapping, Sequence

from kbatch.document.content import Note
from kbatch.document.tables import Row, Table
from kbatch.study.caveat import Caveat

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def marked_notes(caveats: Sequence[Caveat], table: Table) -> tuple[Note, ...]:
    """Gives each caveat whose column the table has a letter; the others follow without one."""
    return tuple(note for _, note in _paired(caveats, table))


def notes_about(
    caveats: Sequence[Caveat], table: Table, columns: Iterable[str]
) -> tuple[Note, ...]:
    """Gives the marked notes about any of these columns, for what else shows their numbers."""
    wanted = set(columns)
    pairs = _paired(caveats, table)
    return tuple(note for caveat, note in pairs if note.mark and wanted & set(caveat.columns))


def marked_table(table: Table, caveats: Sequence[Caveat]) -> Table:
    """Sets the marks of the notes: in the header for a whole column, else in the cells."""
    pairs = [(caveat, note.mark) for caveat, note in _paired(caveats, table) if note.mark]
    everywhere = {
        (mark, column.name)
        for caveat, mark in pairs
        for place, column in enumerate(table.columns)
        if column.name in caveat.columns and _concerns_all(caveat, table, place)
    }
    columns = tuple(
        column._replace(marks=tuple(m for _, m in pairs if (m, column.name) in everywhere))
        for column in table.columns
    )
    concerned = {mark: frozenset(caveat.trial_ids) for caveat, mark in pairs}
    rows = tuple(_marked_row(row, table, pairs, concerned, everywhere) for row in table.rows)
    return table._replace(columns=columns, rows=rows)


def _concerns_all(caveat: Caveat, table: Table, place: int) -> bool:
    """Whether a caveat concerns all numbers of a column; all texts where it has no numbers."""
    with_numbers = {row.key for row in table.rows if row.cells[place].sort_key is not None}
    keys = with_numbers or {row.key for row in table.rows}
    return not caveat.trial_ids or keys <= set(caveat.trial_ids)


def _marked_row(
    row: Row,
    table: Table,
    pairs: Sequence[tuple[Caveat, str]],
    concerned: Mapping[str, frozenset[str]],
    everywhere: set[tuple[str, str]],
) -> Row:
    cells = tuple(
        cell._replace(
            marks=tuple(
                m
                for c, m in pairs
                if row.key in concerned[m]
                and column.name in c.columns
                and (m, column.name) not in everywhere
            )
        )
        for column, cell in zip(table.columns, row.cells, strict=True)
    )
    return row._replace(cells=cells)


def _paired(caveats: Sequence[Caveat], table: Table) -> list[tuple[Caveat, Note]]:
    """Pairs the caveats with their notes, those with a mark first."""
    names = {column.name for column in table.columns}
    ordered = sorted(caveats, key=lambda caveat: not names & set(caveat.columns))
    return [
        (c, Note(_letter(i) if names & set(c.columns) else "", c.label, c.text))
        for i, c in enumerate(ordered)
    ]


def _letter(index: int) -> str:
    """Gives a, b, ... z, aa, ab, ..."""
    before = _letter(index // len(_LETTERS) - 1) if index >= len(_LETTERS) else ""
    return before + _LETTERS[index % len(_LETTERS)]
