"""Notes on a run: codes with values, and what a file may hold."""

import pickle
import string

import pytest
from records_factory import make_execution

from kbatch.records.json_codec import read_record, write_record
from kbatch.records.notes import KINDS, Note
from kbatch.records.training_run import ExecutionRecord

# Of those that a function words.
VALUES = {
    "measured_here": {"why": "gpu"},
    "parts_differ": {"found": "the loss differed by 3 %", "source": "loss"},
    "target_not_verified": {"longer": True},
    "trials_missing": {"count": 2},
    "grid_because": {"why": "time"},
}


def values_of(code):
    """Values for the names in a template, numbers where it says how they are written."""
    if not isinstance(KINDS[code], str):
        return VALUES[code]
    parts = string.Formatter().parse(KINDS[code])
    return {name: 3 if spec else "x" for _, name, spec, _ in parts if name not in (None, "more")}


def every_note():
    return [Note.of(code, **values_of(code)) for code in KINDS]


@pytest.mark.parametrize("note", every_note(), ids=lambda note: note.code)
def test_a_note_is_the_same_when_read_back_and_in_another_process(note, tmp_path):
    write_record(make_execution(notes=(note,)), tmp_path / "run.json")
    (read,) = read_record(ExecutionRecord, tmp_path / "run.json").notes
    sent = pickle.loads(pickle.dumps(note))
    for found in (read, sent):
        assert found == note and isinstance(found, str)
        assert (found.code, found.values) == (note.code, note.values)
