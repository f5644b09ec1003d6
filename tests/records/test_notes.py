"""Notes: codes with values, written to files and read again."""

import pickle
import string

import pytest
from records_factory import make_execution

from kbatch.records.json_codec import read_record, write_record
from kbatch.records.notes import KINDS, Note
from kbatch.records.training_run import ExecutionRecord

# Arguments of the codes whose text is made by a function.
VALUES = {
    "measured_here": {"why": "gpu"},
    "parts_differ": {"found": "the loss differed by 3 %", "source": "loss"},
    "target_not_verified": {"longer": True},
    "trials_missing": {"count": 2},
    "grid_because": {"why": "time"},
}


def values_of(code):
    """Values for the names in a template; numbers for names with a format."""
    if not isinstance(KINDS[code], str):
        return VALUES[code]
    parts = string.Formatter().parse(KINDS[code])
    return {name: 3 if spec else "x" for _, name, spec, _ in parts if name not in (None, "more")}


def every_note():
    return [Note.of(code, **values_of(code)) for code in KINDS]


@pytest.mark.parametrize("note", every_note(), ids=lambda note: note.code)
def test_note_round_trip(note, tmp_path):
    write_record(make_execution(notes=(note,)), tmp_path / "run.json")
    (read,) = read_record(ExecutionRecord, tmp_path / "run.json").notes
    sent = pickle.loads(pickle.dumps(note))
    for found in (read, sent):
        assert found == note and isinstance(found, str)
        assert (found.code, found.values) == (note.code, note.values)
