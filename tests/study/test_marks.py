"""Marks beside the numbers that a caveat concerns."""

import pytest
from records_factory import make_execution, make_study, make_trial

from kbatch.page.section import Cell, Column, Note, Row, Table
from kbatch.records.notes import Note as RunNote
from kbatch.study.caveats import caveats
from kbatch.study.table import lettered, marked_table, trial_table

TABLE = Table(
    "Trials",
    (Column("Batch", True, "batch"), Column("Rate", True, "rate"), Column("Status", False)),
    tuple(
        Row(key, "", False, (Cell(key, 1.0), Cell("9", rate), Cell("ok")))
        for key, rate in (("x", 1.0), ("y", 2.0), ("z", None))
    ),
)


def marks(table):
    """Each mark with the header or the row that it stands in."""
    headers = [(m, column.name) for column in table.columns for m in column.marks]
    cells = [
        (m, row.key, column.name)
        for row in table.rows
        for column, cell in zip(table.columns, row.cells, strict=True)
        for m in cell.marks
    ]
    return headers, cells


def about(label, column, *keys):
    return Note("", label, "text", (column,), keys)


def marked(notes):
    return marked_table(TABLE, lettered(notes, TABLE))


def test_a_caveat_stands_in_the_cells_it_concerns():
    found = [about("one", "rate", "y"), about("two", "rate", "x")]
    assert marks(marked(found)) == ([], [("b", "x", "rate"), ("a", "y", "rate")])


@pytest.mark.parametrize("trial_ids", [(), ("x", "y"), ("x", "y", "z")])
def test_a_caveat_of_every_number_stands_in_the_header(trial_ids):
    assert marks(marked([about("all", "rate", *trial_ids)])) == ([("a", "rate")], [])


def test_what_concerns_no_column_has_no_mark_and_stands_last():
    notes = lettered([Note("", "lost", "a file"), about("rate", "rate")], TABLE)
    assert [(note.mark, note.label) for note in notes] == [("a", "rate"), ("", "lost")]


def test_letters_go_on_after_z():
    assert [note.mark for note in lettered([about("", "rate", "x")] * 28, TABLE)][24:] == [
        "y",
        "z",
        "aa",
        "ab",
    ]


def test_every_caveat_of_a_study_finds_the_numbers_it_concerns():
    note = RunNote.of("batch_normalization_in_parts", parts="bn (BatchNormalization)")
    unstable = {"window_examples": (10,) * 4, "window_durations_s": (0.1, 0.1, 0.13, 0.13)}
    study = make_study(
        make_trial(16, make_execution(16, notes=(note,))),
        make_trial(32, make_execution(32, workers_on_device=2)),
        make_trial(64, make_execution(64, **unstable)),
        make_trial(128, status="out_of_memory"),
    )
    notes = lettered(caveats(study), trial_table(study))
    table = marked_table(trial_table(study), notes)
    labels = {note.mark: note.label for note in notes}
    headers, cells = marks(table)
    assert ("equal-epochs budget", "quality") in [(labels[m], name) for m, name in headers]
    assert {(labels[m], key, name) for m, key, name in cells} == {
        ("BatchNormalization in micro-batches", "0016", "quality"),
        ("shared device", "0032", "samples_per_second"),
        ("unstable timing", "0064", "samples_per_second"),
        ("out of memory", "0128", "status"),
    }


def test_trials_that_failed_alike_share_a_note():
    study = make_study(*(make_trial(16 + k, status="out_of_memory") for k in range(9)))
    (found,) = [c for c in caveats(study) if c.label == "out of memory"]
    assert len(found.keys) == 9
    assert "20 (mixed_float16) and 4 more have no result" in found.text
